"""Runs a model's passes over prompts and draft trees in compiled code."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.core.engine_interface import LOGITS_ONLY, PREFILL_PASS, PassOptions, Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.backend import Backend
from hdtool.runtime.engines.cpu.tree_pass import PROMPT_CHUNK, TreePass
from hdtool.runtime.engines.cpu.weight_table import WeightTable
from hdtool.runtime.model.transformers_internals import attention_of
from hdtool.runtime.model.weight_changes import RecordedModel

if TYPE_CHECKING:
    from hdtool.runtime.caches.kv_cache import KVTensors
    from hdtool.runtime.caches.slots import Cache, Slot
    from hdtool.runtime.core.engine_interface import PassLog
    from hdtool.runtime.engines.cpu.compiled_support import CompiledParts
    from hdtool.runtime.model.pass_inputs import AttentionWindow


class CompiledModel(Backend):
    """Computes a model's passes as long as only in-place writes to weights have changed the model since ``record``."""

    def __init__(self, parts: CompiledParts, windows: Sequence[AttentionWindow], log: PassLog) -> None:
        self._parts, self._log = parts, log
        self.table = WeightTable(parts, windows)
        self._passes = {1: TreePass(self.table)}
        """``TreePass`` objects by the number of slots for which they have memory."""
        self._is_current = False
        """True if the last ``check`` found the model unchanged."""
        self.passes = 0
        """Number of passes computed so far."""
        self.record()

    def record(self) -> None:
        """Record the model's current state, with which ``check`` compares later states."""
        self._recorded, self._attention = RecordedModel(self._parts.model), self._attention_now()
        self._set_unchanged(is_same=True)
        self._compare_attention()

    @property
    def is_current(self) -> bool:
        return self._is_current

    def check(self, *, again: bool) -> None:
        if again or not self._is_current:
            self._set_unchanged(self._recorded.is_same())
        self._compare_attention()

    def renew(self) -> None:
        self.check(again=True)

    def _compare_attention(self) -> None:
        """Refresh copied weights; update ``is_current``, False if the model or its attention implementation changed."""
        if self._is_same:
            self.table.check_copies()
        self._is_current = self._is_same and self._attention_now() == self._attention

    def _attention_now(self) -> str:
        config: Any = self._parts.model.config
        return attention_of(config.get_text_config(decoder=True))

    def _set_unchanged(self, is_same: bool) -> None:
        self._is_same = is_same
        self._memory = self._recorded.memory() if is_same else []
        """References that keep the weights' memory alive if weights are replaced during an answer."""

    def use_int8_activations(self, like: CompiledModel | None = None) -> bool:
        """Multiply packed weights by 8-bit activations from now on; return True if the model has packed weights.

        ``like``, if given, computes the same model with 8-bit activations, and its copies of the weights are shared.

        Rounding to 8 bits amplifies small differences, so a row's result must not depend, bit for bit, on the other
        rows in the pass; compiled passes guarantee this.
        """
        return self.table.use_int8_activations(like.table if like else None)

    @property
    def activations_are_int8(self) -> bool:
        return self.table.activations_are_int8

    @property
    def pads(self) -> bool:
        return bool(self.table.mixers)

    def watch_hidden(self, layers: tuple[int, ...]) -> None:
        """Make each pass return hidden states; hooks that watch the model now don't count as changes to it."""
        self.table.watch(layers)
        if self._is_current:
            self.record()

    def prefill(self, tokens: Sequence[int], slot: Slot) -> torch.Tensor | None:
        """Append tokens to a slot in chunks; return None if a chunk can't be computed, after appending earlier ones."""
        passes, logits = self._passes_for(1), None
        for first in range(0, len(tokens), PROMPT_CHUNK):
            chunk, started = tokens[first : first + PROMPT_CHUNK], time.perf_counter()
            if slot.states:
                self._begin(slot)
                slot.begin_prefill()
            prefilled = passes.prefill(slot.kv, chunk)
            if prefilled is None:
                slot.extend((), None)
                return None
            self._add(passes, started)
            slot.extend(chunk, prefilled.hidden)
            logits = prefilled.logits
        return logits

    def _begin(self, slot: Slot) -> None:
        """Clear a slot's recurrent states if the slot is empty: the states may be those of an earlier sequence."""
        if slot.states and not slot.length:
            slot.states.clear()

    def verify(
        self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions] = ()
    ) -> list[Verified] | None:
        slots, options = cache.slots[: len(trees)], options or [LOGITS_ONLY] * len(trees)
        return self._verified(self._passes_for(len(cache.slots)), cache.storage, slots, trees, options)

    def verify_alone(self, slot: Slot, tree: DraftTree) -> Verified | None:
        verified = self._verified(self._passes_for(1), slot.kv.storage, [slot], [tree], [LOGITS_ONLY])
        return verified[0] if verified else None

    def _verified(
        self,
        passes: TreePass,
        storage: KVTensors,
        slots: Sequence[Slot],
        trees: Sequence[DraftTree],
        options: Sequence[PassOptions],
    ) -> list[Verified] | None:
        started = time.perf_counter()
        if self.table.mixers:
            for slot in slots:
                self._begin(slot)
                slot.hold_states(None)
        verified = passes.verify(storage, slots, trees, options)
        if verified is None:
            return None
        self._add(passes, started, passes.nodes, len(trees))
        if self.table.mixers:
            states = passes.states_of_rows()
            for place, slot in enumerate(slots):
                slot.hold_states(states, place)
        return verified

    def _add(self, passes: TreePass, started: float, nodes: int = PREFILL_PASS, slots: int = 1) -> None:
        self.passes += 1
        self._log.add(time.perf_counter() - started, nodes, slots, passes.experts)

    def _passes_for(self, slots: int) -> TreePass:
        passes = self._passes.get(slots)
        if passes is None:
            passes = self._passes[slots] = TreePass(self.table, slots)
        return passes
