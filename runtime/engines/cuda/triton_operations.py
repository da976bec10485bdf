"""Implements the operations between the matmuls of a described model's pass with Triton kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from hdtool.runtime.engines.cuda import triton_kernels
from hdtool.runtime.engines.cuda.triton_kernels import padded
from hdtool.runtime.engines.cuda.triton_mixers import TritonMixers
from hdtool.runtime.engines.cuda.triton_races import run_races
from hdtool.runtime.engines.reference.operations import Norm, Operations, centered
from hdtool.runtime.model.pass_inputs import MOVES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hdtool.runtime.engines.reference.operations import HeadLayout, HeadNorms, KeysAndValues, Residual
    from hdtool.runtime.model.pass_inputs import StepTensors
    from hdtool.runtime.program.embedding_and_head import Rotary

MAX_SPLITS = 32
UNEVEN_SPLITS = 16
"""Maximum number of splits for a context that is much longer than the other slots' contexts."""
MAX_PARTS = 1 << 26
"""Maximum number of bytes for the outputs of all splits, beyond which ``UNEVEN_SPLITS`` is reduced."""
MIN_SPLIT_KEYS = 128
"""Minimum number of keys in a split; with fewer, merging the splits would take longer than they save."""
GATE_BLOCK = 1024
"""Number of columns that one program of the gate kernel computes."""
PROGRAMS_PER_PROCESSOR = 2
NO_NORM = Norm(torch.empty(0), 0.0)


