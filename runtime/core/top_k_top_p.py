"""Draws tokens with temperature, top-k, top-p and min-p, as parts of an exponential race."""

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

from hdtool.runtime.core.exponential_race import (
    RACE_BLOCK,
    SPLITMIX_STRIDE,
    U64,
    ExponentialRace,
    race_block,
    stream_start,
    time_before,
)
from hdtool.runtime.kernels.compiled import Array, array_at, compiled
from hdtool.runtime.kernels.row_operations import exponentiate
from hdtool.runtime.kernels.topk import argmax_of, write_topk
from hdtool.runtime.kernels.vector_code import LANES

MAX_TOP_K_BY_MAXIMA = 128
"""Largest k for which a tree of maxima finds the k-th highest score faster than a partition."""
ALL_TOKENS = np.empty(0, np.int64)
NOT_FINITE, UNDECIDED = -1, -2
"""Returned instead of a token: ``NOT_FINITE`` if the highest score is NaN or infinite, ``UNDECIDED`` if the known
scores do not determine the draw."""
INFINITY_BITS = 0x7F800000
"""Bit pattern of infinity in float32."""
ROUNDING_MARGIN = 0.999
"""Factor that lowers a bound by more than the rounding error."""
WARPER_OPTIONS = {
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
}
"""Maps each processor that a ``Truncation`` replaces, in the order of ``generate``, to the attribute that holds its
option."""


class DrawOptions(NamedTuple):
    """Options of a draw, in the form that compiled code takes."""

    seed: Any
    temperature: Any
    top_k: int
    """0 keeps all tokens. At most ``MAX_TOP_K_BY_MAXIMA``, except in ``winner_among_any``."""
    top_p: float
    min_p: float


@dataclass(frozen=True)
class Truncation:
    """Applies temperature, top-k, top-p and min-p as part of a draw, in place of the processors of transformers.

    The winner of a race among more tokens than are kept also wins the race among the kept ones if it is one of them. So
    top-p needs no sort: tokens are drawn until those more probable than the winner weigh less than the nucleus.
    """

    temperature: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def at_end_of(cls, processors: Sequence[LogitsProcessor]) -> tuple[list[LogitsProcessor], Truncation]:
        """Split a list of processors into those that stay and a ``Truncation`` that replaces the last ones."""
        pre_processors, options = list(processors), {}
        for kind, name in reversed(WARPER_OPTIONS.items()):
            if pre_processors and type(pre_processors[-1]) is kind and keeps_one(pre_processors[-1]):
                options[name] = getattr(pre_processors.pop(), name)
        return pre_processors, cls(**options)

    def compile(self, race: ExponentialRace) -> None:
        """Compile the draw, or load it from the cache, before the first step."""
        alike = replace(self, top_k=min(self.top_k, MAX_TOP_K_BY_MAXIMA + 1))
        scores = np.ones(MAX_TOP_K_BY_MAXIMA + 2, np.float32)
        alike.draw(race, 0, scores)
        alike.winner(race, 0, scores)

    @property
    def is_compiled(self) -> bool:
        """True if compiled code does the whole draw; top-k with a large k needs NumPy."""
        return self.top_k <= MAX_TOP_K_BY_MAXIMA

    def draws(self, race: ExponentialRace) -> DrawOptions:
        return DrawOptions(race.seed, np.float32(self.temperature), self.top_k, float(self.top_p), float(self.min_p))

    def draw(
        self, race: ExponentialRace, position: int, scores: npt.NDArray[np.float32], among: Array = ALL_TOKENS
    ) -> int:
        """Return the token drawn from the scores at a position; ``NOT_FINITE`` if the highest score is not finite.

        ``scores`` has one score for each token in ``among`` or, by default, in the vocabulary.
        """
        if self.is_compiled:
            return int(draw_row(position, scores, among, self.draws(race)))
        if self.top_k < len(scores):
            index = len(scores) - self.top_k
            scores = np.where(scores < np.partition(scores, index)[index], np.float32(-np.inf), scores)
        return int(draw_row(position, scores, among, replace(self, top_k=0).draws(race)))

    def winner(self, race: ExponentialRace, position: int, scores: npt.NDArray[np.float32]) -> int:
        """Return the token that is drawn no matter which other tokens a mask forbids.

        Return ``UNDECIDED`` if the draw depends on the forbidden tokens, and ``NOT_FINITE`` if the highest score is not
        finite.
        """
        return int(winner_among_any(position, scores, self.draws(race)))


