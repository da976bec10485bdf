"""Computes a supported model's pass over draft trees with merged matmuls and fused operations between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import torch
from torch.nn import Embedding, Linear, Module, Parameter
from torch.nn.functional import linear

from hdtool.runtime.engines.cuda.operations import (
    HeadLayout,
    HeadNorms,
    Norm,
    Operations,
    Residual,
    TorchOperations,
)
from hdtool.runtime.engines.cuda.static_steps import StepOutput
from hdtool.runtime.model.families import HiddenStates, only_watches
from hdtool.runtime.model.transformers_internals import experts_on_device
from hdtool.runtime.model.weight_changes import hooks_of
from hdtool.runtime.program.embedding_and_head import (
    EmbeddingAndHead,
    Rotary,
    norms_and_activations_match,
    rotary_kinds,
    rotary_of,
    windows_of_layers,
)
from hdtool.runtime.program.model_families import FAMILIES, LLAMA, Family
from hdtool.runtime.program.model_parts import Kind, LayerParts, ModelParts, model_parts

if TYPE_CHECKING:
    from hdtool.runtime.caches.kv_cache import KVTensors
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    from hdtool.runtime.engines.stock.facts import ModelFacts
    from hdtool.runtime.engines.stock.stock_model import StockModel
    from hdtool.runtime.model.pass_inputs import AttentionWindow, StepTensors

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MERGED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Merged weights, keyed by address, so that several targets of one model can share them."""

Matmul = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FusedLayer:
    """One layer's matmuls, merged where they read the same input, and the settings of the operations between them."""

    qkv: Matmul
    out: Matmul
    mlp: Matmul
    head_norms: HeadNorms
    layout: HeadLayout
    rotary: str | None
    """Layer type to pass to the rotary module; None without rotary positions."""
    middle: Residual
    """Residual between attention and the MLP."""
    end: Residual
    """Residual between the MLP and the next layer or the output layer."""


