"""A pass of a model of the Llama kind over draft trees: merged matmuls, and few operations between them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch.nn import Embedding, Linear, Module, Parameter
from torch.nn.functional import linear

from hdtool.runtime.engines.cuda.operations import HeadLayout, HeadNorms, Operations, TorchOperations
from hdtool.runtime.engines.model_parts import Kind, LayerParts, ModelParts, model_parts
from hdtool.runtime.model.checks.recorded_model import hooks_of
from hdtool.runtime.model.static_steps import StepOutput

if TYPE_CHECKING:
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    from hdtool.runtime.model.attention_masks import AttentionWindow
    from hdtool.runtime.model.cache.kv_cache import KVTensors
    from hdtool.runtime.model.hidden_states import HiddenStates
    from hdtool.runtime.model.step_input import StepTensors
    from hdtool.runtime.model.target import Target

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MERGED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Merged weights that a pass reads, by their addresses: the passes of another target of the model share them."""


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one layer, with those of parallel matmuls merged."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    out: Linear
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: Linear
    norms: tuple[torch.Tensor, torch.Tensor]
    head_norms: HeadNorms
    layout: HeadLayout


class FusedPass:
    """One pass over the trees of some slots, for captured steps."""

    def __init__(
        self, parts: ModelParts[Linear], windows: list[AttentionWindow], operations: Operations, hidden: HiddenStates
    ) -> None:
        self._parts, self._operations, self._hidden = parts, operations, hidden
        self.reads_extent = operations.reads_extent
        self._layers = [_weights_of(layer, window) for layer, window in zip(parts.layers, windows, strict=True)]

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        operations, parts = self._operations, self._parts
        operations.begin(step, extent)
        operations.move(storage.tensors)
        hidden = parts.embedding(step.tokens).flatten(0, 1)
        rotary = parts.rotary(hidden, step.positions)
        cos, sin = (part.flatten(0, 1).contiguous() for part in rotary)
        half = sin.shape[1] // 2
        sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=1)
        added: torch.Tensor | None = None
        for layer, cache in zip(self._layers, storage.layers, strict=True):
            normed = operations.add_norm(hidden, added, layer.norms[0], layer.layout.epsilon)
            qkv = linear(normed, layer.qkv, layer.qkv_bias)
            queries = operations.rotate_and_store(qkv, (cos, sin), layer.head_norms, cache, layer.layout)
            mixed = operations.attention(queries, cache, layer.layout)
            added = linear(mixed, layer.out.weight, layer.out.bias)
            normed = operations.add_norm(hidden, added, layer.norms[1], layer.layout.epsilon)
            gated = operations.gate(linear(normed, layer.gate_up, layer.gate_up_bias))
            added = linear(gated, layer.down.weight, layer.down.bias)
        hidden = operations.add_norm(hidden, added, parts.norm.weight, parts.epsilon)
        logits = linear(hidden, parts.head.weight, parts.head.bias)
        return StepOutput(logits, hidden.view(*step.tokens.shape, -1) if self._hidden.is_watched else None)


def fuse(target: Target) -> FusedPass | None:
    """The fused pass of a model, whose parallel matrices become views of merged ones; None for one of another kind."""
    if target.dtype not in DTYPES or target.processes > 1:
        return None
    kind = Kind(Linear, partial(_is_plain, target), partial(_embeds, target))
    parts, windows = model_parts(target.model, kind), _windows_of_layers(target)
    watched = 1 if target.hidden.is_watched else 0
    hooks = sum(map(len, hooks_of(target.model.modules())))
    if parts is None or windows is None or len(windows) != len(parts.layers) or hooks > watched:
        return None
    shapes = [shape for layer in target.shapes if layer for shape in layer]
    first = parts.layers[0]
    if len(shapes) != 2 * len(windows) or {(one.heads, one.width) for one in shapes} != {(first.heads, first.width)}:
        return None
    if not _are_mergeable(parts):
        return None
    return FusedPass(parts, windows, operations_of(target), target.hidden)


def operations_of(target: Target) -> Operations:
    """Triton's where they can run, else torch's."""
    return triton_operations(target.device) or TorchOperations(target.stock.masks)


