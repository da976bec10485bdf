"""The engine of the server before its thread starts: what it accepts."""

from __future__ import annotations

from queue import Queue
from typing import Any

import pytest

from hdtool.runtime.config import DecodeConfig, StoresConfig
from hdtool.runtime.integrations.server.scheduler import AnswerJob, EngineError, OverloadError, Scheduler, Tenants
from hdtool.runtime.model.load import Loaded


def nothing(*given: Any) -> Any:
    raise AssertionError("no job is started")


def test_cancelled_answers_take_no_place_among_those_that_wait(loaded: Loaded) -> None:
    decoding = DecodeConfig(method="ar", batch_size=2)
    tenants = Tenants(loaded, decoding, StoresConfig(model_db="none", corpus_db="none"), [""])
    engine = Scheduler(loaded.target, tenants, decoding, max_waiting=2, prefix_bytes=0)
    first, second, third = (AnswerJob("", nothing, nothing) for _ in range(3))
    engine.submit([first, second])
    with pytest.raises(OverloadError):
        engine.submit([third])
    first.is_cancelled = True
    engine.submit([third])
    assert engine.waiting == 2


@pytest.mark.parametrize("batch_size", [1, 2])
def test_passes_are_timed_for_any_budget_that_depends_on_them(loaded: Loaded, batch_size: int) -> None:
    decoding = DecodeConfig(method="ar", batch_size=batch_size)
    tenants = Tenants(loaded, decoding, StoresConfig(model_db="none", corpus_db="none"), [""])
    assert tenants._budget().max_nodes > 0


def test_a_job_whose_drafter_cannot_be_made_is_told(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodeConfig(method="ar")
    tenants = Tenants(loaded, decoding, StoresConfig(model_db="none", corpus_db="none"), [""])
    engine = Scheduler(loaded.target, tenants, decoding, max_waiting=2, prefix_bytes=0)

    def fail(tenant: str) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(tenants, "take", fail)
    told: Queue[Any] = Queue()
    engine.start()
    try:
        engine.submit([AnswerJob("", nothing, told.put)])
        error = told.get(timeout=20)
        assert isinstance(error, EngineError) and str(error) == "no memory"
    finally:
        engine.stop()
