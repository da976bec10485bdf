"""Interface of backends, which compute passes, and an engine that runs each pass by the first one that accepts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from hdtool.runtime.caches.slots import Cache, Slot
from hdtool.runtime.core.engine_interface import PassLog, PassOptions, Verified, WaitForResults
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree

MIN_GROWTH = 512
"""Minimum number of positions by which a cache grows when an answer fills it."""

T = TypeVar("T")


class RunningPass:
    """A pass that was started, with its results, which are valid after ``wait`` until another pass overwrites them."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        """``seconds`` waits until the device has computed the results, and returns the seconds that the pass took."""
        self._measure, self._seconds = seconds, -1.0
        self.results: list[Verified] = []
        self.is_overwritten = False

    def wait(self) -> float:
        """Wait until the results are computed; return the seconds that the pass took."""
        if self._seconds < 0:
            self._seconds = self._measure()
        return self._seconds


class Backend:
    """One way to compute a model's passes; methods return None for a pass that another backend must compute."""

    captures = False
    """True if ``launch`` starts passes that run asynchronously on a device."""

    @property
    def is_current(self) -> bool:
        """False while the backend can compute no pass, for example because the model has changed."""
        return True

    @property
    def pads(self) -> bool:
        """True if trees that are verified together are padded to equal size."""
        return True

    def check(self, *, again: bool) -> None:
        """Update ``is_current`` before a prompt is read; ``again`` is True if the model may have changed."""

    def renew(self) -> None:
        """Prepare again for a model whose weights, adapters or hooks have changed."""

    def watch_hidden(self, layers: tuple[int, ...]) -> None:
        """From now on, make each pass return the output layer's input, followed by the outputs of ``layers``."""

    def capacity_for(self, needed: int, context: int, slots: int) -> int:
        """Return how many positions to allocate per slot, at least ``needed``, for a context of ``context`` tokens."""
        return needed

    def prefill(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor | None:
        """Append tokens to a slot; return the logits ``[1, vocabulary]`` after the last token.

        If this returns None, the slot may already have some of the tokens.
        """
        return None

    def launch(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions]) -> RunningPass | None:
        """Start to verify tree ``i`` in slot ``i``, all in one pass; return the running pass."""
        return None

    def verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions]) -> list[Verified] | None:
        """Verify tree ``i`` in slot ``i``, all in one pass if possible; return the results of each tree."""
        return None

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified | None:
        """Verify a tree in a single slot of a cache that has several slots."""
        return None


