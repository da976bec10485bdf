"""Forward passes of a small module over accepted tokens and over draft paths after them, with one KV cache.

On a GPU, passes have fixed shapes, each of which the target captures once and then replays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from hdtool.runtime.caches.kv_cache import LayerShape, extent_for
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.engine_interface import Ranked, TopTokens
from hdtool.runtime.drafters.trained.draft_module import MAX_PASSES, ROWS_PER_PASS, DraftModule
from hdtool.runtime.drafters.trained.path_drafting import DEPTHS, Extend, rank_best_paths, rankings_for
from hdtool.runtime.drafters.trained.proposal import TOKENS_PER_RANKING
from hdtool.runtime.model.pass_inputs import FULL, AttentionMasks, AttentionWindow, CacheRows
from hdtool.runtime.target.target import Target

READ_CHUNK = 512
"""Maximum number of accepted tokens that one pass reads."""
MAX_DRAFTED = ROWS_PER_PASS * MAX_PASSES
"""Maximum number of rows in a draft."""


Module = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, CacheRows], list[torch.Tensor]]
"""Computes the outputs ``[rows, width]`` of a module's layers for tokens ``[rows]``.

The other arguments are the hidden states before the tokens, the positions of these states, and the rows of the cache.
"""
RankAfter = Callable[[list[torch.Tensor], torch.Tensor], TopTokens]
"""Ranks the next tokens, given the outputs ``[1, width]`` of a module's layers for a token, and that token ``[1]``."""


class ReadingPasses(DraftModule):
    """Passes over accepted tokens, with a KV cache, that rank the tokens that may follow the last one."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        hidden: torch.Tensor,
        target: Target,
        *,
        windows: Sequence[AttentionWindow] = (AttentionWindow(FULL),),
        rankings: int = 1,
        best: int = TOKENS_PER_RANKING,
        drafted: int = 0,
    ) -> None:
        """``hidden`` has the dtype, device and width of the hidden states to read, ``[..., width]``.

        ``windows`` are those of the layers, ``rankings`` is the number of rankings that a pass makes, ``best`` their
        length, and ``drafted`` the maximum number of positions that drafted tokens take in the cache.
        """
        self.rankings, self._passes = rankings, target.ranking_passes(rankings, best)
        self._cache, self._caches, self._drafted = Cache(shapes), bool(shapes), drafted + self._passes.largest
        self._masks = AttentionMasks(list(dict.fromkeys(windows)), hidden.dtype, hidden.device)
        self._new_hidden = hidden.new_zeros((self._passes.largest, hidden.shape[-1]))

    @property
    def length(self) -> int:
        """Number of accepted tokens in the cache; always 0 for a module that caches nothing."""
        return self._cache.slots[0].length

    @torch.inference_mode()
    def begin(self, prompt: list[int]) -> None:
        """Discard everything read so far. Old values are zeroed, because masking works only for finite values."""
        kv = self._cache.slots[0].kv
        kv.cut(0)
        kv.clear_from(0)

    @torch.inference_mode()
    def start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        if not self._caches:
            hidden, tokens = hidden[-1:], tokens[-1:]
        while len(tokens) > READ_CHUNK:
            self._cache_only(hidden[:READ_CHUNK], tokens[:READ_CHUNK])
            hidden, tokens = hidden[READ_CHUNK:], tokens[READ_CHUNK:]
        return self._start(hidden, tokens)

    def _cache_only(self, hidden: torch.Tensor, tokens: list[int]) -> None:
        """Read accepted tokens that others follow, so that nothing is ranked after them."""
        hidden, tokens = self._with_unread(hidden, tokens)
        new, start = len(tokens), self.length
        places = torch.arange(start, start + new, device=hidden.device)
        self._cache_rows(torch.tensor(tokens, device=hidden.device), hidden, places, self._reserved(new))
        self._accept(new)

    def _start(self, hidden: torch.Tensor, tokens: list[int]) -> Callable[[], Ranked]:
        hidden, tokens = self._with_unread(hidden, tokens)
        new = len(tokens)
        size = self._passes.size_for(new)
        if self._passes.captures(new):
            self._new_hidden[:new].copy_(hidden)
            self._new_hidden[new:size] = 0  # masking works only for finite values
            hidden = self._new_hidden[:size]
        extent, words = self._reserved(size), self._words(tokens, size)
        rank_last = partial(self._rank_last, hidden, extent)
        results = self._passes.start((f"read {self.rankings}", size, extent), words, self.rankings, rank_last)
        self._accept(new)
        return results

    def _with_unread(self, hidden: torch.Tensor, tokens: list[int]) -> tuple[torch.Tensor, list[int]]:
        """Return new accepted positions, preceded by those that must be read again, if there are any."""
        return hidden, tokens

    def _words(self, tokens: list[int], size: int) -> list[int]:
        """Return the last token's row, the tokens and their places in the cache, padded to ``size`` rows."""
        new, length = len(tokens), self.length
        return [new - 1, *tokens, *[0] * (size - new), *range(length, length + size)]

    def _reserved(self, new: int) -> int:
        """Make room for ``new`` accepted tokens and a draft; return the number of positions that the pass reads."""
        end = self.length + new
        if self._cache.capacity < end + self._drafted:
            self._passes.forget()
            self._cache.reserve(extent_for(end + self._drafted))
        return self._extent(new, end)

    def _extent(self, rows: int, end: int) -> int:
        """Return the number of positions that a pass over rows up to position ``end`` reads."""
        kv = self._cache.slots[0].kv
        kv.mark_written(end)
        return min(extent_for(end), kv.capacity) if self._passes.captures(rows) else end

    def _accept(self, new: int) -> None:
        if self._caches:
            self._cache.slots[0].kv.length += new

    def _rank_last(self, hidden: torch.Tensor, extent: int, words: torch.Tensor) -> TopTokens:
        """Read accepted tokens, given as ``_words`` returns them, and rank the tokens that may follow the last one."""
        last, (tokens, places) = words[:1], words[1:].view(2, -1)
        return self._ranked(tokens, hidden, last, self._causal_rows(places, extent))

    def _causal_rows(self, places: torch.Tensor, extent: int) -> CacheRows:
        return CacheRows(self._cache.storage, places, extent, self._masks.causal_mask(places, extent))

    def _cache_rows(self, tokens: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, extent: int) -> None:
        """Write what is cached for accepted tokens at these places, given the hidden states before them."""
        raise NotImplementedError

    def _ranked(self, tokens: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, rows: CacheRows) -> TopTokens:
        """Rank the tokens that may follow row ``last`` of some accepted tokens, given the hidden states before them."""
        raise NotImplementedError


