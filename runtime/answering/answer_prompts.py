"""Load a model and its stores once, and answer prompts with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

import torch

from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.answering.answer_plan import compiler_for, plan_answer
from hdtool.runtime.answering.dialogues import Dialogue, Dialogues
from hdtool.runtime.answering.streamed_answer import Answer
from hdtool.runtime.budget.measure_passes import quick_record
from hdtool.runtime.core.drafter import Drafter
from hdtool.runtime.core.prefix_cache import PrefixCache
from hdtool.runtime.core.request import Observer, Request, room_for
from hdtool.runtime.core.session import Session
from hdtool.runtime.drafters.deferred import deferred
from hdtool.runtime.drafters.drafter_factory import compile_ahead, drafters_for
from hdtool.runtime.generation.generation_settings import refuse_settings
from hdtool.runtime.kernels.compile_process import DRAFTER, is_compiling
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.cpu_threads import choose_threads
from hdtool.runtime.target.load import load
from hdtool.runtime.target.tensor_parallel import check_decoding


class Answerer:
    """Loads a model and its stores once, and answers prompts with them."""

    def __init__(
        self,
        model: ModelConfig,
        decoding: DecodeConfig,
        sampling: SamplingConfig,
        chat: bool | None = None,
        stores: StoresConfig | None = None,
        *,
        new_observer: Callable[[], Observer] | None = None,
    ) -> None:
        """Load the model and open its stores; raise an HdtoolError if that fails.

        ``chat`` says whether to apply the chat template, by default if there is one. ``new_observer`` is called once
        per answer to make its observer.
        """
        check_decoding(decoding)
        compile_ahead(model, decoding.method)
        self.loaded = load(model)
        refuse_settings(self.loaded.target.model.generation_config)
        self.store_set = self.loaded.store_opener(stores).open_for(decoding)
        self._threads = model.threads
        self.decoding = decoding
        self.sampling = sampling
        self._chat = chat
        self._new_observer = new_observer
        self._grammars = compiler_for(self.loaded)

    @cached_property
    def _drafters(self) -> list[Drafter]:
        """One drafter per batch slot, created lazily because creation may have to time forward passes."""
        target, all_threads = self.loaded.target, torch.get_num_threads()

        def make() -> list[Drafter]:
            torch.set_num_threads(all_threads)
            choose_threads(target, self._threads, quick_record(target, what="threads"))
            return drafters_for(self.decoding, target, self.store_set)

        if is_compiling(DRAFTER):  # until the drafters join
            choose_threads(target, self._threads)
        return deferred(self.decoding.method, make, self.decoding.batch_size)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Create drafters; raise PromptError for a prompt that cannot be answered, naming it if there are several."""
        _ = self._drafters  # before any output, because making them may fail
        for prompt in prompts:
            try:
                room_for(self.loaded.target, self._encoded(prompt, prompt.messages), self.decoding.max_new_tokens)
                self._grammars.guide_for(prompt.grammar)
            except PromptError as error:
                raise PromptError(f"prompt {prompt.id}: {error}" if len(prompts) > 1 else str(error)) from None

    def all_answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield the answers to all prompts in order, generated in batches of ``batch_size``.

        Iterate over each answer before taking the next one. An interrupted answer is the last one, except in a batch,
        where the other unfinished answers follow.
        """
        target, drafters = self.loaded.target, self._drafters[: len(prompts)]
        if len(drafters) > 1:
            session = Session[Dialogue](target, target.allocate(len(drafters)))
        else:  # a conversation goes on in the target's own cache
            prefixes = PrefixCache() if self.decoding.prefix_caching else None
            session = Session[Dialogue](target, target.cache, prefixes=prefixes)
        stop = self.sampling.stop
        return Dialogues(session, prompts, drafters, self._request, self.loaded.tokenizer, stop).answers()

    def _request(self, dialogue: Dialogue, drafter: Drafter) -> Request[Dialogue]:
        prompt, decoding = dialogue.prompt, self.decoding
        ids = self._encoded(prompt, dialogue.messages)
        prediction = self._prediction(dialogue) if drafter.predicts else []
        guide = self._grammars.guide_for(prompt.grammar)
        plan = plan_answer(self.loaded, self.sampling, ids, decoding.max_new_tokens, guide)
        observer = self._new_observer() if self._new_observer else None
        return plan.request(dialogue, drafter, prediction, draft_tokens=decoding.draft_tokens, observer=observer)

    def _encoded(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        return encode_conversation(self.loaded.tokenizer, messages, chat=self._chat, tools=prompt.tools)

    def _prediction(self, dialogue: Dialogue) -> list[int]:
        """Return the token ids of the predicted answer, or an empty list if there is none."""
        return encode_answer(self.loaded.tokenizer, dialogue.messages, dialogue.prediction, chat=self._chat)
