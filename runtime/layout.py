"""How weights lie in memory, for the few rows at a time that decoding multiplies."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn import Linear
from torch.nn.functional import linear

from hdtool.runtime.quantised import has_plain_weight

IN_CACHE = 32 * 2**20
"""Bytes of weights that a CPU's last cache can be hoped to hold."""
BLOCKED_ROWS = 2
"""From so many rows on blocked weights may be faster; plain decoding multiplies one."""
TRIED_ROWS = 8
LARGE = 1 << 17
"""Numbers in a matrix below which calling takes longer than multiplying."""


class BlockedLinear(Linear):
    """A layer with a second copy of its weights, in the blocks that oneDNN multiplies several rows by."""

    blocked: torch.Tensor

    @classmethod
    def convert(cls, layer: Linear) -> None:
        layer.__class__ = cls
        layer.blocked = _blocked(layer.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.numel() < BLOCKED_ROWS * self.in_features:
            return linear(input, self.weight, self.bias)
        return _multiplied(input, self.blocked, self.bias)


@torch.no_grad()
def lay_out_for_few_rows(model: torch.nn.Module) -> None:
    """Lay a small CPU model's weights out column by column; values and shapes stay as they are.

    With weights in its cache a CPU multiplies one row faster by a column-major matrix (it adds up
    whole columns instead of summing along rows), and the several rows of a tree, on many CPUs, by one
    in oneDNN's blocks. Weights that come from memory gain nothing, and larger models have no room for
    a copy, so they are left alone; docs/results/plain-decoding.md has the figures.
    """
    layers = [module for module in model.modules() if type(module) is Linear and has_plain_weight(module)]
    if not layers or sum(layer.weight.nbytes for layer in layers) > IN_CACHE:
        return
    largest = max(layers, key=lambda layer: layer.weight.numel())
    for layer in layers:
        layer.weight.data = layer.weight.data.t().contiguous().t()
    if _blocks_are_faster(largest):
        for layer in layers:
            if layer.weight.numel() >= LARGE:
                BlockedLinear.convert(layer)


def was_laid_out(model: torch.nn.Module) -> bool:
    """Whether any weights lie otherwise than the checkpoint has them."""
    layers = (module for module in model.modules() if isinstance(module, Linear) and has_plain_weight(module))
    return any(type(layer) is BlockedLinear or not layer.weight.is_contiguous() for layer in layers)


def _blocks_are_faster(layer: Linear) -> bool:
    """Try it: whether blocks are there at all, and help, depends on the build of torch and on the CPU."""
    if layer.weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return False
    rows = torch.ones(TRIED_ROWS, layer.in_features)
    try:
        blocked = _blocked(layer.weight)
        if not torch.allclose(_multiplied(rows, blocked, layer.bias), layer(rows), rtol=1e-3, atol=1e-3):
            return False
        return _seconds(_multiplied, rows, blocked, layer.bias) < 0.9 * _seconds(linear, rows, layer.weight, layer.bias)
    except (AttributeError, RuntimeError):  # an operation of torch's own compiler, which may go or change
        return False


def _blocked(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), TRIED_ROWS)
    return found


def _multiplied(rows: torch.Tensor, blocked: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, blocked, bias, "none", [], "")
    return found


def _seconds(multiply: Any, *arguments: Any) -> float:
    taken = []
    for _ in range(20):
        started = time.perf_counter()
        multiply(*arguments)
        taken.append(time.perf_counter() - started)
    return min(taken)