class ModulePasses(ReadingPasses):
    """Passes of a module over accepted tokens."""

    def __init__(
        self,
        module: Module,
        rank_after: RankAfter,
        shapes: Sequence[LayerShape],
        hidden: torch.Tensor,
        target: Target,
        **options: Any,
    ) -> None:
        self._module, self._rank_after = module, rank_after
        super().__init__(shapes, hidden, target, **options)

    def draft_within_reading(self, depth: int) -> None:
        super().draft_within_reading(depth)
        self.rankings = rankings_for(depth)

    def _with_paths(self, first: TopTokens, extend: Extend) -> TopTokens:
        """Return the ``first`` ranking and, if ``depth`` is not 0, the rankings after the best paths below it."""
        return rank_best_paths(first, self.depth, extend) if self.depth else first

    def _cache_rows(self, tokens: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, extent: int) -> None:
        self._module(tokens, hidden, places, self._causal_rows(places, extent))

    def _ranked(self, tokens: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, rows: CacheRows) -> TopTokens:
        outputs = self._module(tokens, hidden, rows.places, rows)
        return self._rank_after([output.index_select(0, last) for output in outputs], tokens.index_select(0, last))


class DraftPasses(ModulePasses):
    """Passes of a module that also reads drafted tokens, with the hidden states of the current draft.

    Row 0 is the last accepted token; ``extend`` numbers its rows consecutively after it. The cache holds the accepted
    positions followed by those of drafted rows, which the next accepted positions overwrite.
    """

    passes = MAX_PASSES

    def __init__(
        self,
        module: Module,
        best: Callable[[torch.Tensor], TopTokens],
        shapes: Sequence[LayerShape],
        *,
        width: int,
        read_width: int | None = None,
        windows: Sequence[AttentionWindow] = (AttentionWindow(FULL),),
        target: Target,
    ) -> None:
        """``width`` is the width of the module's hidden states; ``best`` ranks the next tokens, given such states.

        ``read_width`` is that of the target's hidden states, or None if it is the same.
        """
        self._best_of = best
        self._states = torch.zeros((2 + MAX_DRAFTED, width), dtype=target.dtype, device=target.device)
        """Hidden state of each row; padding writes to the last row."""
        hidden = self._states.new_empty((0, read_width or width))
        super().__init__(
            module,
            self._rank_first,
            shapes,
            hidden,
            target,
            windows=windows,
            rankings=rankings_for(DEPTHS[-1]),
            best=TOKENS_PER_RANKING + 1,
            drafted=MAX_DRAFTED,
        )
        self.draft_within_reading(0)

    def _extent(self, rows: int, end: int) -> int:
        return super()._extent(rows, end + ROWS_PER_PASS * self.depth)

    def _ranked(self, tokens: torch.Tensor, hidden: torch.Tensor, last: torch.Tensor, rows: CacheRows) -> TopTokens:
        first = super()._ranked(tokens, hidden, last, rows)
        root, ancestors = rows.places.index_select(0, last), torch.zeros_like(last)

        def extend(depth: int, tokens: torch.Tensor, parents: torch.Tensor) -> TopTokens:
            nonlocal ancestors
            new = len(tokens)
            drafted = torch.arange(ROWS_PER_PASS * (depth - 1), ROWS_PER_PASS * (depth - 1) + new, device=root.device)
            ancestors = ancestors[parents] | 1 << drafted
            if depth > 1:
                parents = parents + 1 + ROWS_PER_PASS * (depth - 2)
            positions, places = (root + depth).expand(new), root + 1 + drafted
            return self._rank_rows(rows.extent, root, tokens, positions, ancestors, parents, 1 + drafted, places)

        return self._with_paths(first, extend)

    def _rank_first(self, outputs: list[torch.Tensor], token: torch.Tensor) -> TopTokens:
        """Store the state of the last accepted token as row 0, and rank the next tokens."""
        self._states[:1].copy_(outputs[-1])
        return self._best_of(outputs[-1])

    def read(self, hidden: torch.Tensor, tokens: list[int]) -> Ranked:
        self._ancestors, self._offsets = [0], [-1]
        """For each row, a bitmask of drafted rows that it attends to, and its offset from the accepted positions."""
        return super().read(hidden, tokens)

    @torch.inference_mode()
    def extend(self, parents: list[int], tokens: list[int]) -> Ranked:
        first, new, base = len(self._ancestors), len(tokens), self.length
        for number, parent in enumerate(parents, start=first - 1):
            self._ancestors.append(self._ancestors[parent] | 1 << number)
            self._offsets.append(self._offsets[parent] + 1)
        size = self._passes.size_for(new)
        padding, start = [0] * (size - new), base + first - 1
        extent = self._extent(size, start + size)
        words = [
            base - 1,
            *(*tokens, *padding),
            *(*(base + offset for offset in self._offsets[first:]), *padding),
            *(*self._ancestors[first:], *padding),
            *(*parents, *padding),
            *(*range(first, first + new), *(len(self._states) - 1 for _ in padding)),
            *range(start, start + size),
        ]
        return self._passes.run(("extend", size, extent), words, new, partial(self._extended, extent))

    def _extended(self, extent: int, words: torch.Tensor) -> TopTokens:
        return self._rank_rows(extent, words[:1], *words[1:].view(6, -1))

    def _rank_rows(
        self,
        extent: int,
        root: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        ancestors: torch.Tensor,
        parents: torch.Tensor,
        written: torch.Tensor,
        places: torch.Tensor,
    ) -> TopTokens:
        """Rank the tokens after drafted ``tokens``, and store the states of these in the rows ``written``."""
        mask = self._masks.on_device_for_rows(ancestors, positions, root, extent)
        before = self._states.index_select(0, parents)
        states = self._module(tokens, before, positions, CacheRows(self._cache.storage, places, extent, mask))[-1]
        self._states.index_copy_(0, written, states)
        return self._best_of(states)
