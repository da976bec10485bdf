"""Linear layers with compiled CPU matmuls, for weights in float32, 16 bits or packed blocks."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from hdtool.runtime.kernels.compact_weight import Stored, is_compact, sharing, stored_of
from hdtool.runtime.kernels.matmul import COLUMN_MULTIPLE, matmul_of
from hdtool.runtime.kernels.matrix_formats import BFLOAT16, FLOAT16, FLOAT32, BlockFormat
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from hdtool.runtime.kernels.thread_pool import parallel_matmul, shared_thread_pool

FORMATS_OF_DTYPES = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
ORDINARY_TENSORS = (torch.Tensor, Parameter)
"""Tensor classes whose memory can be read directly, unlike the tensor classes of quantization libraries."""


def is_readable(weight: Any, dtypes: Container[torch.dtype] = (torch.float32,)) -> bool:
    """Return True if compiled code can read a weight with one of ``dtypes``, or its stored form, in place."""
    is_ordinary = type(weight) in ORDINARY_TENSORS or is_compact(weight)
    return is_ordinary and weight.dtype in dtypes and weight.is_cpu and weight.is_contiguous()


class CompiledLinear(Linear):
    """A ``torch.nn.Linear`` with a compiled matmul.

    An output row is bitwise independent of other rows, the number of threads and how the weight is stored. With
    gradients, under autocast or for other dtypes, the layer behaves like ``torch.nn.Linear``.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if self.takes(input):
            return compiled_linear(input.contiguous(), stored_of(weight), self.bias)
        if (
            is_compact(weight)
            and isinstance(weight.stored, torch.Tensor)
            and weight.stored.dtype == input.dtype
            and torch.is_autocast_enabled("cpu")
        ):
            weight = weight.stored  # what autocast would round the expanded weight to
        return linear(input, weight, self.bias)

    def takes(self, input: torch.Tensor) -> bool:
        """Return True if the compiled matmul supports this input and the current weight and bias."""
        return (
            not (torch.compiler.is_compiling() or torch._C._get_tracing_state())  # tracing sees only torch operations
            and type(input) in ORDINARY_TENSORS
            and input.dtype == torch.float32
            and input.is_cpu
            and input.shape[-1] == self.in_features
            and fits_compiled_matmul(self)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


def _fits_bias(bias: torch.Tensor, out_features: int) -> bool:
    """Return True if the compiled matmul can read the bias directly."""
    ordinary = type(bias) in ORDINARY_TENSORS and bias.dtype == torch.float32 and bias.is_cpu and bias.is_contiguous()
    return ordinary and bias.shape == (out_features,)


def compiled_linear(input: torch.Tensor, weight: Stored, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``torch.nn.functional.linear`` for a contiguous float32 input on a CPU.

    The weight may also be stored in 16 bits or in packed blocks.
    """
    return multiply(matmul_of(format_of(weight)).address, weight.data_ptr(), weight.shape, input, bias)


def multiply(
    matmul: int, matrix: int, shape: torch.Size, input: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``input @ matrix.T + bias``, computed by the kernels at address ``matmul`` on torch's number of threads.

    ``matrix`` is the address of the weight, whose shape is ``shape``.
    """
    threads, (out_features, columns) = torch.get_num_threads(), shape
    rows = input.numel() // columns
    outputs = input.new_empty(*input.shape[:-1], out_features)  # keeps the input's dtype
    bias_at = 0 if bias is None else bias.data_ptr()
    arguments = matmul, matrix, out_features, columns, input.data_ptr(), rows, outputs.data_ptr(), bias_at
    with shared_thread_pool(threads).open() as thread_pool:
        parallel_matmul(thread_pool, threads, *arguments)
    return outputs


def format_of(weight: Stored) -> BlockFormat:
    """Return a weight's format for the compiled matmul."""
    return weight.format if isinstance(weight, PackedMatrix) else FORMATS_OF_DTYPES[weight.dtype]


def compile_linear_layers(model: Module) -> None:
    """Replace a model's linear layers in place with ``CompiledLinear`` where possible; parameters are shared."""
    compiled: dict[int, CompiledLinear] = {}
    for module in list(model.modules()):
        for name, layer in module._modules.items():
            if type(layer) is Linear and fits_compiled_matmul(layer):
                module._modules[name] = compiled.setdefault(id(layer), sharing(CompiledLinear, layer))


def has_compiled_layers(model: Module) -> bool:
    return any(isinstance(module, CompiledLinear) for module in model.modules())


def share_weights(stock: Module, compiled: Module) -> None:
    """Make the stock model share the compiled model's weights, to save memory; it still uses torch's matmuls.

    Compact weights aren't shared, so that the stock model computes exactly as in plain transformers.
    """
    for name, layer in compiled.named_modules():
        if isinstance(layer, CompiledLinear) and not is_compact(layer.weight):
            stock_layer = stock.get_submodule(name)
            assert isinstance(stock_layer, Linear)
            stock_layer.weight.data = layer.weight.data


def has_plain_weight(layer: Module) -> bool:
    """Return True if the layer's weight is a plain or compact floating-point tensor of at least 16 bits.

    Tensor subclasses of quantization libraries are not plain.
    """
    weight: object = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return False
    ordinary = is_compact(weight) or type(weight).__module__.startswith("torch.")
    return ordinary and weight.is_floating_point() and weight.itemsize > 1


def fits_compiled_matmul(layer: Linear, dtypes: Container[torch.dtype] = (torch.float32,)) -> bool:
    """Return True if the compiled matmul supports the layer, and if its weight has one of ``dtypes``."""
    weight: Any = getattr(layer, "weight", None)  # some libraries store the weight under another name
    return (
        is_readable(weight, dtypes)
        and weight.dim() == 2
        and weight.shape[1] == layer.in_features
        and weight.numel() > 0
        and layer.in_features % COLUMN_MULTIPLE == 0
        and (layer.bias is None or _fits_bias(layer.bias, len(weight)))
    )
