"""Recognizes the MLPs and mixtures of experts of decoder layers, and their activations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from torch.nn import Module

from hdtool.runtime.program.llama_like_families import Family

if TYPE_CHECKING:
    from hdtool.runtime.program.model_parts import EngineSupport

ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_new",
    "ReLUSquaredActivation": "relu2",
}
"""Activation names by class name."""


class FeedForwardParts(NamedTuple):
    """The modules of a layer's MLP or mixture of experts."""

    mlp: Module | None
    gate_up: tuple[Any, ...] = ()
    down: tuple[Any, ...] = ()
    activation: str = ""
    activation_module: Module | None = None
    experts: Module | None = None
    shared_gate: Any = None


def feed_forward_parts(
    module: Any, mlp: Module | None, support: EngineSupport[Any], family: Family
) -> FeedForwardParts | None:
    """Return the parts of ``module``, an MLP or a mixture of experts; None if it is unsupported.

    If ``module`` is None, the layer has neither, and the parts are empty. ``mlp`` is a mixture's shared expert if that
    is a separate module of the layer, and otherwise None.
    """
    if module is None:
        return FeedForwardParts(None)
    described, experts, gate = family.experts, None, None
    if described and type(module).__name__ == described.block:
        experts, gate = module, module._modules.get(described.shared_gate)
        mlp = mlp or module._modules.get(described.shared)
        if mlp is None:
            return FeedForwardParts(None, experts=experts)
    elif mlp is not None:
        return None
    dense = _mlp_parts(mlp or module, family)
    if dense is None or not all(map(support.is_linear, (*dense[0], *dense[1], *filter(None, [gate])))):
        return None
    if gate is not None and gate.out_features != 1:
        return None
    return FeedForwardParts(mlp or module, *dense, experts, gate)


def _mlp_parts(mlp: Module, family: Family) -> tuple[tuple[Any, ...], tuple[Any, ...], str, Module | None] | None:
    """Return an MLP's ``(gate_up, down, activation, activation_module)``, or None if the MLP is unsupported."""
    layer_names = family.names
    projections, activation_name = (
        ((layer_names.gate_up,), "activation_fn")
        if family.mlp.joins_gate
        else (tuple(filter(None, (layer_names.gate, layer_names.up))), "act_fn")
    )
    activation_name = activation_name if layer_names.activation is None else layer_names.activation
    modules = mlp._modules.keys() - (family.side.lists if family.side else ())
    if modules != {*projections, layer_names.down, *filter(None, [activation_name])}:
        return None
    activation_module = mlp.get_submodule(activation_name) if activation_name else None
    activation = "silu" if activation_module is None else activation_of(activation_module)
    if activation not in family.mlp.activations:
        return None
    return (
        tuple(map(mlp.get_submodule, projections)),
        (mlp.get_submodule(layer_names.down),),
        activation,
        activation_module,
    )


def activation_of(module: Module) -> str:
    """Return an activation's name; empty for unknown classes, and for Python code, which rounds each intermediate."""
    function = getattr(getattr(module, "act", None), "__name__", "")
    return "" if "python" in function else ACTIVATIONS.get(type(module).__name__, "")
