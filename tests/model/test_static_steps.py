"""Steps with fixed shapes, called directly instead of as CUDA graphs: their output equals plain decoding."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.caches.kv_cache import MIN_EXTENT, KVTensors, LayerShape, extent_for
from hdtool.runtime.core.engine_interface import PassOptions, Verified
from hdtool.runtime.core.step import Finish
from hdtool.runtime.core.top_k_top_p import DrawOptions
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.engines.capturable_pass import StepOutput
from hdtool.runtime.engines.captured.static_steps import RECORDED, RECORDED_ROWS, STEP_SIZES, StaticSteps
from hdtool.runtime.engines.captured_functions import CaptureMaker, Run, never
from hdtool.runtime.model.pass_inputs import FULL, MOVES, AttentionMasks, AttentionWindow, StepInput, StepTensors
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import answer_of, output_tokens, run
from tests.support.families import VOCABULARY, model_of
from tests.support.one_sequence import OneSequence
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.rehearsed import Direct, Rehearsed, Replayed, captured_of, direct
from tests.support.trees import WrongDrafter, bush, path_to, tokens_to, trees

CPU = torch.device("cpu")


def steps_of(target: Target) -> StaticSteps:
    steps = captured_of(target).steps
    assert steps
    return steps


@pytest.mark.parametrize(
    "size", sorted({0, 1, 3, 4, 63, 64} | {rows - 1 for rows in STEP_SIZES} | set(STEP_SIZES[:-1]))
)
def test_sizes_next_to_the_fixed_ones(size: int) -> None:
    model = model_of("mistral")
    one = OneSequence(Target(model, direct))
    context, tree = prompt_of(30), bush(size)
    one.prefill(context)
    logits = one.verify(tree)
    for node in {ROOT, 0, size // 2, size - 1} & set(range(ROOT, size)):
        assert_same_logits(logits[node + 1], plain_logits(model, context + tokens_to(tree, node)))


@pytest.mark.parametrize("length", [MOVES - 1, MOVES, MOVES + 1, 20])
def test_paths_longer_than_a_step_moves(length: int) -> None:
    model = model_of("llama")
    one = OneSequence(Target(model, direct))
    context = prompt_of(9)
    tree = DraftTree.of(5, range(3, 3 + 2 * length), [max(ROOT, node - 2) for node in range(2 * length)])
    one.prefill(context)
    one.verify(tree)
    path = path_to(tree, 2 * length - 1)
    assert len(path) == length
    one.commit(path)
    context += tokens_to(tree, path[-1])
    assert_same_logits(one.verify(DraftTree.bare(7))[0], plain_logits(model, [*context, 7]))


WINDOWS = [
    AttentionWindow(FULL),
    AttentionWindow("sliding_attention", window=9),
    AttentionWindow("chunked_attention", chunk=7),
]
HIDDEN = torch.finfo(torch.float32).min


def mask_by_definition(tree: DraftTree, length: int, window: AttentionWindow, shape: torch.Size) -> torch.Tensor:
    """Make a mask key by key, of a root and nodes; rows after the tree's are copies of the root's."""
    mask = torch.full(shape, HIDDEN)
    for row in range(shape[0]):
        node = row - 1 if row <= len(tree) else ROOT
        path = [0, *(below + 1 for below in path_to(tree, node))]
        read = [
            *((column, column) for column in range(length)),
            *((length + at, length + d) for d, at in enumerate(path)),
        ]
        own = length + len(path) - 1
        for column, position in read:
            near = window.window is None or position > own - window.window
            if near and (window.chunk is None or position // window.chunk == own // window.chunk):
                mask[row, column] = 0
    return mask


DRAFTS = st.lists(st.tuples(trees(VOCABULARY, max_nodes=64), st.integers(1, 60)), min_size=1, max_size=3)


@given(DRAFTS, st.sampled_from([WINDOWS, WINDOWS[:1], WINDOWS[1:2]]))
@settings(max_examples=25)
def test_masks_show_each_row_its_context_and_its_path(
    drafts: list[tuple[DraftTree, int]], windows: list[AttentionWindow]
) -> None:
    drafted, lengths = zip(*drafts, strict=True)
    found = AttentionMasks(windows, torch.float32, CPU).of_trees(drafted, lengths)
    if found is None:
        assert len(drafts) == len(windows) == 1 and not len(drafted[0])
        return
    for window in windows:
        masks: Any = found[window.kind] if isinstance(found, dict) else found
        for mask, (tree, length) in zip(masks[:, 0], drafts, strict=True):
            own = len(tree) + 1
            assert torch.equal(mask[:own], mask_by_definition(tree, length, window, mask[:own].shape))
            assert (mask[own:, 0] == 0).all() and (mask[own:, 1:] == HIDDEN).all()


@given(trees(VOCABULARY, max_nodes=64), st.integers(1, 60))
@settings(max_examples=25)
def test_a_padded_step_gets_the_masks_of_its_tree(tree: DraftTree, length: int) -> None:
    rows, own = next(rows for rows in STEP_SIZES if rows > len(tree)), len(tree) + 1
    told = StepInput(CPU)
    told.fill(0, tree, rows, length)
    told.send(1, rows)
    sent = told.tensors(1, rows)
    assert sent.tokens[0, :own].tolist() == tree.all_tokens
    assert sent.positions[0, :own].tolist() == (length + tree.depths).tolist()
    masks = AttentionMasks(WINDOWS, torch.float32, CPU)
    found = masks.on_device(sent.ancestor_mask, sent.positions, sent.length, 192)
    assert isinstance(found, dict)
    for window in WINDOWS:
        mask = found[window.kind]
        assert mask is not None
        assert torch.equal(mask[0, 0], mask_by_definition(tree, length, window, mask[0, 0].shape))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_a_full_context_ends_the_answer(family: str) -> None:
    model = model_of(family)
    prompt = prompt_of(500)
    plain = answer_of(Target(model), prompt, SamplingConfig(), 100)
    target = Target(model, direct)
    wrong_drafter = WrongDrafter(len(prompt), plain * 2, VOCABULARY, seed=5, max_nodes=30)
    steps = run(target, prompt, SamplingConfig(), 100, drafter=wrong_drafter)
    assert output_tokens(steps) == plain
    assert steps[-1].finish is Finish.CONTEXT
    assert target.cache.capacity == -(-(512 + STEP_SIZES[-1]) // 64) * 64


def test_conversations_share_the_cache_the_buffers_and_the_steps() -> None:
    capture = Rehearsed()
    target = Target(model_of("llama"), lambda device: capture)
    steps = steps_of(target)

    def talk(length: int) -> list[int]:
        prompt = prompt_of(length)
        run(target, prompt, SamplingConfig(), 60, drafter=Hierarchy(budget=FixedBudget(20)))
        (mine,) = steps._buffers
        buffers = mine._outcome, mine.input._buffer
        kept = [mine._logits, *(tensor for buffer in buffers for tensor in (buffer.host, buffer.device))]
        return [tensor.data_ptr() for tensor in (*target.cache.storage.tensors, *kept) if tensor is not None]

    first = talk(50)
    recorded = capture.recorded
    assert talk(50) == first
    assert capture.recorded == recorded, "the same conversation has no shapes that are new"
    assert talk(9) == talk(200) == first
    assert capture.recorded <= len(STEP_SIZES) + recorded


@given(st.integers(1, 200_000))
def test_an_extent_is_less_than_half_too_long(rows: int) -> None:
    assert rows <= extent_for(rows) < max(MIN_EXTENT + 1, 1.5 * rows)
    assert extent_for(extent_for(rows)) == extent_for(rows)


def shapes_of(steps: StaticSteps, one: OneSequence) -> set[tuple[int, int, int]]:
    """Slots, rows and extents of the captured steps of a sequence."""
    return set(steps._steps.get(one.cache.storage, {}))


def test_a_step_is_captured_once_whether_positions_move_or_not() -> None:
    one = OneSequence(Target(model_of("llama"), direct))
    steps = steps_of(one.target)
    one.prefill(prompt_of(20))
    for path in ([], [0, 1], [1, 4], []):
        one.verify(bush(6))
        one.commit(path)
    assert shapes_of(steps, one) == {(1, 8, 512)}


def test_a_longer_conversation_reads_more_of_the_cache() -> None:
    """Llama's context of 512 tokens has one extent; without an end there are several."""
    one = OneSequence(Target(model_of("llama"), direct))
    steps = steps_of(one.target)
    assert steps.capacity_for(600, 512) == 600
    assert steps.capacity_for(300, 4096) == 512
    assert steps.capacity_for(3000, 3100) == 3100 + STEP_SIZES[-1]
    assert steps.capacity_for(3000, None) == 4096
    one.cache.reserve(2048)
    one.prefill(prompt_of(440))
    one.verify(bush(63))
    one.commit([0])
    assert one.length == 442
    one.verify(bush(63))
    assert {extent for *_, extent in shapes_of(steps, one)} == {512}
    long = [place % VOCABULARY for place in range(470)]
    one.prefill(long)
    logits = one.verify(bush(63))
    assert {extent for *_, extent in shapes_of(steps, one)} == {512, 768}
    assert_same_logits(logits[1], plain_logits(one.target.model, [*long, 5, 2]))


