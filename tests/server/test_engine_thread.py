"""The engine of the server before its thread starts: what it accepts."""

from __future__ import annotations

import weakref
from queue import Queue
from typing import Any

import pytest

from hdtool.runtime.answering.answer_plan import AnswerPlan
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.drafters.published.lookup_methods import PromptLookup
from hdtool.runtime.integrations.server.engine_thread import (
    AnswerJob,
    EngineError,
    EngineThread,
    OverloadError,
    Tenants,
)
from hdtool.runtime.integrations.server.openai_requests import CompletionRequest
from hdtool.runtime.integrations.server.request_preparation import Preparer
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.load import Loaded


def engine_of(loaded: Loaded, decoding: DecodeConfig, max_waiting: int = 2) -> tuple[Tenants, EngineThread]:
    tenants = Tenants(loaded, decoding, StoresConfig(model_db="none", corpus_db="none"), [""])
    return tenants, EngineThread(loaded.target, tenants, decoding, max_waiting=max_waiting, prefix_bytes=0)


def plan_of(prompt: list[int]) -> AnswerPlan:
    return AnswerPlan(prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=4)


PLAN = plan_of([7, 8])


def nothing(*given: Any) -> Any:
    raise AssertionError("no job is started")


def test_cancelled_answers_take_no_place_among_those_that_wait(loaded: Loaded) -> None:
    decoding = DecodeConfig(method="ar", batch_size=2)
    _, engine = engine_of(loaded, decoding)
    first, second, third = (AnswerJob("", PLAN, nothing) for _ in range(3))
    engine.submit([first, second])
    with pytest.raises(OverloadError):
        engine.submit([third])
    first.is_cancelled = True
    engine.submit([third])
    assert engine.waiting == 2


@pytest.mark.parametrize("batch_size", [1, 2])
def test_passes_are_timed_for_any_budget_that_depends_on_them(loaded: Loaded, batch_size: int) -> None:
    decoding = DecodeConfig(method="pld", batch_size=batch_size)
    tenants, _ = engine_of(loaded, decoding)
    drafter = tenants.take("")
    assert isinstance(drafter, PromptLookup) and drafter.budget.max_nodes > 0


def test_a_job_whose_drafter_cannot_be_made_is_told(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodeConfig(method="ar")
    tenants, engine = engine_of(loaded, decoding)

    def fail(*given: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(tenants, "take", fail)
    delivered: Queue[Any] = Queue()
    engine.start()
    try:
        engine.submit([AnswerJob("", PLAN, delivered.put)])
        error = delivered.get(timeout=20)
        assert isinstance(error, EngineError) and str(error) == "no memory"
    finally:
        engine.stop()


def test_a_session_that_cannot_be_ended_ends_all_answers(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodeConfig(method="ar", batch_size=1)
    _, engine = engine_of(loaded, decoding)

    def fail(*given: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine._session, "advance", fail)
    monkeypatch.setattr(engine._session, "end", fail)
    delivered: Queue[Any] = Queue()
    engine.submit([AnswerJob("", PLAN, delivered.put), AnswerJob("", PLAN, delivered.put)])
    engine.start()
    assert all(isinstance(delivered.get(timeout=20), EngineError) for _ in range(2))
    engine._thread.join(20)
    assert not engine.is_alive
    with pytest.raises(OverloadError):
        engine.submit([AnswerJob("", PLAN, delivered.put)])


def test_the_old_cache_is_freed_before_a_new_one_is_allocated(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodeConfig(method="hd", batch_size=2)
    _, engine = engine_of(loaded, decoding)
    caches: list[weakref.ref[Any]] = [weakref.ref(engine._session._cache)]
    allocate, launch = engine._target.allocate, engine._target.launch
    freed: list[bool] = []

    def allocate_anew(slots: int = 1) -> Any:
        freed.append(caches[-1]() is None)
        cache = allocate(slots)
        caches.append(weakref.ref(cache))
        return cache

    def fail(*given: Any, **others: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._target, "allocate", allocate_anew)
    preparer = Preparer(loaded, decoding, SamplingConfig())
    (choice,) = preparer.completion(CompletionRequest.of({"prompt": [7, 8], "max_tokens": 20}))
    delivered: Queue[Any] = Queue()

    def last_delivered() -> Any:
        while not isinstance(step := delivered.get(timeout=20), Exception) and not step.finish:
            pass
        return step

    engine.start()
    try:
        monkeypatch.setattr(engine._target, "launch", fail)
        engine.submit([choice.job("", delivered.put)])
        assert isinstance(last_delivered(), EngineError)
        monkeypatch.setattr(engine._target, "launch", launch)
        engine.submit([choice.job("", delivered.put)])
        assert last_delivered().finish and freed == [True]
        assert engine.running == 0 and engine.cached_tokens > 0
    finally:
        engine.stop()


def test_a_conversation_gets_the_drafter_of_its_last_turn(loaded: Loaded) -> None:
    decoding = DecodeConfig(method="ar", batch_size=2)
    tenants, engine = engine_of(loaded, decoding, max_waiting=9)
    conversations = [AnswerJob("", plan_of([1, 2, last]), nothing) for last in (3, 4, 5)]
    drafters = [tenants.take("", job.plan.prompt) for job in conversations]
    for job, drafter in zip(conversations, drafters, strict=True):
        engine._running[job] = drafter, job.plan.request(job, drafter)
        engine._finish(job)
    assert tenants.take("", [1, 2, 4, 7, 8, 9]) is drafters[1]
    assert tenants.take("", [1, 2, 3, 7]) is drafters[0]
    assert tenants.take("", [6]) is drafters[2]


def test_the_prompt_chooses_the_drafter(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    decoding = DecodeConfig(method="ar")
    tenants, engine = engine_of(loaded, decoding)
    preparer = Preparer(loaded, decoding, SamplingConfig())
    (choice,) = preparer.completion(CompletionRequest.of({"prompt": [7, 8]}))
    delivered: Queue[Any] = Queue()
    monkeypatch.setattr(tenants, "take", lambda *given: delivered.put(given))
    engine.submit([choice.job("", nothing)])
    engine._start_next()
    assert delivered.get_nowait() == ("", [7, 8])


def test_an_answer_without_drafts_takes_no_drafter_of_the_tenant(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoding = DecodeConfig(method="ar")
    tenants, engine = engine_of(loaded, decoding)
    preparer = Preparer(loaded, decoding, SamplingConfig())
    body = CompletionRequest.of({"prompt": [7, 8], "hdtool": {"drafts": False}})
    (choice,) = preparer.completion(body)
    job = choice.job("", nothing)
    for name in ("take", "put"):
        monkeypatch.setattr(tenants, name, nothing)
    engine.submit([job])
    engine._start_next()
    assert type(engine._running[job][0]) is NoDraft
    engine._finish(job)
    assert not engine._running


def test_a_server_that_stops_begins_no_session(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoding = DecodeConfig(method="ar", batch_size=1)
    _, engine = engine_of(loaded, decoding)

    def fail(*given: Any) -> Any:
        raise MemoryError("no memory")

    monkeypatch.setattr(engine, "_begin_session", fail)
    delivered: Queue[Any] = Queue()
    engine.submit([AnswerJob("", PLAN, delivered.put)])
    engine._is_stopping = True
    engine.start()
    assert isinstance(delivered.get(timeout=20), OverloadError)
    engine.stop()
    assert "Traceback" not in capsys.readouterr().err