# Compiled: a pass of the model evicts Python code from the CPU caches, so NumPy takes three times as long here.
@compiled
def draw_row(position: Any, scores: Any, among: Any, draws: Any) -> Any:
    """Return the token drawn at a position; see ``Truncation.draw``."""
    best, is_finite = argmax_of(scores.view(np.int32), INFINITY_BITS)
    if not is_finite:
        return NOT_FINITE
    if 0 < draws.top_k < len(scores):
        return _draw_from_top(position, scores, scores[best], among, draws)
    if draws.top_p >= 1 and draws.min_p == 0 and len(among) == 0:
        return _draw_by_temperature(position, scores, scores[best], draws)
    return _draw_from_all(position, scores, scores[best], among, draws)


@compiled
def winner_among_any(position: Any, scores: Any, draws: Any) -> Any:
    """Return the token that wins no matter which others are forbidden; see ``Truncation.winner``."""
    best, is_finite = argmax_of(scores.view(np.int32), INFINITY_BITS)
    if not is_finite:
        return NOT_FINITE
    winner = _draw_by_temperature(position, scores, scores[best], draws)
    if winner == best:
        return winner
    num_higher = 0
    for token in range(len(scores)):
        num_higher += scores[token] > scores[winner]
    is_kept = draws.top_p >= 1 and (draws.top_k == 0 or num_higher < draws.top_k)
    weight = np.exp((scores[winner] - scores[best]) / draws.temperature)
    return winner if is_kept and weight >= draws.min_p else UNDECIDED


@compiled
def _draw_by_temperature(position: Any, scores: Any, max_score: Any, draws: Any) -> Any:
    """Return the token drawn with a temperature only; weights are computed block by block and not stored."""
    start, winner, earliest = stream_start(draws.seed, position), -1, np.inf
    weights = np.empty(RACE_BLOCK, np.float32)
    for first in range(0, len(scores), RACE_BLOCK):
        part = scores[first : first + RACE_BLOCK]
        for index in range(len(part)):
            weights[index] = (part[index] - max_score) / draws.temperature
        exponentiate(weights.ctypes.data, RACE_BLOCK, np.float32(0))
        winner, earliest = race_block(start, first, weights[: len(part)], winner, earliest)
    return winner


