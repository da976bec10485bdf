"""Contenders of a benchmark: hdtool's methods, and ``generate`` of transformers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from hdtool.builders.evaluation.experiment import DecodedTurn, timed_turn
from hdtool.builders.evaluation.timing import Stopwatch
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.runtime.answering.answer_plan import generate_options, plan_answer
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.request import room_for
from hdtool.runtime.core.step import Finish
from hdtool.runtime.drafters.drafter_factory import DrafterMaker
from hdtool.runtime.generation.generation_settings import refuse_settings
from hdtool.runtime.generation.grammar import Guide, masks_of
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.model.transformers_internals import cache_in
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from hdtool.runtime.target.target import Target


class FreshDrafters:
    """Makes drafters with new, empty histories, which share the measured costs of forward passes."""

    def __init__(self, target: Target, store_set: StoreSet) -> None:
        self._drafters, self._store_set = DrafterMaker(target, {1}), store_set

    def __call__(self, config: DecodeConfig) -> Drafter:
        return self._drafters.make(config, with_own_history(self._store_set, config))


def with_own_history(store_set: StoreSet, config: DecodeConfig) -> StoreSet:
    """Return the stores with a new in-memory history if ``config`` drafts from a history, else without a history."""
    return replace(store_set, history=History(prompts=config.history_prompts) if config.has_history else None)


class Contender(Protocol):
    """Answers prompts and measures how long each answer takes."""

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        """Answer a prompt, and return the answer with its measurements.

        ``guide`` enforces a grammar and serves this answer only. ``prediction`` is the expected answer, for contenders
        that can draft from it.
        """
        ...

    def fresh(self) -> Contender:
        """Return a copy that has learned nothing from earlier prompts."""
        ...


@dataclass(frozen=True)
class DraftingContender:
    """One of hdtool's methods as a contender."""

    loaded: Loaded
    drafter: Drafter
    sampling: SamplingConfig
    max_new_tokens: int
    new_drafter: Callable[[], Drafter]
    draft_tokens: int | None = None

    def fresh(self) -> DraftingContender:
        return replace(self, drafter=self.new_drafter())

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> DecodedTurn:
        plan = plan_answer(self.loaded, self.sampling, prompt, self.max_new_tokens, guide)
        request = plan.request(None, self.drafter, prediction, draft_tokens=self.draft_tokens)
        turn = timed_turn(self.loaded.target, request)
        return replace(turn, text=text_of(self.loaded.tokenizer, turn.output_ids))


class GenerateContender:
    """Transformers' ``generate`` as a contender, with the same stop tokens, length limit and temperature as hdtool.

    Its greedy answers have the same tokens as plain decoding, up to near ties. Its sampled answers differ, because
    transformers draws tokens differently.
    """

    def __init__(
        self, loaded: Loaded, model: PreTrainedModel, sampling: SamplingConfig, max_new_tokens: int, **drafting: Any
    ) -> None:
        """``drafting`` holds the options of ``generate`` for assisted decoding; if empty, nothing is drafted."""
        self._loaded = loaded
        self._model: Any = model
        self._seed = sampling.seed
        self._max_new_tokens = max_new_tokens
        self._drafting = drafting
        refuse_settings(model.generation_config)
        self._sampling = sampling
        self._assistant: Any = drafting.get("assistant_model")
        self._learned: Any = copy.deepcopy(self._assistant.generation_config) if self._assistant else None
        """Generation config of the draft model, in which some schedules adapt the number of draft tokens."""
        self._begun: Any = copy.deepcopy(self._learned)

    def fresh(self) -> GenerateContender:
        fresh = copy.copy(self)
        fresh._learned = copy.deepcopy(self._begun)
        return fresh

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        if self._assistant:
            self._assistant.generation_config = self._learned
        room, at_the_end = room_for(self._loaded.target, prompt, self._max_new_tokens)
        torch.manual_seed(self._seed % 2**63)
        passes = PassCounter(len(prompt))
        generated = partial(
            generate_ids,
            self._loaded,
            self._sampling,
            prompt,
            room,
            model=self._model,
            masks=masks_of(guide),
            **self._drafting,
        )
        # Without drafts every pass gives one token, so the hook is skipped to keep it out of the timing.
        with (
            passes.counted(self._model, enabled=bool(self._drafting)),
            Stopwatch(self._model.device) as watch,
            first_pass_noted(self._model, watch),
        ):
            output_ids = generated()
        return passes.answer(self._loaded, output_ids, watch, at_the_end, drafts=bool(self._drafting))


