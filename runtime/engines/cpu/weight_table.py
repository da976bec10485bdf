"""Builds the records that describe a model's weights to compiled code: addresses, shapes and matmul functions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import getitem
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch.nn.functional import pad

from hdtool.runtime.engines.cpu import pass_kernel as outer
from hdtool.runtime.engines.cpu.compiled_support import (
    FIELDS,
    MatmulRows,
    adapters_of,
    matmuls_of,
    packed_experts,
    scale_of,
)
from hdtool.runtime.engines.cpu.latent_attention import latent_function
from hdtool.runtime.engines.cpu.layer_experts import expert_function
from hdtool.runtime.engines.cpu.layer_kernel import step_function
from hdtool.runtime.engines.cpu.layer_record import LAYER, PASS
from hdtool.runtime.engines.cpu.mixer_table import MixerTable
from hdtool.runtime.kernels.compact_weight import is_compact, stored_of
from hdtool.runtime.kernels.compiled import Array, Record, zeroed_records
from hdtool.runtime.kernels.int8_matmul import Panels
from hdtool.runtime.kernels.linear_layers import format_of
from hdtool.runtime.kernels.matmul import matmul_of
from hdtool.runtime.kernels.mixture_of_experts import ROUTER, experts_record, experts_scratch_size
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from hdtool.runtime.kernels.row_operations import ACTIVATIONS
from hdtool.runtime.program.embedding_and_head import EmbeddingAndHead, rotary_kinds, rotary_of
from hdtool.runtime.program.mixer_parts import (
    Router,
    router_of,
)

if TYPE_CHECKING:
    from torch.nn import Module

    from hdtool.runtime.caches.kv_cache import KVTensors
    from hdtool.runtime.engines.cpu.compiled_support import CompiledParts
    from hdtool.runtime.kernels.linear_layers import CompiledLinear
    from hdtool.runtime.model.pass_inputs import AttentionWindow
    from hdtool.runtime.program.added_mixture import MixtureParts
    from hdtool.runtime.program.embedding_and_head import LayerInputs
    from hdtool.runtime.program.latent_parts import LatentParts
    from hdtool.runtime.program.model_parts import LayerParts

BLOCK_NORMS = "norm_before_mixer", "norm_after_mixer", "norm_before_mlp", "norm_after_mlp"
"""Fields of a layer's record for the norms in ``LayerParts.block_norms``."""
HEAD_NORMS = "norm_queries", "norm_keys"
"""Fields of an attention's record for the norms in ``LayerParts.head_norms``."""
MIXTURE_NORMS = "norm_mlp_output", "norm_experts_input", "norm_experts_output"
"""Fields of an added mixture's record for the norms in ``MixtureParts.norms``."""
MIN_ROTARY_POSITIONS = 1024
"""Minimum number of positions for which cosines and sines are computed at once."""


