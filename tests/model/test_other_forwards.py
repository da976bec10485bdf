"""Passes of recurrent layers change forwards of the model: for their own thread, and until they end."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch

from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.engines.stock.undescribed_mixers import replace_forwards
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import generated, prompt_of
from tests.support.trees import WrongDrafter

PROMPT, MAX_NEW_TOKENS, TURNS = prompt_of(20), 30, 6


def test_a_block_changes_forwards_for_its_own_thread_alone() -> None:
    module, given = torch.nn.Linear(2, 2), torch.ones(1, 2)
    expected, elsewhere = module(given), []
    with replace_forwards([(module, lambda _: "inner")]), replace_forwards([(module, lambda _: "outer")]):
        assert module(given) == "outer"
        other = Thread(target=lambda: elsewhere.append(module(given)))
        other.start()
        other.join()
    assert torch.equal(elsewhere[0], expected) and torch.equal(module(given), expected)
    assert "forward" not in vars(module)


def test_forwards_return_after_an_error() -> None:
    module = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="inside"), replace_forwards([(module, lambda _: None)]):
        raise ValueError("inside")
    assert "forward" not in vars(module)


@pytest.mark.parametrize("family", ["qwen3_5", "jamba"])
def test_threads_share_a_model(family: str) -> None:
    """Two targets and plain ``generate``, each in a thread of its own."""
    model: Any = model_of(family)
    expected, found = generated(model, PROMPT, MAX_NEW_TOKENS), list[list[int]]()

    def draft(seed: int) -> None:
        target = Target(model)
        for turn in range(TURNS):
            drafter = WrongDrafter(len(PROMPT), expected, VOCABULARY, seed + turn)
            steps = decode(
                target, PROMPT, Sampler(SamplingConfig(), PROMPT), max_new_tokens=MAX_NEW_TOKENS, drafter=drafter
            )
            found.append([token for step in steps for token in step.tokens])

    def plain() -> None:
        found.extend(generated(model, PROMPT, MAX_NEW_TOKENS) for _ in range(TURNS))

    threads = [Thread(target=draft, args=(1,)), Thread(target=draft, args=(50,)), Thread(target=plain)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * (3 * TURNS)
