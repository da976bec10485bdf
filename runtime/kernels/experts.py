"""Mixtures of experts on a CPU: each token is multiplied by the weights of its own experts, and no others are read.

The outputs of a token's experts are added in the order of the experts, so its bits do not depend on other tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import types
from torch.nn import Module

from hdtool.runtime.kernels.compact_weight import is_compact, stored_of
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.elementwise import add_in_place, gelu_in_place, silu_in_place
from hdtool.runtime.kernels.linear import PLAIN, form_of
from hdtool.runtime.kernels.matmul_address import matmul_of
from hdtool.runtime.kernels.memory.raw_memory import array_at, copy_numbers
from hdtool.runtime.kernels.small_batch_gemm import COLUMN_MULTIPLE
from hdtool.runtime.kernels.team import multiply_together, team_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE

if TYPE_CHECKING:
    from collections.abc import Container

NUMBER, WIDTH, INNER, GATE_UP, EXPAND, GATE_UP_SIZE, DOWN, REDUCE, DOWN_SIZE, TANH_GATE = range(10)
"""Experts of a layer, and their shapes; of the matrices that give gate and up, the address, that of their matmul, and
the bytes of one expert; and the same of those behind the gated unit, which has a GELU or a SiLU."""
FIELDS = TANH_GATE + 1
ACTIVATIONS = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True, "PytorchGELUTanh": True}
"""Whether they are the GELU by tanh, by the names of their classes."""
WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters of all experts ``[experts, rows, columns]``, as modules of the library name them."""
PLAIN_EXPERTS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""How the library describes such modules."""
TOLERANCE = 1e-4


@compiled
def experts_numbers(experts: Array, rows: int) -> int:
    """The float32 numbers of scratch memory that ``mix_experts`` needs."""
    return 2 * rows * (experts[WIDTH] + experts[INNER])  # type: ignore[no-any-return]


@compiled
def mix_experts(
    team: int,
    threads: int,
    experts: Array,
    chosen: Array,
    shares: Array,
    inputs: int,
    outputs: int,
    scratch: int,
) -> None:
    """Write the outputs of the ``chosen`` experts ``[rows, top]`` of each row, in the proportion of ``shares``."""
    rows, top = chosen.shape
    width, inner = experts[WIDTH], experts[INNER]
    array_at(outputs, (rows * width,), types.float32)[:] = 0
    gathered, gate = scratch, scratch + rows * width * ITEM_SIZE
    up = gate + rows * inner * ITEM_SIZE
    added = up + rows * inner * ITEM_SIZE
    order = np.argsort(chosen.ravel(), kind="mergesort")
    first = 0
    while first < rows * top:
        expert = chosen[order[first] // top, order[first] % top]
        end = first
        while end < rows * top and chosen[order[end] // top, order[end] % top] == expert:
            row = order[end] // top
            copy_numbers(inputs + row * width * ITEM_SIZE, width, gathered + (end - first) * width * ITEM_SIZE)
            end += 1
        some = end - first
        matrix = experts[GATE_UP] + expert * experts[GATE_UP_SIZE]
        of_up = matrix + experts[GATE_UP_SIZE] // 2
        multiply_together(team, threads, experts[EXPAND], matrix, inner, width, gathered, some, gate, 0)
        multiply_together(team, threads, experts[EXPAND], of_up, inner, width, gathered, some, up, 0)
        if experts[TANH_GATE]:
            gelu_in_place(gate, up, some * inner)
        else:
            silu_in_place(gate, up, some * inner)
        matrix = experts[DOWN] + expert * experts[DOWN_SIZE]
        multiply_together(team, threads, experts[REDUCE], matrix, width, inner, gate, some, added, 0)
        for place in range(first, end):
            row, at = order[place] // top, added + (place - first) * width * ITEM_SIZE
            add_in_place(outputs + row * width * ITEM_SIZE, at, width, shares[row, order[place] % top])
        first = end


@compiled
def route(logits: Array, renorms: bool, chosen: Array, shares: Array) -> None:
    """The most probable experts of each row, and their probabilities, which are made to add up to 1 if it ``renorms``.

    ``logits`` ``[rows, experts]`` are overwritten.
    """
    rows, top = chosen.shape
    for row in range(rows):
        of_row, largest = logits[row], logits[row].max()
        total, taken = np.float32(0), np.float32(0)
        for expert in range(len(of_row)):
            total += np.exp(of_row[expert] - largest)
        for rank in range(top):
            best = np.argmax(of_row)
            chosen[row, rank], shares[row, rank] = best, np.exp(of_row[best] - largest) / total
            taken += shares[row, rank]
            of_row[best] = -np.inf
        if renorms:
            for rank in range(top):
                shares[row, rank] /= taken


def experts_record(module: Any) -> Array:
    """What compiled code reads of the experts of a layer."""
    record = np.zeros(FIELDS, np.int64)
    expand, reduce = (stored_of(getattr(module, name)) for name in WEIGHTS)
    number, width, inner = reduce.shape
    record[: INNER + 1] = number, width, inner
    for field, weight in ((GATE_UP, expand), (DOWN, reduce)):
        assert isinstance(weight, torch.Tensor)
        size = weight[0].numel() * weight.itemsize
        record[field : field + 3] = weight.data_ptr(), matmul_of(*form_of(weight)).address, size
    record[TANH_GATE] = ACTIVATIONS[type(module.act_fn).__name__]
    return record


class CompiledExperts(Module):
    """The experts of a layer with the parameters of another module, which is used where this code does not apply."""

    @classmethod
    def of(cls, experts: Module) -> CompiledExperts:
        made = cls.__new__(cls)
        made.__dict__ = {**experts.__dict__, "_usual": type(experts)}
        return made

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        if not self.takes(hidden):
            found: torch.Tensor = self.__dict__["_usual"].forward(self, hidden, chosen, shares)
            return found
        inputs, rows = hidden.contiguous(), len(hidden)
        record, outputs = experts_record(self), torch.empty_like(inputs)
        scratch = inputs.new_empty(experts_numbers(record, rows))
        threads = torch.get_num_threads()
        given = chosen.numpy(), shares.float().numpy(), inputs.data_ptr(), outputs.data_ptr(), scratch.data_ptr()
        with team_of(threads).open() as team:
            mix_experts(team, threads, record, *given)
        return outputs

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Of the library, for its code."""
        found: torch.Tensor = self.__dict__["_usual"]._apply_gate(self, gate_up)
        return found

    def takes(self, hidden: torch.Tensor) -> bool:
        return (
            not (torch.compiler.is_compiling() or torch._C._get_tracing_state())
            and hidden.is_cpu
            and hidden.dtype == torch.float32
            and hidden.dim() == 2
            and fits_compiled_experts(self)
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
        )


