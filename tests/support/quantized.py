"""Quantized layers in plain torch, with the arithmetic of libraries that may not be installed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module, Parameter


class Int8Layer(Module):
    """Linear layer with 8-bit weights and a scale per row. Subclasses round the activations."""

    def __init__(self, layer: Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.detach().abs().amax(dim=1) / 127
        self.weight = Parameter((layer.weight / scale[:, None]).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)

    def forward(self, rows: Tensor) -> Tensor:
        whole: Tensor = self.rounded(rows) @ (self.weight.double() * self.get_buffer("scale")[:, None]).T
        return whole.to(rows.dtype)

    def rounded(self, rows: Tensor) -> Tensor:
        return rows.double()


class OneScale(Int8Layer):
    """Layer whose activations share one scale per pass, as with torchao's ``granularity=PerTensor()``."""

    def rounded(self, rows: Tensor) -> Tensor:
        return _rounded(rows, rows.abs().amax())


class ScalePerRow(Int8Layer):
    def rounded(self, rows: Tensor) -> Tensor:
        return _rounded(rows, rows.abs().amax(dim=-1, keepdim=True))


class LlmInt8(Int8Layer):
    """Layer that rounds no column with an outlier in any row, as LLM.int8() of bitsandbytes does."""

    threshold = 6.0

    def __init__(self, layer: Linear) -> None:
        super().__init__(layer)
        scale = self.get_buffer("scale") * 127
        self.state = SimpleNamespace(threshold=self.threshold, CB=self.weight.data, SCB=scale)

    def rounded(self, rows: Tensor) -> Tensor:
        outliers = rows.to(torch.float16).abs() >= self.threshold
        rest = rows.masked_fill(outliers, 0)
        columns = outliers.flatten(0, -2).any(dim=0)
        return torch.where(columns, rows.double(), _rounded(rest, rest.abs().amax(dim=-1, keepdim=True)))


def _rounded(rows: Tensor, largest: Tensor) -> Tensor:
    step = largest.double() / 127
    return (rows.double() / step).round() * step


def quantized(model: Any, kind: type[Int8Layer]) -> Any:
    """Return the model with all linear layers inside its blocks quantized."""
    for name, layer in list(model.named_modules()):
        if type(layer) is Linear and "layers" in name:
            model.set_submodule(name, kind(layer))
    return model