@compiled
def _draw_from_all(position: Any, scores: Any, max_score: Any, among: Any, draws: Any) -> Any:
    """Return the token drawn with top-p or min-p, or only from the tokens in ``among``."""
    padded = np.empty(-(-len(scores) // LANES) * LANES, np.float32)
    weights = padded[: len(scores)]
    for token in range(len(scores)):
        weights[token] = (scores[token] - max_score) / draws.temperature
    padded[len(scores) :] = -np.inf
    exponentiate(padded.ctypes.data, len(padded), np.float32(0))
    if draws.top_p >= 1 and draws.min_p == 0:
        return sample_among(draws.seed, position, among, weights, np.inf)
    total = _total(padded)
    # The last token of the nucleus and all less probable ones share at least 1 - top_p of the weight, so the weight of
    # this last token is at least their mean.
    min_weight = max(draws.min_p, ROUNDING_MARGIN * (1 - draws.top_p) * total / len(weights))
    tokens, likely = np.empty(len(weights) + 1, np.int64), 0
    for token in range(len(weights)):
        # Branch-free: always written, counted only if it qualifies.
        tokens[likely] = token
        likely += weights[token] >= min_weight
    kept = np.empty(likely, np.float32)
    for index in range(likely):
        kept[index] = weights[tokens[index]]
    _indices_to_tokens(tokens[:likely], among)
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
    """Return the weight that the nucleus must reach, given the total weight of all tokens; infinity without top-p."""
    return draws.top_p * total if draws.top_p < 1 else np.inf


@compiled
def _draw_from_top(position: Any, scores: Any, max_score: Any, among: Any, draws: Any) -> Any:
    """Return the token drawn with a small top-k and the other options."""
    top_k = draws.top_k
    top, values = np.empty((1, top_k + 1), np.int64), np.empty((1, top_k + 1), np.float32)
    # A new empty array, as compiled code would take the global one of ``topk.py`` as a constant of another type.
    write_topk(scores.reshape(1, -1), top, values, np.empty((0, 0), np.float32))
    tokens = top[0, :top_k]
    if values[0, top_k] == values[0, top_k - 1]:
        tokens = np.nonzero(scores >= values[0, top_k])[0]
    return draw_from_kept(position, tokens, scores[tokens], max_score, among, draws)


@compiled
def draw_from_kept(position: Any, tokens: Any, scores: Any, max_score: Any, among: Any, draws: Any) -> Any:
    """Return the token drawn from those that top-k keeps; ``tokens`` is overwritten."""
    weights, total, kept = np.empty(len(tokens), np.float32), 0.0, 0
    for index in range(len(tokens)):
        weight = np.exp((scores[index] - max_score) / draws.temperature)
        total += weight
        if weight >= draws.min_p:
            tokens[kept], weights[kept] = tokens[index], weight
            kept += 1
    _indices_to_tokens(tokens[:kept], among)
    return sample_among(draws.seed, position, tokens[:kept], weights[:kept], _nucleus(total, draws))


@compiled
def _indices_to_tokens(indices: Any, among: Any) -> None:
    """Replace each index into ``among`` by the token at that index, in place; do nothing if ``among`` is empty."""
    if len(among) > 0:
        for index in range(len(indices)):
            indices[index] = among[indices[index]]


@compiled
def sample_among(seed: Any, position: Any, tokens: Any, weights: Any, nucleus: Any) -> Any:
    """Return the token that wins the race within the nucleus; -1 if no weight is above 0.

    Tokens join the nucleus in order of decreasing weight until the sum of their weights reaches ``nucleus``. Among
    tokens with equal weights, the one with the highest id joins first, as in a stable sort.
    """
    start, winner = stream_start(seed, position), -1
    while True:
        winner = _winner_before(start, tokens, weights, winner)
        if winner < 0:
            return -1
        mass_before = 0.0
        for index in range(weights.shape[0]):
            if _is_before(tokens, weights, index, winner):
                mass_before += weights[index]
        if mass_before < nucleus or mass_before == 0:  # the most probable token is always kept
            return tokens[winner]


@compiled
def _winner_before(start: Any, tokens: Any, weights: Any, border: Any) -> Any:
    """Return the index of the winner among the tokens that precede the one at index ``border``; -1 if there is none.

    All tokens take part if ``border`` is negative.
    """
    winner, earliest = -1, np.inf
    for index in range(tokens.shape[0]):
        if border < 0 or _is_before(tokens, weights, index, border):
            time = time_before(earliest, start + U64(tokens[index] + 1) * SPLITMIX_STRIDE, weights[index])
            if time < earliest:
                winner, earliest = index, time
    return winner


@compiled
def _is_before(tokens: Any, weights: Any, index: Any, other: Any) -> Any:
    return weights[index] > weights[other] or (weights[index] == weights[other] and tokens[index] > tokens[other])


@compiled
def allowed_scores(address: int, vocabulary: int, bits: Any, tokens: Any, scores: Any) -> int:
    """Write to ``tokens`` all tokens whose bit in ``bits`` is set, and to ``scores`` their scores; return their number.

    ``address`` is that of all tokens' scores in float32. Return -1 if the highest of all scores is not finite.
    """
    row = array_at(address, vocabulary, np.float32)
    if not argmax_of(row.view(np.int32), INFINITY_BITS)[1]:
        return -1
    count = 0
    for index in range(min(len(bits), -(-vocabulary // 8))):
        of_eight = bits[index]
        if of_eight:
            for bit in range(min(8, vocabulary - 8 * index)):
                if of_eight >> bit & 1:
                    tokens[count], scores[count] = 8 * index + bit, row[8 * index + bit]
                    count += 1
    return count


def keeps_one(processor: Any) -> bool:
    """Return True if a processor sets removed tokens' scores to minus infinity and may remove all but one token."""
    return getattr(processor, "filter_value", -np.inf) == -np.inf and getattr(processor, "min_tokens_to_keep", 1) == 1
