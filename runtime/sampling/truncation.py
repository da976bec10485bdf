"""Temperature, top-k, top-p and min-p in one step, which sorts no vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdtool.runtime.kernels.argmax import argmax_of
from hdtool.runtime.kernels.compiled import Array, compiled
from hdtool.runtime.kernels.elementwise import exponentiate
from hdtool.runtime.kernels.memory.raw_memory import array_at
from hdtool.runtime.kernels.topk import write_topk
from hdtool.runtime.kernels.vector_code import LANES
from hdtool.runtime.sampling.exponential_race import (
    BLOCK,
    ExponentialRace,
    race_block,
    sample_among,
    start_of,
)

MOST_BY_MAXIMA = 128
"""The largest k for which a tree of maxima finds the k-th highest score faster than a partition."""
ALL_TOKENS = np.empty(0, np.int64)
NOT_FINITE, UNKNOWN = -1, -2
"""In place of a token: the highest score is NaN or infinite; the token depends on others."""
INFINITE = 0x7F800000
"""The bits of infinity."""
CERTAINLY = 0.999
"""Less than 1 by more than rounding."""
NAMES = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""The processors in the order of ``generate``, and the option of each."""


class Draws(NamedTuple):
    """What a draw depends on beside scores and position, for compiled code."""

    seed: Any
    temperature: Any
    top_k: int
    """0 keeps all; at most ``MOST_BY_MAXIMA``, except for a winner among any tokens."""
    top_p: float
    min_p: float


