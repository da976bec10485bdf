"""Builds the inputs of passes over draft trees: token ids, positions and tree-attention masks.

Steps with fixed shapes keep their inputs in one buffer, which is sent to the device in a single copy.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.caches.accepted_path_moves import MAX_DEFERRED_MOVES
from hdtool.runtime.caches.kv_cache import KVTensors
from hdtool.runtime.caches.transformers_views import IndexedKVCache
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree, mark_ancestors
from hdtool.runtime.kernels.compiled import compiled

AttentionMask = torch.Tensor | dict[str, torch.Tensor | None] | None


@dataclass(frozen=True)
class AttentionWindow:
    """The attention window that layers of one kind share."""

    kind: str
    """Name of this kind of layer in the model's configuration."""
    window: int | None = None
    """Size of the sliding window, including the query token; None if there is none."""
    chunk: int | None = None
    """Chunk size of chunked attention; None if it isn't used."""

    @property
    def is_limited(self) -> bool:
        return self.window is not None or self.chunk is not None

    def sees_all(self, length: int) -> bool:
        """Return True if a context of ``length`` tokens fits entirely into the window."""
        return (self.window is None or length <= self.window) and (self.chunk is None or length <= self.chunk)

    def visible(self, related: Any, query: Any, key: Any) -> Any:
        """Return ``related``, which marks the keys that each query may read, without those outside the query's window.

        ``query`` and ``key`` are positions. All arguments and the result are arrays, or all are tensors.
        """
        if self.window is not None:
            related = related & (key[..., None, :] > query[..., None] - self.window)
        if self.chunk is not None:
            related = related & (key[..., None, :] // self.chunk == query[..., None] // self.chunk)
        return related


FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
INDEXED, HYBRID, HYBRID_SLIDING = "indexed_attention", "hybrid", "hybrid_sliding"
WITHOUT_MASK = ("linear_attention", "conv", "dummy", "mamba", "moe", "mlp")
"""Kinds of layers that read no attention mask: recurrences, short convolutions and layers without attention."""
UNMASKED: dict[str, torch.Tensor | None] = dict.fromkeys(("linear_attention", "conv"))
"""Entries for layers that read no mask, added to the mask dictionary of a model with several kinds of layers."""
ALIASES = {FULL: (HYBRID, INDEXED), SLIDING: (HYBRID_SLIDING,)}
"""Other names under which some models look up the mask of a kind, for layers that also have a state or an indexer."""


def windows_of(config: Any) -> list[AttentionWindow]:
    """Return the attention windows that a model's configuration describes, or a full one if it describes none."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [AttentionWindow(SLIDING, window=window) if window else AttentionWindow(FULL)]
    chunk = getattr(config, "attention_chunk_size", None)
    by_name = {alias: kind for kind, aliases in ALIASES.items() for alias in aliases}
    windows = {
        FULL: AttentionWindow(FULL),
        SLIDING: AttentionWindow(SLIDING, window=window),
        CHUNKED: AttentionWindow(CHUNKED, chunk=chunk),
    }
    present = dict.fromkeys(by_name.get(kind, kind) for kind in kinds if kind not in WITHOUT_MASK)
    return [windows[kind] for kind in present if kind in windows] or [windows[FULL]]


class AttentionMasks:
    """Makes the additive attention masks of a model, given the attention windows of its layers.

    A model with one kind of layer gets a single mask, a model with several kinds a dictionary with a mask per kind.
    """

    def __init__(self, windows: list[AttentionWindow], dtype: torch.dtype, device: torch.device) -> None:
        self._windows, self._device = windows, device
        self._mask_value = torch.finfo(dtype).min
        self._is_on_host = dtype == torch.float32 and device.type == "cpu"
        self._visible = torch.zeros((), dtype=dtype, device=device)
        self._hidden = torch.full((), self._mask_value, dtype=dtype, device=device)

    def of_trees(
        self, trees: Sequence[DraftTree], lengths: Sequence[int], step: StepTensors | None = None
    ) -> AttentionMask:
        """Return the mask ``[trees, 1, rows, longest + rows]`` for trees after contexts of these ``lengths``.

        Trees are padded to the size of the largest. Their padding rows attend to the first token, since no row may be
        fully masked. Return None for a single bare root if the model has one kind of layer, whose window contains the
        whole context. ``step`` holds the trees, if they have been sent to the device.
        """
        rows = max(map(len, trees)) + 1
        extent = max(lengths) + rows
        sees_all = all(window.sees_all(extent) for window in self._windows)
        if sees_all and len(trees) == rows == len(self._windows) == 1:
            return None
        if sees_all and self._is_on_host:
            values = np.zeros((len(trees), 1, rows, extent), np.float32)
            for of_tree, tree, length in zip(values[:, 0], trees, lengths, strict=True):
                of_tree[:, length + len(tree) + 1 :] = self._mask_value
                mark_ancestors(of_tree, length, tree.parents, 0.0, self._mask_value)
            masks = [torch.from_numpy(values)] * len(self._windows)
        else:
            step = step or sent_step(trees, lengths, self._device)
            masks = self._on_device(step.ancestor_mask, step.positions, step.length, extent)
        for mask in masks:
            for of_tree, tree in zip(mask, trees, strict=True):
                of_tree[:, len(tree) + 1 :, 0], of_tree[:, len(tree) + 1 :, 1:] = 0.0, self._mask_value
        return self._by_kind(masks)

    def continuation_mask(self, rows: int, length: int) -> AttentionMask:
        """Return the causal mask ``[1, 1, rows, length + rows]`` of prompt tokens after ``length`` cached ones."""
        return self.causal_mask(torch.arange(length, length + rows, device=self._device), length + rows)

    def causal_mask(self, positions: torch.Tensor, extent: int) -> AttentionMask:
        """Compute the causal mask ``[1, 1, rows, extent]`` of tokens at these ``positions`` of the cache."""
        columns = torch.arange(extent, device=positions.device)
        return self._by_kind(self._hiding((columns <= positions[:, None])[None], positions[None], columns))

    def block_mask(self, positions: torch.Tensor, extent: int, causal: Collection[str] = ()) -> AttentionMask:
        """Compute the mask ``[1, 1, rows, extent]`` of tokens that attend to the context and to their whole block.

        In layers whose kind is in ``causal``, tokens don't attend to later ones.
        """
        columns = torch.arange(extent, device=positions.device)
        after = (columns > positions[:, None])[None]
        within = (columns <= positions[-1]).expand_as(after)
        masks = self._hiding(within, positions[None], columns)
        for window, mask in zip(self._windows, masks, strict=True):
            if window.kind in causal:
                mask.masked_fill_(after, self._mask_value)
        return self._by_kind(masks)

    def mask_before_move(
        self, position: torch.Tensor, first: torch.Tensor, places: torch.Tensor, extent: int
    ) -> AttentionMask:
        """Compute the mask ``[1, 1, 1, extent]`` of a token after a context whose end is still to be moved.

        The positions from ``first [1]`` on are in the cache at ``places [MOVES]``; unused places are ``extent``.
        """
        columns = torch.arange(extent + 1, device=places.device)
        related = (columns < first).index_fill(0, places, 1)
        columns = columns.index_copy(0, places, first + torch.arange(MOVES, device=places.device))
        return self._by_kind(self._hiding(related[None, None, :extent], position[None], columns[None, :extent]))

    def on_device(
        self, ancestor_mask: torch.Tensor, positions: torch.Tensor, length: torch.Tensor, extent: int
    ) -> AttentionMask:
        """Compute the mask ``[slots, 1, rows, extent]`` on the device, from ancestor bit masks ``[slots, rows]``.

        Its shape does not depend on the contexts' ``length``. Padding rows attend to the context and the root, so that
        no row is fully masked.
        """
        return self._by_kind(self._on_device(ancestor_mask, positions, length, extent))

    def _on_device(
        self, ancestor_mask: torch.Tensor, positions: torch.Tensor, length: torch.Tensor, extent: int
    ) -> list[torch.Tensor]:
        columns, related = _related(ancestor_mask, length, extent)
        if any(window.is_limited for window in self._windows):
            places = length[:, None] + columns[: positions.shape[1]]
            columns = columns.repeat(len(length), 1).scatter_(1, places, positions)
        return self._hiding(related, positions, columns[..., :extent])

    def on_device_for_rows(
        self, ancestor_mask: torch.Tensor, positions: torch.Tensor, length: torch.Tensor, extent: int
    ) -> AttentionMask:
        """Compute the mask ``[1, 1, rows, extent]`` of some nodes of a tree, whose other rows are in the cache.

        The arguments are those of ``on_device`` for a single slot, without the root's row. Since the positions of other
        rows are unknown, windows take a cached row's distance from the root, in rows, for its distance in tokens.
        """
        columns, related = _related(ancestor_mask[None], length, extent)
        return self._by_kind(self._hiding(related, positions[None], columns[:extent]))

    def _hiding(self, related: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> list[torch.Tensor]:
        """Return a mask per window, in which each row, at its position, sees the ``related`` columns in the window."""
        visible = (window.visible(related, positions, columns).to(self._device) for window in self._windows)
        return [torch.where(shown, self._visible, self._hidden)[:, None] for shown in visible]

    def _by_kind(self, of_windows: list[torch.Tensor]) -> AttentionMask:
        if len(of_windows) == 1:
            return of_windows[0]
        masks: dict[str, torch.Tensor | None] = {
            window.kind: mask for window, mask in zip(self._windows, of_windows, strict=True)
        }
        return masks | {alias: masks[kind] for kind in masks for alias in ALIASES.get(kind, ())} | UNMASKED


def _related(ancestor_mask: torch.Tensor, length: torch.Tensor, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return column numbers, and a mask ``[slots, rows, extent]`` of each row's context, its root and its ancestors.

    The column numbers go on after ``extent``, because ``ancestor_mask`` has bits for more nodes than the pass reads.
    """
    columns = torch.arange(extent + LARGEST_TREE, device=length.device)
    nodes = columns[:LARGEST_TREE]
    related = (columns <= length[:, None])[:, None].repeat(1, ancestor_mask.shape[1], 1)
    is_ancestor = (ancestor_mask[..., None] >> nodes) & 1 == 1
    places = length[:, None] + columns[1 : LARGEST_TREE + 1]
    return columns, related.scatter_(2, places[:, None].expand_as(is_ancestor), is_ancestor)[..., :extent]


MOVES = MAX_DEFERRED_MOVES
HEADER = 5 + MOVES
LENGTH, MOVED_TO, MOVED, SEED, DRAW, MOVED_FROM = range(6)
"""Header indices of the context length, of a move (its first target position, its length and its first source) and of
the draws, 0 if there are none: see ``race_input``."""
LEFT_OUT = -1
"""Move length that marks a slot as left out of a step."""


class CacheRows(NamedTuple):
    """Where a pass writes its rows in a module's cache, and which positions they read."""

    storage: KVTensors
    places: torch.Tensor
    """Cache position of each row."""
    extent: int
    """Number of positions that the pass reads; the mask hides some of them."""
    mask: AttentionMask

    @property
    def cache(self) -> IndexedKVCache:
        """A ``transformers`` cache that writes rows to ``places`` and reads ``extent`` positions."""
        return IndexedKVCache(self.storage, self.places[None], self.extent)

    def mask_of(self, kind: str) -> torch.Tensor | None:
        """Return the mask of layers of this kind, ``[1, 1, rows, extent]``, or None if they need none."""
        return self.mask[kind] if isinstance(self.mask, dict) else self.mask


class StepTensors(NamedTuple):
    """The input buffer of a step on the device, and views of its parts."""

    buffer: torch.Tensor
    """The whole buffer, shape ``[slots, numbers]``."""
    length: torch.Tensor
    """Context lengths, shape ``[slots]``."""
    moved_to: torch.Tensor
    """First target position of each slot's move, shape ``[slots]``."""
    moved_from: torch.Tensor
    """Positions to move, shape ``[slots, MOVES]``; padding entries move positions to where they already are."""
    tokens: torch.Tensor
    positions: torch.Tensor
    """Position ids, shape ``[slots, rows]`` as for ``tokens``."""
    ancestor_mask: torch.Tensor
    """Bits of each row's ancestor nodes, itself included, shape ``[slots, rows]``."""

    @classmethod
    def of(cls, buffer: torch.Tensor, rows: int) -> StepTensors:
        """Return the parts of a buffer ``[slots, numbers]`` that holds a step with this many rows per slot."""
        tokens, positions, ancestor_mask = buffer[:, HEADER:].unflatten(1, (3, rows)).unbind(1)
        moved_from = buffer[:, MOVED_FROM:HEADER]
        return cls(buffer, buffer[:, LENGTH], buffer[:, MOVED_TO], moved_from, tokens, positions, ancestor_mask)

    @classmethod
    def of_root(cls, token: torch.Tensor, length: torch.Tensor) -> StepTensors:
        """Return a step of one slot without drafts, given its root and the length of its context, both ``[1]``."""
        no_move = length + torch.arange(MOVES, device=length.device)
        nothing = torch.zeros_like(length)
        return cls.of(torch.cat([length, length, *[nothing] * 3, no_move, token, length, nothing])[None], 1)


class TransferBuffer:
    """Integers at fixed addresses on host and device, transferred in either direction by a single copy."""

    def __init__(self, words: int, device: torch.device) -> None:
        self.host = torch.zeros(words, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.device = torch.zeros(words, dtype=torch.int64, device=device)

    def send(self, words: int) -> None:
        """Start copying the first ``words`` integers to the device."""
        self.device[:words].copy_(self.host[:words], non_blocking=True)

    def fetch(self, words: int) -> None:
        """Start copying the first ``words`` integers to the host."""
        self.host[:words].copy_(self.device[:words], non_blocking=True)


class StepInput:
    """The input buffer of steps, on host and device. Padding rows repeat the root; their logits are unused."""

    def __init__(self, device: torch.device, slots: int = 1, rows: int = LARGEST_TREE + 1) -> None:
        """Reserve memory for trees in this many slots, each with a root and up to ``rows - 1`` nodes."""
        self._buffer = TransferBuffer(slots * (HEADER + 3 * rows), device)
        self._words: npt.NDArray[np.int64] = self._buffer.host.numpy()

    def fill(self, slot: int, tree: DraftTree, rows: int, length: int) -> None:
        """Write the tree that follows a slot's context of ``length`` tokens; discard its last ``move`` and ``draw``."""
        _fill(self._words_of(slot, rows), tree.root, tree.tokens, tree.parents, rows, length)

    def move(self, slot: int, rows: int, start: int, path: Sequence[int]) -> None:
        """Make the step move the cache positions ``start + path`` to consecutive positions from ``start`` on."""
        words = self._words_of(slot, rows)
        words[MOVED_TO], words[MOVED] = start, len(path)
        words[MOVED_FROM:HEADER] = start + np.arange(MOVES)
        words[MOVED_FROM : MOVED_FROM + len(path)] = np.array(path) + start

    def draw(self, slot: int, rows: int, seed: int, options: int) -> None:
        """Make the step run the races of a filled slot's draws; see ``race_input``."""
        words = self._words_of(slot, rows)
        words[SEED], words[DRAW] = seed, options

    def leave_out(self, slot: int, rows: int) -> None:
        """Mark a filled slot as unused: its results don't count, and kernels may skip its attention."""
        self._words_of(slot, rows)[MOVED] = LEFT_OUT

    def _words_of(self, slot: int, rows: int) -> npt.NDArray[np.int64]:
        size = HEADER + 3 * rows
        return self._words[slot * size : (slot + 1) * size]

    def send(self, slots: int, rows: int) -> None:
        self._buffer.send(slots * (HEADER + 3 * rows))

    def tensors(self, slots: int, rows: int) -> StepTensors:
        buffer = self._buffer.device[: slots * (HEADER + 3 * rows)].view(slots, HEADER + 3 * rows)
        return StepTensors.of(buffer, rows)


def step_words(tree: DraftTree, rows: int, length: int) -> list[int]:
    """Return the numbers of a step that verifies a tree after a context of ``length`` tokens, padded to ``rows``."""
    words = np.empty(HEADER + 3 * rows, np.int64)
    _fill(words, tree.root, tree.tokens, tree.parents, rows, length)
    return words.tolist()


def sent_step(trees: Sequence[DraftTree], lengths: Sequence[int], device: torch.device) -> StepTensors:
    """Return a step over trees after contexts of these ``lengths``, padded to the largest and sent to the device."""
    rows, step_input = max(map(len, trees)) + 1, StepInput(device, len(trees))
    for slot, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        step_input.fill(slot, tree, rows, length)
    step_input.send(len(trees), rows)
    return step_input.tensors(len(trees), rows)


@compiled
def _fill(
    words: npt.NDArray[np.int64],
    root: int,
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    rows: int,
    length: int,
) -> None:
    words[LENGTH] = words[MOVED_TO] = length
    words[MOVED] = words[SEED] = words[DRAW] = 0
    for move in range(MOVES):
        words[MOVED_FROM + move] = length + move
    ids, positions, ancestors = words[HEADER:], words[HEADER + rows :], words[HEADER + 2 * rows :]
    for row in range(rows):
        ids[row], positions[row], ancestors[row] = root, length, 0
    fill_tree(ids, positions, root, tokens, parents, length)
    for node in range(len(tokens)):
        ancestors[node + 1] = ancestors[parents[node] + 1] | (np.int64(1) << np.int64(node))


@compiled
def fill_tree(
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    root: int,
    tokens: npt.NDArray[np.int64],
    parents: npt.NDArray[np.int32],
    length: int,
) -> None:
    ids[0], positions[0] = root, length
    for node in range(len(tokens)):
        ids[node + 1], positions[node + 1] = tokens[node], positions[parents[node] + 1] + 1
