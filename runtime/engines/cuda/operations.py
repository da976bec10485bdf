"""The operations between the matmuls of a fused pass, in plain torch: the reference, and what runs without Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

if TYPE_CHECKING:
    from hdtool.runtime.model.attention_masks import AttentionMasks, AttentionWindow
    from hdtool.runtime.model.step_input import StepTensors


@dataclass(frozen=True)
class HeadLayout:
    """The heads of a layer's attention."""

    query_heads: int
    key_heads: int
    width: int
    scale: float
    epsilon: float
    """The epsilon of the norms of queries and keys."""
    window: AttentionWindow
    softcap: float | None = None
    """Bound of the scores, by tanh."""
    sinks: torch.Tensor | None = None
    """A score for each query head that takes weight and has no value."""


Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, ``[tokens, width]``; the first half of the sines is negative."""
HeadNorms = tuple[torch.Tensor, torch.Tensor] | None
"""The weights of the norms of queries and keys."""


class Operations(Protocol):
    """What a fused pass does beside matmuls."""

    reads_extent: bool
    """Whether attention reads a fixed number of positions, which the caller chooses."""

    def begin(self, step: StepTensors, extent: int) -> None:
        """Begin a pass."""
        ...

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """Add to ``hidden`` in place; its RMSNorm."""
        ...

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: Rotary,
        norms: HeadNorms,
        cache: tuple[torch.Tensor, torch.Tensor],
        layout: HeadLayout,
    ) -> torch.Tensor:
        """Rotate the queries and keys of ``qkv``, and write keys and values into the cache.

        Returns the queries, ``[tokens, heads * width]`` or more.
        """
        ...

    def attention(
        self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], layout: HeadLayout
    ) -> torch.Tensor:
        """Attention of the queries to context and tree, ``[tokens, heads * width]``."""
        ...

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of each row, times the second one."""
        ...

    def move(self, tensors: list[torch.Tensor]) -> None:
        """Move the positions of accepted paths in the cache."""
        ...


class TorchOperations:
    """Each operation by a few calls of torch."""

    reads_extent = True

    def __init__(self, masks: AttentionMasks) -> None:
        self._masks = masks

    def begin(self, step: StepTensors, extent: int) -> None:
        self._step, self._extent = step, extent
        found = self._masks.on_device(step.ancestor_mask, step.positions, step.length, extent)
        self._found = found if isinstance(found, dict) else {"": found}
        self._repeated: dict[tuple[str, int], torch.Tensor] = {}
        """Masks for the query heads of a key head, one below the other."""
        rows = step.tokens.shape[1]
        self._positions = step.length[:, None] + torch.arange(rows, device=step.length.device)
        self._slots = torch.arange(len(step.tokens), device=step.length.device)[:, None]

    def add_norm(
        self, hidden: torch.Tensor, added: torch.Tensor | None, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        if added is not None:
            hidden += added
        normed: torch.Tensor = rms_norm(hidden, weight.shape, weight, epsilon)
        return normed

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: Rotary,
        norms: HeadNorms,
        cache: tuple[torch.Tensor, torch.Tensor],
        layout: HeadLayout,
    ) -> torch.Tensor:
        slots, rows = self._step.tokens.shape
        heads = qkv.view(slots * rows, -1, layout.width)
        turned, values = heads.split([layout.query_heads + layout.key_heads, layout.key_heads], dim=1)
        if norms:
            parts = turned.split([layout.query_heads, layout.key_heads], dim=1)
            normed = [
                rms_norm(part, weight.shape, weight, layout.epsilon) for part, weight in zip(parts, norms, strict=True)
            ]
            turned = torch.cat(normed, dim=1)
        cos, sin = (part[:, None] for part in rotary)
        turned = turned * cos + turned.roll(layout.width // 2, dims=-1) * sin
        for place, new in zip(cache, (turned[:, layout.query_heads :], values), strict=True):
            place[self._slots, :, self._positions] = new.view(slots, rows, layout.key_heads, layout.width)
        queries: torch.Tensor = turned[:, : layout.query_heads].flatten(1)
        return queries

    def attention(
        self, queries: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], layout: HeadLayout
    ) -> torch.Tensor:
        slots, rows = self._step.tokens.shape
        groups = layout.query_heads // layout.key_heads
        heads = queries[:, : layout.query_heads * layout.width]
        # The query heads of a key head as further rows: keys and values are not repeated.
        grouped = heads.reshape(slots, rows, layout.key_heads, groups, layout.width).permute(0, 2, 3, 1, 4)
        keys, values = (part[:slots, :, : self._extent] for part in cache)
        mixed = scaled_dot_product_attention(
            grouped.reshape(slots, layout.key_heads, groups * rows, layout.width),
            keys,
            values,
            attn_mask=self._mask(layout.window.kind, groups),
            scale=layout.scale,
        )
        by_row = mixed.view(slots, layout.key_heads, groups, rows, layout.width).permute(0, 3, 1, 2, 4)
        return by_row.reshape(slots * rows, layout.query_heads * layout.width)

    def _mask(self, kind: str, groups: int) -> torch.Tensor:
        if (kind, groups) not in self._repeated:
            mask = self._found[kind] if kind in self._found else self._found[""]
            assert mask is not None
            self._repeated[kind, groups] = mask.repeat(1, 1, groups, 1)
        return self._repeated[kind, groups]

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return silu(gate) * up

    def move(self, tensors: list[torch.Tensor]) -> None:
        move_positions(tensors, self._step)


def move_positions(tensors: list[torch.Tensor], step: StepTensors) -> None:
    """Move the positions of accepted paths; those that are padding move to where they are."""
    slots, moves = step.moved_from.shape
    targets = step.moved_to[:, None] + torch.arange(moves, device=step.moved_to.device)
    for tensor in tensors:
        for slot in range(slots):
            of_slot = tensor[:, slot]
            of_slot.index_copy_(2, targets[slot], of_slot.index_select(2, step.moved_from[slot]))
