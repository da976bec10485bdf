"""Answers to prompts: encodes conversations, decodes them with one model and one set of options, yields answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.answer import Answer, CollectedAnswer, Conversation
from hdtool.runtime.batched_answers import BatchedAnswers, BatchedConversation, BatchKey
from hdtool.runtime.budget.measure_passes import quick_record
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig
from hdtool.runtime.decode import decode, decode_batch
from hdtool.runtime.drafter import Drafter, HistoryDrafter
from hdtool.runtime.drafters.methods import drafters_for
from hdtool.runtime.drafters.ranking_recorder import RankingRecorder
from hdtool.runtime.generate_settings import refuse_settings
from hdtool.runtime.grammar.guided_drafter import guided
from hdtool.runtime.grammar.processor import masks_of
from hdtool.runtime.loop import Request
from hdtool.runtime.model.cpu_threads import choose_threads
from hdtool.runtime.model.load import load
from hdtool.runtime.model.tensor_parallel import check_decoding
from hdtool.runtime.sequence import room_for
from hdtool.runtime.stores.store_set import StoreSet

if TYPE_CHECKING:
    from transformers import LogitsProcessor


class Answerer:
    """A loaded model with its stores, drafters and options, which all answers of a command share."""

    def __init__(
        self,
        model: ModelConfig,
        decoding: DecodeConfig,
        sampling: SamplingConfig,
        chat: bool | None = None,
        store_set: StoresConfig | None = None,
        *,
        rankings: int = 0,
    ) -> None:
        """With ``rankings``, so many of the target's best tokens are recorded at each position of an answer."""
        check_decoding(decoding)
        self.loaded = load(model)
        refuse_settings(self.loaded.target.model.generation_config)
        self.store_set = StoreSet.for_tokenizer(
            self.loaded.tokenizer,
            store_set or StoresConfig(),
            decoding.databases,
            model=self.loaded.checkpoint,
            identified=decoding.identifies_tokenizer,
        )
        self._threads = model.threads
        self._decoding = decoding
        self.sampling = sampling
        self._chat = chat
        self._rankings = rankings

    @cached_property
    def _drafters(self) -> list[Drafter]:
        """The drafters; passes are timed for them, so they are made when the first prompt is there and not before."""
        target = self.loaded.target
        choose_threads(target, self._threads, quick_record(target, what="threads"))
        return drafters_for(self._decoding, target, self.store_set)

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise PromptError if any prompt cannot be answered, before the first one is."""
        for prompt in prompts:
            try:
                self._ids(prompt, prompt.messages)
                self._guided(self._drafters[0], prompt)
            except PromptError as error:
                raise PromptError(f"prompt {prompt.id}: {error}" if len(prompts) > 1 else str(error)) from None

    def all_answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """The answers to all prompts in their order, generated in batches of ``batch_size``.

        Iterate over each answer before taking the next one. An interrupted answer is the last one.
        """
        if len(self._drafters) > 1:
            batched = BatchedAnswers(prompts, self._request, self._drafters)
            size, most = len(self._drafters), self._decoding.max_new_tokens
            steps = decode_batch(self.loaded.target, batched.next_request, size, max_new_tokens=most)
            yield from batched.answers(steps)
            return
        for prompt in prompts:
            for answer in self.answers(prompt):
                yield answer
                if answer.interrupted:
                    return

    def answers(self, prompt: Prompt) -> Iterator[Answer]:
        """The answer to each user turn. Iterate over each answer before taking the next one."""
        conversation = Conversation(prompt)
        answer = self._answer(conversation)
        yield answer
        while conversation.add_answer(answer.text):
            answer = self._answer(conversation)
            yield answer

    def _answer(self, conversation: Conversation) -> Answer:
        ids = self._encode(conversation.prompt, conversation.messages)
        drafter, masks = self._guided(self._drafters[0], conversation.prompt)
        most = self._decoding.max_new_tokens
        sampler, stops = self.loaded.sampler(self.sampling, ids, max_new_tokens=most, first=masks)
        steps = decode(
            self.loaded.target,
            ids,
            sampler,
            max_new_tokens=most,
            stops=stops,
            drafter=drafter,
            prediction=self._prediction(conversation, drafter),
            prefix_caching=self._decoding.prefix_caching,
        )
        return Answer(self.loaded, drafter, conversation, len(ids), steps, self.sampling.stop)

    def _request(self, conversation: BatchedConversation, drafter: Drafter) -> Request[BatchKey]:
        ids = self._ids(conversation.prompt, conversation.messages)
        drafter, masks = self._guided(drafter, conversation.prompt)
        answer = CollectedAnswer(self.loaded, drafter, conversation, len(ids), self.sampling.stop)
        most = self._decoding.max_new_tokens
        sampler, stops = self.loaded.sampler(self.sampling, ids, max_new_tokens=most, first=masks)
        return Request((conversation, answer), ids, sampler, drafter, stops, self._prediction(conversation, drafter))

    def _guided(self, drafter: Drafter, prompt: Prompt) -> tuple[Drafter, Sequence[LogitsProcessor]]:
        """The drafter of an answer, and the mask of the grammar that the answer must match, if there is one."""
        guide = self.loaded.guide(prompt.grammar)
        drafter = guided(drafter, guide, self._decoding.draft_tokens)
        return (RankingRecorder(drafter, self._rankings) if self._rankings else drafter), masks_of(guide)

    def _ids(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        """Encode messages; raise PromptError if the model cannot answer them."""
        ids = self._encode(prompt, messages)
        room_for(self.loaded.target, ids, self._decoding.max_new_tokens)
        return ids

    def _prediction(self, conversation: Conversation, drafter: Drafter) -> list[int]:
        """The prediction of the next answer, if there is one and the drafter uses it."""
        if not isinstance(drafter, HistoryDrafter):
            return []
        return encode_answer(self.loaded.tokenizer, conversation.messages, conversation.prediction, chat=self._chat)

    def _encode(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        return encode_conversation(self.loaded.tokenizer, messages, chat=self._chat, tools=prompt.tools)
