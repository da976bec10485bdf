"""Decides whether hdtool's own pass can compute a model's steps, and with which operations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.nn import Module

from hdtool.runtime.engines.reference.merged_weights import merging
from hdtool.runtime.engines.reference.operations import Operations
from hdtool.runtime.engines.reference.program_pass import ProgramPass
from hdtool.runtime.engines.reference.program_support import program_support
from hdtool.runtime.model.hidden_states import only_watches
from hdtool.runtime.model.weight_changes import hooks_of
from hdtool.runtime.program.embedding_and_head import norms_and_activations_match, windows_of_layers
from hdtool.runtime.program.llama_like_families import LLAMA
from hdtool.runtime.program.model_parts import ModelParts, fits_cache, model_parts

if TYPE_CHECKING:
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations
    from hdtool.runtime.engines.stock.model_facts import ModelFacts
    from hdtool.runtime.engines.stock.stock_model import StockModel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def fuse(stock: StockModel, facts: ModelFacts) -> ProgramPass | None:
    """Return hdtool's own pass of a model, or None if the model is unsupported.

    The weights of matmuls that read the same input become views of one merged tensor, where possible. Raise a
    ``torch.OutOfMemoryError`` if memory is too short for that.
    """
    if stock.dtype not in DTYPES:
        return None
    parts, windows = (
        model_parts(stock.model, program_support(stock.dtype, stock.device)),
        windows_of_layers(stock.config, stock.windows),
    )
    if parts is None or windows is None or len(windows) != len(parts.layers) or _has_hooks(stock.model, parts):
        return None
    if parts.family is not LLAMA and not norms_and_activations_match(parts, stock.device):
        return None
    if not fits_cache(parts, facts.shapes) or parts.placeholders or _widens(parts, stock.dtype):
        return None
    operations = triton_operations(stock.device) or Operations(stock.masks)
    return ProgramPass(parts, windows, operations, stock.hidden, merging(stock.model))


def _widens(parts: ModelParts[Module], dtype: torch.dtype) -> bool:
    """Return True if hidden states have another dtype than the weights."""
    name = parts.family.layer.widens
    return bool(name) and dtype != torch.float32 and any(getattr(layer.layer, name) for layer in parts.layers)


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
    called = {id(module) for callee in _called_by_pass(parts) for module in callee.modules()}
    hooks = hooks_of(module for module in model.modules() if id(module) not in called)
    return not all(only_watches(hook) for hooks_of_module in hooks for hook in hooks_of_module.values())


def _called_by_pass(parts: ModelParts[Module]) -> Iterator[Module]:
    """Yield the modules that the pass calls, whose hooks therefore run."""
    yield from (*parts.matmuls, parts.embedding, *filter(None, [parts.rotary]))
    for layer in parts.layers:
        mixture, inputs = layer.added_mixture, layer.inputs
        mixer = layer.mixer.called if layer.mixer else ()
        activation = None if parts.family.gates_mlp else layer.activation_module
        called = layer.experts, layer.value_norm, *mixer, activation, inputs.activation_module if inputs else None
        yield from filter(None, called)
        yield from (mixture.router, mixture.experts, *mixture.norms) if mixture else ()