class NoExtent:
    """A pass that computes what depends on the memory of the cache alone."""

    reads_extent = False

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        return StepOutput(step.tokens.flatten()[:, None].float(), None)


def test_a_pass_without_extents_has_one_capacity_and_its_steps_are_captured_at_once() -> None:
    capture = Rehearsed()
    steps = StaticSteps(NoExtent(), capture, CPU, reserved=3000)
    assert steps.capacity_for(300, None) == 3000
    assert steps.capacity_for(300, 4096, slots=2) == 1500
    assert steps.capacity_for(300, 1000) == 1000 + STEP_SIZES[-1]
    assert steps.capacity_for(5000, None) == 8192, "as before beyond the reserve"
    cache = Target(model_of("llama")).allocate(1, 3000)
    steps.record(cache)
    recorded = capture.recorded
    assert recorded == 2 * len(RECORDED), "a step and the rankings after it"
    for nodes, most in zip((0, 3, 30, 63), (8, 0, 61, 33), strict=True):
        steps.prepared(cache, [bush(nodes)], [PassOptions(max_ranked=most)])
    assert capture.recorded == recorded
    steps.prepared(cache, [bush(64)])
    assert capture.recorded == recorded + 1


def test_races_that_a_device_cannot_run_are_left_to_the_logits_of_the_root() -> None:
    def fails(*arguments: torch.Tensor) -> None:
        raise RuntimeError("no compiler")

    def runs(logits: torch.Tensor, best: torch.Tensor, step: torch.Tensor, races: torch.Tensor) -> None:
        races.fill_(1)

    options = [PassOptions(root=True, draws=DrawOptions(np.uint64(1), np.float32(1), 0, 1.0, 0.0)), PassOptions()]
    for run_races in (None, fails, runs):
        steps = StaticSteps(NoExtent(), Rehearsed(), CPU, run_races=run_races)
        for number in (1, 2, 1):
            start = steps.prepared(Target(model_of("llama")).allocate(2, 1000), [bush(1)] * number, options[:number])
            assert start
            for verified in start().results:
                assert (verified.races is not None) == (run_races is runs)
                assert (verified.root is None) == (run_races is runs)