@dataclass(frozen=True)
class Truncation:
    """What these processors do, as far as they are used.

    The winner of a race among more tokens than are kept also wins the race among the kept ones if it is one of them. So
    top-p does not sort: tokens are drawn until the more probable ones have less weight than the nucleus.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def at_end_of(cls, processors: Sequence[LogitsProcessor]) -> tuple[list[LogitsProcessor], Truncation]:
        """The processors before the truncation that a list of them ends with, and this truncation."""
        before, options = list(processors), {}
        for kind, name in reversed(NAMES.items()):
            if before and type(before[-1]) is kind and keeps_one(before[-1]):
                options[name] = getattr(before.pop(), name)
        return before, cls(**options)

    def compile(self, race: ExponentialRace) -> None:
        """Compile what a draw uses, or load it from the cache, before the first step."""
        alike = replace(self, top_k=min(self.top_k, MOST_BY_MAXIMA + 1))
        scores = np.ones(MOST_BY_MAXIMA + 2, np.float32)
        alike.draw(race, 0, scores)
        alike.winner(race, 0, scores)

    @property
    def is_compiled(self) -> bool:
        """Whether all of it is done by compiled code."""
        return self.top_k <= MOST_BY_MAXIMA

    def draws(self, race: ExponentialRace) -> Draws:
        return Draws(race.seed, np.float32(self.temperature), self.top_k, float(self.top_p), float(self.min_p))

    def draw(
        self, race: ExponentialRace, position: int, scores: npt.NDArray[np.float32], among: Array = ALL_TOKENS
    ) -> int:
        """The token drawn at a position by its scores; ``NOT_FINITE`` if the highest one is not finite.

        The scores are those of all tokens, or of the tokens ``among`` which it is drawn.
        """
        if self.is_compiled:
            return int(draw_row(position, scores, among, self.draws(race)))
        if self.top_k < len(scores):
            place = len(scores) - self.top_k
            scores = np.where(scores < np.partition(scores, place)[place], np.float32(-np.inf), scores)
        return int(draw_row(position, scores, among, replace(self, top_k=0).draws(race)))

    def winner(self, race: ExponentialRace, position: int, scores: npt.NDArray[np.float32]) -> int:
        """The token that is drawn among any tokens that include it; ``UNKNOWN`` if it depends on them."""
        return int(winner_among_any(position, scores, self.draws(race)))


# Python code between two passes of a model is slow, as no cache holds it: NumPy takes three times as long for this.
@compiled
def draw_row(position: Any, scores: Any, among: Any, draws: Any) -> Any:
    """The token drawn at a position; see ``Truncation.draw``."""
    best, is_finite = argmax_of(scores.view(np.int32), INFINITE)
    if not is_finite:
        return NOT_FINITE
    if 0 < draws.top_k < len(scores):
        return _draw_from_top(position, scores, scores[best], among, draws)
    if draws.top_p >= 1 and draws.min_p == 0 and len(among) == 0:
        return _draw_by_temperature(position, scores, scores[best], draws)
    return _draw_from_all(position, scores, scores[best], among, draws)


@compiled
def winner_among_any(position: Any, scores: Any, draws: Any) -> Any:
    """The winner among all tokens, if it is kept when some of the others are forbidden."""
    best, is_finite = argmax_of(scores.view(np.int32), INFINITE)
    if not is_finite:
        return NOT_FINITE
    winner = _draw_by_temperature(position, scores, scores[best], draws)
    if winner == best:
        return winner
    before = 0
    for token in range(len(scores)):
        before += scores[token] > scores[winner]
    is_kept = draws.top_p >= 1 and (draws.top_k == 0 or before < draws.top_k)
    weight = np.exp((scores[winner] - scores[best]) / draws.temperature)
    return winner if is_kept and weight >= draws.min_p else UNKNOWN


@compiled
def _draw_by_temperature(position: Any, scores: Any, highest: Any, draws: Any) -> Any:
    """The same with a temperature alone: weights are computed block by block and not kept."""
    start, winner, earliest = start_of(draws.seed, position), -1, np.inf
    weights = np.empty(BLOCK, np.float32)
    for first in range(0, len(scores), BLOCK):
        part = scores[first : first + BLOCK]
        for place in range(len(part)):
            weights[place] = (part[place] - highest) / draws.temperature
        exponentiate(weights.ctypes.data, BLOCK, np.float32(0))
        winner, earliest = race_block(start, first, weights[: len(part)], winner, earliest)
    return winner


@compiled
def _draw_from_all(position: Any, scores: Any, highest: Any, among: Any, draws: Any) -> Any:
    """The same with top-p or min-p, or among some tokens."""
    padded = np.empty(-(-len(scores) // LANES) * LANES, np.float32)
    weights = padded[: len(scores)]
    for token in range(len(scores)):
        weights[token] = (scores[token] - highest) / draws.temperature
    padded[len(scores) :] = -np.inf
    exponentiate(padded.ctypes.data, len(padded), np.float32(0))
    if draws.top_p >= 1 and draws.min_p == 0:
        return sample_among(draws.seed, position, among, weights, np.inf)
    total = _total(padded)
    # Removed tokens have the rest of the weight together, so the most probable one has its mean or more.
    least = max(draws.min_p, CERTAINLY * (1 - draws.top_p) * total / len(weights))
    tokens, likely = np.empty(len(weights) + 1, np.int64), 0
    for token in range(len(weights)):
        # Branch-free: always written, counted only if it qualifies.
        tokens[likely] = token
        likely += weights[token] >= least
    kept = np.empty(likely, np.float32)
    for place in range(likely):
        kept[place] = weights[tokens[place]]
    _name(tokens[:likely], among)
    return sample_among(draws.seed, position, tokens[:likely], kept, _nucleus(total, draws))


@compiled
def _total(padded: Any) -> Any:
    sums = np.zeros(LANES)
    for first in range(0, len(padded), LANES):
        part = padded[first : first + LANES]
        for lane in range(LANES):
            sums[lane] += part[lane]
    return sums.sum()


@compiled
def _nucleus(total: Any, draws: Any) -> Any:
    """The weight that a nucleus of tokens with this weight in all needs."""
    return draws.top_p * total if draws.top_p < 1 else np.inf


@compiled
def _draw_from_top(position: Any, scores: Any, highest: Any, among: Any, draws: Any) -> Any:
    """The same with a small k."""
    top_k = draws.top_k
    top, values = np.empty((1, top_k + 1), np.int64), np.empty((1, top_k + 1), np.float32)
    # Not the array of this kind in ``topk.py``: to compiled code, that one is a constant and of another type.
    write_topk(scores.reshape(1, -1), top, values, np.empty((0, 0), np.float32))
    tokens = top[0, :top_k]
    if values[0, top_k] == values[0, top_k - 1]:
        tokens = np.nonzero(scores >= values[0, top_k])[0]
    return draw_from_kept(position, tokens, scores[tokens], highest, among, draws)


@compiled
def draw_from_kept(position: Any, tokens: Any, scores: Any, highest: Any, among: Any, draws: Any) -> Any:
    """The token drawn among those that top-k keeps; ``tokens`` is overwritten."""
    weights, total, kept = np.empty(len(tokens), np.float32), 0.0, 0
    for place in range(len(tokens)):
        weight = np.exp((scores[place] - highest) / draws.temperature)
        total += weight
        if weight >= draws.min_p:
            tokens[kept], weights[kept] = tokens[place], weight
            kept += 1
    _name(tokens[:kept], among)
    return sample_among(draws.seed, position, tokens[:kept], weights[:kept], _nucleus(total, draws))


@compiled
def _name(places: Any, among: Any) -> None:
    """Replace places in the list of tokens among which one is drawn by these tokens."""
    if len(among) > 0:
        for place in range(len(places)):
            places[place] = among[places[place]]


@compiled
def allowed_scores(address: int, vocabulary: int, bits: Any, tokens: Any, scores: Any) -> int:
    """Write the tokens that have a bit, and their float32 scores at an address; their number.

    It is -1 if the highest of all scores is not finite.
    """
    row = array_at(address, vocabulary, np.float32)
    if not argmax_of(row.view(np.int32), INFINITE)[1]:
        return -1
    count = 0
    for place in range(min(len(bits), -(-vocabulary // 8))):
        of_eight = bits[place]
        if of_eight:
            for bit in range(min(8, vocabulary - 8 * place)):
                if of_eight >> bit & 1:
                    tokens[count], scores[count] = 8 * place + bit, row[8 * place + bit]
                    count += 1
    return count


def keeps_one(processor: Any) -> bool:
    """Whether a processor forbids tokens by minus infinity alone, and may leave a single one."""
    return getattr(processor, "filter_value", -np.inf) == -np.inf and getattr(processor, "min_tokens_to_keep", 1) == 1