class WeightTable:
    """Records that describe a model's weights; all passes of the model share them."""

    def __init__(self, parts: CompiledParts, windows: Sequence[AttentionWindow]) -> None:
        """``windows`` holds one attention window per layer."""
        self._parts, self._windows = parts, windows
        self._kinds = [kind for kind in dict.fromkeys(rotary_kinds(parts)) if kind is not None]
        self._panels: dict[int, Panels] = {}
        """Panels by the address of the packed matrix from which they were made."""
        self._expanded: dict[int, torch.Tensor] = {}
        """Float32 copies of the weights that expand latent vectors, by the address of the stored weight."""
        self._head = MatmulRows.whole(parts.head)
        width = max(layer.width for layer in parts.layers)
        self._ones = torch.full((width,), 1 - parts.family.norm.offset, dtype=torch.float32)
        """Weights for norms that have no weight: with the family's offset added, they are 1."""
        self._zeros = torch.zeros(max(width, parts.layers[0].hidden))
        """Biases for LayerNorms that have no bias."""
        self._placeholders = np.array(parts.placeholders, np.int64)
        self.version = 0
        """Incremented whenever earlier results of ``outer_record`` and ``with_cache`` become outdated."""
        self.has_experts = any(part.experts or part.added_mixture for part in parts.layers)
        self.watches_hidden = False
        self.watched: tuple[int, ...] = ()
        """Indices of the layers whose outputs passes return after the hidden states."""
        self.layer_count = len(parts.layers)
        """Number of layers that a pass computes."""
        self._rotary = torch.empty(0)
        self._frequencies: list[torch.Tensor] = []
        """Copies of the rotary module's buffers, to detect changes."""
        self._filled: tuple[weakref.ref[KVTensors], Record] | None = None
        """Most recent KV cache and the layer records with its addresses."""
        self.mixers = MixerTable.of(parts)
        """Mixers of the model; None if it has none."""
        self._factors: dict[int, dict[str, Array]] = {}
        """Factors of matmuls' columns, by layer index and field."""
        self._fill()

    def _fill(self) -> None:
        self._layers = self._layer_records()
        self._filled, self.version = None, self.version + 1

    @property
    def vocabulary(self) -> int:
        """Number of logits per row."""
        return self._parts.head.out_features

    @property
    def rotary_types(self) -> int:
        """Number of layer types that have their own cosines and sines."""
        return len(self._kinds)

    @property
    def width(self) -> int:
        """Width of hidden states."""
        return self._parts.layers[0].hidden

    @property
    def activations_are_int8(self) -> bool:
        return bool(self._panels)

    def watch(self, layers: tuple[int, ...]) -> None:
        """Make later passes return their final hidden states, followed by the outputs of ``layers``."""
        self.watches_hidden, self.watched = True, layers
        self.version += 1

    def use_int8_activations(self, like: WeightTable | None = None) -> bool:
        """Multiply packed weights by 8-bit activations from now on; return True if the model has packed weights.

        Packed weights are copied into panels, and their own memory is paged out; the panels of ``like``, another table
        of the model, are shared. Other matmuls, such as an unquantized output layer, keep float32.
        """
        self._panels |= like._panels if like else {}
        input_rows = [MatmulRows.whole(self._parts.inputs.projection)] if self._parts.inputs else []
        layer_rows = [rows for part in self._parts.layers for rows in matmuls_of(part).values()]
        adapter_rows = [rows for part in self._parts.layers for pair in adapters_of(part).values() for rows in pair]
        matrices = [rows.stored for rows in [*layer_rows, *adapter_rows, *input_rows, self._head]]
        experts = [stored for part in self._parts.layers for stored in packed_experts(part)]
        for stored in [*(matrix for matrix in matrices if isinstance(matrix, PackedMatrix)), *experts]:
            if stored.data_ptr() not in self._panels:
                self._panels[stored.data_ptr()] = Panels(stored.blocks, stored.format)
                stored.page_out()
        self._fill()
        return bool(self._panels)

    @contextmanager
    def first_layer_alone(self) -> Iterator[None]:
        """Within this block, make passes compute only the first layer, to check the code outside the layers."""
        layer_count, self.layer_count = self.layer_count, 1
        self.version += 1
        try:
            yield
        finally:
            self.layer_count = layer_count
            self.version += 1

    def pass_record(self, slots: int, new: int, mask: Any = None) -> Record:
        """Return the record of a pass over ``slots`` sequences, each of which has ``new`` rows."""
        part, family = self._parts.layers[0], self._parts.family
        attention, rotary, described = family.attention, family.rotary, family.layer
        pass_record = zeroed_records(PASS)[0]
        input_width = part.inputs.width if part.inputs else 0
        inner = max(input_width, *(layer.inner for layer in self._parts.layers))
        pass_record.total_rows = slots * new
        pass_record.slots, pass_record.new, pass_record.hidden, pass_record.inner = slots, new, part.hidden, inner
        pass_record.rotary_width = self._rotary_below(1).shape[-1] if self._kinds else 0
        pass_record.interleaved, pass_record.splits_pairs = rotary.is_interleaved, rotary.splits_pairs
        pass_record.inputs_stride = len(self._parts.layers) * input_width
        if mask is not None:
            pass_record.mask = mask.data_ptr()
            pass_record.mask_slot_stride, pass_record.mask_row_stride = mask.stride(0), mask.stride(2)
        pass_record.threads, pass_record.step_function = torch.get_num_threads(), step_function().address
        for attending in self._parts.attending[:1]:
            softcap = getattr(attending.attention, attention.softcap) if attention.softcap else None
            pass_record.scale, pass_record.softcap = attending.scale, softcap or 0.0
        pass_record.residual = getattr(part.layer, described.residual) if described.residual else 1.0
        pass_record.epsilon, pass_record.norm_offset = part.epsilon, family.norm.offset
        if self.has_experts:
            pass_record.expert_scratch = max(map(_expert_scratch_size, self._layers))
            pass_record.expert_function = expert_function().address
        if any(layer.latent for layer in self._parts.layers):
            pass_record.latent_function = latent_function().address
        pass_record.norms_all_heads, pass_record.centers_norms = attention.norms_all_heads, family.norm.is_centered
        pass_record.is_parallel = described.is_parallel
        for layer in filter(lambda layer: layer.down, self._parts.layers):
            pass_record.activation = ACTIVATIONS[layer.activation]
        pass_record.has_side_blocks = any(layer.side for layer in self._parts.layers)
        pass_record.gates_heads = attention.gates_heads
        if self.mixers:
            self.mixers.fill_pass_record(pass_record)
        return pass_record

    def with_cache(self, storage: KVTensors) -> Record:
        """Return the layer records with the addresses of a KV cache; later calls may return the same array."""
        if (filled := self._filled) and filled[0]() is storage:
            return filled[1]
        table = self._layers.copy()
        for row, part, cached in zip(table, self._parts.layers, storage.layers, strict=True):
            keys, values = cached if part.kv_source is None else storage.layers[part.kv_source]
            attention = row.attention
            attention.cached_keys, attention.cached_values = keys.data_ptr(), values.data_ptr()
            if part.attention:
                attention.slot_stride, attention.head_stride = keys.stride(0), keys.stride(1)
                attention.latents.key_slot_stride = values.stride(0)
        if self.mixers and storage.states:
            self.mixers.fill_states(table, storage.states)
        self._filled = weakref.ref(storage), table
        return table

    def outer_record(self, positions: int) -> Record:
        """Return the record of the modules outside the layers, for passes with positions below ``positions``."""
        parts, rotary, scaling = self._parts, self._rotary_below(positions), EmbeddingAndHead.of(self._parts)
        weight = parts.embedding.weight
        stored, factor = stored_of(weight), scale_of(parts.embedding) or scaling.multiplier
        record = zeroed_records(outer.OUTER)[0]
        record.embed, record.embedding = outer.embedding_of(format_of(stored)).address, stored.data_ptr()
        record.vocabulary, record.multiplier = weight.shape[0], 0.0 if factor == 1.0 else factor
        record.rotary_types, record.rotaries = self.rotary_types, rotary.data_ptr()
        record.known_positions = rotary.shape[2]
        record.norm, record.epsilon = self._norm(parts.norm), parts.epsilon
        record.head = self._matmul(self._head)
        divisor = scaling.divisor / scaling.factor
        if divisor != 1.0 or scaling.softcap:
            record.divisor, record.softcap = divisor, scaling.softcap or 0.0
        record.caching_layers = len(parts.layers)
        if not self.watches_hidden:
            own = [number for number, layer in enumerate(parts.layers) if layer.kv_source is None]
            record.caching_layers = own[-1] + 1
        record.placeholders, record.placeholder_count = self._placeholders.ctypes.data, len(self._placeholders)
        if inputs := parts.inputs:
            self._fill_inputs(record.layer_inputs, inputs)
            record.vocabulary = min(record.vocabulary, inputs.embedding.weight.shape[0])
        return record

    def _fill_inputs(self, record: Record, inputs: LayerInputs[CompiledLinear]) -> None:
        """Fill in the record of the per-layer inputs."""
        stored = stored_of(inputs.embedding.weight)
        record.embed, record.embedding = outer.embedding_of(format_of(stored)).address, stored.data_ptr()
        record.multiplier = scale_of(inputs.embedding) or 1.0
        record.projection = self._matmul(MatmulRows.whole(inputs.projection))
        record.scale, record.input_scale = inputs.scale, inputs.input_scale
        record.norm, record.width = inputs.norm.weight.data_ptr(), len(inputs.norm.weight)

    def _layer_records(self) -> Record:
        parts = self._parts.layers
        table = zeroed_records(LAYER, len(parts))
        first = self._tables_of(torch.zeros(1, 1, dtype=torch.int64))
        rotary_widths = {kind: rotary.shape[-1] for kind, rotary in zip(self._kinds, first, strict=True)}
        described = zip(table, parts, self._windows, rotary_kinds(self._parts), strict=True)
        for number, (layer, part, window, kind) in enumerate(described):
            matmuls, attention = matmuls_of(part), layer.attention
            for field, matmul in matmuls.items():
                _set(layer, field, self._matmul(matmul))
            for name in part.factors(self._parts.family):
                matmul = matmuls[field := FIELDS.get(name, name)]
                self._factors.setdefault(number, {})[name] = factors = np.empty(matmul.end - matmul.first, np.float32)
                _set(layer, f"{field}.factors", factors.ctypes.data)
            for field, norm in zip(BLOCK_NORMS, part.block_norms, strict=False):
                layer[field] = self._norm(norm)
            for field, norm in zip(HEAD_NORMS, part.head_norms, strict=False):
                attention[field] = self._norm(norm)
            attention.sinks = _address_of(part.attention, "sinks") if self._parts.family.attention.has_sinks else 0
            attention.window = window.window or 0
            attention.rotary = -1 if kind is None else self._kinds.index(kind)
            attention.rotary_width = 0 if kind is None else rotary_widths[kind]
            attention.heads, attention.groups, attention.width = part.heads, part.groups, part.width
            attention.norm_values = self._ones.data_ptr() if part.value_norm else 0
            layer.factor = 0 if part.factor is None else part.factor.data_ptr()
            if part.inputs:
                layer.input_offset = number * part.inputs.width
                layer.norm_input = self._norm(part.inputs.norm)
            if part.experts:
                self._fill_experts(layer, part)
            if part.added_mixture:
                self._fill_added_mixture(layer, part.added_mixture)
            if part.latent:
                self._fill_latents(attention.latents, part.latent)
            if part.side:
                layer.side_norm = self._norm(part.side.norm)
            for field, adapter in adapters_of(part).items():
                layer.adapters[field] = tuple(map(self._matmul, adapter))
        self._copy_factors()
        if self.mixers:
            self.mixers.fill_layers(table)
        return table

    def _copy_factors(self) -> None:
        """Copy the factors of matmuls; the addresses of the copies never change."""
        for number, copies in self._factors.items():
            factors = self._parts.layers[number].factors(self._parts.family)
            for field, copied in copies.items():
                copied[:] = torch.as_tensor(factors[field]).detach().flatten().float().numpy()

    def _fill_latents(self, record: Record, latent: LatentParts[CompiledLinear]) -> None:
        """Fill in a record of ``LATENTS``, except its matmuls and the cache's ``key_slot_stride``."""
        weight: Any = latent.expansion.weight
        if is_compact(weight):
            address = weight.stored.data_ptr()
            if address not in self._expanded:
                self._expanded[address] = weight.stored.float()
            weight = self._expanded[address]
        record.expansion, record.epsilon = weight.data_ptr(), latent.epsilon
        record.plain, record.rotated, record.values = latent.plain, latent.rotated, latent.values
        record["norm_queries"], record["norm"] = self._norm(latent.query_norm), self._norm(latent.norm)

    def _fill_experts(self, layer: Record, part: LayerParts[CompiledLinear]) -> None:
        described = self._parts.family.experts
        router = described and router_of(part.experts, described)
        assert router
        layer.has_experts, layer.experts = True, experts_record(cast(Any, part.experts).experts, self._panels)
        layer.router = router_record(router)
        if part.shared_gate:
            layer.router.shared_gate = self._matmul(MatmulRows(part.shared_gate, 0, 1))

    def _fill_added_mixture(self, layer: Record, mixture: MixtureParts[CompiledLinear]) -> None:
        """Fill in the records of a mixture of experts that is added to an MLP's output."""
        layer.has_added_mixture, layer.experts = True, experts_record(mixture.experts, self._panels)
        router, added, (scale, expert_scales) = layer.router, layer.added_mixture, mixture.weights
        router.scores, router.top_k = self._matmul(MatmulRows.whole(mixture.projection)), mixture.top
        router.renormalizes, router.groups, router.used_groups, router.factor = True, 1, 1, 1.0
        for field, norm in zip(MIXTURE_NORMS, mixture.norms, strict=True):
            added[field] = _address_of(norm, "weight")
        added.norm_router_input, added.router_input_factor = scale.data_ptr(), mixture.factor
        added.expert_scales = expert_scales.data_ptr()

    def _norm(self, norm: Module | None) -> tuple[int, int, int]:
        """Return the values of a ``NORM`` record."""
        if norm is None:
            return 0, 0, 0
        bias = _address_of(norm, "bias") if self._parts.family.norm.has_bias else self._zeros.data_ptr()
        weight: Any = norm._parameters["weight"]
        return _address_of(norm, "weight"), bias, weight.stride(0) if weight.dim() == 2 else 0

    def _matmul(self, rows: MatmulRows) -> tuple[int, int, int, int, int, int]:
        """Return the values of a ``MATMUL`` record, without factors."""
        layer, stored = rows.layer, rows.stored
        bias = 0 if layer.bias is None else layer.bias[rows.first :].data_ptr()
        if panels := self._panels.get(stored.data_ptr()):
            matmul, matrix = panels.matmul, panels.data_ptr()
        else:
            matmul, matrix = matmul_of(format_of(stored)).address, stored.data_ptr()
        return matmul, matrix, rows.end - rows.first, layer.in_features, bias, 0

    def check_copies(self) -> None:
        """Refresh copied weights, factors and rotary tables, whose sources may have been changed in place."""
        self._copy_factors()
        if self.mixers:
            self.mixers.copy_weights()
        buffers = list(self._parts.rotary.buffers()) if self._parts.rotary else []
        if not (len(buffers) == len(self._frequencies) and all(map(torch.equal, buffers, self._frequencies))):
            self._frequencies = [buffer.clone() for buffer in buffers]
            self._rotary = torch.empty(0)
            self.version += 1

    def _rotary_below(self, positions: int) -> torch.Tensor:
        """Return cosines and sines ``[kinds, 2, positions, width]`` for at least this many positions."""
        if self._rotary.dim() < 4 or self._rotary.shape[2] < positions:
            count = max(MIN_ROTARY_POSITIONS, positions + positions // 4)
            self._rotary = self.rotary_at(torch.arange(count)[None])
            self.version += 1  # passes hold the addresses of the previous tensor
        return self._rotary

    def rotary_at(self, positions: torch.Tensor) -> torch.Tensor:
        """Return cosines and sines ``[kinds, 2, positions, width]``; those of narrower kinds are padded with zeros."""
        tables = self._tables_of(positions)
        if not tables:
            return torch.empty(0, 2, positions.numel(), 0)
        widest = max(table.shape[-1] for table in tables)
        return torch.stack([pad(table, (0, widest - table.shape[-1])) for table in tables])

    def _tables_of(self, positions: torch.Tensor) -> list[torch.Tensor]:
        """Return the cosines and sines ``[2, positions, width]`` of each rotary type."""
        no_hidden = torch.empty(0, dtype=torch.float32)
        embeddings = [rotary_of(self._parts, no_hidden, positions, kind) for kind in self._kinds]
        return [torch.stack((rotary.cos, rotary.sin)) for rotary in embeddings]


def _set(record: Record, path: str, value: Any) -> None:
    """Set a field, such as ``mixer.out``, of a record within records."""
    *outer_fields, field = path.split(".")
    reduce(getitem, outer_fields, record)[field] = value


def _expert_scratch_size(layer: Record) -> int:
    """Return how many float32 values of scratch memory per row a layer's experts need."""
    experts, mixed_rows = layer.experts, 2 if layer.has_added_mixture else 1
    return int(1 + experts.count + mixed_rows * experts.width + experts_scratch_size(experts, 1))


def router_record(router: Router) -> Record:
    """Return the record of a router, without a shared gate."""
    record, (expert_count, width) = zeroed_records(ROUTER)[0], router.weight.shape
    bias, correction = (0 if tensor is None else tensor.data_ptr() for tensor in (router.bias, router.correction))
    matmul = matmul_of(format_of(router.weight)).address
    record.scores = matmul, router.weight.data_ptr(), expert_count, width, bias, 0
    record.top_k, record.has_sigmoids, record.renormalizes = router.top, router.has_sigmoids, router.renormalizes
    record.correction, record.groups, record.used_groups = correction, router.groups, router.used_groups
    record.group_top = router.group_top
    record.factor, record.sum_offset, record.min_sum = router.factor, router.sum_offset, router.min_sum
    return record


def _address_of(module: Module | None, name: str) -> int:
    """Return the address of a module's parameter; 0 if the module or the parameter is None."""
    parameter: Any = None if module is None else module._parameters[name]
    return 0 if parameter is None else stored_of(parameter).data_ptr()
