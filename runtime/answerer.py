"""Answer prompts in batches, or one at a time while streaming the text of each answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch

from hdtool.data.chat import encode_answer, encode_conversation
from hdtool.data.errors import PromptError
from hdtool.data.prompts import Message, Prompt
from hdtool.runtime.budget.measure_passes import quick_record
from hdtool.runtime.config.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.core.drafter import Drafter, RankingRecorder
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.sequence import Finish, Request, Stats, Step, room_for
from hdtool.runtime.core.session import decode, decode_batch
from hdtool.runtime.drafters.deferred import deferred
from hdtool.runtime.drafters.methods import compile_ahead, drafters_for
from hdtool.runtime.generation.grammar import guided_drafter, masks_of
from hdtool.runtime.generation.settings import refuse_settings
from hdtool.runtime.generation.text_stream import Piece, TextStream, before_stop, cut_at_stop, text_of
from hdtool.runtime.kernels.compile_process import DRAFTER, is_compiling
from hdtool.runtime.samplers import compiler_for, sampler_for
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.tensor_parallel import check_decoding
from hdtool.runtime.target.threads import choose_threads

if TYPE_CHECKING:
    from transformers import LogitsProcessor


class Conversation:
    """A prompt whose user turns are answered in order: the messages so far, and the turns that are still to come."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.messages: list[Message] = list(prompt.messages)
        self.prediction = prompt.prediction
        """Predicted text of the next answer; empty if there is none."""
        self._later = iter(prompt.later_turns)

    def add_answer(self, text: str) -> bool:
        """Append an answer and the next user turn to the messages; if no turn is left, return False instead."""
        self.prediction = ""
        turn = next(self._later, None)
        if turn is None:
            return False
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": turn}]
        return True


class Answer:
    """An answer that is generated while the caller iterates over it; the iteration yields its text in pieces."""

    def __init__(
        self,
        loaded: Loaded,
        drafter: Drafter,
        conversation: Conversation,
        prompt_tokens: int,
        steps: Iterable[Step] = (),
        stop: Sequence[str] = (),
    ) -> None:
        """``stop`` holds the stop strings; the text ends before the first one that occurs."""
        self.question = conversation.messages[-1]["content"]
        self.prompt = conversation.prompt
        self.prompt_tokens = prompt_tokens
        self.output_ids: list[int] = []
        self.stats = Stats()
        self.drafter = drafter
        self._tokenizer = loaded.tokenizer
        self._steps = steps
        self._stop = stop

    def __iter__(self) -> Iterator[str]:
        if not self._stop:  # does the work of ``before_stop`` with fewer nested generators
            return (text for text in self._texts() if text)
        pieces = ((text, SourceId.NONE) for text in self._texts())
        return (text for text, _ in before_stop(pieces, self._stop))

    def by_source(self) -> Iterator[Piece]:
        """Generate the answer; yield the text of each token and the source that drafted that token."""
        return before_stop(self._pieces_by_source(), self._stop)

    def _texts(self) -> Iterator[str]:
        text = TextStream(self._tokenizer)
        for step in self._collect_steps():
            yield text.add(step.tokens)
        yield text.end()

    def _pieces_by_source(self) -> Iterator[Piece]:
        text = TextStream(self._tokenizer)
        for step in self._collect_steps():
            for token, source in zip(step.tokens, step.sources, strict=True):
                yield text.add([token]), source
        yield text.end(), SourceId.NONE

    def _collect_steps(self) -> Iterator[Step]:
        for step in self.stats.counted(self._steps, self.drafter):
            self.output_ids += step.tokens
            yield step

    @property
    def interrupted(self) -> bool:
        return self.stats.finish is Finish.INTERRUPT

    def interrupt(self) -> None:
        """Mark the answer as interrupted; the tokens generated so far remain."""
        self.stats.finish = Finish.INTERRUPT

    @property
    def text(self) -> str:
        return cut_at_stop(text_of(self._tokenizer, self.output_ids), self._stop)


class CollectedAnswer(Answer):
    """An answer that is generated in a batch: ``add`` collects the steps, and iterating over the answer yields text."""

    def __init__(
        self,
        loaded: Loaded,
        drafter: Drafter,
        conversation: Conversation,
        prompt_tokens: int,
        stop: Sequence[str] = (),
    ) -> None:
        super().__init__(loaded, drafter, conversation, prompt_tokens, stop=stop)
        self._collected: list[Step] = []
        self._seconds_before = dict(drafter.seconds)

    def add(self, step: Step) -> None:
        self._collected.append(step)
        self.output_ids += step.tokens
        self.stats.add(step)
        if step.finish:
            self.stats.add_seconds(self._seconds_before, self.drafter.seconds)

    def _collect_steps(self) -> Iterator[Step]:
        return iter(self._collected)


