"""Makes the samplers of a model's answers, with the processors and criteria that ``generate`` would use."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from hdtool.data.errors import HdtoolError, ModelError, error_reason
from hdtool.runtime.config.model import SamplingConfig
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import room_for
from hdtool.runtime.generation.grammar import GrammarCompiler
from hdtool.runtime.generation.settings import NO_SETTINGS, refuse_settings
from hdtool.runtime.generation.text_stream import StopTexts
from hdtool.runtime.target.load import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NEUTRAL_SETTINGS: dict[str, Any] = {
    "prompt_lookup_num_tokens": None,
    "assistant_early_exit": None,
    "use_mtp": None,
    "speculation_type": None,
    "cache_implementation": None,
    "return_dict_in_generate": False,
    "output_scores": False,
    "output_logits": False,
    "output_attentions": False,
    "output_hidden_states": False,
}
"""Values that switch off drafting, caching and reporting in ``generate``; none of them changes the output."""


class Stops:
    """Container of the tokens that end an answer: ``ends``, and any token at which a stopping criterion is met."""

    def __init__(
        self,
        ends: Container[int],
        criteria: StoppingCriteriaList,
        sampler: Sampler,
        device: torch.device,
        scores: Callable[[], Any] = lambda: None,
    ) -> None:
        """``scores`` returns the scores to pass to the criteria."""
        self._ends, self._criteria, self._sampler = ends, criteria, sampler
        self._device, self._scores = device, scores

    def __contains__(self, token: object) -> bool:
        if token in self._ends:
            return True
        # Criteria may be stateful, so each must be called exactly once per token.
        return bool(self._criteria) and bool(self._criteria(self._sampler.ids(self._device), self._scores()).all())


def sampler_for(
    loaded: Loaded,
    config: SamplingConfig,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    first: Sequence[LogitsProcessor] = (),
) -> tuple[Sampler, Container[int]]:
    """Return ``(sampler, stops)`` for one answer, with the processors and criteria that ``generate`` would use.

    Options that are None in ``config`` come from the model's generation settings, else from the defaults of
    transformers. The processors in ``first`` run before those of ``generate``. Raise ModelError if the settings cannot
    be used.
    """
    room, _ = room_for(loaded.target, prompt, max_new_tokens)
    processors, criteria = _processors_and_criteria(loaded, config, prompt, room)
    sampler = Sampler(config, prompt, processors=LogitsProcessorList([*first, *processors]))
    ends = loaded.stops
    stops = Stops(ends, criteria, sampler, loaded.target.model.device) if criteria else ends
    return sampler, StopTexts(loaded.tokenizer, config.stop, stops) if config.stop else stops


def _processors_and_criteria(
    loaded: Loaded, config: SamplingConfig, prompt: Sequence[int], max_new_tokens: int
) -> tuple[LogitsProcessorList, StoppingCriteriaList]:
    """Get what ``generate`` would use from a ``custom_generate`` that returns before the first forward pass."""
    model = loaded.target.model
    settings = model.generation_config
    refuse_settings(settings)
    processors, criteria = LogitsProcessorList(), StoppingCriteriaList()

    def take(
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **others: Any,
    ) -> torch.Tensor:
        # The loop itself checks the length and the end tokens.
        applied_by_loop = (MaxLengthCriteria, EosTokenCriteria)
        processors.extend(logits_processor)
        criteria.extend(criterion for criterion in stopping_criteria if not isinstance(criterion, applied_by_loop))
        return input_ids

    ids = torch.tensor([list(prompt)], device=model.device)
    options = NEUTRAL_SETTINGS | generate_options(config, settings, loaded.stops, max_new_tokens)
    try:
        # ``generate`` passes no tokenizer with ``custom_generate``, so it cannot build the criterion for stop strings.
        generate: Any = model.generate
        generate(ids, attention_mask=torch.ones_like(ids), custom_generate=take, **options, stop_strings=None)
        if strings := settings.stop_strings:
            criteria.append(StopStringCriteria(tokenizer=loaded.tokenizer, stop_strings=strings))
    except HdtoolError:
        raise
    except Exception as error:  # transformers raises many types of errors for invalid settings
        raise ModelError(
            f"the generation settings of the model cannot be used ({error_reason(error)}): correct its "
            f"generation_config.json, or name another file with --generation-config, or {NO_SETTINGS}"
        ) from error
    return processors, criteria


def compiler_for(loaded: Loaded) -> GrammarCompiler:
    """Return a compiler of grammars for a model's answers."""
    return GrammarCompiler(loaded.tokenizer, loaded.stops, loaded.target.vocabulary)


def generate_options(
    config: SamplingConfig, settings: GenerationConfig, ends: frozenset[int], max_new_tokens: int
) -> dict[str, Any]:
    """Return the arguments with which ``generate`` draws tokens from the same distribution as hdtool."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": not config.is_greedy}
    if ends:
        options["eos_token_id"] = sorted(ends)
        options["pad_token_id"] = settings.pad_token_id if settings.pad_token_id is not None else min(ends)
    chosen: dict[str, Any] = {"repetition_penalty": config.repetition_penalty}
    if not config.is_greedy:
        chosen |= {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p}
    return options | {name: value for name, value in chosen.items() if value is not None}
