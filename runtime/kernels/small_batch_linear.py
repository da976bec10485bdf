"""Layers on a CPU that multiply the few rows of a step by our own product, where that is the faster one."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import cast

import torch
from torch.nn import Linear
from torch.nn.functional import linear

from hdtool.data.stores.home import product_choice_at_home
from hdtool.runtime.kernels.cpu_name import processor_name
from hdtool.runtime.kernels.gemm_choice import kept_choice
from hdtool.runtime.kernels.small_batch_gemm import WHOLE, multiply
from hdtool.runtime.model.quantized_layers import has_plain_weight

TRIED = (1, 4, 16, 64)
"""Both products are timed with so many rows; which is faster holds for fewer rows too, down to the next."""
TIMES = 3
SAMPLED = 4
"""Layers of a shape that are timed one after another: a single one would stay in a nearer cache."""
LARGEST = 1 << 19
"""Of each so many numbers at most."""


class Choice:
    """Which product is faster for layers of one shape: measured once on a machine for each number of threads."""

    def __init__(self, weights: list[torch.Tensor]) -> None:
        self._weights = weights
        self._own: dict[int, tuple[bool, ...]] = {}

    def own(self, rows: int) -> bool:
        """Whether it is our own for so many rows."""
        if rows > TRIED[-1]:
            return False
        threads = torch.get_num_threads()
        if threads not in self._own:
            tried = kept_choice(_place(self._weights[0].shape, threads), TRIED, self._measured)
            nearest = (min(most for most in TRIED if rows <= most) for rows in range(TRIED[-1] + 1))
            self._own.setdefault(threads, tuple(tried[most] for most in nearest))
        return self._own[threads][rows]

    def _measured(self) -> dict[int, bool]:
        return {most: self._own_is_faster(most) for most in TRIED}

    def _own_is_faster(self, rows: int) -> bool:
        columns = self._weights[0].shape[1]
        parts = [weight.detach()[: max(1, LARGEST // columns)] for weight in self._weights[:SAMPLED]]
        numbers = self._weights[0].new_ones(rows, columns)
        seconds = [float("inf"), float("inf")]
        for _ in range(TIMES):
            for place, product in enumerate((linear, own_linear)):
                seconds[place] = min(seconds[place], _seconds(product, numbers, parts))
        return seconds[1] < seconds[0]


class SmallBatchLinear(Linear):
    """A layer of torch's with its own weights, to which only another way to multiply was given."""

    choice: Choice

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if (
            input.dtype == weight.dtype == torch.float32
            and input.is_cpu
            and weight.is_cpu
            and input.is_contiguous()
            and weight.is_contiguous()
            and input.shape[-1] == self.in_features
            and not torch.is_grad_enabled()
            and self.choice.own(input.numel() // self.in_features)
        ):
            return own_linear(input, weight, self.bias)
        return linear(input, weight, self.bias)


def own_linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As torch's function, for float32 without gaps on a CPU."""
    outs, columns = weight.shape
    found = input.new_empty(*input.shape[:-1], outs)  # of its type and place, whatever the program's defaults are
    multiply(
        weight.data_ptr(),
        outs,
        columns,
        input.data_ptr(),
        input.numel() // columns,
        found.data_ptr(),
        0 if bias is None else bias.data_ptr(),
    )
    return found


def use_small_batch_products(model: torch.nn.Module) -> None:
    """Give a CPU model's layers the product of ``small_batch_gemm.py``; weights stay as and where they are."""
    choices: dict[torch.Size, list[torch.Tensor]] = {}
    fit = [module for module in model.modules() if type(module) is Linear and _fits(module)]
    for layer in fit:
        choices.setdefault(layer.weight.shape, []).append(layer.weight)
    made = {shape: Choice(weights) for shape, weights in choices.items()}
    for layer in fit:
        layer.__class__ = SmallBatchLinear
        cast(SmallBatchLinear, layer).choice = made[layer.weight.shape]


def has_own_products(model: torch.nn.Module) -> bool:
    """Whether any layer multiplies otherwise than the library would."""
    return any(isinstance(module, SmallBatchLinear) for module in model.modules())


def share_weights(stock: torch.nn.Module, own: torch.nn.Module) -> None:
    """Let a model that was loaded once more keep none of the weights that ours has already; it multiplies as before."""
    for name, layer in own.named_modules():
        if isinstance(layer, SmallBatchLinear):
            other = stock.get_submodule(name)
            assert isinstance(other, Linear)
            other.weight.data = layer.weight.data


def _place(shape: torch.Size, threads: int) -> Path | None:
    """Where the choice for layers of a shape is kept; None on a machine that has no place for it."""
    try:
        version = metadata.version("hdtool")
        words = (
            processor_name(),
            f"{threads} threads",
            f"torch {torch.__version__}",
            "x".join(map(str, shape)),
            version,
        )
        return product_choice_at_home(words)
    except (OSError, RuntimeError, ImportError):  # an account without a home folder, a copy that was not installed
        return None


def _fits(layer: Linear) -> bool:
    weight = layer.weight
    plain = has_plain_weight(layer) and weight.dtype == torch.float32 and weight.is_cpu
    bias = layer.bias is None or (layer.bias.dtype == torch.float32 and layer.bias.is_contiguous())
    return plain and bias and weight.is_contiguous() and weight.numel() > 0 and layer.in_features % WHOLE == 0


@torch.no_grad()
def _seconds(product: Callable[..., torch.Tensor], numbers: torch.Tensor, weights: list[torch.Tensor]) -> float:
    started = time.perf_counter()
    for weight in weights:
        product(numbers, weight)
    return time.perf_counter() - started
