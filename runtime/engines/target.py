"""The target model: a stock ``transformers`` model as an engine, with captured or compiled passes where possible.

``choose_threads`` times compiled passes to choose the number of CPU threads: on a busy machine, or if memory bandwidth
is the bottleneck, fewer can be faster, and any number gives bitwise equal results. In transformers' code, the number of
threads can change the order of a sum, so without compiled passes the number depends only on the machine.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import TYPE_CHECKING

import torch

from hdtool.data.durable_files import MAX_CACHE_AGE, CachedValue
from hdtool.data.errors import FamilyError
from hdtool.runtime.caches.kv_cache import LayerShape
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.caches.states import StateShape
from hdtool.runtime.core.engine import PassOptions, Verified, WaitForResults
from hdtool.runtime.core.tolerances import distances, tolerance_of
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.engines.checks.trees import prove_chains, prove_trees, some_context
from hdtool.runtime.engines.cuda.captured_passes import CapturedPasses
from hdtool.runtime.engines.cuda.static_steps import Capture, CaptureMaker, by_device
from hdtool.runtime.engines.stock.mixers import forward_lock
from hdtool.runtime.engines.stock.stock_passes import CompiledPasses, ReplayPasses, StockPasses
from hdtool.runtime.kernels.compile_process import DRAFTER, is_compiling
from hdtool.runtime.model.families import (
    context_limit,
    refuse_by_class,
    refuse_by_configuration,
    refuse_trees,
    tells_prompts_from_answers,
)
from hdtool.runtime.model.transformers_internals import use_masked_attention, windows_only_the_cache
from hdtool.runtime.model.weight_changes import ModelChanges
from hdtool.runtime.weights.damaged_weights import refuse_damaged_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MIN_GROWTH = 512
"""Minimum number of positions by which a cache grows when an answer fills it."""


class Target:
    """A ``transformers`` model as an engine, which reads prompts, verifies draft trees and commits accepted paths."""

    def __init__(
        self, model: PreTrainedModel, capture: CaptureMaker = by_device, shapes: Sequence[LayerShape] | None = None
    ) -> None:
        """Check that the model can verify trees, or else chains; raise a ``FamilyError`` if it can do neither.

        ``capture`` returns the ``Capture`` for a device, or None if steps aren't captured on it. ``shapes`` are the
        shapes of each layer's keys and values, known from an earlier check; if given, the model isn't checked again.
        """
        refuse_by_configuration(model.config)
        refuse_by_class(model)
        use_masked_attention(model)
        self.model = model.eval()
        self.stock = StockPasses(model)
        """Computes the passes that are neither captured nor compiled."""
        self.config, self.device, self.dtype = self.stock.config, self.stock.device, self.stock.dtype
        self.log, self.hidden = self.stock.log, self.stock.hidden
        weakref.finalize(self, self.stock.row_by_row.release)  # the model may outlive its target
        self.vocabulary = embedded_tokens(model)
        """Number of token embeddings; every token id must be less than this."""
        self.processes = 1
        """Number of processes that share the weights (tensor parallelism)."""
        self.busy = Lock()
        """Held during each decoding step, so that only one thread at a time uses the model."""
        self.shapes: tuple[LayerShape, ...] = tuple(shapes or ())
        """Shapes of each layer's keys and values."""
        self.state_shapes: tuple[StateShape, ...] = ()
        """Shapes of the recurrent layers' states."""
        self.continues = not windows_only_the_cache(model, self.config) and not tells_prompts_from_answers(self.config)
        """True if passes continue correctly from tokens that earlier passes read, so prompts may be read in parts."""
        self.rounding: float | None = None
        """Rounding error of the logits, in standard deviations of the logits.

        Measured for quantized models and for models that round more than their dtype suggests; otherwise None.
        """
        self._replay: ReplayPasses | None = None
        """Runs passes over chains for a model that cannot verify trees; None if it can."""
        self.no_trees: FamilyError | None = None
        """Why the model cannot verify trees; None if it can."""
        self._capture, self._captured = capture, CapturedPasses()
        self.compiled: CompiledPasses | None = None
        """Compiled passes, which replace the model's own code once they are proved equivalent to it."""
        self._overflow_noted = False
        self._first_logits: torch.Tensor | None = None
        """Logits after a single token, to detect weight changes that torch doesn't track."""
        self._changes = ModelChanges(model)
        self._own_cache: Cache | None = None
        if not self.shapes:
            with forward_lock(model), self.changing(), self.log.unchanged():
                self._prove()
        if self.captures:
            self._changes.record(holds_memory=True)

    def _prove(self) -> None:
        """Check that the model verifies trees, or else chains, and capture steps if possible."""
        try:
            self._prove_trees_or_chains()
        except FamilyError:
            refuse_damaged_model(self.model)
            raise

    def _prove_trees_or_chains(self) -> None:
        self._captured.disable()
        if self.no_trees:
            self._replay = prove_chains(self, self.no_trees)
            return
        try:
            refuse_trees(self.model, positions=self.stock.takes_positions, mask=self.stock.takes_mask)
            prove_trees(self)
        except FamilyError as no_trees:
            if self._own_cache or self._changes.count:  # it has verified trees before
                raise
            self._forget_shapes()
            self._replay, self.no_trees = prove_chains(self, no_trees), no_trees
            return
        if (recurrent := self.stock.recurrent) and not recurrent.can_be_captured:
            return  # passes that run level by level have shapes that depend on the tree
        if capture := self._capture(self.device):
            self._captured.enable(self, capture)

    def _forget_shapes(self) -> None:
        self.shapes, self.state_shapes, self.stock.recurrent, self.rounding = (), (), None, None

    @property
    def pads(self) -> bool:
        """True if trees that are verified together are padded to equal size."""
        compiled = None if self.captures else self._current()
        return compiled is None or compiled.pads

    @property
    def takes_trees(self) -> bool:
        """True if the model can verify trees; otherwise it verifies only chains, with caches of ``transformers``."""
        return self._replay is None

    def fit_tree(self, cache: Cache, slot: int, tree: DraftTree) -> DraftTree:
        return self._replay.fit_tree(cache, slot, tree) if self._replay else tree

    @property
    def changes(self) -> int:
        """Number of changes to the model so far (adapters, weights, hooks); each invalidates all cached contexts."""
        return self._changes.count

    @torch.inference_mode()
    def is_unchanged(self, *, goes_on: bool) -> bool:
        """Return False if weights changed in a way that torch doesn't track, which invalidates all cached contexts.

        Writing to a weight through ``.data`` leaves its version counter unchanged. The logits after a single token are
        therefore compared with those that the first call recorded. Later calls compare them only if ``goes_on`` says
        that a prompt continues a cached context; otherwise they return True.

        Comparing the cached keys and values of such a context is not enough, since recurrent states can't be compared.
        """
        if self.processes > 1 or (self._first_logits is not None and not goes_on):
            return True
        cache, token = self.allocate(1, 1), some_context(1, self.config.vocab_size)
        with self.log.unchanged():
            replayed = self._replay.prefill(cache, 0, token, 0) if self._replay else None
            logits = replayed.logits if replayed else self.stock.read(token, cache.slots[0])
        before, self._first_logits = self._first_logits, logits.clone()
        if before is None or bool((distances(logits, before) <= tolerance_of(self.dtype)).all()):
            return True
        self._changes.count += 1
        return False

    def changing(self) -> AbstractContextManager[None]:
        """In this block, ignore changes to the model. Use this for hdtool's own changes, which don't affect answers."""
        return self._changes.ignored()

    def notice_changes(self) -> None:
        """Discard captured and compiled passes if the model's adapters, weights or hooks changed since the last prompt.

        If the model's modules, code or hooks changed, check it again; raise a ``FamilyError`` if the check fails.
        """
        with forward_lock(self.model):  # a pass of another target may have replaced forwards, and a proof adds hooks
            changed = self._changes.found(self._discard)
            if changed:
                self._changes.record(holds_memory=self.captures)
        if self.compiled:
            self.compiled.check(again=changed or not self.compiled.is_current)

    def _discard(self, is_other_code: bool) -> None:
        self._first_logits = None
        self._captured.renew(self)
        if self.compiled:
            self.compiled.check()  # first, so that the check below doesn't use outdated passes
        # With several processes, all of them would have to run the check at the same time.
        if (is_other_code or self.vocabulary != embedded_tokens(self.model)) and self.processes == 1:
            self.vocabulary = embedded_tokens(self.model.eval())
            with self.changing(), self.log.unchanged():
                self._prove()

    @property
    def captures(self) -> bool:
        """True if steps run with fixed shapes and are captured."""
        return self._captured.steps is not None

    def new_recorder(self) -> Capture | None:
        """Return a ``Capture`` for other modules to capture passes with, or None if steps aren't captured."""
        return self._capture(self.device) if self.captures else None

    def context_limit(self, prompt_length: int) -> int | None:
        return context_limit(self.config, prompt_length)

    def reads_in_pieces(self, length: int) -> bool:
        """Return True if a prompt of ``length`` tokens may be read in several passes.

        It may not if a token's result depends on how the passes split the prompt: with 8-bit layers of bitsandbytes, in
        a LongRoPE model beyond its original context length, and if passes don't continue correctly from earlier ones.
        """
        is_fixed = not self.stock.row_by_row.layers and self.context_limit(length) == self.context_limit(1)
        return is_fixed and self.continues

    def allocate(self, slots: int = 1, capacity: int = 0) -> Cache:
        if self._replay:
            return self._replay.allocate(slots)
        return Cache(self.shapes, slots, capacity, self.state_shapes)

    @property
    def cache(self) -> Cache:
        """Cache for answers that are decoded one after another; it keeps the context of the last answer."""
        if self._own_cache is None:
            self._own_cache = self.allocate()
        return self._own_cache

    @torch.inference_mode()
    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int = 0, *, room: int = 0) -> Verified:
        """Truncate a slot's context to ``start`` tokens, then prefill ``tokens``.

        Return the logits ``[1, vocabulary]`` after the last token. ``room`` is the number of positions to reserve for
        further tokens.
        """
        if self._replay:
            return self._replay.prefill(cache, slot, tokens, start)
        end = start + len(tokens)
        needed = end + room + LARGEST_TREE + 1
        if cache.capacity < needed:
            cache.reserve(needed, self._captured.capacity_for(needed, self.context_limit(end), len(cache.slots)))
        sequence = cache.slots[slot]
        sequence.cut(start)
        logits = compiled.read(tokens, sequence) if (compiled := self._current()) else None
        if logits is None:
            logits = self.stock.read(tokens[sequence.length - start :], sequence)
        if self.captures or len(cache.slots) > 1:
            sequence.kv.clear_from(end)  # these passes read beyond the context
        return Verified(logits, sequence.all_hidden(), slot=sequence)

    def verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> list[Verified]:
        """Verify tree ``i`` in slot ``i``, all in a single pass; return logits for the root and each node.

        Results are valid until the next pass.
        """
        return self.launch(cache, trees, options)()

    def launch(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> WaitForResults:
        """Start to verify tree ``i`` in slot ``i``, all in a single pass; return a function for the results.

        Only a captured step starts now. If another step has begun by the time the function is called, for another
        answer, it has overwritten the results, and the function runs this step again. The results are the same, because
        the slots' contexts don't change before ``commit``.
        """
        running = None
        if self._captured.steps:
            context = self._make_room(cache, len(trees))
            running = self._captured.launch(cache, trees, options)
        if running is None:
            return partial(self._verify, cache, trees, options)
        _begin_commit(cache, trees, running.results)

        def wait_for_results() -> list[Verified]:
            if running.is_overwritten:
                return self.verify(cache, trees, options)
            self.log.add(running.wait(), max(map(len, trees)), len(trees))
            self.log.context = context
            return running.results

        return wait_for_results

    def _verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions]) -> list[Verified]:
        """Verify trees by a pass that isn't captured."""
        if self._replay:
            self.log.context = max(slot.length for slot in cache.slots[: len(trees)])
            return self._replay.verify(cache, trees)
        self.log.context = self._make_room(cache, len(trees))
        for slot in cache.slots[: len(trees)]:
            if slot.kv.pending_move:
                slot.kv.settle()
        verified = compiled.verify(cache, trees, options) if (compiled := self._current()) else None
        verified = verified or self.stock.verify(cache, trees)
        _begin_commit(cache, trees, verified)
        return verified

    def _make_room(self, cache: Cache, trees: int) -> int:
        """Reserve room for the largest tree in each of the first slots; return the length of context to log."""
        lengths = [slot.kv.length for slot in cache.slots[:trees]]
        longest = max(lengths)
        if longest + LARGEST_TREE >= cache.storage.capacity:
            needed = longest + LARGEST_TREE + 1
            cache.reserve(needed, needed + max(MIN_GROWTH, longest // 2))
        # Without padding, each tree attends only to its own context, so the cost depends on the sum of context lengths.
        return sum(lengths) // trees if trees > 1 and not self.pads else longest

    @torch.inference_mode()
    def recompute(self, cache: Cache, slot: int, root: int) -> Verified:
        """Discard what an overflowed pass with drafts wrote, and verify the slot's root without drafts."""
        sequence, tree = cache.slots[slot], DraftTree.bare(root)
        if self._replay:
            return self._replay.verify_alone(cache, slot, tree)
        sequence.kv.settle()
        sequence.kv.clear_from(sequence.length)
        if len(cache.slots) == 1:
            return self.verify(cache, [tree])[0]
        recomputed = compiled.verify_alone(sequence, tree) if (compiled := self._current()) else None
        verified = recomputed or self.stock.verify_alone(sequence, tree)
        sequence.tree, sequence.hidden_of_tree = tree, verified.hidden
        return verified

    def commit(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        """Append the root and the nodes of ``path`` to a slot's context; the rest of its tree is discarded."""
        cache.slots[slot].commit(path, deferred=self.captures)

    def watch_hidden(self, layers: Sequence[int] = ()) -> slice:
        """From now on, make each pass return hidden states, which some drafters need; return a slice of columns.

        The slice selects the columns with the output layer's input or, if ``layers`` are given, those with the outputs
        of these decoder layers.
        """
        if (known := self.hidden.columns(layers)) is not None:
            return known

        def run() -> None:
            self.prefill(self.allocate(1, MIN_GROWTH), 0, some_context(4, self.config.vocab_size))

        self.notice_changes()
        compiled, self.compiled = self.compiled, None
        try:
            with self.changing():
                if not self.hidden.is_watched:
                    self.hidden.watch(self.model, self.model.config.model_type, run)
                if layers:
                    self.hidden.watch_layers(self.model.get_decoder(), layers)
                run()
        finally:
            self.compiled = compiled
        if self.compiled:
            self.compiled.watch_hidden(self.hidden.layers)
        self._changes.count += 1  # slots that were filled before have no hidden states
        if self.captures:
            if layers:
                self._captured.renew(self)
            else:
                self._captured.forget()
            if self.cache.user is None:
                self.cache.slots[0].cut(0)
                self._captured.record(self.cache)
            self._changes.record(holds_memory=True)
        columns = self.hidden.columns(layers)
        assert columns is not None
        return columns

    def _current(self) -> CompiledPasses | None:
        return self.compiled if self.compiled and self.compiled.is_current else None

    def note_overflow(self) -> None:
        """Print, at most once, a note that logits were NaN or infinite."""
        if not self._overflow_noted:
            self._overflow_noted = True
            print(
                f"note: the model overflowed in {str(self.dtype).removeprefix('torch.')}: logits were NaN or infinite. "
                "Steps with such logits are decoded without drafts; another --dtype may avoid it",
                file=sys.stderr,
            )


def _begin_commit(cache: Cache, trees: Sequence[DraftTree], verified: Sequence[Verified]) -> None:
    """Let each slot know the tree that a pass verifies, so that ``commit`` can accept a path of it."""
    for slot, tree, result in zip(cache.slots, trees, verified, strict=False):
        slot.tree, slot.hidden_of_tree, result.slot = tree, result.hidden, slot


def embedded_tokens(model: PreTrainedModel) -> int:
    """Return the number of token embeddings; a tokenizer may have more ids."""
    number = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(number or model.config.get_text_config(decoder=True).vocab_size)


NODES = (0, 15)
"""Sizes, in nodes, of the trees that are timed to choose the number of threads."""
REPEATS, PATIENCE = 3, 0.02
"""Number of timed repetitions after a warm-up, and the time in seconds after which no further one starts."""
MIN_SPEEDUP = 1.03
"""Minimum speedup for which twice as many threads are used."""
CGROUPS = Path("/sys/fs/cgroup")


def choose_threads(target: Target, wanted: int | None = None, record: CachedValue | None = None) -> int:
    """Set torch's thread count to ``wanted`` or, if None, choose it automatically without raising it; return the count.

    Compiled passes are timed with all threads, half of them, and so on, until fewer are slower. With a ``record``,
    processes reuse the result for 24 hours. While the drafter is compiled in another process, they get one thread less
    than all instead, as times would mislead. Without compiled passes, at most as many threads are used as the
    container's CPU quota allows.
    """
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif target.device.type == "cpu" and (max_threads := torch.get_num_threads()) > 1:
        torch.set_num_threads(
            _fastest(target, max_threads, record) if target.compiled else min(max_threads, cpu_quota() or max_threads)
        )
    return torch.get_num_threads()


def cpu_quota(root: Path = CGROUPS) -> int | None:
    """Return the number of CPUs that a container may use, rounded up; None if unlimited. torch ignores the limit."""
    for files in (["cpu.max"], ["cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((root / file).read_text() for file in files).split()
            return None if quota in ("max", "-1") else max(1, -(-int(quota) // int(period)))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return None


def _fastest(target: Target, max_threads: int, record: CachedValue | None) -> int:
    if is_compiling(DRAFTER):
        return max_threads - 1
    threads = record.read(int, max_age=MAX_CACHE_AGE) if record else None
    if threads is None or not 1 <= threads <= max_threads:
        threads = fastest_threads(lambda count: _seconds_with(count, target), max_threads)
        if record:
            record.write(threads)
    return threads


def fastest_threads(seconds_with: Callable[[int], float], best: int) -> int:
    """Return the number of threads, at most ``best``, with which ``seconds_with`` is the shortest, or nearly so.

    Half as many threads are tried until fewer are slower.
    """
    shortest = seconds_with(best)
    while best > 1 and (seconds := seconds_with(best // 2)) <= MIN_SPEEDUP * shortest:
        best, shortest = best // 2, min(shortest, seconds)
    return best


def _seconds_with(threads: int, target: Target) -> float:
    """Return the total time in seconds of one pass per tree size in ``NODES``."""
    torch.set_num_threads(threads)
    cache = target.allocate()
    target.prefill(cache, 0, some_context(4, target.config.vocab_size), room=max(NODES))
    trees = [DraftTree.of(0, [1] * size, [-1] * size if target.takes_trees else range(-1, size - 1)) for size in NODES]

    def run() -> float:
        before = target.log.seconds
        for tree in trees:
            target.verify(cache, [tree])
        return target.log.seconds - before

    return mean_seconds(run)


def mean_seconds(run: Callable[[], float]) -> float:
    """Return the mean of several measurements after a warm-up, including those slowed by a busy machine."""
    seconds: list[float] = []
    began = time.perf_counter()
    for repeat in range(REPEATS + 1):
        seconds.append(run())
        if repeat and time.perf_counter() - began > PATIENCE:
            break
    return fmean(seconds[1:])