BatchKey = tuple["BatchedConversation", CollectedAnswer]
RequestMaker = Callable[["BatchedConversation", Drafter], Request[BatchKey]]
"""Makes a request for the next answer of a conversation; raises PromptError if its prompt cannot be answered."""


class BatchedConversation(Conversation):
    """A conversation that is answered in a batch, with its answers so far."""

    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.answers: list[CollectedAnswer] = []
        self.drafter: Drafter | None = None
        """The drafter of the latest answer; None before the first one."""
        self.is_over = False
        self.error: PromptError | None = None

    def all_answers(self) -> Iterator[Answer]:
        yield from self.answers
        if self.error:
            raise self.error


class BatchedAnswers:
    """Answers several prompts at once and yields the answers in the order of the prompts."""

    def __init__(self, prompts: Sequence[Prompt], make_request: RequestMaker, drafters: Sequence[Drafter]) -> None:
        """``drafters`` holds one drafter for each conversation that is answered concurrently."""
        self._make_request = make_request
        self._free_drafters = list(drafters)
        self._unreported = deque(BatchedConversation(prompt) for prompt in prompts)
        self._waiting = deque(self._unreported)

    def answers(self, steps: Iterable[tuple[Request[BatchKey], Step]]) -> Iterator[Answer]:
        """Yield the answers ordered by prompt and turn; after an interrupt, also yield the unfinished answers.

        ``steps`` must come from decoding the requests that ``next_request`` returns. If a prompt cannot be answered,
        its PromptError is raised after the answers to its earlier turns, and no later prompt is started.
        """
        try:
            for request, step in steps:
                self._add(*request.key, step)
                for answer in self._finished():
                    yield answer
                    if answer.interrupted:
                        raise KeyboardInterrupt
            yield from self._finished()
        except KeyboardInterrupt:
            yield from self._interrupted()

    def next_request(self) -> Request[BatchKey] | None:
        """Return a request for the next turn of a started conversation, else for the next prompt, else None."""
        while self._waiting:
            conversation = self._waiting.popleft()
            try:
                request = self._make_request(conversation, self._free_drafters[-1])
            except PromptError as error:
                conversation.error, conversation.is_over = error, True
                self._waiting.clear()  # no prompt after an error is answered
                continue
            conversation.drafter = self._free_drafters.pop()
            conversation.answers.append(request.key[1])
            return request
        return None

    def _add(self, conversation: BatchedConversation, answer: CollectedAnswer, step: Step) -> None:
        answer.add(step)
        if step.finish:
            assert conversation.drafter is not None
            self._free_drafters.append(conversation.drafter)
            if conversation.add_answer(answer.text):
                self._waiting.appendleft(conversation)
            else:
                conversation.is_over = True

    def _finished(self) -> Iterator[Answer]:
        while self._unreported and self._unreported[0].is_over:
            yield from self._unreported.popleft().all_answers()

    def _interrupted(self) -> Iterator[Answer]:
        for conversation in self._unreported:
            for answer in conversation.answers:
                if not answer.stats.finish:
                    answer.interrupt()
                yield answer


class AnswerInputs(NamedTuple):
    """The inputs for decoding one answer, besides the tokens of its prompt."""

    drafter: Drafter
    sampler: Sampler
    stops: Container[int]
    prediction: list[int]
    """Token ids of the predicted answer; empty if there is none or the drafter doesn't use one."""


