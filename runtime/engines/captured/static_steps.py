"""Captures steps with fixed shapes as CUDA graphs, once per shape, and replays them.

A step moves the cache positions of accepted paths, verifies a tree in each of the first slots and computes the argmax
at each node. Steps are captured per tree size and number of slots, which is a power of two or all; a step leaves out
those of its slots that have no tree. If passes read a fixed number of cache positions (the extent), steps are captured
per extent, too, and for exactly the slots with trees. Rankings and races are captured separately, once per shape of a
step, except for models with recurrent states: another graph may overwrite the states, which are read after the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product, zip_longest
from math import prod
from weakref import WeakKeyDictionary

import numpy as np
import torch

from hdtool.runtime.caches.kv_cache import MIN_EXTENT, KVTensors, extent_for
from hdtool.runtime.caches.recurrent_states import StatesOfTree
from hdtool.runtime.caches.slots import Cache, Slot
from hdtool.runtime.core.engine_interface import PassOptions, Verified
from hdtool.runtime.core.race_leaders import RACE, race_input
from hdtool.runtime.core.top_k_top_p import DrawOptions
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.engines.backend import RunningPass
from hdtool.runtime.engines.capturable_pass import StepOutput, StepPass
from hdtool.runtime.engines.captured.device_clock import DeviceClock
from hdtool.runtime.engines.captured_functions import Capture, CapturedRun, CapturedRuns, Run
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.topk import MAX_RANKED
from hdtool.runtime.model.pass_inputs import StepInput, TransferBuffer

STEP_SIZES = (1, 8, 16, 32, 64, LARGEST_TREE + 1)
"""Numbers of rows per slot in captured steps; in matmuls, a row more than 64 starts another tile."""
RECORDED = STEP_SIZES[:-1]
"""Step sizes that are captured before an answer needs them; draft budgets never choose larger ones."""
RECORDED_ROWS = 512
"""Maximum rows of a step over several slots that is captured before an answer needs it; larger ones rarely pay."""
UNUSED = DraftTree.bare(0)
"""Tree of each slot that a step leaves out; since all have the same token, they need few experts of a mixture."""

ANY_DRAWS = DrawOptions(np.uint64(0), np.float32(1.0), 0, 1.0, 0.0)
RACE_WORDS = RACE.itemsize // 8
FIXED_WORDS = 2 + RACE_WORDS
"""Number of words of each row in an outcome before the rankings."""
RunRaces = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""Runs the races of logits, given the argmax of each row and the step's input, and writes ``RACE`` records."""
Steps = CapturedRuns[tuple[int, int, int], StatesOfTree | None]
"""Captured steps by slots, rows and extent; the output of each is its pass's ``StepOutput.states``."""


