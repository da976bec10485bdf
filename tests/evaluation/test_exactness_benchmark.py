"""The benchmark that compares methods with plain decoding: what makes it fail."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hdtool.runtime.core.drafter import NoDraft
from tests.benchmarks import exactness

PLAIN = [1, 2]


@pytest.mark.parametrize(("generated", "drafted", "code"), [(PLAIN, PLAIN, 0), ([1, 3], PLAIN, 1), (PLAIN, [1, 3], 1)])
def test_every_difference_from_plain_decoding_is_a_failure(
    generated: list[int], drafted: list[int], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = SimpleNamespace(target=SimpleNamespace(model=None), tokenizer=None)
    drafter = object()

    def answer(*arguments: Any) -> tuple[list[int], int]:
        return (PLAIN if isinstance(arguments[-1], NoDraft) else drafted), 2

    for name, value in {
        "load": lambda _: loaded,
        "encode_conversation": lambda *_: PLAIN,
        "drafters": lambda *_: {"pld": drafter},
        "answer": answer,
        "generated": lambda *_, **__: generated,
    }.items():
        monkeypatch.setattr(exactness, name, value)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    monkeypatch.setattr("sys.argv", ["exactness", "--methods", "pld", "--samplings", "greedy", "--prompts", "1"])
    assert exactness.main() == code
