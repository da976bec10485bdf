"""Linear layers on a CPU that use our small-batch product for the few rows of a step where it is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import torch
from torch.nn import Linear
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hdtool.data.stores.home import product_choice_at_home
from hdtool.runtime.kernels.compact_weight import Stored, in_float32, is_compact
from hdtool.runtime.kernels.cpu_name import processor_name
from hdtool.runtime.kernels.expanded_linear import BlockwiseLinear
from hdtool.runtime.kernels.gemm_choice import saved_choice
from hdtool.runtime.kernels.gemm_tiles import BFLOAT16, FLOAT16, FLOAT32
from hdtool.runtime.kernels.memory.output_memory import OutputMemory
from hdtool.runtime.kernels.packed.matrix import PackedMatrix
from hdtool.runtime.kernels.product_address import product_of
from hdtool.runtime.kernels.small_batch_gemm import COLUMN_MULTIPLE
from hdtool.runtime.kernels.team import multiply_together, team_of

TIMED_ROWS = (1, 4, 16, 64, 256)
"""Numbers of rows at which both products are timed; others use the next larger one, or the last."""
KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
REPEATS = 3
CLEARLY_SLOWER = 1.25
"""Our own product is left where it takes so many times as long as that of torch. Its rows have the same bits for any
number of rows, so nearly equal times do not decide against it."""
CALL_SECONDS = 5e-6
"""Python's way to our own product may be longer than the one to torch's by this much. Compiled layers do not go it, and
leave a whole pass to Python if a single product of it, as small as that of the keys, is not our own."""
PRODUCT = "product 7"
"""The version of our own product, to which saved measurements belong."""
TIMED_LAYERS = 4
"""Layers of a shape that are timed in turn: a single one would stay in the cache."""
TIMED_NUMBERS = 1 << 19
"""The number of weights of each layer that are timed."""


class ProductChoice:
    """The product for layers of one shape: our own unless that of torch is clearly faster.

    It is measured once on a machine for each number of threads. Weights in 16 bits are measured in float32: the
    products round differently, and an answer does not depend on how these weights are kept. Packed weights are measured
    as they are, since torch multiplies them only after they are unpacked.
    """

    def __init__(self, weights: list[torch.Tensor], fixed: bool | None = None) -> None:
        """``fixed`` states the product for all numbers of rows; None measures it."""
        self._weights, self._fixed = weights, fixed
        self._own: dict[int, tuple[bool, ...]] = {}

    def own(self, rows: int) -> bool:
        """Whether our own product is the faster one for this number of rows."""
        if self._fixed is not None:
            return self._fixed
        threads = torch.get_num_threads()
        if threads not in self._own:
            tried = saved_choice(_choice_file(_shape_in_words(self._weights[0]), threads), TIMED_ROWS, self._measured)
            nearest = (min(most for most in TIMED_ROWS if rows <= most) for rows in range(TIMED_ROWS[-1] + 1))
            self._own.setdefault(threads, tuple(tried[most] for most in nearest))
        return self._own[threads][min(rows, TIMED_ROWS[-1])]

    def _measured(self) -> dict[int, bool]:
        return {most: self._own_is_faster(most) for most in TIMED_ROWS}

    def _own_is_faster(self, rows: int) -> bool:
        columns = self._weights[0].shape[1]
        size = max(1, TIMED_NUMBERS // columns)
        parts = [_timed_part(weight.detach()[:size]) for weight in self._weights[:TIMED_LAYERS]]
        other = linear if isinstance(parts[0], torch.Tensor) else BlockwiseLinear()
        numbers = torch.ones(rows, columns, dtype=torch.float32)
        seconds = [float("inf"), float("inf")]
        for _ in range(REPEATS):
            for place, product in enumerate((other, own_linear)):
                seconds[place] = min(seconds[place], _seconds(product, numbers, parts))
        return seconds[1] < CLEARLY_SLOWER * seconds[0] + len(parts) * CALL_SECONDS


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

    It is used where it is measured to be fast enough, or everywhere or nowhere by ``own``.
    """
    choices: dict[str, list[torch.Tensor]] = {}
    fit = [module for module in model.modules() if type(module) is Linear and fits_own_product(module)]
    for layer in fit:
        choices.setdefault(_shape_in_words(layer.weight), []).append(layer.weight)
    made = {form: ProductChoice(weights, own) for form, weights in choices.items()}
    blockwise = {form: BlockwiseLinear() for form in choices}
    for layer in fit:
        form = _shape_in_words(layer.weight)
        layer.__class__ = SmallBatchLinear
        cast(SmallBatchLinear, layer).choice = made[form]
        cast(SmallBatchLinear, layer).blockwise = blockwise[form]
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


def _timed_part(weight: torch.Tensor) -> Stored:
    if is_compact(weight) and isinstance(weight.stored, PackedMatrix):
        return weight.stored
    return in_float32(weight)


def _choice_file(form: str, threads: int) -> Path | None:
    """The file that holds the choice for layers of a form; None on a machine without a home folder."""
    try:
        version = metadata.version("hdtool")
        words = (
            processor_name(),
            f"{threads} threads",
            f"torch {torch.__version__}",
            form,
            version,
            PRODUCT,
        )
        return product_choice_at_home(words)
    except (OSError, RuntimeError, ImportError):  # an account without a home folder, a copy that was not installed
        return None


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


@torch.no_grad()
def _seconds(product: Callable[..., torch.Tensor], numbers: torch.Tensor, weights: Sequence[Stored]) -> float:
    if product is own_linear:
        return _own_seconds(numbers, weights)
    started = time.perf_counter()
    for weight in weights:
        product(numbers, weight)
    return time.perf_counter() - started


def _own_seconds(numbers: torch.Tensor, weights: Sequence[Stored]) -> float:
    """The same for our own product. Its threads are awake, as a pass wakes them once for all of its products."""
    threads = torch.get_num_threads()
    with team_of(threads).open() as team:
        started = time.perf_counter()
        for weight in weights:
            _multiply_by(team, threads, product_of(*form_of(weight)).address, weight.data_ptr(), weight.shape, numbers)
        return time.perf_counter() - started
