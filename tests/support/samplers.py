"""Samplers with the processors of a configuration alone, without the settings of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.sampler import Sampler


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
