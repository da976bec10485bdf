"""Linear layers on a CPU with compiled matmuls, for weights in float32, in 16 bits or in blocks."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.nn import Linear, Module, Parameter
from torch.nn.functional import linear

from hdtool.runtime.kernels.compact_weight import Stored, is_compact, stored_of
from hdtool.runtime.kernels.gemm import COLUMN_MULTIPLE, matmul_of
from hdtool.runtime.kernels.gemm_tiles import BFLOAT16, FLOAT16, FLOAT32
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from hdtool.runtime.kernels.thread_pool import multiply_together, team_of

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
PLAIN = (torch.Tensor, Parameter)
"""Classes of tensors that have memory of their own; those of quantization libraries may have none."""


class CompiledLinear(Linear):
    """A ``torch.nn.Linear`` with the same parameters and a compiled matmul.

    A row has the same bits alone and beside others, with any number of threads, however the weight is kept. Where
    gradients are recorded, under autocast, and for other dtypes it computes as its base class does.
    """

    @classmethod
    def of(cls, layer: Linear) -> CompiledLinear:
        """The layer that takes the place of another one, with its parameters and hooks."""
        made = cls.__new__(cls)
        made.__dict__ = dict(layer.__dict__)
        return made

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
        """Whether the compiled matmul takes this input and the parameters, which may have been replaced."""
        weight, bias = self.weight, self.bias
        return (
            not (torch.compiler.is_compiling() or torch._C._get_tracing_state())  # these see operations of torch only
            and type(input) in PLAIN
            and input.dtype == weight.dtype == torch.float32
            and input.is_cpu
            and weight.is_cpu
            and (type(weight) in PLAIN or is_compact(weight))
            and weight.is_contiguous()
            and weight.dim() == 2
            and weight.shape[1] == input.shape[-1] == self.in_features
            and self.in_features % COLUMN_MULTIPLE == 0
            and (bias is None or _fits_bias(bias, weight.shape[0]))
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


def _fits_bias(bias: torch.Tensor, outs: int) -> bool:
    """Whether the compiled matmul reads a bias as the numbers that it has."""
    ordinary = type(bias) in PLAIN and bias.dtype == torch.float32 and bias.is_cpu and bias.is_contiguous()
    return ordinary and bias.shape == (outs,)


def compiled_linear(input: torch.Tensor, weight: Stored, bias: torch.Tensor | None = None) -> torch.Tensor:
    """As ``torch.nn.functional.linear``, for contiguous float32 tensors on a CPU; the weight may be in 16 bits or in
    blocks."""
    return multiply(matmul_of(*form_of(weight)).address, weight.data_ptr(), weight.shape, input, bias)


def multiply(
    matmul: int, matrix: int, shape: torch.Size, input: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Call the matmul at an address, for a matrix of this shape, with as many threads as torch has."""
    threads, (out_features, columns) = torch.get_num_threads(), shape
    rows = input.numel() // columns
    outputs = input.new_empty(*input.shape[:-1], out_features)  # of the input's dtype, not torch's default
    added = 0 if bias is None else bias.data_ptr()
    given = matmul, matrix, out_features, columns, input.data_ptr(), rows, outputs.data_ptr(), added
    with team_of(threads).open() as team:
        multiply_together(team, threads, *given)
    return outputs


def form_of(weight: Stored) -> tuple[Any, int]:
    """The format of a matrix for the compiled matmul, and the bytes of its numbers or blocks."""
    return weight.format.kind if isinstance(weight, PackedMatrix) else KINDS[weight.dtype], weight.itemsize


def compile_linear_layers(model: Module) -> None:
    """Replace the linear layers of a model that the compiled matmul takes; parameters stay the same objects."""
    made: dict[int, CompiledLinear] = {}
    for module in list(model.modules()):
        for name, layer in module._modules.items():
            if type(layer) is Linear and fits_compiled_matmul(layer):
                module._modules[name] = made.setdefault(id(layer), CompiledLinear.of(layer))


def has_compiled_layers(model: Module) -> bool:
    return any(isinstance(module, CompiledLinear) for module in model.modules())


def share_weights(stock: Module, own: Module) -> None:
    """Let the stock copy of a model use the weights of ours, to save memory; its matmuls stay those of torch.

    Compact weights are not shared: the stock model computes as its users have it.
    """
    for name, layer in own.named_modules():
        if isinstance(layer, CompiledLinear) and not is_compact(layer.weight):
            other = stock.get_submodule(name)
            assert isinstance(other, Linear)
            other.weight.data = layer.weight.data


def has_plain_weight(layer: Module) -> bool:
    """Whether the weight of a layer is a plain floating-point tensor; quantization libraries use other classes."""
    weight: object = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return False
    ordinary = is_compact(weight) or type(weight).__module__.startswith("torch.")
    return ordinary and weight.is_floating_point() and weight.itemsize > 1


def fits_compiled_matmul(layer: Linear, dtypes: Container[torch.dtype] = (torch.float32,)) -> bool:
    """Whether the compiled matmul takes the weight of a layer once it has one of these dtypes."""
    if not has_plain_weight(layer):  # some libraries have it under another name
        return False
    weight, has_columns = layer.weight, layer.in_features % COLUMN_MULTIPLE == 0
    bias = layer.bias is None or _fits_bias(layer.bias, layer.out_features)
    plain = weight.dtype in dtypes and weight.is_cpu and weight.is_contiguous()
    return plain and bias and weight.numel() > 0 and has_columns
