"""Mixtures of experts on a CPU: each token is multiplied by the weights of its own experts, and no others are read.

The outputs of a token's experts are added in the order of the experts, so its bits do not depend on other tokens.
"""

from __future__ import annotations

from copy import copy
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numba import types
from torch.nn import Module
from torch.nn.functional import silu

from hdtool.runtime.kernels.compact_weight import is_compact, stored_of
from hdtool.runtime.kernels.compiled import Array, array_at, bits, compiled, copy_numbers, float_of
from hdtool.runtime.kernels.gemm import COLUMN_MULTIPLE, matmul_of
from hdtool.runtime.kernels.linear import PLAIN, form_of
from hdtool.runtime.kernels.packed_matrix import PackedExperts
from hdtool.runtime.kernels.thread_pool import multiply_together, team_of
from hdtool.runtime.kernels.vector_code import ITEM_SIZE, add_in_place, gate_pairs, gelu_in_place, silu_in_place

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

ROUTE, SCORES, OUTPUTS, INPUTS, BIAS, TOP, SIGMOID, RENORMS, CORRECTION, GROUPS, USED_GROUPS = range(11)
"""The matmul that gives the scores: its address, that of the matrix, rows and columns, and the address of the bias.
Then the experts of a token; whether their shares are sigmoids of their scores, and no softmax of all; whether they are
made to add up to 1; the address of what is added to shares to choose by, 0 for none; and the groups of experts, with
the number of those that are used."""
FACTOR, ADDED, LEAST, SHARED_GATE = range(USED_GROUPS + 1, USED_GROUPS + 5)
"""The bits of what shares are multiplied by in the end, of what is added to their sum, and of its least value. Then the
fields of a matmul with one row, whose sigmoid is the share of the expert that all tokens have: 1 without it."""
ROUTER_FIELDS = SHARED_GATE + BIAS + 1


@compiled
def route(router: Array, scores: Array, chosen: Array, shares: Array) -> None:
    """Choose the best experts of each row; ``scores`` ``[rows, experts]`` are overwritten."""
    rows, top = chosen.shape
    factor = float_of(router, FACTOR)
    for row in range(rows):
        of_row = scores[row]
        choices = of_row.copy()
        _to_shares(of_row, router[SIGMOID] != 0)
        if router[CORRECTION]:
            added = array_at(router[CORRECTION], (len(of_row),), types.float32)
            for expert in range(len(of_row)):
                choices[expert] = of_row[expert] + added[expert]
        if router[USED_GROUPS] < router[GROUPS]:
            _hide_groups(choices, router[GROUPS], router[USED_GROUPS])
        taken = np.float32(0)
        for rank in range(top):
            best = np.argmax(choices)
            chosen[row, rank], shares[row, rank] = best, of_row[best]
            taken += of_row[best]
            choices[best] = -np.inf
        divisor = max(taken + float_of(router, ADDED), float_of(router, LEAST)) if router[RENORMS] else np.float32(1)
        for rank in range(top):
            shares[row, rank] = shares[row, rank] / divisor * factor


@compiled
def _to_shares(scores: Array, is_sigmoid: bool) -> None:
    if is_sigmoid:
        for expert in range(len(scores)):
            scores[expert] = np.float32(1) / (np.float32(1) + np.exp(-scores[expert]))
        return
    largest, total = scores.max(), np.float32(0)
    for expert in range(len(scores)):
        scores[expert] = np.exp(scores[expert] - largest)
        total += scores[expert]
    for expert in range(len(scores)):
        scores[expert] /= total


@compiled
def _hide_groups(choices: Array, groups: int, used: int) -> None:
    """Leave the experts of the best groups, by the sum of the best two of each."""
    size = len(choices) // groups
    best = np.empty(groups, np.float32)
    for group in range(groups):
        first, second = np.float32(-np.inf), np.float32(-np.inf)
        for expert in range(group * size, (group + 1) * size):
            if choices[expert] > first:
                first, second = choices[expert], first
            elif choices[expert] > second:
                second = choices[expert]
        best[group] = first + second
    is_used = np.zeros(groups, np.bool_)
    for _ in range(used):
        most = np.argmax(best)
        is_used[most], best[most] = True, -np.inf
    for group in range(groups):
        if not is_used[group]:
            choices[group * size : (group + 1) * size] = -np.inf


