"""A pass of a model of the Llama kind over draft trees: merged matmuls, and few operations between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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
from hdtool.runtime.model.hidden_states import HiddenStates, only_watches
from hdtool.runtime.model.static_steps import StepOutput

if TYPE_CHECKING:
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    from hdtool.runtime.model.attention_masks import AttentionWindow
    from hdtool.runtime.model.cache.kv_cache import KVTensors
    from hdtool.runtime.model.step_input import StepTensors
    from hdtool.runtime.model.target import Target

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MERGED: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()
"""Merged weights that a pass reads, by their addresses: the passes of another target of the model share them."""

Matmul = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """The matmuls of one layer, with parallel ones merged, and its norms."""

    qkv: Matmul
    out: Matmul
    gate_up: Matmul
    down: Matmul
    norms: tuple[torch.Tensor, torch.Tensor]
    head_norms: HeadNorms
    layout: HeadLayout


class FusedPass:
    """One pass over the trees of some slots, for captured steps."""

    def __init__(
        self, parts: ModelParts[Module], windows: list[AttentionWindow], operations: Operations, hidden: HiddenStates
    ) -> None:
        self._parts, self._operations, self._hidden = parts, operations, hidden
        self.reads_extent = operations.reads_extent
        own = [weight for module in parts.model.modules() for weight in module.parameters(recurse=False)]
        uses = Counter(_memory_of(weight) for weight in own if type(weight) is Parameter)
        self._layers = [_weights_of(layer, window, uses) for layer, window in zip(parts.layers, windows, strict=True)]

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        operations, parts = self._operations, self._parts
        operations.begin(step, extent)
        operations.move(storage.tensors)
        hidden = parts.embedding(step.tokens).flatten(0, 1)
        rotary = parts.rotary(hidden, step.positions)
        cos, sin = (part.flatten(0, 1).contiguous() for part in rotary)
        half = sin.shape[1] // 2
        if 2 * half != self._layers[0].layout.width:
            raise NotImplementedError("rotary positions for a part of a head")
        sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=1)
        added: torch.Tensor | None = None
        for layer, cache in zip(self._layers, storage.layers, strict=True):
            normed = operations.add_norm(hidden, added, layer.norms[0], layer.layout.epsilon)
            qkv = layer.qkv(normed)
            queries = operations.rotate_and_store(qkv, (cos, sin), layer.head_norms, cache, layer.layout)
            mixed = operations.attention(queries, cache, layer.layout)
            added = layer.out(mixed)
            normed = operations.add_norm(hidden, added, layer.norms[1], layer.layout.epsilon)
            added = layer.down(operations.gate(layer.gate_up(normed)))
        hidden = operations.add_norm(hidden, added, parts.norm.weight, parts.epsilon)
        logits = parts.head(hidden)
        return StepOutput(logits, hidden.view(*step.tokens.shape, -1) if self._hidden.is_watched else None)


def fuse(target: Target) -> FusedPass | None:
    """The fused pass of a model, whose parallel matrices become parts of merged ones; None for one of another kind."""
    if target.dtype not in DTYPES or target.processes > 1 or target.state_shapes or target.hidden.layers:
        return None
    kind: Kind[Module] = Kind(_has_shape, partial(_is_plain, target), partial(_embeds, target))
    parts, windows = model_parts(target.model, kind), _windows_of_layers(target)
    if parts is None or windows is None or len(windows) != len(parts.layers) or _has_hooks(target, parts):
        return None
    shapes = [shape for layer in target.shapes for shape in layer.kept]
    first = parts.layers[0]
    if len(shapes) != 2 * len(windows) or {(one.heads, one.width) for one in shapes} != {(first.heads, first.width)}:
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
    """The attention window of each layer; None if one has chunks, or attends in another way."""
    by_kind = {window.kind: window for window in target.stock.windows}
    if any(window.chunk for window in by_kind.values()):
        return None
    number = int(target.config.num_hidden_layers)
    kinds = getattr(target.config, "layer_types", None) or [target.stock.windows[0].kind] * number
    return [by_kind[kind] for kind in kinds] if by_kind.keys() >= set(kinds) else None


def _has_hooks(target: Target, parts: ModelParts[Module]) -> bool:
    """Whether there are hooks on modules that the pass does not call, but those that watch hidden states."""
    called = {id(module) for matmul in (*parts.matmuls, parts.embedding, parts.rotary) for module in matmul.modules()}
    hooks = hooks_of(module for module in target.model.modules() if id(module) not in called)
    return not all(only_watches(hook) for found in hooks for hook in found.values())


def _has_shape(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), int) for name in ("in_features", "out_features"))


def _is_plain(target: Target, weight: Any) -> bool:
    is_dense = type(weight) is Parameter and weight.is_contiguous()
    return is_dense and weight.dtype == target.dtype and weight.device == target.device


def _embeds(target: Target, module: Module) -> bool:
    return type(module) is Embedding and module.max_norm is None and _is_plain(target, module.weight)


def _memory_of(weight: torch.Tensor) -> int:
    """Names the memory of a weight; a tensor without memory has its own."""
    return weight.untyped_storage().data_ptr() or id(weight)


def _weights_of(layer: LayerParts[Module], window: AttentionWindow, uses: Counter[int]) -> LayerWeights:
    *qkv, out, gate, up, down = layer.matmuls
    weights: list[Any] = [norm.weight for norm in layer.norms]
    layout = HeadLayout(layer.heads * layer.groups, layer.heads, layer.width, layer.scale, layer.epsilon, window)
    norms = (weights[2], weights[3]) if len(weights) == 4 else None
    qkv_of, gate_up = _together(qkv, uses), _together([gate, up], uses)
    return LayerWeights(qkv_of, out, gate_up, down, (weights[0], weights[1]), norms, layout)


def _together(modules: list[Any], uses: Counter[int]) -> Matmul:
    """The outputs of several linear layers side by side: one matmul, if their weights can be merged."""
    if all(_is_mergeable(module, uses) for module in modules) and len({module.bias is None for module in modules}) == 1:
        weight = _merged([module.weight for module in modules])
        bias = None if modules[0].bias is None else _merged([module.bias for module in modules])
        return partial(linear, weight=weight, bias=bias)
    return lambda rows: torch.cat([module(rows) for module in modules], dim=-1)


def _is_mergeable(module: Any, uses: Counter[int]) -> bool:
    """Whether a module is a plain matmul, and nothing shares the memory of its weights.

    Others may know this memory, such as an optimizer that keeps all weights in one buffer, and go on writing there.
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
    """One tensor of all rows, of which the parameters become parts: no weight lies in memory twice.

    To whoever saves the model each part is a tensor of its own. Tensors that share a storage are refused by some
    libraries as aliases of each other, and left out by others.
    """
    if (merged := _merged_before(parameters)) is None:
        # Tensors of inference mode cannot be trained; weights that were made in it take no others.
        with torch.inference_mode(parameters[0].is_inference()):
            merged = torch.cat([parameter.data for parameter in parameters])
            for parameter, part in zip(parameters, merged.split(list(map(len, parameters))), strict=True):
                parameter.data = torch.from_dlpack(part)  # type: ignore[attr-defined]
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
