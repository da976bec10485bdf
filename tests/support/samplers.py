"""Samplers with the processors of a configuration alone, without the settings of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdtool.runtime.core.exponential_race import RACE_BLOCK, ExponentialRace, race_block, stream_start
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.kernels.compiled import compiled
from hdtool.runtime.settings.model import SamplingConfig


def sampler_of(config: SamplingConfig, context: Sequence[int], **options: Any) -> Sampler:
    return Sampler(config, context, processors=processors_of(config), **options)


def processors_of(config: SamplingConfig) -> LogitsProcessorList:
    """Return the processors for the options in ``config``, in the order in which ``generate`` applies them."""
    chosen = LogitsProcessorList()
    if config.repetition_penalty not in (None, 1.0):
        chosen.append(RepetitionPenaltyLogitsProcessor(config.repetition_penalty))
    if config.is_greedy:
        return chosen
    if config.temperature != 1.0:
        chosen.append(TemperatureLogitsWarper(config.temperature))
    if config.top_k:
        chosen.append(TopKLogitsWarper(config.top_k))
    if config.top_p is not None and config.top_p < 1.0:
        chosen.append(TopPLogitsWarper(config.top_p))
    if config.min_p:
        chosen.append(MinPLogitsWarper(config.min_p))
    return chosen


def race_winner(race: ExponentialRace, position: int, rates: npt.NDArray[np.float32]) -> int:
    """Return the token that wins a race with these rates; -1 if none is above 0."""
    return int(_race_winner(race.seed, position, rates))


@compiled
def _race_winner(seed: Any, position: Any, rates: Any) -> Any:
    winner, earliest = -1, np.inf
    for first in range(0, rates.shape[0], RACE_BLOCK):
        weights = rates[first : first + RACE_BLOCK]
        winner, earliest = race_block(stream_start(seed, position), first, weights, winner, earliest)
    return winner