class TileSizes(NamedTuple):
    """The attention kernel's block size, in query rows and in keys, and its numbers of warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int = 2

    @classmethod
    def of(cls, queries: int, width: int, dtype: torch.dtype, capability: int) -> TileSizes:
        """Return the largest blocks that fit into registers, or small ones for float32, which doesn't use tensor cores.

        ``capability`` is the GPU's major compute capability.
        """
        if dtype == torch.float32:
            return cls(16, 16, 16, 1) if width > 256 else cls(16, 16, 4 if width <= 128 else 8)
        if width > 256:
            return cls(16, 16, 4)
        if width > 128:
            return cls(min(32, queries), 32, 4)
        return cls(min(64, queries), 64, 8 if queries > 32 and capability < HOPPER else 4)


HOPPER = 9


class TritonOperations(Operations):
    """Implements most operations of a described model's pass with one Triton kernel each.

    Attention needs two kernels, and so does ``rotate_and_store`` if a norm spans all heads.
    """

    reads_extent = False
    run_races = staticmethod(run_races)

    def __init__(self, device: torch.device) -> None:
        self._processors, self._capability = processor_of(device)
        self.mixers = TritonMixers()

    def prepare(self, residuals: Sequence[Residual], head_norms: Sequence[HeadNorms]) -> None:
        pass

    def begin(self, step: StepTensors, extent: int) -> None:
        self._step, self._stride = step, step.length.stride(0)

    def add_norm(self, hidden: torch.Tensor, added: torch.Tensor | None, residual: Residual) -> torch.Tensor:
        tokens, width = hidden.shape
        after, before = residual.after, residual.before
        normed = hidden if before is None else torch.empty_like(hidden)
        kind = (before or after or NO_NORM).kind
        triton_kernels.add_norm_kernel[(tokens,)](
            hidden,
            hidden if added is None else added,
            *(hidden if tensor is None else tensor for norm in (after, before) for tensor in _weights_of(norm)),
            normed,
            width,
            0.0 if after is None else after.epsilon,
            0.0 if before is None else before.epsilon,
            residual.multiplier,
            ADDS=added is not None,
            AFTER=after is not None,
            BEFORE=before is not None,
            SCALES=residual.multiplier != 1.0,
            OFFSET=kind.offset,
            ROUNDS=kind.rounds,
            CENTERS=kind.is_centered,
            BIAS=kind.has_bias,
            BLOCK=triton.next_power_of_2(width),
            num_warps=8,
        )
        return normed

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        rotary: Rotary | None,
        norms: HeadNorms,
        cache: KeysAndValues | None,
        layout: HeadLayout,
    ) -> torch.Tensor:
        if norms and norms[0].kind.is_centered:
            self._center_heads(qkv, norms, layout)
            norms = None
        if norms and len(norms[0].weight) != layout.width:
            self._norm_all_heads(qkv, norms)
            norms = None
        query_norm, key_norm = norms or (NO_NORM, NO_NORM)
        half = (layout.width if rotary is None else rotary.cos.shape[1]) // 2
        rest = layout.width - 2 * half
        key_heads = layout.key_heads if cache else 0
        keys, values = cache or (qkv[None], qkv[None])
        triton_kernels.rotary_kernel[(len(qkv), layout.query_heads + 2 * key_heads)](
            qkv,
            *(rotary[:2] if rotary else (qkv, qkv)),
            query_norm.weight if norms else qkv,
            key_norm.weight if norms else qkv,
            keys,
            values,
            self._step.length,
            self._step.tokens.shape[1],
            self._stride,
            layout.query_heads,
            key_heads,
            *keys.stride()[:2],
            query_norm.epsilon,
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            REST=rest,
            REST_BLOCK=triton.next_power_of_2(max(1, rest)),
            ROTATES=rotary is not None,
            PAIRS=rotary is not None and rotary.is_interleaved,
            NORMS=norms is not None,
            OFFSET=query_norm.kind.offset,
            ROUNDS=query_norm.kind.rounds,
            num_warps=1,
        )
        return qkv

    def _center_heads(self, qkv: torch.Tensor, norms: tuple[Norm, Norm], layout: HeadLayout) -> None:
        """Compute the LayerNorms of queries and keys in place, by PyTorch; few models have them."""
        parts = qkv.view(len(qkv), -1, layout.width).tensor_split(
            [layout.query_heads, layout.query_heads + layout.key_heads], 1
        )
        for part, norm in zip(parts, norms, strict=False):
            part.copy_(centered(part, norm))

    def _norm_all_heads(self, qkv: torch.Tensor, norms: tuple[Norm, Norm]) -> None:
        """Normalize queries and keys in place, each across all heads."""
        queries, keys = norms
        triton_kernels.norm_parts_kernel[(len(qkv), 2)](
            qkv,
            queries.weight,
            keys.weight,
            qkv.shape[1],
            len(queries.weight),
            len(keys.weight),
            queries.epsilon,
            OFFSET=queries.kind.offset,
            ROUNDS=queries.kind.rounds,
            BLOCK=triton.next_power_of_2(len(queries.weight)),
            num_warps=8,
        )

    def rotate_and_store_latents(
        self, queries: torch.Tensor, latents: torch.Tensor, rotary: Rotary | None, norm: Norm, cache: KeysAndValues
    ) -> torch.Tensor:
        tokens, heads, rotated = queries.shape
        rank, half = len(norm.weight), rotated // 2
        turned = queries.new_empty(queries.shape)
        triton_kernels.latent_kernel[(tokens, heads + 1)](
            queries,
            latents,
            *(rotary[:2] if rotary else (latents, latents)),
            norm.weight,
            turned,
            *cache,
            self._step.length,
            self._step.tokens.shape[1],
            self._stride,
            heads,
            *queries.stride()[:2],
            latents.stride(0),
            cache[0].stride(0),
            cache[1].stride(0),
            norm.epsilon,
            RANK=rank,
            RANK_BLOCK=triton.next_power_of_2(rank),
            HALF=half,
            BLOCK=triton.next_power_of_2(half),
            ROTATES=rotary is not None,
            PAIRS=rotary is not None and rotary.is_interleaved,
            SPLITS=rotary is not None and rotary.splits_pairs,
            OFFSET=norm.kind.offset,
            ROUNDS=norm.kind.rounds,
            num_warps=1,
        )
        return turned

    def attention(self, queries: torch.Tensor, cache: KeysAndValues, layout: HeadLayout) -> torch.Tensor:
        slots, rows = self._step.tokens.shape
        tokens, heads, width, rotated = slots * rows, layout.query_heads, layout.width, layout.rotated
        groups = heads // layout.key_heads
        keys, cached_values = (cache[0], cache[0]) if rotated else cache
        values = cached_values.shape[3]
        block = TileSizes.of(padded(rows * groups), width, queries.dtype, self._capability)
        blocks = triton.cdiv(rows * groups, block.queries)
        wanted = max(1, PROGRAMS_PER_PROCESSOR * self._processors // (blocks * layout.key_heads))
        splits = splits_of(wanted, slots, tokens * heads * values * torch.float32.itemsize)
        parts = torch.empty((splits, tokens, heads, values), dtype=torch.float32, device=queries.device)
        levels = torch.empty((splits, tokens, heads), dtype=torch.float32, device=queries.device)
        step, window = self._step, layout.window.window
        triton_kernels.attention_kernel[(blocks * splits, layout.key_heads, slots)](
            queries,
            keys,
            cache[1],
            cached_values,
            step.length,
            step.positions,
            step.ancestor_mask,
            parts,
            levels,
            rows,
            self._stride,
            groups,
            queries.stride(0),
            *keys.stride()[:2],
            cache[1].stride(0),
            *cached_values.stride()[:2],
            layout.scale,
            layout.softcap or 0.0,
            window or 0,
            blocks,
            wanted,
            SLOTS=triton.next_power_of_2(slots),
            SPLITS=splits,
            LEAST=MIN_SPLIT_KEYS,
            WIDTH=width,
            LOADED=padded(width),
            ROTATED=rotated,
            ROTATED_LOADED=padded(rotated),
            VALUES=values,
            VALUES_LOADED=padded(values),
            BLOCK_M=block.queries,
            BLOCK_N=block.keys,
            WINDOW=window is not None,
            SOFTCAP=layout.softcap is not None,
            PRECISION="ieee",
            num_warps=block.warps,
            num_stages=block.stages,
        )
        mixed = torch.empty((tokens, heads * values), dtype=queries.dtype, device=queries.device)
        triton_kernels.merge_kernel[(tokens * heads,)](
            parts,
            levels,
            levels if layout.sinks is None else layout.sinks,
            mixed,
            tokens * heads,
            heads,
            SPLITS=splits,
            SINKS=layout.sinks is not None,
            WIDTH=values,
            LOADED=padded(values),
            num_warps=2,
        )
        return mixed

    def gate(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        gated = gate_up.new_empty((tokens, width))
        grid = tokens, triton.cdiv(width, GATE_BLOCK)
        triton_kernels.gate_kernel[grid](gate_up, gated, width, ACTIVATION=activation, BLOCK=GATE_BLOCK, num_warps=4)
        return gated

    def move(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            layers, _, heads, _, width = tensor.shape
            layer, slot, head = tensor.stride()[:3]
            triton_kernels.move_kernel[(layers * heads, len(self._step.tokens))](
                tensor,
                self._step.buffer,
                self._stride,
                layer,
                slot,
                head,
                heads,
                WIDTH=width,
                LOADED=padded(width),
                MOVES=MOVES,
                num_warps=4,
            )


def _weights_of(norm: Norm | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (norm.weight, norm.bias) if norm else (None, None)


def splits_of(wanted: int, slots: int, size: int) -> int:
    """Return the maximum number of splits of one slot's keys, chosen so that all multiprocessors are busy.

    ``wanted`` splits of all slots together are enough for that, but a slot with a long context beside short ones may
    need most of them. ``size`` is the number of bytes that one split of all slots takes up.
    """
    even = triton.next_power_of_2(max(1, wanted // slots))
    uneven = min(UNEVEN_SPLITS, triton.next_power_of_2(wanted)) if slots > 1 else 1
    while uneven > 1 and uneven * size > MAX_PARTS:
        uneven //= 2
    return int(min(MAX_SPLITS, max(even, uneven)))


def processor_of(device: torch.device) -> tuple[int, int]:
    """Return a GPU's ``(multiprocessors, major compute capability)``; ``(1, 0)`` for other devices."""
    if device.type != "cuda":
        return 1, 0
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(properties.major)
