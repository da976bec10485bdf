"""A model whose passes over prompts and draft trees are computed in compiled code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.engine import LOGITS_ONLY, PREFILL_PASS, PassOptions, Verified
from hdtool.runtime.engines.cpu.tree_pass import PIECE, TreePass
from hdtool.runtime.engines.cpu.weight_table import WeightTable
from hdtool.runtime.model.checks.changes import RecordedModel
from hdtool.runtime.model.library import attention_of
from hdtool.runtime.tree import DraftTree

if TYPE_CHECKING:
    from hdtool.runtime.engine import PassLog
    from hdtool.runtime.engines.cpu.compiled_kind import CompiledParts
    from hdtool.runtime.model.cache.slots import Cache, Slot
    from hdtool.runtime.model.pass_inputs import AttentionWindow


class CompiledModel:
    """The compiled passes of one model, as long as it stays the one that was compiled."""

    def __init__(self, parts: CompiledParts, windows: Sequence[AttentionWindow], log: PassLog) -> None:
        self._parts, self._log = parts, log
        self.table = WeightTable(parts, windows)
        self._passes = {1: TreePass(self.table)}
        """By the number of slots for which a pass has memory."""
        self.is_current = False
        """Whether the model was the compiled one when the last prompt was read."""
        self.passes = 0
        """Compiled passes so far."""
        self.record()

    def record(self) -> None:
        """Take the model as it is now for the compiled one."""
        self._recorded, self._attention = RecordedModel(self._parts.model), self._attention_now()
        self._found(is_same=True)
        self.check(again=False)

    def check(self, *, again: bool = True) -> None:
        """Before a prompt is read, find out whether the model is the compiled one; ``again`` if it may have changed."""
        if again:
            self._found(self._recorded.is_same())
        if self._is_same:
            self.table.check_copies()
        self.is_current = self._is_same and self._attention_now() == self._attention

    def _attention_now(self) -> str:
        config: Any = self._parts.model.config
        return attention_of(config.get_text_config(decoder=True))

    def _found(self, is_same: bool) -> None:
        self._is_same = is_same
        self._memory = self._recorded.memory() if is_same else []
        """Held, so that no memory is read that was freed if weights are replaced within an answer."""

    def use_int8_activations(self) -> bool:
        """Multiply packed weights by activations in 8 bits from now on; whether the model has any.

        Rounding to 8 bits enlarges every difference, so a row must have the same bits in every pass, which it has here.
        """
        return self.table.use_int8_activations()

    @property
    def activations_are_int8(self) -> bool:
        return self.table.activations_are_int8

    @property
    def pads(self) -> bool:
        return bool(self.table.mixers)

    def watch_hidden(self, layers: tuple[int, ...]) -> None:
        """Give hidden states in each pass from now on, and behind them the outputs of these layers.

        The hooks that watch the model by now belong to it.
        """
        self.table.watch(layers)
        if self.is_current:
            self.record()

    def first_layer_alone(self) -> AbstractContextManager[None]:
        """Leave the other layers out meanwhile."""
        return self.table.first_layer_alone()

    def read(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor | None:
        """Read tokens after those of a slot; the logits ``[1, vocabulary]`` after the last one.

        None if a pass is not computed here, which leaves the slot with the tokens before.
        """
        passes, logits = self._of_slots(1), None
        for first in range(0, len(tokens), PIECE):
            piece, started = tokens[first : first + PIECE], time.perf_counter()
            if slot.states:
                self._begin(slot)
                slot.begin_reading()
            read = passes.read(slot.kv, piece)
            if read is None:
                slot.states_length = slot.length
                return None
            self._add(started)
            slot.extend(piece, read.hidden)
            logits = read.logits
        if slot.states:
            slot.kv.begin_states(has_begun=slot.length > 0)
        return logits

    def _begin(self, slot: Slot) -> None:
        """Clear the states of a slot without tokens, which are those of an earlier sequence."""
        if slot.states and not slot.length:
            slot.states.clear()

    def verify(
        self, cache: Cache, trees: Sequence[DraftTree], wants: Sequence[PassOptions] = ()
    ) -> list[Verified] | None:
        """Verify a tree in each of the first slots; None for a pass that is not computed here."""
        passes, count, started = self._of_slots(len(cache.slots)), len(trees), time.perf_counter()
        if self.table.mixers:
            for slot in cache.slots[:count]:
                self._begin(slot)
                slot.states_of_tree = None
        if count == 1:
            one = passes.verify_one(cache.slots[0].kv, trees[0], wants[0] if wants else LOGITS_ONLY)
            if one is None:
                return None
            self._add(started, len(trees[0].tokens))
            if self.table.mixers:
                self._keep_states(passes, cache.slots[:1])
            return [one]
        several = passes.verify(cache, trees, wants or [LOGITS_ONLY] * count)
        if several:
            nodes = [len(tree.tokens) for tree in trees]
            self._add(started, max(nodes) if self.pads else sum(nodes) + count - 1, count)
            if self.table.mixers:
                self._keep_states(passes, cache.slots[:count])
        return several

    def _keep_states(self, passes: TreePass, slots: Sequence[Slot]) -> None:
        states = passes.states_of_rows()
        for place, slot in enumerate(slots):
            slot.states_of_tree, slot.place_in_tree = states, place

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified | None:
        """Verify a tree in one slot of several."""
        passes, started = self._of_slots(1), time.perf_counter()
        self._begin(slot)
        slot.states_of_tree = None
        verified = passes.verify_one(slot.kv, tree, LOGITS_ONLY)
        if verified:
            self._add(started, len(tree))
            if self.table.mixers:
                self._keep_states(passes, [slot])
        return verified

    def _add(self, started: float, nodes: int = PREFILL_PASS, slots: int = 1) -> None:
        self.passes += 1
        self._log.add(time.perf_counter() - started, nodes, slots)

    def _of_slots(self, slots: int) -> TreePass:
        passes = self._passes.get(slots)
        if passes is None:
            passes = self._passes[slots] = TreePass(self.table, slots)
        return passes