class Answerer:
    """Loads a model and its stores once, and answers prompts with them."""

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
        """``rankings`` is the number of the target's top tokens to record at each position of an answer."""
        check_decoding(decoding)
        compile_ahead(model, decoding.method)
        self.loaded = load(model)
        refuse_settings(self.loaded.target.model.generation_config)
        self.store_set = self.loaded.library(store_set).open_for(decoding)
        self._threads = model.threads
        self._decoding = decoding
        self.sampling = sampling
        self._chat = chat
        self._rankings = rankings
        self._grammars = compiler_for(self.loaded)

    @cached_property
    def _drafters(self) -> list[Drafter]:
        """One drafter per batch slot, created lazily because creation may have to time forward passes."""
        target, all_threads = self.loaded.target, torch.get_num_threads()

        def make() -> list[Drafter]:
            torch.set_num_threads(all_threads)
            choose_threads(target, self._threads, quick_record(target, what="threads"))
            return drafters_for(self._decoding, target, self.store_set)

        if is_compiling(DRAFTER):  # until the drafters join
            choose_threads(target, self._threads)
        return deferred(self._decoding.method, make, self._decoding.batch_size)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Raise PromptError if a prompt cannot be answered; if several are given, the error says which."""
        for prompt in prompts:
            try:
                self._encode_checked(prompt, prompt.messages)
                self._drafter_and_masks(self._drafters[0], prompt)
            except PromptError as error:
                raise PromptError(f"prompt {prompt.id}: {error}" if len(prompts) > 1 else str(error)) from None

    def all_answers(self, prompts: Sequence[Prompt]) -> Iterator[Answer]:
        """Yield the answers to all prompts in order, generated in batches of ``batch_size``.

        Iterate over each answer before taking the next one. An interrupted answer is the last one, except in a batch,
        where the other unfinished answers follow.
        """
        if len(self._drafters) > 1:
            batched = BatchedAnswers(prompts, self._request, self._drafters)
            size, max_new_tokens = len(self._drafters), self._decoding.max_new_tokens
            steps = decode_batch(self.loaded.target, batched.next_request, size, max_new_tokens=max_new_tokens)
            yield from batched.answers(steps)
            return
        for prompt in prompts:
            for answer in self.answers(prompt):
                yield answer
                if answer.interrupted:
                    return

    def answers(self, prompt: Prompt) -> Iterator[Answer]:
        """Yield the answer to each user turn; iterate over each answer before taking the next one."""
        conversation = Conversation(prompt)
        answer = self._answer(conversation)
        yield answer
        while conversation.add_answer(answer.text):
            answer = self._answer(conversation)
            yield answer

    def _answer(self, conversation: Conversation) -> Answer:
        ids = self._encode(conversation.prompt, conversation.messages)
        inputs = self._inputs_of(conversation, ids, self._drafters[0])
        steps = decode(
            self.loaded.target,
            ids,
            inputs.sampler,
            max_new_tokens=self._decoding.max_new_tokens,
            stops=inputs.stops,
            drafter=inputs.drafter,
            prediction=inputs.prediction,
            prefix_caching=self._decoding.prefix_caching,
        )
        return Answer(self.loaded, inputs.drafter, conversation, len(ids), steps, self.sampling.stop)

    def _request(self, conversation: BatchedConversation, drafter: Drafter) -> Request[BatchKey]:
        ids = self._encode_checked(conversation.prompt, conversation.messages)
        inputs = self._inputs_of(conversation, ids, drafter)
        answer = CollectedAnswer(self.loaded, inputs.drafter, conversation, len(ids), self.sampling.stop)
        return Request(
            (conversation, answer), ids, inputs.sampler, inputs.drafter, inputs.stops, prediction=inputs.prediction
        )

    def _inputs_of(self, conversation: Conversation, ids: list[int], drafter: Drafter) -> AnswerInputs:
        """Return the inputs for decoding a conversation's next answer; ``ids`` are the tokens of its prompt."""
        drafter, masks = self._drafter_and_masks(drafter, conversation.prompt)
        max_new_tokens = self._decoding.max_new_tokens
        sampler, stops = sampler_for(self.loaded, self.sampling, ids, max_new_tokens=max_new_tokens, first=masks)
        return AnswerInputs(drafter, sampler, stops, self._prediction(conversation, drafter))

    def _drafter_and_masks(self, drafter: Drafter, prompt: Prompt) -> tuple[Drafter, Sequence[LogitsProcessor]]:
        """Return the drafter for an answer, and logits processors that mask tokens the prompt's grammar forbids."""
        guide = self._grammars.guide(prompt.grammar) if prompt.grammar else None
        drafter = guided_drafter(drafter, guide, self._decoding.draft_tokens)
        return (RankingRecorder(drafter, self._rankings) if self._rankings else drafter), masks_of(guide)

    def _encode_checked(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        """Encode messages; raise PromptError if they leave no room for an answer."""
        ids = self._encode(prompt, messages)
        room_for(self.loaded.target, ids, self._decoding.max_new_tokens)
        return ids

    def _prediction(self, conversation: Conversation, drafter: Drafter) -> list[int]:
        """Return the token ids of the predicted answer, or an empty list if there is none or the drafter ignores it."""
        if not drafter.predicts:
            return []
        return encode_answer(self.loaded.tokenizer, conversation.messages, conversation.prediction, chat=self._chat)

    def _encode(self, prompt: Prompt, messages: Sequence[Message]) -> list[int]:
        return encode_conversation(self.loaded.tokenizer, messages, chat=self._chat, tools=prompt.tools)