class StockBackend(Backend):
    """A backend that computes all passes, not captured or compiled, and allocates the caches of all backends."""

    def allocate(self, slots: int, capacity: int) -> Cache:
        raise NotImplementedError

    def prefill(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor:
        raise NotImplementedError

    def verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> list[Verified]:
        raise NotImplementedError

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified:
        raise NotImplementedError

    def fit_tree(self, slot: Slot, tree: DraftTree) -> DraftTree:
        """Return the part of a drafted tree that the next pass can verify."""
        return tree


class BackendEngine:
    """Allocates caches and runs passes, each by the first of its backends that accepts it."""

    def __init__(self, backends: Sequence[Backend], stock: StockBackend, log: PassLog) -> None:
        self.log = log
        self._use(backends, stock)

    def _use(self, backends: Sequence[Backend], stock: StockBackend) -> None:
        """Use these backends from now on, in this order and ``stock`` last."""
        self._backends: list[Backend] = [*backends, stock]
        self.stock_passes = stock

    def _run(self, run: Callable[[Backend], T | None]) -> T:
        """Call ``run`` with each current backend in turn; return the first result that isn't None."""
        for backend in self._backends:
            if backend.is_current and (result := run(backend)) is not None:
                return result
        raise AssertionError("the stock backend computes all passes")

    @property
    def captures(self) -> bool:
        """True if launched passes run asynchronously on a device."""
        first = self._backends[0]
        return first.captures and first.is_current

    @property
    def pads(self) -> bool:
        """True if trees that are verified together are padded to equal size."""
        return self._run(lambda backend: backend.pads)

    def allocate(self, slots: int = 1, capacity: int = 0) -> Cache:
        return self.stock_passes.allocate(slots, capacity)

    def fit_tree(self, cache: Cache, slot: int, tree: DraftTree) -> DraftTree:
        return self.stock_passes.fit_tree(cache.slots[slot], tree)

    @torch.inference_mode()
    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int = 0, *, room: int = 0) -> Verified:
        """Truncate a slot's context to ``start`` tokens, then prefill ``tokens``.

        Return the logits ``[1, vocabulary]`` after the last token, and the hidden states of the whole context if they
        are recorded. ``room`` is the number of positions to reserve for further tokens.
        """
        end = start + len(tokens)
        needed = end + room + LARGEST_TREE + 1
        if cache.capacity < needed:
            slots = len(cache.slots)
            cache.reserve(needed, self._run(lambda backend: backend.capacity_for(needed, end, slots)))
        sequence = cache.slots[slot]
        sequence.cut(start)
        logits = self._run(lambda backend: backend.prefill(tokens[sequence.length - start :], sequence))
        if self.captures or len(cache.slots) > 1:
            sequence.kv.clear_from(end)  # these passes read beyond the context
        return Verified(logits, sequence.all_hidden(), slot=sequence)

    def verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> list[Verified]:
        """Verify tree ``i`` in slot ``i``, all in one pass if possible; return the results of each tree.

        The results are valid until the next pass.
        """
        return self.launch(cache, trees, options)()

    def launch(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()) -> WaitForResults:
        """Start to verify tree ``i`` in slot ``i`` as ``verify`` does; return a function that returns the results.

        Only a captured step starts now; another pass runs when the function is called. If another answer's step has
        overwritten the results by then, the function runs this step again. That gives the same results, because the
        slots' contexts don't change before ``commit``.
        """
        if not self.captures:
            return partial(self._verify, cache, trees, options)
        context = self.make_room(cache, len(trees))
        running = self._backends[0].launch(cache, trees, options)
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
        self.log.context = self.make_room(cache, len(trees))
        for slot in cache.slots[: len(trees)]:
            slot.kv.settle()
        verified = self._run(lambda backend: backend.verify(cache, trees, options))
        _begin_commit(cache, trees, verified)
        return verified

    def make_room(self, cache: Cache, trees: int) -> int:
        """Reserve room in the first ``trees`` slots; return the longest context length, or the mean without padding."""
        lengths = [slot.length for slot in cache.slots[:trees]]
        longest = max(lengths)
        if longest + LARGEST_TREE >= cache.capacity:
            needed = longest + LARGEST_TREE + 1
            cache.reserve(needed, needed + max(MIN_GROWTH, longest // 2))
        # Without padding, each tree attends only to its own context, so the cost depends on the sum of context lengths.
        return sum(lengths) // trees if trees > 1 and not self.pads else longest

    @torch.inference_mode()
    def recompute(self, cache: Cache, slot: int, root: int) -> Verified:
        """Discard what an overflowed pass with drafts wrote, and verify ``root`` alone in the slot."""
        sequence, tree = cache.slots[slot], DraftTree.bare(root)
        sequence.kv.settle()
        sequence.kv.clear_from(sequence.length)
        if len(cache.slots) == 1:
            return self.verify(cache, [tree])[0]
        verified = self._run(lambda backend: backend.verify_alone(sequence, tree))
        sequence.begin_commit(tree, verified.hidden)
        return verified

    def commit(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        """Append the root and the nodes of ``path`` to a slot's context; the rest of its tree is discarded."""
        cache.slots[slot].commit(path, deferred=self.captures)


def _begin_commit(cache: Cache, trees: Sequence[DraftTree], verified: Sequence[Verified]) -> None:
    """Record in each slot the tree that a pass verifies, for ``commit``, and in each result its slot."""
    for slot, tree, result in zip(cache.slots, trees, verified, strict=False):
        slot.begin_commit(tree, result.hidden)
        result.slot = slot