class FusedPass:
    """Computes forward passes over one draft tree per slot, for steps that are captured and replayed."""

    def __init__(
        self, parts: ModelParts[Module], windows: list[AttentionWindow], operations: Operations, hidden: HiddenStates
    ) -> None:
        self._parts, self._operations, self._hidden = parts, operations, hidden
        self._ends = EmbeddingAndHead.of(parts)
        self.reads_extent = operations.reads_extent
        weights = [weight for module in parts.model.modules() for weight in module.parameters(recurse=False)]
        uses = Counter(_memory_of(weight) for weight in weights if type(weight) is Parameter)
        norm = Norm(parts.norm.weight, parts.epsilon, parts.family.norm)
        first = [_norm_of(layer, layer.block_norms[0], parts.family) for layer in parts.layers]
        self._kinds = dict.fromkeys(rotary_kinds(parts))
        self._begin = Residual(None, first[0])
        self._layers = [
            self._fused(layer, window, kind, after, uses)
            for layer, window, kind, after in zip(
                parts.layers, windows, rotary_kinds(parts), [*first[1:], norm], strict=True
            )
        ]

        residuals = [self._begin, *(residual for layer in self._layers for residual in (layer.middle, layer.end))]
        operations.prepare(residuals, [layer.head_norms for layer in self._layers])

    def _fused(
        self,
        layer: LayerParts[Module],
        window: AttentionWindow,
        rotary: str | None,
        next_norm: Norm | None,
        uses: Counter[int],
    ) -> FusedLayer:
        family, attention = self._parts.family, cast(Any, layer.attention)
        layout = HeadLayout(
            layer.heads * layer.groups,
            layer.heads,
            layer.width,
            layer.scale,
            window,
            getattr(attention, family.softcap) if family.softcap else None,
            attention.sinks if family.has_sinks else None,
        )
        _, after_attention, before_mlp, after_mlp = (_norm_of(layer, norm, family) for norm in layer.block_norms)
        head_norms = [Norm(cast(Any, norm).weight, layer.epsilon, family.norm) for norm in layer.head_norms]
        multiplier = float(getattr(layer.layer, family.residual)) if family.residual else 1.0
        return FusedLayer(
            _joined_matmul(list(layer.qkv), uses),
            layer.out,
            self._mlp_of(layer, uses),
            (head_norms[0], head_norms[1]) if head_norms else None,
            layout,
            rotary,
            Residual(after_attention, before_mlp, multiplier),
            Residual(after_mlp, next_norm, multiplier),
        )

    def _mlp_of(self, layer: LayerParts[Module], uses: Counter[int]) -> Matmul:
        if layer.experts is not None:
            return partial(self._experts, layer.experts)
        gate_up, (down,), activation = _joined_matmul(list(layer.gate_up), uses), layer.down, layer.activation
        return lambda rows: cast(torch.Tensor, down(self._operations.gate(gate_up(rows), activation)))

    def _experts(self, experts: Module, rows: torch.Tensor) -> torch.Tensor:
        """Run Transformers' mixture of experts, and drop the routing weights that some mixtures return as well."""
        outputs = experts(rows.view(self._slots, -1, rows.shape[-1]))
        mixed: torch.Tensor = outputs[0] if isinstance(outputs, tuple) else outputs
        return mixed.view(rows.shape)

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        has_experts = any(layer.experts for layer in self._parts.layers)
        with experts_on_device(self._parts.model) if has_experts else nullcontext():
            return self._run(step, storage, extent)

    def _run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        operations, parts = self._operations, self._parts
        self._slots = len(step.tokens)
        operations.begin(step, extent)
        operations.move(storage.tensors)
        hidden = self._ends.embedded(parts.embedding(step.tokens).flatten(0, 1))
        rotary = {kind: self._rotary(hidden, step.positions, kind) for kind in self._kinds}
        normed = operations.add_norm(hidden, None, self._begin)
        watched: dict[int, torch.Tensor] = {}
        for number, (layer, cache) in enumerate(zip(self._layers, storage.layers, strict=True)):
            qkv = layer.qkv(normed)
            queries = operations.rotate_and_store(qkv, rotary[layer.rotary], layer.head_norms, cache, layer.layout)
            mixed = operations.attention(queries, cache, layer.layout)
            normed = operations.add_norm(hidden, layer.out(mixed), layer.middle)
            normed = operations.add_norm(hidden, layer.mlp(normed), layer.end)
            if number in self._hidden.layers:
                watched[number] = hidden.clone()
        logits = self._ends.bounded(parts.head(normed))
        if not self._hidden.is_watched:
            return StepOutput(logits, None)
        columns = [normed, *(watched[number] for number in self._hidden.layers)]
        return StepOutput(logits, torch.cat(columns, dim=1).view(*step.tokens.shape, -1))

    def _rotary(self, hidden: torch.Tensor, positions: torch.Tensor, kind: str | None) -> Rotary | None:
        return None if kind is None else rotary_of(self._parts, hidden, positions, kind)


def _norm_of(layer: LayerParts[Module], norm: Any, family: Family) -> Norm | None:
    return None if norm is None else Norm(norm.weight, layer.epsilon, family.norm)


def fuse(stock: StockModel, facts: ModelFacts) -> FusedPass | None:
    """Return the fused pass of a model, or None if the model is unsupported.

    The weights of matmuls that read the same input become views of one merged tensor, where possible.
    """
    if stock.dtype not in DTYPES or facts.state_shapes:
        return None
    kind: Kind[Module] = Kind(_has_shape, partial(_is_plain, stock), partial(_is_embedding, stock), families=FAMILIES)
    parts, windows = model_parts(stock.model, kind), windows_of_layers(stock.config, stock.windows)
    if parts is None or windows is None or len(windows) != len(parts.layers) or _has_hooks(stock.model, parts):
        return None
    if parts.family is not LLAMA and not norms_and_activations_match(parts, stock.device):
        return None
    shapes = [shape for layer in facts.shapes for shape in layer.kept]
    first = parts.layers[0]
    if len(shapes) != 2 * len(windows) or {(shape.heads, shape.width) for shape in shapes} != {
        (first.heads, first.width)
    }:
        return None
    return FusedPass(parts, windows, operations_of(stock), stock.hidden)