def fits_compiled_experts(module: Any, dtypes: Container[torch.dtype] = (torch.float32,)) -> bool:
    """Whether the experts of a module are gated units of a known kind, whose weights the compiled matmul takes."""
    weights: list[Any] = [module._parameters.get(name) for name in WEIGHTS]
    if set(module._parameters) != set(WEIGHTS) or any(weight is None or weight.dim() != 3 for weight in weights):
        return False
    expand, reduce = weights
    return (
        all(getattr(module, name, value) is value for name, value in PLAIN_EXPERTS.items())
        and set(module._modules) == {"act_fn"}
        and type(module.act_fn).__name__ in ACTIVATIONS
        and expand.shape == (reduce.shape[0], 2 * reduce.shape[2], reduce.shape[1])
        and all(weight.shape[2] % COLUMN_MULTIPLE == 0 and _is_plain(weight, dtypes) for weight in weights)
    )


def _is_plain(weight: Any, dtypes: Container[torch.dtype]) -> bool:
    own = type(weight) in PLAIN or is_compact(weight)
    return own and weight.dtype in dtypes and weight.is_cpu and weight.is_contiguous()


def compile_experts(model: Module) -> None:
    """Replace the experts of a model that compute what this code does; parameters stay the same objects."""
    same: dict[type, bool] = {}
    for module in list(model.modules()):
        experts = module._modules.get("experts")
        if experts is None or not fits_compiled_experts(experts):
            continue
        kind = type(experts)
        if kind not in same:
            same[kind] = _has_same_numbers(experts)
        if same[kind]:
            module._modules["experts"] = CompiledExperts.of(experts)


@torch.inference_mode()
def _has_same_numbers(experts: Any) -> bool:
    """Compare the code of the library, which may compute something else, with this one."""
    number, width = experts.gate_up_proj.shape[0], experts.gate_up_proj.shape[2]
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, width, generator=random)
    chosen, shares = torch.tensor([[0], [number - 1], [0]]), torch.tensor([[1.0], [0.5], [2.0]])
    reads = [weight.reads for weight in experts.parameters() if is_compact(weight)]
    before = [each.number for each in reads]
    try:
        expected = experts(hidden, chosen, shares)
        found = CompiledExperts.of(experts)(hidden, chosen, shares)
    except Exception:  # experts with other arguments
        return False
    finally:
        for each, number in zip(reads, before, strict=True):
            each.number = number
    return found.shape == expected.shape and torch.allclose(found, expected, TOLERANCE, TOLERANCE * expected.std())


def compile_mixing() -> None:
    """Compile it ahead, for no rows: a first pass would wait for it."""
    record, none = np.zeros(FIELDS, np.int64), np.zeros((0, 1), np.int64)
    experts_numbers(record, 0)
    mix_experts(0, 1, record, none, np.zeros((0, 1), np.float32), 0, 0, 0)