def triton_operations(device: torch.device) -> TritonOperations | None:
    """None without a GPU or without Triton."""
    if device.type != "cuda":
        return None
    try:
        from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    except ImportError:
        return None
    return TritonOperations(device)


def _windows_of_layers(target: Target) -> list[AttentionWindow] | None:
    """The attention window of each layer; None if one has chunks."""
    by_kind = {window.kind: window for window in target.stock.windows}
    if any(window.chunk for window in by_kind.values()):
        return None
    number = int(target.config.num_hidden_layers)
    kinds = getattr(target.config, "layer_types", None) or [target.stock.windows[0].kind] * number
    return [by_kind[kind] for kind in kinds]


def _is_plain(target: Target, weight: Any) -> bool:
    is_dense = type(weight) is Parameter and weight.is_contiguous()
    return is_dense and weight.dtype == target.dtype and weight.device == target.device


def _embeds(target: Target, module: Module) -> bool:
    return type(module) is Embedding and module.max_norm is None and _is_plain(target, module.weight)


def _are_mergeable(parts: ModelParts[Linear]) -> bool:
    """Whether parallel matmuls have biases all or none, and whether nothing shares the memory of their weights.

    Others may know this memory, such as an optimizer that keeps all weights in one buffer, and go on writing there.
    """
    parallel = [group for layer in parts.layers for group in (layer.matmuls[:3], layer.matmuls[4:6])]
    if any(len({matmul.bias is None for matmul in group}) > 1 for group in parallel):
        return False
    weights = [weight for group in parallel for matmul in group for weight in matmul.parameters()]
    own = [weight for module in parts.model.modules() for weight in module.parameters(recurse=False)]
    uses = Counter(weight.untyped_storage().data_ptr() for weight in own)
    return all(
        uses[weight.untyped_storage().data_ptr()] == 1 and weight.untyped_storage().nbytes() == weight.nbytes
        for weight in weights
    )


def _weights_of(layer: LayerParts[Linear], window: AttentionWindow) -> LayerWeights:
    queries, keys, values, out, gate, up, down = layer.matmuls
    weights: list[Any] = [norm.weight for norm in layer.norms]
    layout = HeadLayout(layer.heads * layer.groups, layer.heads, layer.width, layer.scale, layer.epsilon, window)
    return LayerWeights(
        _merged([queries.weight, keys.weight, values.weight]),
        _merged_bias([queries, keys, values]),
        out,
        _merged([gate.weight, up.weight]),
        _merged_bias([gate, up]),
        down,
        (weights[0], weights[1]),
        (weights[2], weights[3]) if len(weights) == 4 else None,
        layout,
    )


def _merged(parameters: list[Any]) -> torch.Tensor:
    """One tensor of all rows, of which the parameters become parts: no weight lies in memory twice.

    To whoever saves the model each part is a tensor of its own. Tensors that share a storage are refused by some
    libraries as aliases of each other, and left out by others.
    """
    if (merged := _merged_before(parameters)) is None:
        # Tensors of inference mode cannot be trained; weights that were made in it take no others.
        with torch.inference_mode(parameters[0].is_inference()):
            merged = torch.cat([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, merged.split(list(map(len, parameters))), strict=True):
                parameter.data = torch.from_dlpack(part)
        MERGED[merged.data_ptr()] = merged
    return merged


def _merged_before(parameters: list[Any]) -> torch.Tensor | None:
    """The tensor of which these parameters are parts already, one after the other; None if they are not."""
    merged = MERGED.get(parameters[0].data_ptr())
    if merged is None or merged.dtype != parameters[0].dtype:
        return None
    ends = list(accumulate((parameter.nbytes for parameter in parameters), initial=merged.data_ptr()))
    are_parts = [parameter.data_ptr() for parameter in parameters] == ends[:-1]
    return merged if are_parts and ends[-1] == merged.data_ptr() + merged.nbytes else None


def _merged_bias(modules: list[Linear]) -> torch.Tensor | None:
    return _merged([module.bias for module in modules]) if modules[0].bias is not None else None
