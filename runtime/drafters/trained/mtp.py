"""Drafting by multi-token-prediction layers: one that is applied again and again, or several in turn."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.accept import Accepted
from hdtool.runtime.drafters.heads.modules import best_of
from hdtool.runtime.drafters.trained.accepted_tokens import AcceptedTokens
from hdtool.runtime.drafters.trained.calibration import Calibration, bucket_of
from hdtool.runtime.drafters.trained.draft_passes import CHUNK, DraftPasses, causal_mask
from hdtool.runtime.drafters.trained.library_mtp import LibraryMtp, load_mtp
from hdtool.runtime.drafters.trained.loaded_once import loaded_once
from hdtool.runtime.drafters.trained.pace import pace_for
from hdtool.runtime.drafters.trained.proposal import BEST, NONE, Proposal, TrainedDrafter
from hdtool.runtime.drafters.trained.sequential import SequentialDrafter
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.model.cache.kv_cache import KVTensors, StaticKVCache
from hdtool.runtime.model.static_steps import extent_for
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.verified import Verified

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target

NAME = "MTP layers"


def mtp_drafter(target: Target, *, is_measured: bool) -> TrainedDrafter:
    """A drafter of the MTP layers of a target's checkpoint; measured, it makes the passes that pay."""
    with target.changing():
        layers = loaded_once(target, NAME, lambda: _loaded(target))
        columns = target.watch_hidden()
    if layers.number > 1:
        return MtpLayersInTurn(layers, target, columns)
    pace = pace_for(target, NAME, is_measured=is_measured)
    return SequentialDrafter(IteratedMtp(layers, target), pace, columns=columns)


def _loaded(target: Target) -> LibraryMtp:
    layers = load_mtp(target.model)
    if target.device.type == "cpu":
        compile_linear_layers(layers.own)
    return layers


class IteratedMtp(DraftPasses):
    """A single MTP layer, which extends drafts by reading its own hidden states."""

    def __init__(self, layers: LibraryMtp, target: Target) -> None:
        super().__init__(
            lambda tokens, hidden, positions, cache, mask: layers.run(0, tokens, hidden, positions, cache, mask),
            lambda hidden: best_of(layers.logits(hidden), BEST),
            layers.shapes,
            width=layers.width,
            window=layers.window(0),
            target=target,
        )


class MtpLayersInTurn:
    """Several MTP layers: each reads what the one before it gave, one position further ahead.

    All but the first read drafted tokens at the last positions, which are read again when the real ones are known.
    """

    source = SourceName.HEADS

    def __init__(self, layers: LibraryMtp, target: Target, columns: slice) -> None:
        self.seconds = 0.0
        self._layers, self._device = layers, target.device
        self._shapes = layers.shapes
        self._cache = StaticKVCache(KVTensors.for_layers(self._shapes, 0))
        self._accepted = AcceptedTokens(columns)
        self._calibration = Calibration(None, layers.number)
        self._proposed: Proposal | None = None
        self.begin([0])

    def begin(self, prompt: list[int]) -> None:
        self._accepted.begin(prompt)
        self._restart()
        self._proposed = None

    def _restart(self) -> None:
        self._settled = 0
        """Positions that all layers have read with real tokens."""
        self._hidden: torch.Tensor | None = None
        self._tokens: list[int] = []
        """Hidden states and tokens of the accepted positions after these."""

    def observe(self, accepted: Accepted, verified: Verified) -> None:
        proposed, self._proposed = self._proposed, None
        if proposed is not None:
            self._calibration.learn(proposed, self._buckets, accepted.tokens)
        self._accepted.add(accepted, verified)

    @torch.inference_mode()
    def propose(self, most: int) -> Proposal:
        started = time.perf_counter()
        new, tokens, skipped = self._accepted.take()
        if skipped:
            self._restart()
        self._tokens += tokens
        self._hidden = new if self._hidden is None else torch.cat([self._hidden, new])
        number = min(self._layers.number, most)
        found, probs = np.zeros((number, BEST), np.int64), np.zeros((number, BEST))
        self._make_room(self._settled + len(self._tokens))
        hidden, read = self._hidden, list(self._tokens)
        for layer in range(number):
            hidden = self._read(layer, hidden, read)
            best, prob = best_of(self._layers.logits(hidden[-1:]), BEST)
            found[layer], probs[layer] = NONE, 0
            found[layer, : best.shape[1]], probs[layer, : best.shape[1]] = best[0].cpu().numpy(), prob[0].cpu().numpy()
            read = [*read[1:], int(found[layer, 0])]
        kept = max(0, len(self._tokens) - (self._layers.number - 1))
        self._settled += kept
        self._hidden, self._tokens = self._hidden[kept:], self._tokens[kept:]
        self._buckets = bucket_of(probs)
        after = np.full(found.shape, NONE)
        after[:-1, 0] = np.arange(1, number)  # each layer reads the best token of the one before it
        calibrated = self._calibration(self._buckets)
        self._proposed = Proposal(found, calibrated, after, np.full(number, NONE), np.arange(number))
        self.seconds += time.perf_counter() - started
        return self._proposed

    def _read(self, layer: int, hidden: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """Read all tokens after the settled ones into a layer's cache."""
        window, parts = self._layers.window(layer), list[torch.Tensor]()
        for start in range(0, len(tokens), CHUNK):
            ids = torch.tensor([tokens[start : start + CHUNK]], device=self._device)
            self._cache.length = first = self._settled + start
            new = ids.shape[1]
            positions = torch.arange(first, first + new, device=self._device)[None] + layer + 1
            mask = causal_mask(first, new, window, hidden)
            states = hidden[None, start : start + CHUNK]
            parts.append(self._layers.run(layer, ids, states, positions, self._cache, mask)[0])
        return torch.cat(parts)

    def _make_room(self, positions: int) -> None:
        old = self._cache
        if old.capacity < positions:
            self._cache = StaticKVCache(KVTensors.for_layers(self._shapes, extent_for(positions)))
            old.length = self._settled
            self._cache.copy_from(old)