@contextmanager
def first_pass_noted(model: PreTrainedModel, watch: Stopwatch) -> Iterator[None]:
    """Note the end of the model's first forward pass as the time of the first token; later passes run no hook."""

    def note(*_: Any) -> None:
        hook.remove()
        watch.first_token()

    hook = model.register_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


def generate_ids(
    loaded: Loaded,
    sampling: SamplingConfig,
    prompt: list[int],
    max_new_tokens: int,
    *,
    model: PreTrainedModel | None = None,
    masks: Sequence[LogitsProcessor] = (),
    **options: Any,
) -> list[int]:
    """Return the token ids that ``generate`` adds to the prompt; ``model``, if given, replaces the loaded target."""
    generator: Any = model or loaded.target.model
    ids = torch.tensor([prompt], device=generator.device)
    if generator.generation_config.stop_strings:
        options = {"tokenizer": loaded.tokenizer, **options}
    if masks:
        options = {"logits_processor": LogitsProcessorList(masks), **options}
    options |= generate_options(sampling, generator.generation_config, loaded.stops, max_new_tokens)
    output = generator.generate(ids, attention_mask=torch.ones_like(ids), **options)
    answer: list[int] = output[0, len(prompt) :].tolist()
    return answer


class PassCounter:
    """Counts the forward passes of ``generate`` or llama.cpp, and the tokens that each pass adds."""

    def __init__(self, prompt_length: int) -> None:
        self._lengths = [prompt_length]
        """Length of the conversation, in tokens, at the start of each pass."""
        self.drafted = 0
        self._first = True

    def note(self, length: int, drafted: int) -> None:
        """Record a pass that verifies ``drafted`` tokens after a conversation of ``length`` tokens."""
        self._lengths.append(length)
        self.drafted += drafted

    def tokens(self, answered: int) -> list[int]:
        """Return the number of tokens that each pass added; ``answered`` is the length of the answer in tokens."""
        ends = [*self._lengths[1:], self._lengths[0] + answered]
        return [end - start for start, end in zip(self._lengths, ends, strict=True)]

    def answer(
        self, loaded: Loaded, output_ids: list[int], watch: Stopwatch, at_the_end: Finish, *, drafts: bool
    ) -> AnsweredTurn:
        """Return the turn answered with ``output_ids``; if ``drafts`` is False, one token per pass is assumed."""
        ended = output_ids[-1] in loaded.stops
        return AnsweredTurn(
            text_of(loaded.tokenizer, output_ids),
            output_ids,
            self.tokens(len(output_ids)) if drafts else [1] * len(output_ids),
            **watch.times(),
            finish=str(Finish.STOP if ended else at_the_end),
            nodes=self.drafted,
        )

    @contextmanager
    def counted(self, model: PreTrainedModel, *, enabled: bool) -> Iterator[None]:
        """Count the forward passes inside ``generate``, and their draft tokens, with a forward pre-hook."""
        hook = model.register_forward_pre_hook(self._note_inputs, with_kwargs=True) if enabled else None
        try:
            yield
        finally:
            if hook:
                hook.remove()

    def _note_inputs(self, model: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        rows = options["input_ids"].shape[1]
        if self._first:
            self._first = False
            self.drafted += rows - self._lengths[0]
        else:
            # The conversation's last token is not in the KV cache yet, as it is the first input of this pass.
            self.note(cache_in(options).get_seq_length() + 1, rows - 1)
