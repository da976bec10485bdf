"""Defines the operations between the matmuls of a described model's pass, and implements them in PyTorch.

The PyTorch operations are the reference, and are used where Triton isn't available.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import layer_norm, rms_norm, scaled_dot_product_attention

from hdtool.runtime.caches.accepted_path_moves import move_on_device
from hdtool.runtime.engines.reference.mixer_operations import MixerOperations
from hdtool.runtime.model.pass_inputs import AttentionWindow
from hdtool.runtime.program.embedding_and_head import ACTIVATIONS, Rotary
from hdtool.runtime.program.llama_like_families import ROUNDED_FIRST, NormKind

if TYPE_CHECKING:
    from hdtool.runtime.model.pass_inputs import AttentionMask, AttentionMasks, StepTensors


@dataclass(frozen=True)
class HeadLayout:
    """The shape and options of a layer's attention."""

    query_heads: int
    key_heads: int
    width: int
    scale: float
    window: AttentionWindow
    softcap: float | None = None
    """Bound that a tanh applies to scores; None for unbounded scores."""
    sinks: torch.Tensor | None = None
    """Attention sinks: one more score per query head that enters the softmax but has no value."""
    rotated: int = 0
    """Width of a latent attention's rotated keys, cached beside latent vectors of ``width`` that are also the values.

    The keys are then latent vectors followed by rotated keys; 0 for other attention.
    """


@dataclass(frozen=True)
class Norm:
    """The weights and settings of a norm."""

    weight: torch.Tensor
    epsilon: float
    kind: NormKind = ROUNDED_FIRST
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, module: Any, epsilon: float, kind: NormKind) -> Norm:
        return cls(module.weight, epsilon, kind, module.bias if kind.has_bias else None)


@dataclass(frozen=True)
class Residual:
    """How to add a sublayer's output to the hidden states, and how to normalize the sum for the next matmul."""

    after: Norm | None
    """Norm applied to the output before it is added; None for no norm."""
    before: Norm | None
    """Norm applied to the sum for the next matmul; None if that matmul reads the sum itself."""
    multiplier: float = 1.0
    """Scales the output before it is added."""


KeysAndValues = tuple[torch.Tensor, torch.Tensor]
"""Cached keys and values of one layer."""
HeadNorms = tuple[Norm, Norm] | None
"""Norms of queries and keys; None without norms.

The weight's length tells whether a norm spans one head or all. A weight of two dimensions has a row for each head.
"""