def test_steps_over_many_slots_share_the_buffers_of_the_largest_that_is_captured_ahead() -> None:
    steps = StaticSteps(NoExtent(), Rehearsed(), CPU)
    steps.record(Target(model_of("llama")).allocate(32, 100))
    assert [buffers.rows for buffers in steps._buffers] == [RECORDED_ROWS]


def test_a_cache_takes_less_where_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = model_of("llama"), prompt_of(20)
    plain = answer_of(Target(model), prompt, SamplingConfig())
    allocate, refused = KVTensors.for_layers, []

    def small(shapes: Sequence[LayerShape], capacity: int, *others: Any) -> KVTensors:
        if capacity > 192:
            refused.append(capacity)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return allocate(shapes, capacity, *others)

    monkeypatch.setattr(KVTensors, "for_layers", small)
    target = Target(model, direct)
    assert target.captures and target.cache.capacity <= 192
    assert answer_of(target, prompt, SamplingConfig()) == plain
    assert min(refused) == MIN_EXTENT
    with pytest.raises(torch.OutOfMemoryError):
        target.prefill(target.allocate(), 0, prompt_of(200))


def test_a_sequence_and_a_batch_keep_their_steps() -> None:
    capture = Rehearsed()
    target = Target(model_of("llama"), lambda device: capture)
    one, batch = target.allocate(), target.allocate(2)
    recorded: list[int] = []
    for _ in range(3):
        for cache in (one, batch):
            for slot in range(len(cache.slots)):
                target.prefill(cache, slot, prompt_of(9 + slot))
            target.verify(cache, [bush(4)] * len(cache.slots))
        recorded.append(capture.recorded)
    assert recorded[0] == recorded[-1]


