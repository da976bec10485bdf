"""Gets the logits processors and stopping criteria that transformers' ``generate`` would use, for hdtool's loop."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Container, Sequence
from pathlib import Path
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
from hdtool.runtime.config import SamplingConfig
from hdtool.runtime.core.sampler import Sampler

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

NO_SETTINGS = "none"
"""Value of --generation-config that selects the defaults of transformers."""

Refused = Callable[[Any], bool]


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _several(value: Any) -> bool:
    return value is not None and value > 1


REFUSED_SETTINGS: dict[str, tuple[Refused, str]] = {
    "num_beams": (_several, "hdtool decodes one sequence, not beams"),
    "num_beam_groups": (_several, "hdtool decodes one sequence, not beams"),
    "num_return_sequences": (_several, "hdtool returns one answer for each prompt"),
    "penalty_alpha": (_given, "contrastive search is not supported"),
    "dola_layers": (_given, "DoLa decoding is not supported"),
    "constraints": (_given, "constrained beam search is not supported"),
    "force_words_ids": (_given, "constrained beam search is not supported"),
    "token_healing": (_given, "hdtool does not change the tokens of the prompt"),
    "is_assistant": (_given, "the model ends its answers early, as a draft model of another"),
    "assistant_ensemble_weight": (_given, "it changes the distribution that tokens are drawn from"),
    "cache_implementation": (lambda value: value == "quantized", "a quantized KV cache changes the output"),
}
"""Maps each unsupported setting that changes the output of ``generate`` to ``(test for refused values, reason)``."""

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


def sampler_as_generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    config: SamplingConfig,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    ends: frozenset[int],
    first: Sequence[LogitsProcessor] = (),
) -> tuple[Sampler, Container[int]]:
    """Return ``(sampler, stops)`` for one answer, with the processors and criteria that ``generate`` would use.

    To get these processors and criteria, ``generate`` is called with a ``custom_generate`` that returns before the
    first forward pass. Options that are None in ``config`` come from the model's generation settings, else from the
    defaults of transformers. The processors in ``first`` run before those of ``generate``. Raise ModelError if the
    settings cannot be used.
    """
    settings = model.generation_config
    refuse_settings(settings)
    processors, criteria = LogitsProcessorList(first), StoppingCriteriaList()

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
    options = NEUTRAL_SETTINGS | generate_options(config, settings, ends, max_new_tokens)
    try:
        # ``generate`` passes no tokenizer with ``custom_generate``, so it cannot build the criterion for stop strings.
        generate: Any = model.generate
        generate(ids, attention_mask=torch.ones_like(ids), custom_generate=take, **options, stop_strings=None)
        if strings := settings.stop_strings:
            criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    except HdtoolError:
        raise
    except Exception as error:  # transformers raises many types of errors for invalid settings
        raise ModelError(
            f"the generation settings of the model cannot be used ({error_reason(error)}): correct its "
            f"generation_config.json, or name another file with --generation-config, or {NO_SETTINGS}"
        ) from error
    sampler = Sampler(config, prompt, processors=processors)
    return sampler, Stops(ends, criteria, sampler, model.device) if criteria else ends


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


def refused_setting(settings: GenerationConfig, allowed: Container[str] = ()) -> tuple[str, str] | None:
    """Return ``(name, reason)`` for the first unsupported setting not in ``allowed``, or None if there is none."""
    for name, (is_refused, reason) in REFUSED_SETTINGS.items():
        if name not in allowed and is_refused(getattr(settings, name, None)):
            return name, reason
    return None


def refuse_settings(settings: GenerationConfig) -> None:
    """Raise ModelError for generation settings that are not supported."""
    if refused := refused_setting(settings):
        name, reason = refused
        raise ModelError(
            f"{name} is {getattr(settings, name)!r} in the model's generation settings, but {reason}: remove it from "
            f"its generation_config.json, or name another file with --generation-config, or {NO_SETTINGS}"
        )


def generation_settings(chosen: str, model_settings: GenerationConfig) -> GenerationConfig:
    """Load generation settings from a file or the folder that holds it; ``NO_SETTINGS`` selects transformers' defaults.

    Special tokens that the loaded settings lack are copied from ``model_settings``. Raise ModelError if the file cannot
    be used.
    """
    if chosen == NO_SETTINGS:
        settings = GenerationConfig()
    else:
        path = Path(chosen).expanduser()
        file = path / "generation_config.json" if path.is_dir() else path
        try:
            row = json.loads(file.read_text(encoding="utf-8"))
            settings = GenerationConfig.from_dict(row)
        except OSError as error:
            raise ModelError(
                f"{file} cannot be read ({error.strerror or error}): name a file of generation settings, or "
                f"{NO_SETTINGS}"
            ) from None
        except Exception as error:  # transformers raises many types of errors for invalid settings
            raise ModelError(
                f"{file} holds no generation settings ({error_reason(error)}): name a generation_config.json"
            ) from None
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(settings, name) is None:
            setattr(settings, name, copy.copy(getattr(model_settings, name)))
    return settings
