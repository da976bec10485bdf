"""Plans a model's answers: their samplers, with the processors and criteria that ``generate`` would use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.request import Key, Observer, Request, room_for
from hdtool.runtime.core.sampler import Criterion, Sampler
from hdtool.runtime.generation.generation_settings import NO_SETTINGS, refuse_settings
from hdtool.runtime.generation.grammar import GrammarCompiler, Guide, guided_drafter, masks_of
from hdtool.runtime.generation.text_stream import TextStream
from hdtool.runtime.settings.model import SamplingConfig
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


@dataclass(frozen=True)
class AnswerPlan:
    """Everything that the request for an answer needs except the drafter."""

    prompt: Sequence[int]
    sampler: Sampler
    max_new_tokens: int
    stops: frozenset[int] = frozenset()
    guide: Guide | None = None
    """State of the grammar that the answer must match, if there is one."""

    def request(
        self,
        key: Key,
        drafter: Drafter,
        prediction: Sequence[int] = (),
        *,
        draft_tokens: int | None = None,
        owner: str = "",
        observer: Observer | None = None,
    ) -> Request[Key]:
        """Return the request for the answer; see ``guided_drafter`` for ``draft_tokens``."""
        guided = guided_drafter(drafter, self.guide, draft_tokens)
        limit = self.max_new_tokens
        return Request(key, self.prompt, self.sampler, guided, self.stops, prediction, limit, owner, observer)


def plan_answer(
    loaded: Loaded,
    config: SamplingConfig,
    prompt: Sequence[int],
    max_new_tokens: int,
    guide: Guide | None = None,
    processors: Sequence[LogitsProcessor] = (),
    text: TextStream | None = None,
) -> AnswerPlan:
    """Plan an answer, with the processors and criteria that ``generate`` would use.

    Options that are None in ``config`` come from the model's generation settings, else from the defaults of
    transformers. The mask of the grammar and then ``processors`` run before those of ``generate``. If ``config`` has
    stop strings, the sampler adds each token to ``text``, and the answer ends once one is found there; by default, the
    text has no special tokens. Raise ModelError for unusable settings, and PromptError or OptionError as ``room_for``.
    """
    room, _ = room_for(loaded.target, prompt, max_new_tokens)
    own, criteria = _processors_and_criteria(loaded, config, prompt, room)
    met, _ = criteria_and_ends(criteria, loaded.target.model.device)
    if config.stop:
        met.append(_completes(text or TextStream(loaded.tokenizer, config.stop)))
    all_processors = LogitsProcessorList([*masks_of(guide), *processors, *own])
    sampler = Sampler(config, prompt, processors=all_processors, criteria=met)
    return AnswerPlan(prompt, sampler, max_new_tokens, loaded.stops, guide)


def sampler_for(
    loaded: Loaded, config: SamplingConfig, prompt: Sequence[int], *, max_new_tokens: int
) -> tuple[Sampler, frozenset[int]]:
    """Return the sampler of one answer, and the tokens that end it; see ``plan_answer``."""
    plan = plan_answer(loaded, config, prompt, max_new_tokens)
    return plan.sampler, plan.stops


def criteria_and_ends(
    criteria: StoppingCriteriaList, device: torch.device, scores: Callable[[Any], Any] = lambda _: None
) -> tuple[list[Criterion], frozenset[int]]:
    """Convert transformers' stopping criteria to criteria of a sampler; return them, and the tokens that end an answer.

    Criteria for end tokens and the length are left out, as the loop checks these. ``scores`` maps the sampler to the
    scores that transformers' criteria get.
    """
    ends = {token for each in criteria if type(each) is EosTokenCriteria for token in each.eos_token_id.tolist()}
    checked = StoppingCriteriaList(each for each in criteria if type(each) not in (EosTokenCriteria, MaxLengthCriteria))

    def is_met(sampler: Any, token: int) -> bool:
        return bool(checked(sampler.ids(device), scores(sampler)).all())

    return [is_met] if checked else [], frozenset(ends)


def _completes(text: TextStream) -> Criterion:
    """Return a criterion that adds each token to ``text``, and is met once the text contains a stop string."""

    def is_met(sampler: Sampler, token: int) -> bool:
        text.add([token])
        return text.shown.found is not None

    return is_met


def _processors_and_criteria(
    loaded: Loaded, config: SamplingConfig, prompt: Sequence[int], max_new_tokens: int
) -> tuple[LogitsProcessorList, StoppingCriteriaList]:
    """Collect what ``generate`` passes to a ``custom_generate`` that runs no pass; raise ModelError if that fails."""
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
        processors.extend(logits_processor)
        criteria.extend(stopping_criteria)
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
    """Return arguments of ``generate`` for greedy decoding, or for sampling from the distribution that hdtool uses."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": not config.is_greedy}
    if ends:
        options["eos_token_id"] = sorted(ends)
        options["pad_token_id"] = settings.pad_token_id if settings.pad_token_id is not None else min(ends)
    chosen: dict[str, Any] = {"repetition_penalty": config.repetition_penalty}
    if not config.is_greedy:
        chosen |= {name: getattr(config, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    return options | {name: value for name, value in chosen.items() if value is not None}
