"""The addresses, compiled matmuls and shapes of a model's weights, as compiled code reads them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hdtool.runtime.engines.cpu import layer_kernel as layers
from hdtool.runtime.engines.cpu import pass_kernel as ends
from hdtool.runtime.engines.cpu.int8.matmul import int8_matmul_of
from hdtool.runtime.engines.cpu.int8.panels import Panels
from hdtool.runtime.kernels.compact_weight import stored_of
from hdtool.runtime.kernels.linear import CompiledLinear, form_of
from hdtool.runtime.kernels.matmul_address import matmul_of
from hdtool.runtime.kernels.packed.matrix import PackedMatrix

if TYPE_CHECKING:
    from hdtool.runtime.engines.cpu.compiled_kind import CompiledParts
    from hdtool.runtime.model.cache.kv_cache import KVTensors

FEWEST_POSITIONS = 1024
"""Rotary positions that are computed at once, at least."""


class WeightTable:
    """What the passes of one model have in common."""

    def __init__(self, parts: CompiledParts) -> None:
        self._parts = parts
        self._panels: dict[int, tuple[PackedMatrix, Panels]] = {}
        """By the identity of the packed matrices that they were made from."""
        self.version = 0
        """Changes with what ``ends`` and ``with_cache`` return."""
        self.watches_hidden = False
        self.used = len(parts.layers)
        """Layers that a pass computes."""
        self._rotary = torch.empty(0), torch.empty(0)
        self._frequencies: list[torch.Tensor] = []
        """Copies of the buffers that the rotary positions were computed from."""
        self._filled: tuple[weakref.ref[KVTensors], layers.Numbers] | None = None
        """The last KV cache, and the table of layers with its addresses."""
        self._fill()

    def _fill(self) -> None:
        self._layers = self._layer_rows()
        self._filled, self.version = None, self.version + 1

    @property
    def vocabulary(self) -> int:
        """Logits after each row."""
        return self._parts.head.out_features

    @property
    def width(self) -> int:
        """Of hidden states."""
        return self._parts.layers[0].hidden

    @property
    def activations_are_int8(self) -> bool:
        return bool(self._panels)

    def use_int8_activations(self) -> bool:
        """Multiply packed weights by activations in 8 bits from now on; whether the model has any.

        Matmuls with other weights, such as those of an output layer that is not quantized, keep float32.
        """
        for layer in self._parts.matmuls:
            source = stored_of(layer.weight)
            if isinstance(source, PackedMatrix) and id(source) not in self._panels:
                self._panels[id(source)] = source, Panels(source.blocks, source.format)
                source.page_out()
        self._fill()
        return bool(self._panels)

    @contextmanager
    def first_layer_alone(self) -> Iterator[None]:
        """Leave the other layers out meanwhile: one is enough to compare what a model computes around its layers."""
        used, self.used = self.used, 1
        self.version += 1
        try:
            yield
        finally:
            self.used = used
            self.version += 1

    def shape_of(self, slots: int, new: int, mask: Any, storage: KVTensors) -> layers.Numbers:
        """The shapes of a pass over so many sequences and new rows of each."""
        keys, part = storage.layers[0][0], self._parts.layers[0]
        shape = np.zeros(layers.PASS_FIELDS, np.int64)
        shape[: layers.COS] = slots, new, part.heads, part.groups, part.width, part.hidden, part.inner
        shape[layers.SLOT_STRIDE], shape[layers.HEAD_STRIDE] = keys.stride(0), keys.stride(1)
        if mask is not None:
            shape[layers.MASK : layers.MASK_ROW + 1] = mask.data_ptr(), mask.stride(0), mask.stride(2)
        shape[layers.THREADS], shape[layers.PART] = torch.get_num_threads(), layers.part_function().address
        shape[layers.SCALE], shape[layers.EPSILON] = _bits(part.scale), _bits(part.epsilon)
        return shape

    def with_cache(self, storage: KVTensors) -> layers.Numbers:
        """The rows of all layers with the addresses of a KV cache."""
        if (filled := self._filled) and filled[0]() is storage:
            return filled[1]
        table = self._layers.copy()
        for row, (keys, values) in zip(table, storage.layers, strict=True):
            row[layers.KEYS], row[layers.VALUES] = keys.data_ptr(), values.data_ptr()
        self._filled = weakref.ref(storage), table
        return table

    def ends(self, positions: int) -> layers.Numbers:
        """What a pass up to so many positions reads beside the layers, without what differs from pass to pass."""
        parts, (cos, sin) = self._parts, self._rotary_below(positions)
        weight = parts.embedding.weight
        stored = stored_of(weight)
        made = np.zeros(ends.END_FIELDS, np.int64)
        made[ends.EMBED : ends.VOCABULARY + 1] = (
            ends.embedding_of(*form_of(stored)).address,
            stored.data_ptr(),
            weight.shape[0],
        )
        made[ends.COSINES : ends.KNOWN + 1] = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
        made[ends.NORM], made[ends.LAST_EPSILON] = parts.norm.weight.data_ptr(), _bits(parts.epsilon)
        matmul, matrix, out_features, _, bias = self._matmul_row(parts.head)
        made[ends.PROJECT : ends.BIAS + 1] = matmul, matrix, out_features, bias
        return made

    def _layer_rows(self) -> layers.Numbers:
        parts = self._parts.layers
        table = np.zeros((len(parts), layers.FIELDS), np.int64)
        for row, part in zip(table, parts, strict=True):
            for number, layer in enumerate(part.matmuls):
                first = number * layers.MATMUL_FIELDS
                row[first : first + layers.MATMUL_FIELDS] = self._matmul_row(layer)
            norms: list[Any] = [norm._parameters["weight"] for norm in part.norms]
            row[layers.NORM_BEFORE : layers.NORM_BEFORE + len(norms)] = [stored_of(norm).data_ptr() for norm in norms]
        return table

    def _matmul_row(self, layer: CompiledLinear) -> tuple[int, int, int, int, int]:
        """Addresses of the matmul and of the matrix, rows and columns of it, address of the bias."""
        stored = stored_of(layer.weight)
        bias = 0 if layer.bias is None else layer.bias.data_ptr()
        if found := self._panels.get(id(stored)):
            panels = found[1]
            called, matrix = int8_matmul_of(panels.format.kind), panels.data_ptr()
        else:
            called, matrix = matmul_of(*form_of(stored)), stored.data_ptr()
        return called.address, matrix, layer.out_features, layer.in_features, bias

    def check_rotary(self) -> None:
        """Discard the rotary positions if their frequencies were written in place."""
        buffers = list(self._parts.rotary.buffers())
        if not (len(buffers) == len(self._frequencies) and all(map(torch.equal, buffers, self._frequencies))):
            self._frequencies = [buffer.clone() for buffer in buffers]
            self._rotary = torch.empty(0), torch.empty(0)
            self.version += 1

    def _rotary_below(self, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The cosines and sines of all positions below a number, which the model's own module has computed."""
        if self._rotary[0].shape[0] < positions:
            count = max(FEWEST_POSITIONS, positions + positions // 4)
            cos, sin = self._parts.rotary(torch.empty(0, dtype=torch.float32), torch.arange(count)[None])
            self._rotary = cos[0].contiguous(), sin[0].contiguous()
            self.version += 1  # other passes have the addresses of the old ones
        return self._rotary


def _bits(number: float) -> int:
    """Those of a float32."""
    return int(np.float32(number).view(np.int32))
