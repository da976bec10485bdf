"""Computes latent attention over the cached latent vectors themselves, without expanding them to keys and values.

A head's plain key part is ``expansion @ latent``, so its scores are those of the query multiplied by the expansion,
with the latent vectors as keys. All heads then share these keys, which are also the values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hdtool.runtime.engines.reference.operations import HeadLayout, HeadNorms, KeysAndValues, Norm, Operations, Residual
from hdtool.runtime.program.latent_parts import LatentParts

if TYPE_CHECKING:
    from hdtool.runtime.program.embedding_and_head import Rotary

Matmul = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class LatentPlan:
    """The matmuls and norms of one layer's latent attention, and the settings of the operations between them."""

    inputs: Matmul
    """Joined projections to queries or latent queries, to latent vectors and rotated keys, and to any output gates."""
    parts: LatentParts[Any]
    out: Matmul
    query_norm: Residual
    """Norm of latent queries, if there are any."""
    norm: Norm
    """Norm of latent vectors."""
    layout: HeadLayout
    rotary: str | None
    """Layer type to pass to the rotary module; None without rotary positions."""
    source: int
    """Index of the layer in the cache."""

    @property
    def residuals(self) -> tuple[Residual, ...]:
        return (self.query_norm,)

    @property
    def head_norms(self) -> HeadNorms:
        """The norm of latent vectors, twice, in the place of the norms of queries and keys."""
        return self.norm, self.norm

    def attended(
        self, operations: Operations, rows: torch.Tensor, rotary: Rotary | None, cached: KeysAndValues
    ) -> torch.Tensor:
        """Return the attention's output for normalized rows, and write their latent vectors and keys to the cache."""
        parts, heads, rank = self.parts, self.parts.heads, self.parts.rank
        queries, latents, *gates = self.inputs(rows).split([matmul.out_features for matmul in parts.inputs], dim=1)
        if parts.queries:
            queries = parts.queries[0](operations.add_norm(queries.contiguous(), None, self.query_norm))
        plain, turned = queries.unflatten(1, (heads, -1)).split([parts.plain, parts.rotated], dim=2)
        turned = operations.rotate_and_store_latents(turned, latents, rotary, self.norm, cached)
        # The weight is read in each pass, because it may have been changed in place.
        weight = parts.expansion.weight.unflatten(0, (heads, -1))
        to_keys, to_values = weight.split([parts.plain, parts.values], dim=1)
        absorbed = (plain.transpose(0, 1) @ to_keys).transpose(0, 1)
        mixed = operations.attention(torch.cat([absorbed, turned], dim=2).flatten(1), cached, self.layout)
        by_head = mixed.unflatten(1, (heads, rank)).transpose(0, 1) @ to_values.mT
        by_row = by_head.transpose(0, 1)
        for gate in gates:
            by_row = by_row * gate.sigmoid()[..., None]
        return self.out(by_row.flatten(1))
