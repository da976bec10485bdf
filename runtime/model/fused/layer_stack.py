"""All decoder layers of a model as one callable, which computes passes of few rows in compiled code.

Models of transformers loop over ``layers[:number of layers]``. That slice has one item here, the stack: it computes all
layers at once, or calls them one by one as the loop would.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn import Module, ModuleList

from hdtool.runtime.kernels.fused import layers as compiled
from hdtool.runtime.kernels.fused.layers import COS, PASS_FIELDS, SIN, TEAM, THREADS, Numbers
from hdtool.runtime.kernels.fused.passes import compute_pass, pass_numbers
from hdtool.runtime.kernels.small_batch_linear import ProductChoice
from hdtool.runtime.kernels.team import team_of
from hdtool.runtime.model.cache.kv_cache import KVTensors, SlotKVCache, StaticKVCache
from hdtool.runtime.model.checks.unchanged import Unchanged
from hdtool.runtime.model.fused.layer_parts import LayerParts
from hdtool.runtime.model.fused.weight_table import table_of
from hdtool.runtime.model.library import CACHE_NAMES, attention_of, cache_in

MOST_ROWS, MOST_THREADS = 64, 8
"""Larger passes, such as those of prompts, are computed here if all products are our own, and with no more threads than
this: what lies between the products is the work of one."""
MOST_WORK = 1 << 23
"""Where products are those of torch: numbers of rows, positions and queries' widths, multiplied, above which attention
is the library's, which uses all threads. Compiled attention has one there: a team gained nothing, because the threads
of torch keep their cores busy for a while after each product."""
FEW_THREADS = 2
"""With so many, compiled attention by one thread was faster than the library's by all of them, however large."""
NO_NUMBERS = np.empty(0, np.int64)
KNOWN = {"attention_mask", "position_embeddings", "position_ids", *CACHE_NAMES, "use_cache"}
"""What a pass of ours gives to a layer; a pass with other arguments is the library's."""


class StackedLayers(ModuleList):
    """A model's list of layers, of which the slice of all of them is a stack."""

    stack: LayerStack | None = None

    def __getitem__(self, index: Any) -> Any:
        if self.stack and isinstance(index, slice) and index.indices(len(self)) == (0, len(self), 1):
            return [self.stack]
        return super().__getitem__(index)

    def __getstate__(self) -> dict[str, Any]:
        """Without the stack: copies have other addresses."""
        return {name: value for name, value in vars(self).items() if name != "stack"}