class Operations:
    """Operations between the matmuls of a described model's pass, each in a few PyTorch calls.

    A subclass may implement them all with kernels.
    """

    reads_extent = True
    """True if attention reads a fixed number of cache positions, given to ``begin`` as ``extent``."""

    def __init__(self, masks: AttentionMasks | None = None) -> None:
        """``masks`` makes the masks of passes over trees; None if passes begin with ``begin_rows``."""
        self._masks = masks
        self.mixers = MixerOperations()
        self._shifted: list[Norm] = []
        """Norms that add an offset to their weights."""
        self._sums: dict[int, torch.Tensor] = {}
        """Float32 sums of weight and offset, by the ``id`` of the norm."""

    def prepare(self, residuals: Sequence[Residual], head_norms: Sequence[HeadNorms]) -> None:
        """Prepare for passes that use these residuals and norms; called once, before the first pass."""
        norms = [norm for residual in residuals for norm in (residual.after, residual.before)]
        norms += [norm for both in head_norms for norm in both or ()]
        self._shifted = [norm for norm in norms if norm is not None and norm.kind.offset]

    def begin(self, step: StepTensors, extent: int) -> None:
        """Begin a pass over the trees of ``step``; the other operations read ``step`` until the next ``begin``."""
        assert self._masks
        self._step = step
        places = step.length[:, None] + torch.arange(step.tokens.shape[1], device=step.length.device)
        masks = self._masks.on_device(step.ancestor_mask, step.positions, step.length, extent)
        self.begin_rows(places, masks, extent)

    def begin_rows(self, places: torch.Tensor, masks: AttentionMask, extent: int, context: int = 0) -> None:
        """Begin a pass whose rows are written to the cache at ``places [slots, rows]`` and read what ``masks`` show.

        Attention computes no outputs for the first ``context`` rows of a single slot, for which there are no masks.
        """
        self._places, self._extent, self._context = places, extent, context
        if self._shifted:
            # Weights may have been changed in place, so each pass adds the offset anew, to all weights at once.
            weights = [norm.weight for norm in self._shifted]
            sums = torch.cat(weights).float() + self._shifted[0].kind.offset
            parts = sums.split(list(map(len, weights)))
            self._sums = {id(norm): part for norm, part in zip(self._shifted, parts, strict=True)}
        self._found = masks if isinstance(masks, dict) else {"": masks}
        self._repeated: dict[tuple[str, int], torch.Tensor] = {}
        """Masks repeated for the query heads of a key head, by layer type and number of these heads."""
        self._slots = torch.arange(len(places), device=places.device)[:, None]

    def add_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, residual: Residual) -> torch.Tensor:
        """Add ``added``, if any, to ``hidden`` in place; return the sum for the next matmul.

        ``residual`` says how ``added`` is normalized and scaled, and how the returned sum is normalized.
        """
        if added is not None:
            hidden.add_(self._normed(added, residual.after), alpha=residual.multiplier)
        return self._normed(hidden, residual.before)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: Rotary | None,
        norms: HeadNorms,
        cache: KeysAndValues | None,
        layout: HeadLayout,
    ) -> torch.Tensor:
        """Normalize and rotate the queries and keys of ``qkv``, and write keys and values into the cache.

        Without a cache, ``qkv`` consists of queries alone. Return a tensor ``[tokens, columns]`` whose first
        ``heads * width`` columns are the queries, without those of context rows. ``qkv`` may be changed in place.
        """
        slots, rows = self._places.shape
        heads = qkv.view(slots * rows, -1, layout.width)
        key_heads = layout.key_heads if cache else 0
        turned, values = heads.split([layout.query_heads + key_heads, key_heads], dim=1)
        if norms:
            parts = turned.split([layout.query_heads, key_heads], dim=1)
            normed = [self._normed_heads(part, norm) for part, norm in zip(parts, norms, strict=True) if part.numel()]
            turned = torch.cat(normed, dim=1)
        if rotary:
            turned = _rotated(turned, rotary).to(qkv.dtype)  # some models rotate in float32
        for place, new in zip(cache or (), (turned[:, layout.query_heads :], values), strict=False):
            place[self._slots, :, self._places] = new.view(slots, rows, layout.key_heads, layout.width)
        queries: torch.Tensor = turned[self._context :].flatten(1)
        return queries

    def rotate_and_store_latents(
        self, queries: torch.Tensor, latents: torch.Tensor, rotary: Rotary | None, norm: Norm, cache: KeysAndValues
    ) -> torch.Tensor:
        """Return ``queries [tokens, heads, rotated]``, rotated, and write latent vectors and rotated keys to the cache.

        ``latents`` has a latent vector, which ``norm`` normalizes, and a key of width ``rotated`` for each token.
        """
        slots, rows = self._places.shape
        compressed, keys = latents.tensor_split([len(norm.weight)], dim=1)
        turned = torch.cat([keys[:, None], queries], dim=1)
        if rotary:
            turned = _rotated(turned, rotary).to(queries.dtype)
        for place, new in zip(cache, (self._normed(compressed, norm), turned[:, 0]), strict=True):
            place[self._slots, :, self._places] = new.view(slots, rows, 1, -1)
        return turned[:, 1:]

    def _normed(self, rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        if norm is None:
            return rows
        if norm.kind.is_centered:
            return centered(rows, norm)
        if norm.kind.offset:
            exact: torch.Tensor = rms_norm(rows.float(), norm.weight.shape, self._sums[id(norm)], norm.epsilon)
            return exact.to(rows.dtype)
        normed: torch.Tensor = rms_norm(rows, norm.weight.shape, norm.weight, norm.epsilon)
        return normed

    def _normed_heads(self, heads: torch.Tensor, norm: Norm) -> torch.Tensor:
        """Normalize ``[tokens, heads, width]`` per head, or across all heads if the weight spans them."""
        if norm.weight.shape[-1] == heads.shape[2]:
            return self._normed(heads, norm)
        return self._normed(heads.flatten(1), norm).view(heads.shape)

    def attention(self, queries: torch.Tensor, cache: KeysAndValues, layout: HeadLayout) -> torch.Tensor:
        """Compute attention of the queries over the context and the tree; return ``[tokens, heads * width]``."""
        slots, groups = len(self._places), layout.query_heads // layout.key_heads
        rows = len(queries) // slots
        width = layout.width + layout.rotated
        heads = queries[:, : layout.query_heads * width]
        # Query heads that share a key head become additional rows, so that keys and values needn't be repeated.
        grouped = heads.reshape(slots, rows, layout.key_heads, groups, width).permute(0, 2, 3, 1, 4)
        keys, values = (part[:slots, :, : self._extent] for part in cache)
        if layout.rotated:
            keys, values = torch.cat([keys, values], dim=3), keys
        grouped = grouped.reshape(slots, layout.key_heads, groups * rows, width)
        mask = self._mask(layout.window.kind, groups)
        if layout.softcap is None and layout.sinks is None:
            mixed = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=layout.scale)
        else:
            mixed = _attention(grouped, keys, values, mask, layout)
        by_row = mixed.view(slots, layout.key_heads, groups, rows, layout.width).permute(0, 3, 1, 2, 4)
        return by_row.reshape(slots * rows, layout.query_heads * layout.width)

    def _mask(self, kind: str, groups: int) -> torch.Tensor:
        if (kind, groups) not in self._repeated:
            mask = self._found[kind] if kind in self._found else self._found[""]
            assert mask is not None
            self._repeated[kind, groups] = mask.repeat(1, 1, groups, 1)
        return self._repeated[kind, groups]

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """Return the activation of each row's first half, multiplied by the row's second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def move(self, tensors: list[torch.Tensor]) -> None:
        """Move the keys and values of accepted paths to their final positions in the cache."""
        move_on_device(tensors, self._step.moved_to, self._step.moved_from)


def centered(rows: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return the LayerNorm of rows, or of heads with a weight for each."""
    width = norm.weight.shape[-1:]
    if norm.weight.dim() == 1:
        normed: torch.Tensor = layer_norm(rows, width, norm.weight, norm.bias, norm.epsilon)
        return normed
    exact = layer_norm(rows.float(), width, eps=norm.epsilon) * norm.weight
    return exact.to(rows.dtype)


