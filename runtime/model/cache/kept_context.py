"""The context whose keys and values a KV cache still holds, and its use by the next prompt (prefix caching)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TYPE_CHECKING

import torch

from hdtool.runtime.model.cache.kv_cache import StaticKVCache
from hdtool.runtime.model.families import HIGH_PRECISION_TOLERANCE, LOW_PRECISION_TOLERANCE, is_low_precision

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PIECE = 512
"""Tokens that are read in one pass after a kept context, which bounds the size of the mask."""


ReadPiece = Callable[[list[int], int], torch.Tensor | None]
"""Reads a piece of a prompt that begins at a position; returns its hidden states if these are watched."""


class KeptContext:
    """The tokens at the first positions of a KV cache, and what shows that the keys and values there still hold."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._tokens: list[int] = []
        self._valid = 0
        """Tokens whose keys and values are known to be complete."""
        self._hidden: list[torch.Tensor] = []
        self._limit: int | None = None
        self._versions: list[tuple[int, int]] = []

    def restart(self, limit: int | None) -> None:
        """Forget everything: a context is read from its start.

        ``limit`` is the model's context limit for it, which differs between the variants of a LongRoPE model.
        """
        self._tokens, self._valid, self._hidden = [], 0, []
        self._limit, self._versions = limit, _versions(self._model)

    def shared_with(self, context: Sequence[int], limit: int | None) -> int:
        """The number of tokens that begin ``context`` too, the last token of ``context`` left out.

        It is 0 if the weights changed since, by what torch counts of them, and where reading one token less would not
        pay.
        """
        if limit != self._limit or self._versions != _versions(self._model):
            return 0
        pairs = zip(self._tokens, islice(context, min(self._valid, len(context) - 1)), strict=False)
        shared = 0
        for kept, token in pairs:
            if kept != token:
                break
            shared += 1
        return shared if shared > 1 else 0

    def read_rest(self, context: Sequence[int], kept: int, cache: StaticKVCache, read: ReadPiece) -> bool:
        """Read what follows the first ``kept`` tokens; False if the model is not the one that computed these.

        The last of them is computed again and compared, because adapters and assignments to ``data`` change a model
        unseen by the counters of its weights. The last piece is left for the caller to append.
        """
        start = kept - 1
        self._cut(start)
        before = _keys_values_at(cache, start)
        for first in range(start, len(context), PIECE):
            piece = list(context[first : first + PIECE])
            hidden = read(piece, first)
            if first == start and _differ(before, _keys_values_at(cache, start)):
                return False
            if first + PIECE < len(context):
                self.append(piece, hidden)
        return True

    def _cut(self, length: int) -> None:
        """Keep the first ``length`` tokens only."""
        del self._tokens[length:]
        self._valid = length
        if self._hidden:
            self._hidden = [torch.cat(self._hidden)[:length]]

    def append(self, tokens: Sequence[int], hidden: torch.Tensor | None) -> None:
        """Add tokens whose keys and values are complete, with their hidden states if these are watched."""
        self._tokens += tokens
        self._valid = len(self._tokens)
        if hidden is not None:
            self._hidden.append(hidden)

    def hidden(self) -> torch.Tensor | None:
        """The hidden states of all kept tokens, if they are watched."""
        if len(self._hidden) > 1:
            self._hidden = [torch.cat(self._hidden)]
        return self._hidden[0] if self._hidden else None

    @contextmanager
    def unfinished_from(self, position: int) -> Iterator[None]:
        """Keys and values from ``position`` on are written in this block; if it is interrupted, they are lost."""
        valid, self._valid = self._valid, min(self._valid, position)
        yield
        self._valid = valid


def _differ(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> bool:
    """Whether keys and values of one position, computed twice, differ by more than rounding in any layer."""
    for old, new in zip(before, after, strict=True):
        tolerance = LOW_PRECISION_TOLERANCE if is_low_precision(old.dtype) else HIGH_PRECISION_TOLERANCE
        rows = old.float().flatten(1)
        distance = (new.float().flatten(1) - rows).abs().mean(1) / rows.std(1).clamp_min(1e-12)
        if not bool((distance <= tolerance).all()):  # NaN differs
            return True
    return False


def _keys_values_at(cache: StaticKVCache, position: int) -> list[torch.Tensor]:
    """A copy of the keys and values of one position, ``[layers, ...]`` for each shape of layers."""
    return [tensor.narrow(3, position, 1).clone() for tensor in cache.storage.tensors]


def _versions(model: PreTrainedModel) -> list[tuple[int, int]]:
    """What changes if weights are replaced, or updated in place as an optimizer does."""
    return [(id(one), -1 if one.is_inference() else one._version) for one in model.parameters()]
