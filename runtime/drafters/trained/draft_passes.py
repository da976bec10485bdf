"""Forward passes of a small module over accepted tokens and over draft paths after them, with one KV cache.

On a GPU, passes have fixed shapes, each of which is captured once and then replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from hdtool.runtime.caches.kv_cache import IndexedKVCache, KVTensors, LayerShape, StaticKVCache
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING, RankedBlock
from hdtool.runtime.drafters.trained.sequential import MAX_PASSES, ROWS_PER_PASS
from hdtool.runtime.engines.cuda.static_steps import Run, extent_for
from hdtool.runtime.kernels.compiled import Array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hdtool.runtime.target.target import Target

READ_CHUNK = 512
"""Maximum number of accepted tokens that one pass reads."""
CAPTURED_SIZES = (1, 2, 4, 8, 16)
"""Numbers of rows in a captured pass."""
CAPTURED_HEADER_WORDS = 2
"""Number of integers before those of the rows: the number of accepted positions, and the last accepted token's row."""
READS_NOTHING = -1

Module = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Any, torch.Tensor], torch.Tensor]
"""Computes the hidden states after tokens ``[1, rows]``, given the states before them, positions, cache and mask."""
SelectTopTokens = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Computes the best tokens after hidden states ``[rows, width]``, and their probabilities."""


class PassRows(NamedTuple):
    """Inputs for the rows of a captured pass, padded to its size."""

    tokens: list[int]
    offsets: list[int]
    """Offset of each row's position from the end of the accepted ones."""
    seen: list[int]
    """Bitmask of the drafted positions that each row attends to."""
    parents: list[int]
    """Row that holds the hidden state before each token."""
    written: list[int]
    """Row to which each token's own hidden state is written."""


WORDS_PER_ROW = len(PassRows._fields) + 1
"""Integers per row: the fields of ``PassRows``, and the position to which its keys and values are written."""


