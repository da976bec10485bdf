"""Linear layers on a CPU that use our own matmul where the rule says so."""

from __future__ import annotations

from collections.abc import Container
from typing import Any, cast

import torch
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hdtool.runtime.kernels.compact_weight import Stored, is_compact
from hdtool.runtime.kernels.expanded_linear import BlockwiseLinear
from hdtool.runtime.kernels.gemm_tiles import BFLOAT16, FLOAT16, FLOAT32
from hdtool.runtime.kernels.matmul_rule import uses_own_matmul
from hdtool.runtime.kernels.memory.output_memory import OutputMemory
from hdtool.runtime.kernels.packed.matrix import PackedMatrix
from hdtool.runtime.kernels.product_address import product_of
from hdtool.runtime.kernels.small_batch_gemm import COLUMN_MULTIPLE
from hdtool.runtime.kernels.team import multiply_together, team_of

KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}


class ProductChoice:
    """Which matmul multiplies by matrices with so many columns."""

    def __init__(self, columns: int, fixed: bool | None = None) -> None:
        """``fixed`` states for all numbers of rows whether it is our own; None leaves it to the rule."""
        self._columns, self._fixed = columns, fixed

    def own(self, rows: int) -> bool:
        """Whether it is our own for this number of rows."""
        return uses_own_matmul(rows, self._columns) if self._fixed is None else self._fixed