class StaticSteps:
    """Captures and replays the steps of one model.

    All steps share buffers and the memory pool of their graphs. Before either is written or freed, the running step is
    finished, no matter which answer it belongs to.
    """

    def __init__(
        self,
        used: StepPass,
        capture: Capture,
        device: torch.device,
        reserved: int = 0,
        run_races: RunRaces | None = None,
    ) -> None:
        """Prepare to capture ``used``; reserve ``reserved`` positions per cache unless ``used.reads_extent`` is set.

        ``run_races`` runs the races of draws on the device; None if it can't.
        """
        self._run_races = run_races
        self._pass, self._capture, self._device, self._reserved = used, capture, device, reserved
        self._clock = DeviceClock(device)
        self._steps: WeakKeyDictionary[KVTensors, Steps] = WeakKeyDictionary()
        """Captured steps by cache storage."""
        self._rankings = CapturedRuns[int, None](capture)
        """Captured rankings of the logits in the buffers, by number of rows."""
        self._races = CapturedRuns[tuple[int, int], None](capture)
        """Captured races for the logits in the buffers, by slots and rows."""
        self._buffers: list[_Buffers] = []
        """Buffers, the smallest first; a step uses the smallest that hold its rows, and only larger ones are added."""
        self._running: RunningPass | None = None
        """The last step that was started, while the buffers hold its results."""

    def use(self, used: StepPass) -> None:
        """Replace the pass to capture, and release all captured steps."""
        self._pass = used
        self.forget()

    def forget(self) -> None:
        """Release all captured steps; each is captured again when next used."""
        self._finish_running()
        for kept in (self._steps, self._rankings, self._races, self._buffers):
            kept.clear()

    def capacity_for(self, needed: int, limit: int | None, slots: int = 1) -> int:
        """Return the capacity per slot for ``needed`` positions: one of a few up to ``limit``, to reuse steps."""
        capacity = MIN_EXTENT
        while capacity < needed:
            capacity *= 2
        if not self._pass.reads_extent:
            capacity = max(capacity, self._reserved // slots)
        return capacity if limit is None else min(capacity, max(needed, limit + LARGEST_TREE + 1))

    def record(self, cache: Cache) -> None:
        """Capture the usual steps over a cache's first slots ahead of time, so that answers don't wait for captures."""
        shapes = product(padded_numbers(len(cache.slots)), RECORDED)
        for slots, rows in sorted(shapes, key=prod, reverse=True):  # all use the buffers of the largest
            if slots == 1 or slots * rows <= RECORDED_ROWS:
                tree = DraftTree.of(0, [0] * (rows - 1), [ROOT] * (rows - 1))
                self.prepared(cache, [tree] * slots, [PassOptions(max_ranked=1, draws=ANY_DRAWS)] * slots)

    @property
    def holds_results(self) -> bool:
        """True if the buffers hold the results of the last step; False if memory was too short to run it."""
        return self._running is not None

    def _finish_running(self) -> None:
        """Wait for the running step, and tell whoever started it that its results are overwritten from now on."""
        if running := self._running:
            running.wait()
            running.is_overwritten, self._running = True, None

    def prepared(
        self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()
    ) -> Callable[[], RunningPass] | None:
        """Return a function that starts to verify the trees; capture the step first if its shape is new.

        Return None if there is not enough memory for the step, even without capturing it.

        The running step is finished first. The new step makes the cache's pending moves. If the ``options`` of any
        tree ask for rankings, races or root logits, those of all trees are copied to the host.
        """
        self._finish_running()
        rows = STEP_SIZES[bisect_left(STEP_SIZES, max(map(len, trees)) + 1)]
        slots = cache.slots[: self._padded(cache, len(trees), rows)]
        number = len(slots) * rows
        buffers = self._buffers_for(number)
        extent = 0
        if self._pass.reads_extent:
            extent = min(extent_for(max(slot.kv.length for slot in slots) + rows), cache.capacity)
        for place, (slot, tree) in enumerate(zip_longest(slots, trees)):
            buffers.input.fill(place, UNUSED if tree is None else tree, rows, slot.kv.length)
            slot.kv.mark_written(slot.kv.length + rows)
            if tree is None:
                slot.kv.settle()  # the step writes where the pending move would read
                buffers.input.leave_out(place, rows)

        for place, each in enumerate(options):
            if each.draws:
                buffers.input.draw(place, rows, *race_input(each.draws))

        def prepare_capture() -> None:
            for slot in slots:  # capturing runs the step, which would overwrite the accepted path
                slot.kv.settle()
            buffers.input.send(len(slots), rows)

        shape, steps = (len(slots), rows, extent), self._steps.setdefault(cache.storage, Steps(self._capture))
        step = steps.of(shape, partial(self._compute, buffers, cache.storage, *shape), prepare_capture)
        if step.run is None:
            return None
        rank: Run | None = partial(buffers.rank, number) if any(each.max_ranked for each in options) else None
        is_captured = step.output is None  # recurrent states stay in memory that another graph may overwrite
        if rank and is_captured:
            captured = self._rankings.of_any(number, rank)
            rank = captured.run if captured else rank
        has_draws = any(each.draws for each in options)
        race = self._race(buffers, len(slots), rows, is_captured=is_captured) if has_draws else None
        is_root_read = any(each.root and not (race and each.draws) for each in options)
        return lambda: self._run(step, rank, race, buffers, slots, trees, rows, is_root_read=is_root_read)

    def _race(self, buffers: _Buffers, slots: int, rows: int, *, is_captured: bool) -> Run | None:
        """Return a function that runs the races of a step, or None if the device can't, or failed to when captured."""
        if self._run_races is None:
            return None
        race = partial(buffers.race, self._run_races, slots, rows)
        captured = self._races.of_any((slots, rows), race)
        run = captured.run if captured else None
        return race if run and not is_captured else run

    def _buffers_for(self, rows: int) -> _Buffers:
        if not self._buffers or self._buffers[-1].rows < rows:
            self._buffers.append(_Buffers(self._device, max(RECORDED[-1], 1 << (rows - 1).bit_length())))
        return next(buffers for buffers in self._buffers if buffers.rows >= rows)

    def _padded(self, cache: Cache, trees: int, rows: int) -> int:
        """Return the number of slots in the step that verifies this many trees.

        It is a power of two, so that few steps serve all batches, or the number of all slots. The step leaves the
        further slots out, but writes to them, after their contexts: if one has no room for that, none is added.
        """
        padded = next(number for number in padded_numbers(len(cache.slots)) if number >= trees)
        has_room = all(slot.kv.length + rows <= cache.capacity for slot in cache.slots[trees:padded])
        return padded if has_room and not self._pass.reads_extent else trees

    def _run(
        self,
        step: CapturedRun[StatesOfTree | None],
        rank: Run | None,
        race: Run | None,
        buffers: _Buffers,
        slots: Sequence[Slot],
        trees: Sequence[DraftTree],
        rows: int,
        *,
        is_root_read: bool,
    ) -> RunningPass:
        assert step.run
        used = slots[: len(trees)]  # the others have no pending moves
        for place, slot in enumerate(used):
            if slot.kv.pending_move:
                buffers.input.move(place, rows, *slot.kv.pending_move)
        running = self._running = RunningPass(self._clock.seconds)
        self._clock.start()
        try:
            buffers.input.send(len(slots), rows)
            for slot in used:
                slot.kv.begin_move()
            step.run()
            for place, slot in enumerate(used):
                slot.kv.end_move()
                slot.hold_states(step.output, place)
            for run in filter(None, (race, rank)):
                run()
            collect = buffers.received(
                len(slots), rows, is_raced=race is not None, is_ranked=rank is not None, is_root_read=is_root_read
            )
        finally:  # the next step waits for this one even if an interrupt has left it to the device
            self._clock.stop()
        running.results = [collect(place * rows, len(tree) + 1) for place, tree in enumerate(trees)]
        return running

    def _compute(
        self, buffers: _Buffers, storage: KVTensors, slots: int, rows: int, extent: int
    ) -> StatesOfTree | None:
        output = self._pass.run(buffers.input.tensors(slots, rows), storage, extent)
        buffers.write(output)
        return output.states


class _Buffers:
    """Input and output buffers at fixed addresses, for steps of up to ``rows`` rows in all slots together."""

    def __init__(self, device: torch.device, rows: int) -> None:
        self.rows = rows
        self.input = StepInput(device, rows, 1)
        self._outcome = TransferBuffer(rows * (FIXED_WORDS + MAX_RANKED + MAX_RANKED // 2), device)
        """Results that are copied to the host together, hence in one contiguous tensor.

        First the argmax of each row, then whether its logit is finite, then its race, then the rankings: tokens and
        their logits.
        """
        self._logits: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self._roots: torch.Tensor | None = None
        """Logits of each slot's root, on the host."""

    def write(self, output: StepOutput) -> None:
        """Write a pass's outputs and each row's argmax to the buffers; the first call allocates those for outputs."""
        logits, hidden, _ = output
        if self._logits is None:
            self._logits = logits.new_zeros((self.rows, logits.shape[1]))
        if hidden is not None and self._hidden is None:
            self._hidden = hidden.new_zeros((self.rows, hidden.shape[-1]))
        rows = len(logits)
        self._logits[:rows].copy_(logits)
        tokens, finite = self._outcome.device[: 2 * rows].view(2, rows)
        torch.argmax(logits, dim=-1, out=tokens)
        finite.copy_(logits.gather(1, tokens[:, None])[:, 0].isfinite())
        if hidden is not None and self._hidden is not None:
            self._hidden[:rows].copy_(hidden.flatten(0, 1))

    def rank(self, rows: int) -> None:
        """Rank ``MAX_RANKED`` tokens in each of the first ``rows`` rows: one captured function serves all options."""
        assert self._logits is not None
        best = self._logits[:rows].topk(min(MAX_RANKED, self._logits.shape[1]))
        tokens, scores = rankings_in(self._outcome.device[FIXED_WORDS * rows :], rows, best.indices.shape[1])
        tokens.copy_(best.indices)
        scores.copy_(best.values)

    def race(self, run_races: RunRaces, slots: int, rows: int) -> None:
        """Run the races of the slots that draw, with their inputs in the buffer."""
        assert self._logits is not None
        number, outcome = slots * rows, self._outcome.device
        races = outcome[2 * number : FIXED_WORDS * number].view(number, RACE_WORDS)
        run_races(self._logits[:number], outcome[:number], self.input.tensors(slots, rows).buffer, races)

    def received(
        self, slots: int, rows: int, *, is_raced: bool, is_ranked: bool, is_root_read: bool
    ) -> Callable[[int, int], Verified]:
        """Start copying results to the host; return a function that reads the results of some rows.

        The function takes the index of the first row and the number of rows.
        """
        assert self._logits is not None
        logits, number = self._logits, slots * rows
        k = min(MAX_RANKED, logits.shape[1]) if is_ranked else 0
        end = number * (FIXED_WORDS + k if k or is_raced else 2) + -(-number * k // 2)
        self._outcome.fetch(end)
        roots = self._roots_on_host(slots, rows) if is_root_read else None
        tokens, finite = self._outcome.host[: 2 * number].view(2, number).numpy()
        races, rankings = self._outcome.host[2 * number :].tensor_split([RACE_WORDS * number])
        raced = races.numpy().view(RACE) if is_raced else None
        ranked, scores = (part.numpy() for part in rankings_in(rankings, number, k))

        def of_rows(first: int, number: int) -> Verified:
            used = slice(first, first + number)
            # Cloned, because the next replay overwrites the buffer.
            hidden = self._hidden[used].clone() if self._hidden is not None else None
            of_ranks = (ranked[used], scores[used]) if k else None
            root = None if roots is None else roots[first // rows]
            of_races = None if raced is None else raced[used]
            found = Verified(logits[used], hidden, ranked=of_ranks, root=root, races=of_races)
            found.argmax, found.finite = tokens[used], finite[used]
            return found

        return of_rows

    def _roots_on_host(self, slots: int, rows: int) -> Array:
        assert self._logits is not None
        logits = self._logits[: slots * rows : rows]
        if self._roots is None or len(self._roots) < slots:
            self._roots = torch.zeros(logits.shape, pin_memory=logits.is_cuda)
        self._roots[:slots].copy_(logits.to(torch.float32, memory_format=torch.contiguous_format), non_blocking=True)
        found: Array = self._roots.numpy()
        return found


def rankings_in(words: torch.Tensor, rows: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the ranked tokens and of their scores in ``words``, each of shape ``[rows, k]``."""
    tokens, scores = words.split_with_sizes([rows * k, len(words) - rows * k])
    return tokens.view(rows, k), scores.view(torch.float32)[: rows * k].view(rows, k)


def padded_numbers(slots: int) -> list[int]:
    """Return how many slots a step may have in a cache with ``slots`` slots: powers of two, and all slots."""
    return sorted({min(1 << power, slots) for power in range(slots.bit_length() + 1)})