class DraftPasses:
    """Forward passes of a module, with its KV cache and the hidden states of the current draft.

    Row 0 is the last accepted token; ``extend`` numbers its rows consecutively after it. The cache holds the accepted
    positions followed by those of drafted rows, which the next accepted positions overwrite.
    """

    passes = MAX_PASSES

    def __init__(
        self,
        module: Module,
        best: SelectTopTokens,
        shapes: Sequence[LayerShape],
        *,
        width: int,
        read_width: int | None = None,
        window: int | None,
        target: Target,
    ) -> None:
        """``width`` is the width of the module's hidden states.

        ``read_width`` is that of the target's hidden states, or None if it is the same; ``window`` is the size of the
        sliding window, or None without one.
        """
        self._module, self._best_of, self._shapes, self._window = module, best, shapes, window
        self._device = target.device
        self._storage = KVTensors.for_layers(shapes, 0)
        self._states = torch.zeros((2 + ROWS_PER_PASS * MAX_PASSES, width), dtype=target.dtype, device=self._device)
        """Hidden state of each row; padding writes to the last row."""
        self._host = torch.zeros(
            CAPTURED_HEADER_WORDS + WORDS_PER_ROW * CAPTURED_SIZES[-1],
            dtype=torch.int64,
            pin_memory=self._device.type == "cuda",
        )
        self._input = self._host.to(self._device, copy=True)
        self._new_hidden = self._states.new_zeros((CAPTURED_SIZES[-1], read_width or width))
        self._capture = target.new_recorder()
        self._captured: dict[tuple[bool, int, int], Run] = {}
        self._result = RankedBlock(CAPTURED_SIZES[-1], TOKENS_PER_RANKING, self._device)
        self.begin([])

    @torch.inference_mode()
    def begin(self, prompt: list[int]) -> None:
        """Discard everything read so far. Old values are zeroed, because masking works only for finite values."""
        for tensor in self._storage.tensors:
            tensor.zero_()
        self._length = 0
        """Number of accepted positions."""
        self._forget_rows()

    def skip(self, tokens: int) -> None:
        self.begin([])

    def _forget_rows(self) -> None:
        self._ancestors, self._offsets = [0], [-1]
        """For each row, a bitmask of drafted rows that it attends to, and its offset from the accepted positions."""

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[Array, Array]:
        """Read accepted tokens; return the best tokens after the last one, and their probabilities."""
        for start in range(0, len(tokens), READ_CHUNK):
            chosen, before = tokens[start : start + READ_CHUNK], hidden[start : start + READ_CHUNK]
            ends = start + READ_CHUNK >= len(tokens)
            if ends and self._capture and len(chosen) <= CAPTURED_SIZES[-1]:
                ranked = self._read_captured(before, chosen)
            else:
                ranked = self._read(before, chosen, ends=ends)
        self._forget_rows()
        return ranked

    def _read(self, hidden: torch.Tensor, tokens: list[int], *, ends: bool) -> tuple[Array, Array]:
        first, new = self._length, len(tokens)
        self._make_room(first + new)
        cache = StaticKVCache(self._storage)
        cache.length = first
        ids = torch.tensor([tokens], device=self._device)
        positions = torch.arange(first + 1, first + new + 1, device=self._device)[None]
        mask = causal_mask(first, new, self._window, hidden)
        states = self._module(ids, hidden[None], positions, cache, mask)[0, -1:]
        self._length = first + new
        if not ends:
            return NO_TOKENS
        self._states[:1] = states
        return on_host(self._best_of(states))

    def extend(self, parents: list[int], tokens: list[int]) -> tuple[Array, Array]:
        """Extend the path of each row in ``parents`` by the corresponding token.

        Return the best tokens after each of ``tokens``, and their probabilities.
        """
        first = len(self._ancestors)
        for number, parent in enumerate(parents, start=first - 1):
            self._ancestors.append(self._ancestors[parent] | 1 << number)
            self._offsets.append(self._offsets[parent] + 1)
        rows = range(first, first + len(parents))
        if self._capture:
            return self._extend_captured(rows, parents, tokens)
        base, new = self._length, len(tokens)
        end = base + rows.stop - 1
        self._make_room(end)
        seen, offsets = torch.tensor([self._ancestors[first:], self._offsets[first:]])
        indices = torch.arange(base + first - 1, end, device=self._device)
        cache = IndexedKVCache(self._storage, indices[None], end)
        mask = draft_mask(torch.tensor(base), seen, offsets, end, self._window, self._states)
        ids, positions = torch.tensor([tokens], device=self._device), (base + 1 + offsets)[None].to(self._device)
        states = self._module(ids, self._states[parents][None], positions, cache, mask)[0]
        self._states[first : first + new] = states
        return on_host(self._best_of(states))

    def _make_room(self, positions: int) -> None:
        old = self._storage
        if old.capacity >= positions:
            return
        self._storage = KVTensors.for_layers(self._shapes, extent_for(positions))
        for mine, theirs in zip(self._storage.tensors, old.tensors, strict=True):
            mine.narrow(3, 0, old.capacity).copy_(theirs)
        self._captured.clear()

    def _read_captured(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[Array, Array]:
        new = len(tokens)
        size = next(size for size in CAPTURED_SIZES if size >= new)
        self._new_hidden[:new].copy_(hidden)
        self._new_hidden[new:size] = 0  # masking works only for finite values
        offsets, nothing = list(range(size)), [0] * size
        seen = [(2 << row) - 1 for row in offsets]
        rows = PassRows([*tokens, *[0] * (size - new)], offsets, seen, nothing, nothing)
        ranked = self._replay(rows, first=0, last=new - 1)
        self._length += new
        return ranked[0][:1], ranked[1][:1]

    def _extend_captured(self, rows: range, parents: list[int], tokens: list[int]) -> tuple[Array, Array]:
        padding = [0] * (next(size for size in CAPTURED_SIZES if size >= len(rows)) - len(rows))
        padded = PassRows(
            [*tokens, *padding],
            [*self._offsets[rows.start :], *padding],
            [*self._ancestors[rows.start :], *padding],
            [*parents, *padding],
            [*rows, *[len(self._states) - 1] * len(padding)],
        )
        ranked = self._replay(padded, first=rows.start - 1)
        return ranked[0][: len(rows)], ranked[1][: len(rows)]

    def _replay(self, rows: PassRows, first: int, last: int = READS_NOTHING) -> tuple[Array, Array]:
        """Run a captured pass over ``rows``; their keys and values are written after ``first`` drafted positions.

        If the rows are accepted tokens, ``last`` is the index of the last of them.
        """
        size, start = len(rows.tokens), self._length + first
        self._make_room(start + size)
        extent, is_read = min(extent_for(start + size), self._storage.capacity), last != READS_NOTHING
        words = torch.tensor([*rows, list(range(start, start + size))])
        self._host[:CAPTURED_HEADER_WORDS] = torch.tensor([self._length, max(0, last)])
        self._host[CAPTURED_HEADER_WORDS : CAPTURED_HEADER_WORDS + WORDS_PER_ROW * size] = words.flatten()
        self._input.copy_(self._host, non_blocking=True)
        key = is_read, size, extent
        if key not in self._captured:
            self._captured[key] = self._record(*key)
        self._captured[key]()
        return self._result.wait(size)

    def _record(self, is_read: bool, size: int, extent: int) -> Run:
        assert self._capture is not None
        given = self._input
        tokens, offsets, seen, parents, written, indices = given[
            CAPTURED_HEADER_WORDS : CAPTURED_HEADER_WORDS + WORDS_PER_ROW * size
        ].view(WORDS_PER_ROW, size)

        def run() -> None:
            cache = IndexedKVCache(self._storage, indices[None], extent)
            before = self._new_hidden[:size] if is_read else self._states.index_select(0, parents)
            mask = draft_mask(given[0], seen, offsets, extent, self._window, self._states)
            positions = given[0] + offsets + 1  # a token's position is one after that of its hidden state
            states = self._module(tokens[None], before[None], positions[None], cache, mask)[0]
            if is_read:
                states = states.index_select(0, given[1:CAPTURED_HEADER_WORDS])
                self._states[:1].copy_(states)
            else:
                self._states.index_copy_(0, written, states)
            self._result.write(*self._best_of(states))

        return self._capture.record(run)


def causal_mask(first: int, new: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Return the attention mask ``[1, 1, new, first + new]`` for ``new`` tokens after ``first`` earlier ones."""
    keys = torch.arange(first + new, device=like.device)
    queries = keys[first:, None]
    visible = keys <= queries
    if window:
        visible &= keys > queries - window
    return _hiding(visible, like)


def draft_mask(
    base: torch.Tensor, seen: torch.Tensor, offsets: torch.Tensor, extent: int, window: int | None, like: torch.Tensor
) -> torch.Tensor:
    """Return the attention mask ``[1, 1, rows, extent]`` for drafted rows after ``base`` accepted positions.

    ``seen`` holds a bitmask of the drafted positions that each row attends to, and ``offsets`` the offset of each row's
    position from ``base``.
    """
    keys = torch.arange(extent, device=like.device) - base.to(like.device)
    bits = (seen.to(like.device)[:, None] >> keys.clamp(0, 62)) & 1
    visible = (keys < 0) | ((bits == 1) & (keys <= 62))
    if window:
        visible &= keys > offsets.to(like.device)[:, None] - window
    return _hiding(visible, like)


def _hiding(visible: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    hidden = torch.zeros(visible.shape, dtype=like.dtype, device=like.device)
    return hidden.masked_fill_(~visible, torch.finfo(like.dtype).min)[None, None]


def on_host(ranked: tuple[torch.Tensor, torch.Tensor]) -> tuple[Array, Array]:
    tokens, probs = ranked
    return tokens.cpu().numpy(), probs.float().cpu().numpy()


NO_TOKENS: tuple[Array, Array] = on_host((torch.empty((0, 1), dtype=torch.int64), torch.empty((0, 1))))