def test_batches_of_all_sizes_take_little_more_memory_than_the_largest() -> None:
    model = model_of("llama")
    target = Target(model, lambda device: Replayed())
    cache, contexts = target.allocate(7), [prompt_of(5 + slot) for slot in range(7)]
    for slot, context in enumerate(contexts):
        target.prefill(cache, slot, context, room=200)
    for number in (7, 3, 5, 1, 6, 4, 2, 7):
        found = target.verify(cache, [bush(4)] * number)
        for slot, verified in enumerate(found):
            assert_same_logits(verified.logits[1], plain_logits(model, [*contexts[slot], 5, 2]))
    buffers = steps_of(target)._buffers
    rows = [len(buffer._logits) for buffer in buffers if buffer._logits is not None]
    assert len(rows) == len(buffers) and rows == [RECORDED[-1]], "these steps have up to 56 rows"


class Failing(Direct):
    """Records some steps and then, like a graph of a model that looks at its own numbers, none."""

    def __init__(self, good: int) -> None:
        self._left = good

    def record(self, run: Run) -> Run:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("operation not permitted when stream is capturing\nand a long story")
        return run


@pytest.mark.parametrize("good", [0, 1, 2])
def test_steps_that_cannot_be_captured_run_without_capture(good: int, capsys: pytest.CaptureFixture[str]) -> None:
    model, prompt = model_of("llama"), prompt_of(20)
    plain = answer_of(Target(model), prompt, SamplingConfig())
    target = Target(model, lambda device: Failing(good))
    for seed in range(3):
        wrong_drafter = WrongDrafter(len(prompt), plain, VOCABULARY, seed)
        assert answer_of(target, prompt, SamplingConfig(), drafter=wrong_drafter) == plain
    assert not target.captures
    said_aloud = capsys.readouterr().err
    assert said_aloud.count("\n") == 1
    assert "not captured as CUDA graphs: operation not permitted when stream is capturing" in said_aloud


class Stale(Direct):
    """What a graph does to a model that takes something of its first step, such as a length, for every step's."""

    def record(self, run: Run) -> Run:
        run()
        return lambda: None


def test_a_capture_with_other_logits_is_not_used(capsys: pytest.CaptureFixture[str]) -> None:
    target = Target(model_of("llama"), lambda device: Stale())
    assert not target.captures
    assert "its logits would be off by" in capsys.readouterr().err


def test_a_known_argmax_is_not_computed_again() -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
    known = Verified(rows, argmax=np.array([2, 2]), finite=np.array([1, 1]))
    assert known.best().tolist() == [2, 2] and known.best(1).tolist() == [2]
    found = known.known_argmax()
    assert found is not None and [part.tolist() for part in found] == [[2, 2], [1, 1]]
    unknown = Verified(rows)
    assert unknown.known_argmax() is None, "on a CPU, acceptance reads the rows that it reaches"
    assert unknown.best().tolist() == [1, 0] and unknown.best(1).tolist() == [0]


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell resident memory so")
@pytest.mark.parametrize("capture", [direct, pytest.param(never, marks=pytest.mark.long)])
def test_memory_stays_where_it_was_over_250_answers(capture: CaptureMaker) -> None:
    target = Target(model_of("llama"), capture)
    drafter = Hierarchy(budget=FixedBudget(12))

    def answers(many: int) -> None:
        for number in range(many):
            run(target, prompt_of(1 + number % 40), SamplingConfig(), 3, drafter=drafter)

    answers(50)
    before = resident()
    answers(250)
    assert resident() < 1.01 * before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rankings_come_with_a_step(dtype: torch.dtype) -> None:
    target = Target(model_of("llama", dtype), direct)
    cache = target.allocate(3)
    for slot, length in enumerate((9, 20, 3)):
        target.prefill(cache, slot, prompt_of(length))
    for wanted in (8, 61, 0):
        found = target.verify(
            cache,
            [bush(size) for size in (6, 0, 20)],
            [PassOptions(), PassOptions(max_ranked=wanted), PassOptions()],
        )
        for verified in found:
            assert (verified.ranked is not None) == (wanted > 0)
            for most, rows in ((8, slice(None)), (wanted or 1, slice(0, 1))):
                tokens, scores = verified.topk(most, rows)
                assert tokens.shape == scores.shape and tokens.flags.c_contiguous and scores.flags.c_contiguous
                logits = verified.logits[rows].float()
                assert np.array_equal(scores, logits.topk(most).values.numpy())
                assert np.array_equal(logits.gather(1, torch.from_numpy(tokens)).numpy(), scores)