def operations_of(stock: StockModel) -> Operations:
    """Return the Triton operations if they can run on the model's device, and otherwise the PyTorch ones."""
    return triton_operations(stock.device) or TorchOperations(stock.masks)


def triton_operations(device: torch.device) -> TritonOperations | None:
    """Return the Triton operations, or None without a GPU or Triton."""
    if device.type != "cuda":
        return None
    try:
        from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    except ImportError:
        return None
    return TritonOperations(device)


def _has_hooks(model: Module, parts: ModelParts[Module]) -> bool:
    """Return True if modules that the pass doesn't call have hooks, other than hooks that watch hidden states."""
    experts = [layer.experts for layer in parts.layers if layer.experts is not None]
    callees = (*parts.matmuls, *experts, parts.embedding, parts.rotary)
    called = {id(module) for callee in callees for module in callee.modules()}
    hooks = hooks_of(module for module in model.modules() if id(module) not in called)
    return not all(only_watches(hook) for hooks_of_module in hooks for hook in hooks_of_module.values())


def _has_shape(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def _is_plain(stock: StockModel, weight: Any) -> bool:
    is_dense = type(weight) is Parameter and weight.is_contiguous()
    return is_dense and weight.dtype == stock.dtype and weight.device == stock.device


def _is_embedding(stock: StockModel, module: Module) -> bool:
    return isinstance(module, Embedding) and module.max_norm is None and _is_plain(stock, module.weight)


def _memory_of(weight: torch.Tensor) -> int:
    """Return the address of a weight's storage, or the tensor's ``id`` if it has no storage."""
    return weight.untyped_storage().data_ptr() or id(weight)


def _joined_matmul(modules: list[Any], uses: Counter[int]) -> Matmul:
    """Return a function that computes several linear layers, in one matmul if possible, and joins their outputs."""
    if len(modules) == 1:
        return cast(Matmul, modules[0])
    if all(_is_mergeable(module, uses) for module in modules) and len({module.bias is None for module in modules}) == 1:
        weight = _merged([module.weight for module in modules])
        bias = None if modules[0].bias is None else _merged([module.bias for module in modules])
        return partial(linear, weight=weight, bias=bias)
    return lambda rows: torch.cat([module(rows) for module in modules], dim=-1)


def _is_mergeable(module: Any, uses: Counter[int]) -> bool:
    """Return True if a module is an unmodified ``Linear`` whose weights don't share memory with other tensors.

    Other owners of shared memory, such as an optimizer with all weights in one buffer, would go on using that memory.
    """
    is_plain = type(module) is Linear and "forward" not in vars(module) and not any(map(len, hooks_of([module])))
    return is_plain and all(
        type(weight) is Parameter
        and weight.layout is torch.strided
        and weight.is_contiguous()
        and uses[_memory_of(weight)] == 1
        and weight.untyped_storage().nbytes() == weight.nbytes
        for weight in module.parameters()
    )


def _merged(parameters: list[Any]) -> torch.Tensor:
    """Concatenate parameters into one tensor and make each parameter a view of it, so that no weight is stored twice.

    Each view gets a separate storage object, because code that saves a model may reject or drop tensors that share one.
    """
    if (merged := _merged_before(parameters)) is None:
        # Inference tensors can't be trained, and parameters made in inference mode accept no others as data.
        with torch.inference_mode(parameters[0].is_inference()):
            merged = torch.cat([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, merged.split(list(map(len, parameters))), strict=True):
                parameter.data = torch.from_dlpack(part)  # type: ignore[attr-defined]
        MERGED[merged.data_ptr()] = merged
    return merged


def _merged_before(parameters: list[Any]) -> torch.Tensor | None:
    """Return the merged tensor that consists of exactly these parameters in this order, or None if there is none."""
    merged = MERGED.get(parameters[0].data_ptr())
    if merged is None or merged.dtype != parameters[0].dtype:
        return None
    ends = list(accumulate((parameter.nbytes for parameter in parameters), initial=merged.data_ptr()))
    are_parts = [parameter.data_ptr() for parameter in parameters] == ends[:-1]
    return merged if are_parts and ends[-1] == merged.data_ptr() + merged.nbytes else None