def _rotated(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cos, sin = rotary.cos[:, None], rotary.sin[:, None]
    width = cos.shape[-1]
    first = heads[..., :width]
    if rotary.splits_pairs:
        first = first.unflatten(-1, (-1, 2)).mT.flatten(-2)
    if rotary.is_interleaved:
        partner = first.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partner = first.roll(width // 2, dims=-1)
    rotated = torch.addcmul(first * cos, partner, sin)
    return rotated if width == heads.shape[-1] else torch.cat([rotated, heads[..., width:]], dim=-1)


def _attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, layout: HeadLayout
) -> torch.Tensor:
    """Compute attention with a softcap or sinks.

    ``queries`` have the shape ``[slots, key heads, query heads per key head * rows, width]``.
    """
    scores, scale = queries @ keys.mT, layout.scale
    if layout.softcap is not None:
        scores, scale = scores.mul_(scale / layout.softcap).tanh_(), layout.softcap
    scores = torch.add(mask, scores, alpha=scale)
    if layout.sinks is None:
        weights = scores.softmax(-1, dtype=torch.float32)
    else:
        by_head = layout.sinks.view(layout.key_heads, -1, 1).expand(
            -1, -1, scores.shape[2] * layout.key_heads // layout.query_heads
        )
        sinks = by_head.reshape(layout.key_heads, -1, 1).expand(len(scores), -1, -1, -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(values.dtype) @ values