class LayerStack:
    """The layers of one model with the addresses of their weights."""

    def __init__(self, parts: list[LayerParts], config: Any) -> None:
        self._parts, self._config = parts, config
        self._first = parts[0]
        self._unchanged = Unchanged(module for part in parts for module in part.modules)
        self._choices = _choices_of(parts)
        self._table = table_of(parts)
        self._last: tuple[weakref.ref[KVTensors], Numbers] | None = None
        """The cache of the last pass, and the table with its addresses."""
        self._scratch: list[torch.Tensor] = []
        self.epsilon = np.float32(self._first.epsilon)
        self._scale = int(np.float32(self._first.scale).view(np.int32))
        self.used = len(parts)
        """The number of layers that a pass computes."""
        self._attention = ""
        self.takes_all_rows = False
        self.passes = 0
        """Passes that were computed in compiled code."""

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def width(self) -> int:
        """Of hidden states."""
        return self._first.hidden

    @contextmanager
    def first_layer_alone(self) -> Iterator[None]:
        """Leave the other layers out meanwhile: one is enough to compare what a model computes around its layers."""
        self.used = 1
        try:
            yield
        finally:
            self.used = len(self._parts)

    def take_all_rows(self) -> None:
        """Compute passes of any number of rows, with the products that the layers have now for the same weights."""
        self._table, self._last = table_of(self._parts), None
        self._choices = _choices_of(self._parts)
        self.takes_all_rows = True

    def __getattr__(self, name: str) -> Any:
        """Attributes of a layer that models read in their loop, such as its kind of attention."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._first.layer, name)

    def __call__(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        if self.takes(hidden_states, given):
            return self.compute(hidden_states, given)
        for part in self._parts[: self.used]:
            hidden_states = part.layer(hidden_states, **given)
        return hidden_states

    def takes(self, hidden: torch.Tensor, given: dict[str, Any]) -> bool:
        """Whether a pass is computed in compiled code."""
        cos_sin = given.get("position_embeddings")
        return (
            given.keys() <= KNOWN
            and _are_numbers(hidden, (*hidden.shape[:2], self._first.hidden))
            and isinstance(cos_sin, tuple)
            and len(cos_sin) == 2
            and all(_are_numbers(one, (*hidden.shape[:2], self._first.width)) for one in cos_sin)
            and self.takes_pass(hidden.shape[0], hidden.shape[1], given.get("attention_mask"), cache_in(given))
        )

    def takes_pass(self, slots: int, new: int, mask: object, cache: object) -> bool:
        """Whether a pass over so many sequences and new tokens of each, in float32, is computed in compiled code."""
        return (
            isinstance(cache, StaticKVCache | SlotKVCache)
            and self._takes_rows(slots, new, cache)
            and self._takes_mask(slots, new, mask, cache.length + new)
            and self._pays(slots * new, cache.length)
            and self.is_usable
        )

    @property
    def is_usable(self) -> bool:
        """Whether the model is the recorded one, and passes may be computed for it here and now."""
        return (
            not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
            and self._unchanged()
            and self._is_masked_attention()
        )

    def check_again(self) -> None:
        """Before the next pass, compare modules and weights with those whose addresses are known.

        An answer follows one model, as its keys and values do, so this is called when a prompt is read: the comparison
        takes longer than all else around a pass.
        """
        self._unchanged.check_again()
        self._attention = ""

    def _is_masked_attention(self) -> bool:
        self._attention = self._attention or attention_of(self._config)
        return self._attention == "sdpa"

    def takes_number(self, rows: int) -> bool:
        """Whether a pass of so many rows is computed in compiled code."""
        few_threads = torch.get_num_threads() <= MOST_THREADS
        return self.takes_all_rows or rows <= MOST_ROWS or (few_threads and self.has_own_products(rows))

    def _takes_rows(self, slots: int, new: int, cache: StaticKVCache | SlotKVCache) -> bool:
        """Compiled code writes to addresses: the cache must have room for all rows."""
        return slots == cache.slots and self.takes_number(slots * new) and cache.length + new <= cache.capacity

    def _takes_mask(self, slots: int, new: int, mask: object, positions: int) -> bool:
        if mask is None:
            return slots == new == 1
        return (
            type(mask) is torch.Tensor
            and mask.dtype == torch.float32
            and mask.is_cpu
            and mask.shape == (slots, 1, new, positions)
            and mask.stride(3) == 1
        )

    def _pays(self, rows: int, positions: int) -> bool:
        work = rows * positions * self._first.groups * self._first.heads * self._first.width
        return work <= MOST_WORK or torch.get_num_threads() <= FEW_THREADS or self.has_own_products(rows)

    def has_own_products(self, rows: int) -> bool:
        """Whether all products of so many rows are our own, so that the layers are one call."""
        return self.takes_all_rows or all(choice.own(rows) for choice in self._choices)

    def compute(
        self, hidden: torch.Tensor, given: dict[str, Any], first: int = 0, end: int | None = None
    ) -> torch.Tensor:
        """The layers from ``first`` to ``end`` in compiled code; it writes to the KV cache that is given."""
        end = self.used if end is None else end
        storage, starts = cache_in(given).room_for(hidden.shape[1])
        table = self.with_cache(storage)
        shape = self.shape_of(hidden.shape[0], hidden.shape[1], given["attention_mask"], storage)
        shape[COS], shape[SIN] = (one.data_ptr() for one in given["position_embeddings"])
        hidden = hidden.clone()
        scratch = self._memory(compiled.scratch_numbers(shape, max(starts) + hidden.shape[1]), hidden)
        places = np.array(starts, np.int64)
        if self.has_own_products(hidden.shape[0] * hidden.shape[1]):
            own = shape, table[first:end], places, self.epsilon
            with team_of(int(shape[THREADS])).open() as shape[TEAM]:
                compiled.compute_layers(*own, hidden.data_ptr(), scratch.data_ptr())
        else:
            for part, layer in zip(self._parts[first:end], table[first:end], strict=True):
                self._compute_by_products(part, layer, shape, places, hidden, scratch)
        self._scratch.append(scratch)
        self.passes += 1
        return hidden

    def compute_whole(self, slots: int, new: int, mask: Any, cache: Any, ends: Numbers, epsilon: Any) -> bool:
        """Compute a pass in one call, which writes to the KV cache and what ``ends`` states.

        ``epsilon`` is that of the last norm. False for token ids or positions that the model does not have.
        """
        storage, starts = cache.room_for(new)
        shape = self.shape_of(slots, new, mask, storage)
        hidden = torch.empty((slots, new, self._first.hidden), dtype=torch.float32)
        scratch = self._memory(pass_numbers(shape, max(starts) + new), hidden)
        own = shape, self.with_cache(storage)[: self.used], np.array(starts, np.int64), ends
        with team_of(int(shape[THREADS])).open() as shape[TEAM]:
            known: bool = compute_pass(*own, self.epsilon, epsilon, NO_NUMBERS, hidden.data_ptr(), scratch.data_ptr())
        self._scratch.append(scratch)
        self.passes += known
        return known

    def _compute_by_products(
        self,
        part: LayerParts,
        layer: Numbers,
        shape: Numbers,
        starts: Numbers,
        hidden: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """One layer whose products are those of its modules, changing ``hidden``."""
        epsilon = self.epsilon
        to_queries, to_keys, to_values, to_output, to_gate, to_up, to_down = part.products
        normed = torch.empty_like(hidden)
        compiled.norm_before(shape, layer, epsilon, hidden.data_ptr(), normed.data_ptr())
        queries, keys, values = to_queries(normed), to_keys(normed), to_values(normed)
        attended = torch.empty_like(queries)
        made = (one.data_ptr() for one in (queries, keys, values, scratch, attended))
        compiled.attend_layer(shape, layer, starts, epsilon, *made)
        added = to_output(attended)
        compiled.norm_after(shape, layer, epsilon, hidden.data_ptr(), added.data_ptr(), normed.data_ptr())
        gate, up = to_gate(normed), to_up(normed)
        compiled.gate_rows(shape, gate.data_ptr(), up.data_ptr())
        added = to_down(gate)
        compiled.add_rows(shape, hidden.data_ptr(), added.data_ptr())

    def shape_of(self, slots: int, new: int, mask: Any, storage: KVTensors) -> Numbers:
        keys, part = storage.layers[0][0], self._first
        own = slots, new, part.heads, part.groups, part.width, part.hidden, part.inner
        of_mask = (0, 0, 0) if mask is None else (mask.data_ptr(), mask.stride(0), mask.stride(2))
        of_team = 0, torch.get_num_threads(), compiled.attention_function().address
        made = np.array((*own, 0, 0, keys.stride(0), keys.stride(1), *of_mask, *of_team, self._scale), np.int64)
        assert len(made) == PASS_FIELDS
        return made

    def with_cache(self, storage: KVTensors) -> Numbers:
        """The table with the addresses of a cache."""
        if (last := self._last) and last[0]() is storage:
            return last[1]
        table = self._table.copy()
        for row, (keys, values) in zip(table, storage.layers, strict=True):
            row[compiled.KEYS], row[compiled.VALUES] = keys.data_ptr(), values.data_ptr()
        self._last = weakref.ref(storage), table
        return table

    def _memory(self, numbers: int, like: torch.Tensor) -> torch.Tensor:
        """Scratch memory, kept from one pass to the next; taken from the list, so that two threads share none."""
        kept = self._scratch.pop() if self._scratch else None
        self._scratch.clear()
        with torch.inference_mode(False):
            return kept if kept is not None and kept.numel() >= numbers else like.new_empty(numbers * 5 // 4)


def _choices_of(parts: list[LayerParts]) -> list[ProductChoice]:
    return list({id(one.choice): one.choice for part in parts for one in part.products}.values())


def _are_numbers(tensor: object, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.dtype == torch.float32
        and tensor.is_cpu
        and tensor.shape == shape
        and tensor.is_contiguous()
    )


def stack_of(model: Module) -> LayerStack | None:
    """The stack of a model, if its layers are in compiled code."""
    return next((module.stack for module in model.modules() if isinstance(module, StackedLayers)), None)


def takes_number(model: Module, rows: int) -> bool:
    """Whether compiled layers compute passes of so many rows."""
    stack = stack_of(model)
    return stack is not None and stack.takes_number(rows)


def check_layers_again(model: Module) -> None:
    """To be called before a prompt is read: adapters and training may have changed the model since the last one."""
    if stack := stack_of(model):
        stack.check_again()
