"""Runs passes with transformers' own code: over prompts and draft trees or, if a model cannot verify trees, chains."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers.cache_utils import Cache as LibraryCache

from hdtool.runtime.caches.kv_cache import SlotKVCache
from hdtool.runtime.caches.replay_slots import ReplayCache, ReplaySlot, TensorPath
from hdtool.runtime.caches.slots import Cache, Slot
from hdtool.runtime.caches.states import States
from hdtool.runtime.core.engine import PassLog, PassOptions, Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.stock.recurrent_layers import RecurrentLayers
from hdtool.runtime.model.families import HiddenStates, rotary_switch
from hdtool.runtime.model.pass_inputs import AttentionMasks, Mask, TreeInput, windows_of
from hdtool.runtime.model.placement import device_of
from hdtool.runtime.model.quantization import RowByRow
from hdtool.runtime.model.transformers_internals import (
    cache_in,
    cache_name,
    last_logits_of_all_rows,
    last_logits_only,
    takes,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class CompiledPasses(Protocol):
    """Compiled passes of one model. A method returns None for a pass that the model's own code must compute."""

    is_current: bool
    """True if the model matched the compiled passes when the last prompt was read."""

    def check(self, *, again: bool = True) -> None:
        """Update ``is_current`` before a prompt is read; pass ``again=True`` if the model may have changed."""
        ...

    def watch_hidden(self, layers: tuple[int, ...]) -> None:
        """From now on, make each pass return the output layer's input, followed by the outputs of ``layers``.

        Hooks that already record hidden states count as part of the model.
        """
        ...

    def read(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor | None:
        """Append tokens to a slot; return the logits ``[1, vocabulary]`` after the last token.

        If this returns None, the slot may already have some of the tokens.
        """
        ...

    def verify(
        self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()
    ) -> list[Verified] | None:
        """Verify tree ``i`` in slot ``i``, all in one pass."""
        ...

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified | None:
        """Verify a tree in a single slot of a cache that has several slots."""
        ...

    def use_int8_activations(self) -> bool:
        """In matmuls with packed weights, use 8-bit activations from now on; return False if no weights are packed."""
        ...

    @property
    def pads(self) -> bool:
        """True if trees that are verified together are padded to equal size."""
        ...

    @property
    def activations_are_int8(self) -> bool: ...


NO_CONTEXT = nullcontext()


class StockPasses:
    """Runs and times passes of a model's own code."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.config = model.config.get_text_config(decoder=True)
        self.device, self.dtype = device_of(model), model.dtype
        self.log = PassLog()
        self.windows = windows_of(self.config)
        self._switch = rotary_switch(self.config)
        self.masks = AttentionMasks(self.windows, self.dtype, self.device)
        self.last_only = last_logits_only(model)
        """Option that makes a pass compute only the last token's logits."""
        self._last_of_all = last_logits_of_all_rows(model)
        self.row_by_row = RowByRow(model)
        self.hidden = HiddenStates()
        self.cache_name = cache_name(model) or ""
        """Name of the cache argument, read once because a wrapper of ``forward`` need not name its arguments."""
        self.recurrent: RecurrentLayers | None = None
        """Runs recurrent layers over trees; None if the model has none."""
        self.takes_positions, self.takes_mask = takes(model, "position_ids"), takes(model, "attention_mask")
        self._tree_input = TreeInput(self.device)

    def read(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor:
        """Append tokens to a slot; return the logits ``[1, vocabulary]`` after the last token."""
        first = slot.length
        # A whole prompt needs no mask: the model makes its own, or uses a causal kernel.
        mask = self.masks.continuation_mask(len(tokens), first) if first else None
        positions = range(first, first + len(tokens))
        slot.begin_reading()
        option = self._last_of_all if self.hidden.is_watched else self.last_only
        logits = self.forward([list(tokens)], [positions], mask, slot.kv, **option)[0, -1:]
        slot.extend(tokens, self.hidden.slot_rows(0, len(tokens)))
        return logits

    @torch.inference_mode()
    def verify(self, cache: Cache, trees: Sequence[DraftTree]) -> list[Verified]:
        """Verify tree ``i`` in slot ``i``, all in one pass if the slots' rotary factors agree."""
        slots = cache.slots[: len(trees)]
        if len(trees) == 1 or self._have_other_factors(slots):
            return [self.verify_alone(slot, tree) for slot, tree in zip(slots, trees, strict=True)]
        return self._verify_together(cache, trees)

    def _have_other_factors(self, slots: Sequence[Slot]) -> bool:
        """Return True if the slots' lengths are on different sides of the length at which rotary factors change."""
        return self._switch is not None and len({slot.length >= self._switch for slot in slots}) > 1

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified:
        """Verify a tree in a single slot."""
        mask = self.masks.tree_mask(tree, slot.length, reused=True)
        with self._over([tree], [slot], slot.states, slot.kv):
            logits = self.run(*self._tree_input.tree_inputs(tree, slot.length), mask, slot.kv)[0]
        self.log.nodes, self.log.slots = len(tree), 1
        return Verified(logits, self.hidden.slot_rows(0, len(tree) + 1))

    def _verify_together(self, cache: Cache, trees: Sequence[DraftTree]) -> list[Verified]:
        """Verify all trees in one pass, padded to equal size."""
        slots = cache.slots[: len(trees)]
        lengths = [slot.length for slot in slots]
        mask = self.masks.batch_mask(trees, lengths)
        ids, positions = self._tree_input.batch_inputs(trees, lengths)
        rows = ids.shape[1]
        for slot in slots:
            slot.kv.written_length = max(slot.kv.written_length, slot.length + rows)
        batch_cache = SlotKVCache(cache.storage, lengths, rows)
        with self._over(trees, slots, cache.storage.states, batch_cache):
            logits = self.run(ids, positions, mask, batch_cache)
        self.log.nodes, self.log.slots = rows - 1, len(trees)
        used = [len(tree) + 1 for tree in trees]
        return [Verified(logits[slot, :n], self.hidden.slot_rows(slot, n)) for slot, n in enumerate(used)]

    @contextmanager
    def _over(
        self, trees: Sequence[DraftTree], slots: Sequence[Slot], states: States | None, cache: LibraryCache
    ) -> Iterator[None]:
        """Run recurrent layers over trees within the block, then give each slot the states after its tree's rows."""
        if self.recurrent is None or states is None:
            yield
            return
        with self.recurrent.over(trees, states, cache) as states_of_rows:
            yield
        for place, slot in enumerate(slots):
            slot.states_of_tree, slot.place_in_tree = states_of_rows, place

    def forward(
        self,
        tokens: list[list[int]],
        positions: Sequence[Sequence[int]],
        mask: Mask,
        cache: LibraryCache,
        **options: Any,
    ) -> torch.Tensor:
        """Run a pass over lists of token ids; return logits ``[batch, tokens, vocabulary]``."""
        ids = torch.tensor(tokens, device=self.device)
        return self.run(ids, torch.tensor(positions, device=self.device), mask, cache, **options)

    def run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Mask,
        cache: LibraryCache,
        **options: Any,
    ) -> torch.Tensor:
        """Run a pass over token ids on the model's device; return logits ``[batch, tokens, vocabulary]``."""
        logits: torch.Tensor = self.call(ids, positions, mask, cache, **options).logits
        return logits

    def call(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: Mask,
        cache: LibraryCache | None,
        **options: Any,
    ) -> Any:
        """Run and time a pass over token ids on the model's device; return the model's output."""
        with self.row_by_row.on() if self.row_by_row.layers and mask is not None else NO_CONTEXT:
            self._synchronize()  # a captured step may still run, which the time of this pass should not include
            started = time.perf_counter()
            options_: dict[str, Any] = {self.cache_name: cache, "use_cache": True, "return_dict": True, **options}
            if self.takes_positions:
                options_["position_ids"] = positions
            output = self.model(input_ids=ids, attention_mask=mask, **options_)
            self._synchronize()
            self.log.add(time.perf_counter() - started)
        return output

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


MAX_WAITING = 12
"""Maximum number of accepted tokens that a pass reads again together with drafts.

If more tokens are waiting, the pass verifies no drafts: none can be rejected, so the slot can keep the pass's cache.
"""


class ReplayPasses:
    """Runs passes over chains, for a model that cannot verify trees.

    Each pass first reads the accepted tokens that the slot's cache lacks.
    """

    def __init__(self, stock: StockPasses, shared: frozenset[TensorPath]) -> None:
        self._stock, self._shared = stock, shared

    def allocate(self, slots: int) -> ReplayCache:
        return ReplayCache(self._shared, slots)

    @torch.inference_mode()
    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int) -> Verified:
        """Truncate a slot's context to ``start`` tokens, then prefill ``tokens``.

        Return the logits after the last token.
        """
        held = _slot(cache, slot)
        held.cut(start)
        logits, after, hidden = self._pass(held, tokens, 1)
        held.read(tokens, after, None if hidden is None else hidden[-len(tokens) :])
        return Verified(logits, held.all_hidden())

    @staticmethod
    def fit_tree(cache: Cache, slot: int, tree: DraftTree) -> DraftTree:
        """Return the part of a tree that the slot's next pass verifies: the chain of first children.

        If more than ``MAX_WAITING`` tokens are waiting, that part is only the root.
        """
        if len(_slot(cache, slot).waiting) > MAX_WAITING:
            return DraftTree.bare(tree.root)
        return tree.first_chain()

    @torch.inference_mode()
    def verify(self, cache: Cache, trees: Sequence[DraftTree]) -> list[Verified]:
        """Verify chain ``i`` in slot ``i``, one after another; the log counts them as one pass."""
        log = self._stock.log
        passes, seconds = log.passes, log.seconds
        verified = [self.verify_alone(cache, slot, tree) for slot, tree in enumerate(trees)]
        log.passes, log.last_seconds = passes + 1, log.seconds - seconds
        log.nodes, log.slots = max(map(len, trees)), len(trees)
        return verified

    @torch.inference_mode()
    def verify_alone(self, cache: Cache, slot: int, tree: DraftTree) -> Verified:
        assert tree.is_chain, "this model verifies chains"
        held, rows = _slot(cache, slot), len(tree) + 1
        logits, after, hidden = self._pass(held, tree.all_tokens, rows)
        held.verified(len(tree), after)
        held.tree, held.hidden_of_tree = tree, None if hidden is None else hidden[-rows:]
        return Verified(logits, held.hidden_of_tree)

    def _pass(self, held: ReplaySlot, new: Sequence[int], keep: int) -> tuple[torch.Tensor, Any, torch.Tensor | None]:
        """Run a pass over the slot's ``waiting`` tokens and then ``new``; return ``(logits, cache, hidden)``.

        ``logits`` are those of the last ``keep`` tokens. ``hidden`` has the hidden states of all tokens that were read,
        or is None if they aren't recorded.
        """
        stock, tokens = self._stock, [*held.waiting, *new]
        first = held.filled.length
        ids = torch.tensor([tokens], device=stock.device)
        positions = torch.arange(first, first + len(tokens), device=stock.device)[None]
        options = dict.fromkeys(stock.last_only, keep)
        output = stock.call(ids, positions, None, held.copy_of_filled(), **options)
        return output.logits[0, -keep:], cache_in(output), stock.hidden.slot_rows(0, len(tokens))


def _slot(cache: Cache, slot: int) -> ReplaySlot:
    held = cache.slots[slot]
    assert isinstance(held, ReplaySlot)
    return held
