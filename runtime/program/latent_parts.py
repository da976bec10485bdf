"""Recognizes latent attention, which caches one compressed vector per token for the keys and values of all heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from torch.nn import Linear, Module

from hdtool.runtime.kernels.linear_layers import CompiledLinear
from hdtool.runtime.program.mixer_parts import epsilon_of, tensors_of

if TYPE_CHECKING:
    from hdtool.runtime.program.llama_like_families import Family
    from hdtool.runtime.program.model_parts import EngineSupport

Matmul = TypeVar("Matmul", bound=Module)
QUERIES = ("q_proj",), ("q_a_proj", "q_a_layernorm", "q_b_proj")
"""Names of the modules that compute queries: a projection, or two projections with a norm between them."""
KEYS_AND_VALUES = "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj"
"""Names of the modules that compute keys and values.

They are a projection to the latent vector and the rotated part of the keys, the latent vector's norm, and the
projection that expands it to the plain key part and values of each head.
"""


@dataclass(frozen=True)
class LatentParts(Generic[Matmul]):
    """The modules and widths of a latent attention.

    A head's key consists of a plain part, which depends linearly on the latent vector, and a rotated part, which all
    heads share. The head's values depend linearly on the latent vector, too.
    """

    inputs: tuple[Matmul, ...]
    """Projections of the hidden states: to queries or latent queries, and to the latent vector and rotated keys.

    The third, if there is one, is ``gate``.
    """
    queries: tuple[Matmul, ...]
    """Projection of latent queries to queries; empty if the first projection gives the queries."""
    query_norm: Module | None
    """Norm of latent queries; None if there are none."""
    norm: Module
    """Norm of the latent vector; the cache holds normalized vectors."""
    expansion: Matmul
    """Linear layer from the latent vector to each head's plain key part and values; engines read its weight."""
    heads: int
    plain: int
    """Width of the plain part, which is the first part of a query or key."""
    rotated: int
    """Width of the rotated part of a query or key."""
    values: int
    """Width of a head's values."""
    epsilon: float
    """Epsilon of the norms."""
    gate: Matmul | None = None
    """Linear layer whose sigmoids scale the heads' outputs; None if the outputs aren't scaled."""

    @property
    def rank(self) -> int:
        """Width of the latent vector."""
        return int(self.expansion.in_features)  # type: ignore[arg-type]

    @property
    def norms(self) -> tuple[Module, ...]:
        return *filter(None, [self.query_norm]), self.norm

    @property
    def query_rank(self) -> int:
        """Width of latent queries; 0 if there are none."""
        return int(self.queries[0].in_features) if self.queries else 0  # type: ignore[arg-type]

    @property
    def query_shapes(self) -> list[tuple[int, int]]:
        return [(self.heads * (self.plain + self.rotated), self.query_rank)] if self.queries else []


def latent_parts(
    attention: Any, out: Any, support: EngineSupport[Matmul], family: Family
) -> LatentParts[Matmul] | None:
    """Return the parts of a latent attention with the output projection ``out``; None for unsupported modules."""
    names = next((names for names in QUERIES if names[0] in attention._modules), QUERIES[0])
    gates = tuple(filter(None, [family.attention.latent_gate]))
    if set(attention._modules) - {"o_proj"} != {*names, *KEYS_AND_VALUES, *gates}:
        return None
    if attention.num_key_value_groups != 1:
        return None
    first, *others = (attention.get_submodule(name) for name in names)
    compression, norm, expansion = (attention.get_submodule(name) for name in KEYS_AND_VALUES)
    query_norm, queries = (others[0], tuple(others[1:])) if others else (None, ())
    norms = [*filter(None, [query_norm]), norm]
    epsilons = {epsilon_of(norm) for norm in norms}
    epsilon = epsilons.pop()
    inputs = first, compression, *map(attention.get_submodule, gates)
    if epsilon is None or epsilons or not all(map(support.is_linear, (*inputs, *queries, out))):
        return None
    parts: LatentParts[Matmul] = LatentParts(
        inputs, queries, query_norm, norm, expansion, attention.num_heads, attention.qk_nope_head_dim,
        attention.qk_rope_head_dim, attention.v_head_dim, epsilon, inputs[2] if gates else None,
    )  # fmt: skip
    return parts if _fits(parts, out, support) else None


def _fits(parts: LatentParts[Any], out: Any, support: EngineSupport[Any]) -> bool:
    """Return True if the engine supports all widths, can read the norms' and expansion's weights, and shapes match."""
    first, compression, *gates = parts.inputs
    hidden, query_width = out.out_features, parts.heads * (parts.plain + parts.rotated)
    shapes = [
        (first, parts.query_rank or query_width, hidden),
        (compression, parts.rank + parts.rotated, hidden),
        *((gate, parts.heads, hidden) for gate in gates),
        *((layer, *shape) for layer, shape in zip(parts.queries, parts.query_shapes, strict=True)),
        (parts.expansion, parts.heads * (parts.plain + parts.values), parts.rank),
        (out, hidden, parts.heads * parts.values),
    ]
    norm_widths = [*filter(None, [parts.query_rank]), parts.rank]
    weight = parts.expansion._parameters.get("weight")
    widths = (*norm_widths, parts.plain, parts.rotated, parts.values)
    return (
        type(parts.expansion) in (Linear, CompiledLinear)
        and all((layer.out_features, layer.in_features) == tuple(shape) for layer, *shape in shapes)
        and [tuple(cast(Any, norm).weight.shape) for norm in parts.norms] == [(width,) for width in norm_widths]
        and all(support.is_readable(norm.weight) for norm in parts.norms)
        and weight is not None
        and support.is_readable(weight)
        and [id(tensor) for tensor in tensors_of(parts.expansion)] == [id(weight)]
        and all(width > 0 and width % support.divisor == 0 for width in widths)
    )
