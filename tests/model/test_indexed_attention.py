"""Indexed attention: keys of an indexer are kept, moved and copied with keys and values."""

from __future__ import annotations

import pytest
import torch

from hdtool.runtime.caches.transformers_views import KVLayer
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.session import Session
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, answered, assert_lossless
from tests.support.oracle import generated, prompt_of
from tests.support.rehearsed import direct
from tests.sweep.models import tiny_model


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(tiny_model("deepseek_v32"))


@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_answers_in_captured_steps(kind: str) -> None:
    target = Target(tiny_model(kind), direct)
    assert_lossless(target, prompt_of(60), expected=generated(target.model, prompt_of(60), 32))
    assert target.captures


def test_keys_of_indexers_are_copied_with_a_kept_conversation(target: Target) -> None:
    first, second = prompt_of(40), prompt_of(41)
    session = Session[int](target, target.allocate(1), max_new_tokens=16, prefixes=PrefixCache(1 << 24))
    answer, _ = answered(session, first)
    answered(session, second)
    again = [*first, *answer, *prompt_of(5)]
    found, cached = answered(session, again)
    assert found == generated(target.model, again, 16) and cached >= 50


def test_answers_depend_on_where_the_keys_of_indexers_are(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    update = KVLayer.update_indexer

    def misplaced(layer: KVLayer, keys: torch.Tensor) -> torch.Tensor:
        return update(layer, keys).roll(1, 1)

    monkeypatch.setattr(KVLayer, "update_indexer", misplaced)
    assert answer_of(target, prompt_of(40), max_new_tokens=40) != generated(target.model, prompt_of(40), 40)