class SmallBatchLinear(Linear):
    """A ``torch.nn.Linear`` with unchanged weights and another product."""

    choice: ProductChoice
    blockwise: BlockwiseLinear
    memory: OutputMemory | None = None
    """Of an output layer without bias: the memory of its output is used again."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        # The last rows of several prompts are a slice; copying them is nothing beside expanding a packed weight.
        input = input.contiguous()
        if self.takes(input):
            stored = weight.stored if is_compact(weight) else weight
            if self.choice.own(input.numel() // self.in_features):
                return own_linear(input, stored, self.bias, self.memory)
            if stored is not weight and not torch.is_autocast_enabled("cpu"):
                return self.blockwise(input, stored, self.bias, self.memory)
            if self.memory:
                rows = input.view(-1, self.in_features)
                found = self.memory.room_for(len(rows), self.out_features, input)
                return torch.mm(rows, weight.t(), out=found).view(*input.shape[:-1], self.out_features)
        if (
            is_compact(weight)
            and isinstance(weight.stored, torch.Tensor)
            and weight.stored.dtype == input.dtype
            and torch.is_autocast_enabled("cpu")
        ):
            weight = weight.stored  # what autocast would round the expanded weight to
        return linear(input, weight, self.bias)

    @property
    def has_own_weight(self) -> bool:
        """Whether our own product takes the weight."""
        weight = self.weight
        return weight.dtype == torch.float32 and weight.is_cpu and weight.is_contiguous()

    def takes(self, input: torch.Tensor) -> bool:
        """Whether our own product takes this input and the weight."""
        return (
            self.has_own_weight
            and input.dtype == torch.float32
            and input.is_cpu
            and input.shape[-1] == self.in_features
            and not torch.is_grad_enabled()
        )

    def compiled_product(self) -> tuple[int, int]:
        """The addresses of our own product and of the matrix that it reads."""
        stored = self.weight.stored if is_compact(self.weight) else self.weight
        return product_of(*form_of(stored)).address, stored.data_ptr()


def own_linear(
    input: torch.Tensor, weight: Stored, bias: torch.Tensor | None = None, memory: OutputMemory | None = None
) -> torch.Tensor:
    """As ``torch.nn.functional.linear``, for contiguous float32 tensors on a CPU; the weight may be in 16 bits or in
    blocks."""
    return multiply(product_of(*form_of(weight)).address, weight.data_ptr(), weight.shape, input, bias, memory)


def multiply(
    product: int,
    matrix: int,
    shape: torch.Size,
    input: torch.Tensor,
    bias: torch.Tensor | None,
    memory: OutputMemory | None,
) -> torch.Tensor:
    """Call the product at an address, for a matrix of this shape, with as many threads as torch has."""
    threads = torch.get_num_threads()
    with team_of(threads).open() as team:
        return _multiply_by(team, threads, product, matrix, shape, input, bias, memory)


def _multiply_by(
    team: int,
    threads: int,
    product: int,
    matrix: int,
    shape: torch.Size,
    input: torch.Tensor,
    bias: torch.Tensor | None = None,
    memory: OutputMemory | None = None,
) -> torch.Tensor:
    """The same by the threads of an open team."""
    outs, columns = shape
    rows = input.numel() // columns
    # Of the input's dtype and device, not the defaults of torch.
    found = memory.room_for(rows, outs, input) if memory else input.new_empty(rows, outs)
    added = 0 if bias is None else bias.data_ptr()
    multiply_together(team, threads, product, matrix, outs, columns, input.data_ptr(), rows, found.data_ptr(), added)
    return found.view(*input.shape[:-1], outs)


def form_of(weight: Stored) -> tuple[Any, int]:
    """The format of a matrix for our own product, and the bytes of its numbers or blocks."""
    return weight.format.kind if isinstance(weight, PackedMatrix) else KINDS[weight.dtype], weight.itemsize


def use_small_batch_products(model: torch.nn.Module, own: bool | None = None) -> None:
    """Use the product of ``small_batch_gemm.py`` in the linear layers of a CPU model; weights are not changed.

    It is used where the rule of ``matmul_rule.py`` says so, or everywhere or nowhere by ``own``.
    """
    fit = [module for module in model.modules() if type(module) is Linear and fits_own_product(module)]
    choices = {columns: ProductChoice(columns, own) for columns in {layer.in_features for layer in fit}}
    blockwise: dict[str, BlockwiseLinear] = {}
    for layer in fit:
        layer.__class__ = SmallBatchLinear
        cast(SmallBatchLinear, layer).choice = choices[layer.in_features]
        form = _shape_in_words(layer.weight)
        cast(SmallBatchLinear, layer).blockwise = blockwise.setdefault(form, BlockwiseLinear())
    last = model.get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    if isinstance(last, SmallBatchLinear) and last._parameters["bias"] is None:
        last.memory = OutputMemory()


def has_own_products(model: torch.nn.Module) -> bool:
    """Whether any layer uses our own product."""
    return any(isinstance(module, SmallBatchLinear) for module in model.modules())


def share_weights(stock: torch.nn.Module, own: torch.nn.Module) -> None:
    """Let the stock copy of a model use the weights of ours, to save memory; its products stay those of torch.

    Compact weights are not shared: the stock model computes as its users have it.
    """
    for name, layer in own.named_modules():
        if isinstance(layer, SmallBatchLinear) and not is_compact(layer.weight):
            other = stock.get_submodule(name)
            assert isinstance(other, Linear)
            other.weight.data = layer.weight.data


def _shape_in_words(weight: torch.Tensor) -> str:
    """The shape of a weight and, if it is packed, its format."""
    packed = is_compact(weight) and isinstance(weight.stored, PackedMatrix) and weight.stored.format.name
    return "x".join(map(str, weight.shape)) + (f"-{packed}" if packed else "")


def has_plain_weight(layer: torch.nn.Module) -> bool:
    """Whether the weight of a layer is a plain floating-point tensor; quantization libraries use other classes."""
    weight: object = getattr(layer, "weight", None)
    if not isinstance(weight, torch.Tensor):
        return False
    ordinary = is_compact(weight) or type(weight).__module__.startswith("torch.")
    return ordinary and weight.is_floating_point() and weight.itemsize > 1


def fits_own_product(layer: Linear, dtypes: Container[torch.dtype] = (torch.float32,)) -> bool:
    """Whether our own product takes the weight of a layer once it has one of these dtypes."""
    weight = layer.weight
    plain = has_plain_weight(layer) and weight.dtype in dtypes and weight.is_cpu
    bias = layer.bias is None or (layer.bias.dtype == torch.float32 and layer.bias.is_contiguous())
    return plain and bias and weight.is_contiguous() and weight.numel() > 0 and layer.in_features % COLUMN_MULTIPLE == 0
