"""Computes the decoder layers of trained drafters by the reference operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hdtool.runtime.engines.reference.merged_weights import merging
from hdtool.runtime.engines.reference.operations import Operations
from hdtool.runtime.engines.reference.program_pass import ProgramLayers

if TYPE_CHECKING:
    import torch
    from torch.nn import Module

    from hdtool.runtime.model.pass_inputs import AttentionWindow, CacheRows
    from hdtool.runtime.program.model_parts import ModelParts


class DrafterLayers:
    """Decoder layers of a trained drafter, between its input (tokens and hidden states) and its output layer."""

    def __init__(self, parts: ModelParts[Module], windows: list[AttentionWindow]) -> None:
        self._operations = Operations()
        self._layers = ProgramLayers(parts, windows, self._operations, merging(parts.model))

    def run(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        rows: CacheRows,
        *,
        normed: torch.Tensor | None = None,
        context: torch.Tensor | None = None,
        first: int = 0,
    ) -> torch.Tensor:
        """Compute the layers of ``hidden [rows, width]`` in place; return the output of the norm after them, if any.

        ``normed`` is what the first layer reads, by default the norm of ``hidden``. ``context`` are normalized rows
        before the others, of which the layers only write keys and values; ``positions`` include theirs, but the mask
        has no rows for them. ``first`` is the first layer's index in the cache.
        """
        of_context = 0 if context is None else len(context)
        self._operations.begin_rows(rows.places[None], rows.mask, rows.extent, of_context)
        cached = rows.storage.layers[first:]
        return self._layers.through(hidden, normed, positions[None], cached, context=context)
