"""Changes of a model between two answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import Linear, Module, Parameter

from hdtool.runtime.kernels.compact_weight import expand_compact


class Adapter(Module):
    """Linear layer with a low-rank product added to its output, as in LoRA."""

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base, self.enabled, self._scales = base, True, {"default": 1.0}
        random, device = torch.Generator().manual_seed(5), base.weight.device
        self.down = Parameter(torch.randn(4, base.in_features, generator=random).to(device))
        self.up = Parameter(torch.randn(base.out_features, 4, generator=random).to(device))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(rows)
        return found + self._scales["default"] * (rows @ self.down.T @ self.up.T) if self.enabled else found


def mlp_of(model: Any) -> Any:
    return model.model.layers[0].mlp


def noise(like: torch.Tensor) -> torch.Tensor:
    return (torch.randn(like.shape, generator=torch.Generator().manual_seed(7)) / 2).to(like.device)


def with_adapter(model: Any) -> None:
    mlp_of(model).down_proj = Adapter(mlp_of(model).down_proj)


def with_other_data(model: Any) -> None:
    weight = mlp_of(model).down_proj.weight
    weight.data = noise(weight)


def with_other_parameter(model: Any) -> None:
    mlp_of(model).down_proj.weight = Parameter(noise(mlp_of(model).down_proj.weight))


def with_weights_in_place(model: Any) -> None:
    weight = mlp_of(model).down_proj.weight
    with torch.no_grad():
        weight.copy_(noise(weight))


def with_other_module(model: Any) -> None:
    layer = mlp_of(model).up_proj
    mlp_of(model).up_proj = Linear(layer.in_features, layer.out_features, bias=False)
    with_weights_of(mlp_of(model).up_proj)


def with_other_norms(model: Any) -> None:
    model.model.layers[1].input_layernorm.weight = Parameter(noise(model.model.norm.weight))
    model.model.norm.weight = Parameter(noise(model.model.norm.weight))


def with_weights_of(module: Any) -> None:
    module.weight.data = noise(module.weight)


def with_transposed_weight(model: Any) -> None:
    """Transpose a weight, which keeps its memory if it is in float32."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = expand_compact(weight).data.t()


def with_fewer_units(model: Any) -> None:
    """Halve the MLP's units; weights in float32 become views that start where the whole weights did."""
    mlp, units = mlp_of(model), mlp_of(model).up_proj.out_features // 2
    for layer in (mlp.gate_proj, mlp.up_proj):
        layer.weight.data = expand_compact(layer.weight).data[:units]
    mlp.down_proj.weight.data = expand_compact(mlp.down_proj.weight).data[:, :units]


def with_function(model: Any) -> None:
    mlp = mlp_of(model)
    mlp.forward = lambda rows: mlp.down_proj(mlp.up_proj(rows))


CHANGES: dict[str, Callable[[Any], object]] = {
    "an adapter": with_adapter,
    "other data": with_other_data,
    "another parameter": with_other_parameter,
    "weights in place": with_weights_in_place,
    "another module": with_other_module,
    "other embeddings": lambda model: with_weights_of(model.model.embed_tokens),
    "other norms": with_other_norms,
    "a transposed weight": with_transposed_weight,
    "fewer units": with_fewer_units,
    "a buffer": lambda model: setattr(model.model.rotary_emb, "inv_freq", model.model.rotary_emb.inv_freq * 0.5),
    "a hook": lambda model: mlp_of(model).register_forward_hook(lambda module, inputs, output: output * 0.5 + 1),
    "a hook before": lambda model: mlp_of(model).register_forward_pre_hook(lambda _, inputs: (inputs[0].flip(-1),)),
    "a hook after the layers": lambda model: model.model.norm.register_forward_hook(
        lambda module, inputs, output: output.flip(-1)
    ),
    "a function": with_function,
}