NUMBER, WIDTH, INNER, EXPAND, GATE, GATE_SIZE, UP, UP_SIZE, EXPAND_BIAS = range(9)
"""Experts of a layer, and their shapes; of the matrices that give gate and up, the address of their matmul, those of
the first expert's, and the bytes of each, then the address of biases, 0 for none."""
REDUCE, DOWN, DOWN_SIZE, REDUCE_BIAS, PAIRS, ALPHA, LIMIT, TANH_GATE = range(9, 17)
"""The matmul, address, bytes and biases of the matrices behind the gated unit; then whether one matrix gives gate and
up in pairs, with the bits of two numbers of the unit that takes these; without pairs, whether the unit has a GELU by
tanh, and no SiLU."""
FIELDS = TANH_GATE + 1
ACTIVATIONS = {"SiLU": False, "SiLUActivation": False, "GELUTanh": True, "PytorchGELUTanh": True}
"""Whether they are the GELU by tanh, by the names of their classes."""
WEIGHTS = ("gate_up_proj", "down_proj")
"""Parameters of all experts ``[experts, rows, columns]``, as modules of the library name them."""
BIASES = ("gate_up_proj_bias", "down_proj_bias")
PLAIN_EXPERTS = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
    "_is_expert_parallel": False,
}
"""How the library describes such modules."""
PAIRED_EXPERTS = {**PLAIN_EXPERTS, "has_bias": True, "is_transposed": True, "is_concatenated": False}
"""How it describes those with pairs of gate and up, whose matrices are transposed."""
TOLERANCE = 1e-4
FEW = 2
"""Experts that are compared with those of the library."""
TRIED = (1.0, 100.0)
"""Sizes of the rows by which experts are compared: larger ones meet the bounds of a gated unit."""


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
) -> int:
    """Write the outputs of the ``chosen`` experts ``[rows, top]`` of each row, in the proportion of ``shares``.

    Returns the number of experts that any row has, whose weights were read.
    """
    rows, top = chosen.shape
    width, inner = experts[WIDTH], experts[INNER]
    array_at(outputs, (rows * width,), types.float32)[:] = 0
    gathered, gate = scratch, scratch + rows * width * ITEM_SIZE
    added = gate + 2 * rows * inner * ITEM_SIZE
    order = np.argsort(chosen.ravel(), kind="mergesort")
    first = woken = 0
    while first < rows * top:
        expert = chosen[order[first] // top, order[first] % top]
        end = first
        while end < rows * top and chosen[order[end] // top, order[end] % top] == expert:
            row = order[end] // top
            copy_numbers(inputs + row * width * ITEM_SIZE, width, gathered + (end - first) * width * ITEM_SIZE)
            end += 1
        some = end - first
        _expand(team, threads, experts, expert, gathered, some, gate)
        matrix = experts[DOWN] + expert * experts[DOWN_SIZE]
        bias = experts[REDUCE_BIAS] + expert * width * ITEM_SIZE if experts[REDUCE_BIAS] else 0
        multiply_together(team, threads, experts[REDUCE], matrix, width, inner, gate, some, added, bias)
        for place in range(first, end):
            row, at = order[place] // top, added + (place - first) * width * ITEM_SIZE
            add_in_place(outputs + row * width * ITEM_SIZE, at, width, shares[row, order[place] % top])
        first, woken = end, woken + 1
    return woken


@compiled
def _expand(team: int, threads: int, experts: Array, expert: int, inputs: int, rows: int, gate: int) -> None:
    """Write what the gated unit of an expert gives; there is room for twice as many numbers."""
    width, inner = experts[WIDTH], experts[INNER]
    matrix, of_up = experts[GATE] + expert * experts[GATE_SIZE], experts[UP] + expert * experts[UP_SIZE]
    bias = experts[EXPAND_BIAS] + 2 * expert * inner * ITEM_SIZE if experts[EXPAND_BIAS] else 0
    if experts[PAIRS]:
        multiply_together(team, threads, experts[EXPAND], matrix, 2 * inner, width, inputs, rows, gate, bias)
        gate_pairs(gate, rows * inner, float_of(experts, ALPHA), float_of(experts, LIMIT), gate)
        return
    up = gate + rows * inner * ITEM_SIZE
    multiply_together(team, threads, experts[EXPAND], matrix, inner, width, inputs, rows, gate, 0)
    multiply_together(team, threads, experts[EXPAND], of_up, inner, width, inputs, rows, up, 0)
    if experts[TANH_GATE]:
        gelu_in_place(gate, up, rows * inner)
    else:
        silu_in_place(gate, up, rows * inner)


def matrices_of(weight: Any) -> Any:
    """The matrices ``[experts, rows, columns]`` of a parameter, of which some have them transposed."""
    return weight if weight.is_contiguous() else weight.transpose(1, 2)


class ExpertMatrices(NamedTuple):
    """Where compiled code has the matrices of all experts."""

    matmul: int
    """Its address."""
    first: int
    """The address of the first expert's matrix."""
    size: int
    """Bytes from one expert to the next."""


def expert_matrices(weight: Any, panels: Mapping[int, Any]) -> list[ExpertMatrices]:
    """Those of a parameter: of one matrix of each expert, or of gate and up apart.

    ``panels`` has what packed parts are multiplied as, by their addresses.
    """
    stored = matrices_of(stored_of(weight))
    parts = stored.parts if isinstance(stored, PackedExperts) else [stored]
    found = []
    for part in parts:
        made = panels.get(part.data_ptr())
        matmul = made.matmul if made else matmul_of(*form_of(part)).address
        memory, size = (made.data_ptr(), made.nbytes) if made else (part.data_ptr(), part.nbytes)
        found.append(ExpertMatrices(matmul, memory, size // len(stored)))
    return found


def experts_record(module: Any, panels: Mapping[int, Any] = MappingProxyType({})) -> Array:
    """What compiled code reads of the experts of a layer, see ``expert_matrices``."""
    record = np.zeros(FIELDS, np.int64)
    (gate, *of_up), (down,) = (expert_matrices(getattr(module, name), panels) for name in WEIGHTS)
    up = of_up[0] if of_up else gate._replace(first=gate.first + gate.size // 2)
    record[: INNER + 1] = matrices_of(module.down_proj).shape
    record[EXPAND : GATE_SIZE + 1] = gate
    record[UP : UP_SIZE + 1] = up.first, up.size
    record[REDUCE : DOWN_SIZE + 1] = down
    if _has_pairs(module):
        record[EXPAND_BIAS], record[REDUCE_BIAS] = (getattr(module, name).data_ptr() for name in BIASES)
        record[PAIRS : LIMIT + 1] = 1, bits(module.alpha), bits(module.limit)
    else:
        record[TANH_GATE] = bool(_has_gelu(module))
    return record


def _has_pairs(module: Any) -> bool:
    return not getattr(module, "is_concatenated", True)


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
    """Whether the experts of a module are gated units that are known, whose weights the compiled matmul takes."""
    kind = PAIRED_EXPERTS if _has_pairs(module) else PLAIN_EXPERTS
    names = WEIGHTS + BIASES if kind["has_bias"] else WEIGHTS
    weights: list[Any] = [module._parameters.get(name) for name in WEIGHTS]
    if set(module._parameters) != set(names) or any(weight is None or weight.dim() != 3 for weight in weights):
        return False
    if not all(getattr(module, name, value) is value for name, value in kind.items()):
        return False
    expand, reduce = (weight.transpose(1, 2) if kind["is_transposed"] else weight for weight in weights)
    number, width, inner = reduce.shape
    return (
        all(map(_parts_fit, weights))
        and (_pairs_fit(module, dtypes) if kind["has_bias"] else _has_gelu(module) is not None)
        and expand.shape == (number, 2 * inner, width)
        and all(weight.shape[2] % COLUMN_MULTIPLE == 0 and _is_plain(weight, dtypes) for weight in (expand, reduce))
    )


def _parts_fit(weight: Any) -> bool:
    """Whether the parts of a packed weight have one format, and are gate and up if there are several."""
    stored = stored_of(weight)
    if not isinstance(stored, PackedExperts):
        return not is_compact(weight) or isinstance(stored, torch.Tensor)
    forms = {(part.format, part.shape) for part in stored.parts}
    return len(forms) == 1 and len(stored.parts) <= 2 and not (stored.is_transposed and len(stored.parts) > 1)


def _has_gelu(module: Any) -> bool | None:
    """Whether the gated unit of experts has a GELU by tanh, and no SiLU; None for another unit."""
    if not module._modules:
        return False if getattr(module, "act_fn", None) is silu else None
    return ACTIVATIONS.get(type(module.act_fn).__name__) if set(module._modules) == {"act_fn"} else None


def _pairs_fit(module: Any, dtypes: Container[torch.dtype]) -> bool:
    """Whether the biases and the numbers of a unit with pairs have their forms."""
    biases = [module._parameters[name] for name in BIASES]
    shapes = [matrices_of(module._parameters[name]).shape[:2] for name in WEIGHTS]
    return (
        not module._modules
        and all(isinstance(getattr(module, name, None), float) for name in ("alpha", "limit"))
        and all(type(bias) in PLAIN and _is_plain(bias, dtypes) for bias in biases)
        and [bias.shape for bias in biases] == shapes
    )


def _is_plain(weight: Any, dtypes: Container[torch.dtype]) -> bool:
    own = type(weight) in PLAIN or is_compact(weight)
    return own and weight.dtype in dtypes and weight.is_cpu and weight.is_contiguous()


def arrange_experts(model: Module) -> None:
    """Have the matrices of experts that the library transposes in the order that the matmul reads.

    Parameters keep their shapes and numbers; their strides are other ones.
    """
    for module in model.modules():
        if not getattr(module, "is_transposed", False) or not _has_pairs(module):
            continue
        for name in WEIGHTS:
            weight = module._parameters.get(name)
            if weight is not None and type(weight) in PLAIN and weight.dim() == 3 and weight.is_contiguous():
                weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2)


def compile_experts(model: Module) -> None:
    """Replace the experts of a model that compute what this code does; parameters stay the same objects."""
    arrange_experts(model)
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
    """Compare the code of the library, which may compute something else, with this one, on the first experts."""
    reads = [weight.reads for weight in experts.parameters() if is_compact(weight)]
    before = [each.number for each in reads]
    try:
        return all(_is_same(_first_experts(experts), size) for size in TRIED)
    except Exception:  # experts with other arguments
        return False
    finally:
        for each, number in zip(reads, before, strict=True):
            each.number = number


def _first_experts(experts: Any) -> Any:
    """A module with the first experts: code of the library may expand the weights of all that there are."""
    few = copy(experts)
    few._parameters = {name: weight[:FEW] for name, weight in experts._parameters.items()}
    few.num_experts = min(FEW, experts.num_experts)
    return few


def _is_same(experts: Any, size: float) -> bool:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, matrices_of(experts.down_proj).shape[1], generator=random) * size
    chosen, shares = torch.tensor([[0], [experts.num_experts - 1], [0]]), torch.tensor([[1.0], [0.5], [2.0]])
    expected = experts(hidden, chosen, shares)
    found = CompiledExperts.of(experts)(hidden, chosen, shares)
    return found.shape == expected.shape and torch.allclose(found, expected, TOLERANCE, TOLERANCE * expected.std())


def compile_mixing() -> None:
    """Compile it ahead, for no rows: a first pass would wait for it."""
    record, none = np.zeros(FIELDS, np.int64), np.zeros((0, 1), np.int64)
    experts_numbers(record, 0)
    mix_experts(0, 1, record, none, np.zeros((0, 1), np.float32), 0, 0, 0)
