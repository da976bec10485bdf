"""Compiled passes: the logits and hidden states of the library up to rounding, and the same answers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from hdtool.runtime.core.engine_interface import PassOptions, Verified
from hdtool.runtime.core.tree import UNDETERMINED, DraftTree
from hdtool.runtime.engines.cpu import compile_and_check, layer_kernel, pass_kernel, weight_table
from hdtool.runtime.engines.cpu.tree_pass import PROMPT_CHUNK
from hdtool.runtime.engines.proofs.probes import PROOF_CONTEXT, some_context
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import output_tokens, run
from tests.support.fused import KINDS, TREE, after, both, compiled, logits_of, model_of, with_compiled_layers
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of

pytestmark = pytest.mark.usefixtures("wide")

LARGE = DraftTree.of(4, list(range(40)), [-1] * 40)
CERTAIN = replace(TREE, forced_tokens=np.array([UNDETERMINED, 5, UNDETERMINED, 3, 8, UNDETERMINED, 1], np.int64))
LENGTHS = (1, 2, 31, 64, PROMPT_CHUNK, PROMPT_CHUNK + 1, 3 * PROMPT_CHUNK + 9)


@pytest.fixture
def without_the_library(monkeypatch: pytest.MonkeyPatch) -> Callable[[Target], None]:
    """A pass of a model of the same class raises from now on."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the library computes a pass")

    return lambda target: monkeypatch.setattr(type(target.model), "__call__", refuse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hidden_states_are_those_of_the_library(
    dtype: torch.dtype, without_the_library: Callable[[Target], None]
) -> None:
    usual, fused = both("qwen3", dtype)
    for target in (usual, fused):
        target.watch_hidden()
    expected = list(hidden_of_passes(usual))
    without_the_library(fused)
    for found, other in zip(hidden_of_passes(fused), expected, strict=True):
        assert found.shape == other.shape
        assert_same_logits(found, other)


def hidden_of_passes(target: Target) -> Iterator[torch.Tensor]:
    """Of prompts, trees and accepted nodes, alone and in a batch."""

    def given(verified: Verified) -> torch.Tensor:
        assert verified.hidden is not None
        return verified.hidden

    kept = []
    for length in LENGTHS:
        one = after(target, prompt_of(length))
        yield given(one.verified)
        for tree in (LARGE, CERTAIN, TREE):
            one.verify(tree, PassOptions(walk=True))
            kept.append(given(one.verified))
            yield kept[-1].clone()
        one.commit([1, 3])
        one.prefill(prompt_of(PROMPT_CHUNK + 5), length + 3)
        yield given(one.verified)
    cache = target.allocate(3)
    for slot, length in enumerate((20, PROMPT_CHUNK + 12, 1)):
        yield given(target.prefill(cache, slot, prompt_of(length), room=64))
    for trees in ([TREE, DraftTree.bare(7)], [CERTAIN, TREE, LARGE]):
        yield from map(given, target.verify(cache, trees))
    for slot in range(3):
        target.commit(cache, slot, [0])
    yield from (given(target.prefill(cache, slot, [3, 9], cache.slots[slot].length)) for slot in range(3))
    yield given(target.recompute(cache, 1, 5))
    yield from kept  # a later pass leaves those of earlier ones as they are


def batch_logits(target: Target) -> list[torch.Tensor]:
    """Of two sequences of different lengths."""
    cache = target.allocate(2)
    for slot, length in enumerate((20, 90)):
        target.prefill(cache, slot, prompt_of(length), room=9)
    return [verified.logits.clone() for verified in target.verify(cache, [TREE, DraftTree.bare(7)])]


def test_the_capacity_of_the_cache_changes_no_bit() -> None:
    _, fused = both()
    small = logits_of(fused, prompt_of(40))
    one = after(fused, prompt_of(40), room=1000)
    assert one.cache.capacity > 1000
    with torch.inference_mode():
        one.cache.storage.tensors[0][:, :, :, 47:] = float("nan")
    assert torch.equal(one.verify(TREE), small)


def test_positions_beyond_those_that_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_table, "MIN_ROTARY_POSITIONS", 4)
    usual, fused = both()
    for length in (3, 50, 12, 200):
        assert_same_logits(logits_of(fused, prompt_of(length)), logits_of(usual, prompt_of(length)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_no_bit(dtype: torch.dtype) -> None:
    """Loading another model changes it meanwhile."""
    contexts, (_, fused) = [prompt_of(length) for length in (40, 1100)], both()
    expected = [logits_of(fused, context) for context in contexts] + batch_logits(fused)
    target, usual = Target(fused.model), torch.get_default_dtype()
    target.compile(proved=True)
    torch.set_default_dtype(dtype)
    try:
        found = [logits_of(target, context) for context in contexts] + batch_logits(target)
    finally:
        torch.set_default_dtype(usual)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("slots", [1, 2])
def test_the_memory_of_a_cache_is_given_back_with_it(slots: int) -> None:
    _, fused = both()
    cache = fused.allocate(slots)
    for slot in range(slots):
        fused.prefill(cache, slot, prompt_of(9), room=9)
    fused.verify(cache, [TREE] * slots)
    memory = weakref.ref(cache.storage.tensors[0])
    del cache
    gc.collect()  # a cache and its layers refer to each other
    assert memory() is None


@pytest.mark.parametrize("slots", [1, 2])
def test_an_overflow_affects_no_other_pass(slots: int) -> None:
    usual, fused = both("qwen3")
    for target in (usual, fused):
        with torch.no_grad():
            target.model.get_input_embeddings().weight[8] = torch.inf
    cache, contexts = fused.allocate(slots), [prompt_of(20), prompt_of(9)][:slots]
    assert TREE.tokens[1] == 8 and not any(8 in context for context in contexts)
    fused.notice_changes()
    for slot, context in enumerate(contexts):
        fused.prefill(cache, slot, context, room=9)
    of_tree, *others = fused.verify(cache, [TREE, DraftTree.bare(7)][:slots])
    assert not of_tree.logits.isfinite().all()
    assert all(bool(one.logits.isfinite().all()) for one in others)
    for root in (3, 5):
        alone = fused.recompute(cache, 0, root).logits
        assert_same_logits(alone[0], plain_logits(usual.model, [*contexts[0], root]))
        fused.commit(cache, 0, [])
        contexts[0].append(root)
    for slot, context in enumerate(contexts):
        again = fused.prefill(cache, slot, [*context, 4]).logits
        assert_same_logits(again[0], plain_logits(usual.model, [*context, 4]))


def test_the_proof_passes_with_a_tenth_of_its_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    usual = compile_and_check.distance

    def noted(*given: torch.Tensor) -> float:
        seen.append(usual(*given))
        return seen[-1]

    monkeypatch.setattr(compile_and_check, "distance", noted)
    for kind in KINDS:
        both(kind)
    assert seen and max(seen) < compile_and_check.TOLERANCE / 10


def test_a_context_of_the_proof_is_not_used_again() -> None:
    """The proof leaves layers out, so the keys and values of its contexts are incomplete."""
    usual, fused = both()
    context = some_context(PROOF_CONTEXT + 3, fused.vocabulary)
    found, expected = (run(target, context, SamplingConfig(), 8) for target in (fused, usual))
    assert found[0].cached_tokens == 0
    assert output_tokens(found) == output_tokens(expected)


def test_passes_are_counted_once() -> None:
    _, fused = both()
    counted = fused.log.passes, compiled(fused).passes
    logits_of(fused, prompt_of(20))
    assert (fused.log.passes - counted[0], compiled(fused).passes - counted[1]) == (2, 2)


def test_no_pass_compiles_anything() -> None:
    """Loading has compiled all kinds of passes, also where a model was proved before."""
    target = with_compiled_layers(model_of())
    target.compile(proved=True)

    def signatures() -> dict[str, list[Any]]:
        return {name: one.signatures for module in KERNELS for name, one in functions_of(module)}

    before = signatures()
    one = after(target, prompt_of(PROMPT_CHUNK + 5))
    for tree in (TREE, DraftTree.bare(1), CERTAIN):
        for options in (PassOptions(), PassOptions(walk=True), PassOptions(wants_maxima=True)):
            one.verify(tree, options)
    cache = target.allocate(2)
    for slot in range(2):
        target.prefill(cache, slot, prompt_of(9), room=9)
    for trees in ([TREE], [TREE, DraftTree.bare(1)], [CERTAIN, TREE]):
        target.verify(cache, trees, [PassOptions(walk=True, wants_maxima=True)] * len(trees))
    assert signatures() == before
    assert {"compute_layers", "compute_trees"} <= before.keys()


KERNELS = (layer_kernel, pass_kernel)


def functions_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    return ((name, one) for name, one in vars(module).items() if hasattr(one, "signatures"))
