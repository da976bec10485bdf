"""Turns a request into jobs: checks settings, compiles grammars, and encodes prompts and quotable text."""

from __future__ import annotations

import re
import secrets
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import LogitsProcessor

from hdtool.data.chat import encode_answer, encode_text, read_conversation
from hdtool.data.errors import HdtoolError, PromptError, lone_surrogate
from hdtool.data.prompts import Grammar, grammar_of, prediction_of, tools_of
from hdtool.runtime.answering.answer_plan import AnswerPlan, compiler_for, plan_answer
from hdtool.runtime.core.request import room_for
from hdtool.runtime.core.sampler import seed_of
from hdtool.runtime.core.step import Step
from hdtool.runtime.generation.grammar import Guide
from hdtool.runtime.generation.text_stream import TextStream, text_of
from hdtool.runtime.integrations.server.call_grammar import arguments_schema
from hdtool.runtime.integrations.server.engine_thread import AnswerJob
from hdtool.runtime.integrations.server.generic_tools import GenericTools
from hdtool.runtime.integrations.server.logit_processors import AnswerPenalty, LogitBias, LogprobRecorder
from hdtool.runtime.integrations.server.openai_formats import RequestError, TokenLogprobs
from hdtool.runtime.integrations.server.openai_requests import (
    MAX_PROMPTS,
    NO_EXTENSION,
    NO_TOOLS,
    ChatRequest,
    CompletionRequest,
    Extension,
    GenerationRequest,
    ToolChoice,
    require_text_answers,
    template_messages,
)
from hdtool.runtime.integrations.server.quoted_files import Quotes
from hdtool.runtime.integrations.server.system_messages import takes_late_instructions, with_early_instructions
from hdtool.runtime.integrations.server.tool_calls import THINK_CLOSING, ThinkingReader, ToolCallReader
from hdtool.runtime.settings.decoding import HIERARCHIES, DecodeConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.load import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_REQUEST_GRAMMAR_CHARACTERS = 65_536
"""Maximum length of a grammar in characters; longer ones would take seconds to compile."""


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt and its settings, shared by all choices that answer it."""

    tokens: list[int]
    limit: int
    """Maximum number of tokens in an answer."""
    grammar: Grammar | None = None
    prediction: Sequence[int] = ()
    """Token ids of the request's predicted output."""
    quotes: Sequence[int] = ()
    """Tokens of text that the answer may quote; used as the prediction if the request has none."""
    logprobs: int | None = None
    """Number of alternatives to report for each token; None reports no log-probabilities."""
    tools: ToolChoice = NO_TOOLS
    rendered: str = ""
    """Prompt as the chat template renders it; empty for completions."""
    echo: str = ""
    """Text to return before the answer."""
    extension: Extension = NO_EXTENSION

    def readers(self, tokenizer: PreTrainedTokenizerBase) -> AnswerReaders:
        tools = self.tools
        if not self.rendered or (self.grammar and not tools.is_generic):
            return AnswerReaders()
        calls = ToolCallReader.of(tokenizer, tools.tools, self.rendered, is_generic=tools.is_generic)
        has_own = calls is not None and calls.reads_thinking
        thinking = None if has_own else ThinkingReader.of(tokenizer, self.rendered)
        is_marked = thinking is not None and THINK_CLOSING in tokenizer.all_special_tokens
        return AnswerReaders(calls, thinking, calls is not None or is_marked)


class AnswerReaders(NamedTuple):
    """Readers that split one answer's text into plain text, tool calls and thinking."""

    calls: ToolCallReader | None = None
    thinking: ThinkingReader | None = None
    is_marked: bool = False
    """True if special tokens may mark calls or thinking."""


@dataclass(frozen=True)
class PreparedChoice:
    """One answer, ready to be generated."""

    prompt: PreparedPrompt
    plan: AnswerPlan
    text: TextStream
    """Turns the answer's tokens into text."""
    readers: AnswerReaders
    recorded: list[TokenLogprobs] | None

    def job(self, tenant: str, deliver: Callable[[Step | Exception], None]) -> AnswerJob:
        """Return the job that generates this choice; the engine calls ``deliver`` with each step, or with an error."""
        prompt = self.prompt
        observer = None if self.recorded is None else LogprobRecorder(prompt.logprobs or 0, self.recorded)
        prediction = prompt.prediction or prompt.quotes
        return AnswerJob(tenant, self.plan, deliver, prediction, observer, prompt.extension.drafts)


class Preparer:
    """Prepares the requests of one server."""

    def __init__(
        self, loaded: Loaded, decoding: DecodeConfig, defaults: SamplingConfig, max_answers: int = sys.maxsize
    ) -> None:
        """``defaults`` holds the sampling settings to use where a request sets none.

        A request for more than ``max_answers`` answers is refused before any of them is planned.
        """
        self._max_answers = max_answers
        self._loaded, self._decoding, self._defaults = loaded, decoding, defaults
        self._takes_late_instructions = takes_late_instructions(loaded.tokenizer)
        self._generic_tools = GenericTools.of(loaded.tokenizer)
        self._lock = threading.Lock()
        self._quotes = Quotes(loaded.tokenizer)
        self._grammars = compiler_for(loaded)

    def chat(self, body: ChatRequest, tenant: str) -> list[PreparedChoice]:
        """Prepare the choices of a chat request; raise HdtoolError if the request is invalid."""
        tokenizer, variables = self._loaded.tokenizer, body.template_variables
        messages, choice = self._conversation(body)
        grammar = grammar_of(body.structure, "the request")
        if grammar and choice.required:
            raise RequestError("response_format and tool_choice exclude each other", param="tool_choice")
        predicted = prediction_of(body.prediction, "the request")
        rendered, ids = self._read(messages, choice, variables)
        is_quoted = not predicted and self._decoding.method in HIERARCHIES
        in_json = bool(choice.tools or grammar)
        if grammar:  # the whole answer matches it, so that no call is marked
            choice = replace(choice, is_generic=False)
        prompt = PreparedPrompt(
            ids,
            self._limit(ids, body.max_completion_tokens or body.max_tokens),
            grammar or self._call_grammar(choice, rendered),
            encode_answer(tokenizer, messages, predicted, variables=variables) if predicted else (),
            self._quotes.tokens(messages, tenant, in_json=in_json) if is_quoted else (),
            (body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None,
            choice,
            rendered,
            extension=body.hdtool,
        )
        return self._choices(body, [prompt])

    def tokens(self, body: ChatRequest) -> int:
        """Return the number of prompt tokens of a chat request; raise HdtoolError if the request is invalid."""
        messages, choice = self._conversation(body)
        return len(self._read(messages, choice, body.template_variables)[1])

    def _read(
        self, messages: list[dict[str, Any]], choice: ToolChoice, variables: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        """Return the rendered conversation and its token ids."""
        tools = () if choice.is_generic else choice.tools
        return read_conversation(self._loaded.tokenizer, messages, tools=tools, variables=variables)

    def _conversation(self, body: ChatRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
        require_text_answers(body)
        tools = tools_of(body.tools, "the request")
        choice = ToolChoice.of(body.tool_choice, tools, parallel=body.parallel_tool_calls is not False)
        messages = template_messages(body.messages)
        if not self._takes_late_instructions:
            messages = with_early_instructions(messages)
        if self._generic_tools is None:
            return messages, choice
        return self._generic_tools.conversation(messages, choice.tools), replace(choice, is_generic=bool(choice.tools))

    def _call_grammar(self, choice: ToolChoice, rendered: str) -> Grammar | None:
        """Return the grammar that the tools require, if any; raise RequestError for the first unusable tool schema."""
        grammar = choice.grammar(rendered)
        try:
            self._guide(grammar)
        except HdtoolError as fault:
            for tool in choice.tools:
                try:
                    self._guide(Grammar.json_schema(arguments_schema(tool)))
                except HdtoolError as error:
                    raise RequestError(f"tools: {tool['function']['name']}: {error}", param="tools") from None
            raise RequestError(f"tools: {fault}", param="tools") from None
        return grammar

    def completion(self, body: CompletionRequest) -> list[PreparedChoice]:
        """Prepare the choices of a completion request, ordered by prompt; raise HdtoolError if it is invalid."""
        tokenizer, prompts = self._loaded.tokenizer, body.prompts
        if not 1 <= len(prompts) <= MAX_PROMPTS:
            raise RequestError(f"prompt must hold 1 to {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt")
        if body.echo and body.logprobs is not None:
            raise RequestError(
                "echo and logprobs exclude each other, because this server computes none for prompts: leave one out",
                param="logprobs",
            )
        grammar = grammar_of(body.structure, "the request")
        predicted = prediction_of(body.prediction, "the request")
        prediction = encode_text(tokenizer, predicted, special=False) if predicted else ()
        prepared = []
        for prompt in prompts:
            ids = self._ids(prompt)
            echo = (prompt if isinstance(prompt, str) else text_of(tokenizer, ids)) if body.echo else ""
            limit = self._limit(ids, body.max_tokens)
            prepared.append(
                PreparedPrompt(
                    ids, limit, grammar, prediction, logprobs=body.logprobs, echo=echo, extension=body.hdtool
                )
            )
        return self._choices(body, prepared)

    def _choices(self, body: GenerationRequest, prepared: Sequence[PreparedPrompt]) -> list[PreparedChoice]:
        if (answers := len(prepared) * (body.n or 1)) > self._max_answers:
            raise PromptError(
                f"the request asks for {answers} answers, and this server takes at most {self._max_answers} at once: "
                "send fewer prompts or a lower n"
            )
        seed = secrets.randbits(63) if body.seed is None else body.seed % 2**64
        biases = self._biases(body.logit_bias or {})
        with self._lock:  # transformers' preparation of ``generate`` is not thread-safe
            return [
                self._choice(body, prompt, seed_of(seed, number), biases)
                for prompt in prepared
                for number in range(body.n or 1)
            ]

    def _choice(
        self, body: GenerationRequest, prompt: PreparedPrompt, seed: int, biases: Mapping[int, float]
    ) -> PreparedChoice:
        given: dict[str, Any] = {
            "temperature": body.temperature,
            "top_k": None if body.top_k is None else max(0, body.top_k),
            "top_p": body.top_p,
            "min_p": body.min_p,
            "repetition_penalty": body.repetition_penalty,
        }
        set_here = {name: value for name, value in given.items() if value is not None}
        config = replace(self._defaults, seed=seed, stop=body.stops, **set_here)
        processors: list[LogitsProcessor] = []
        if body.presence_penalty or body.frequency_penalty:
            processors.append(
                AnswerPenalty(len(prompt.tokens), body.presence_penalty or 0.0, body.frequency_penalty or 0.0)
            )
        if biases:
            processors.append(LogitBias(biases))
        guide = self._guide(prompt.grammar)
        tokenizer, readers = self._loaded.tokenizer, prompt.readers(self._loaded.tokenizer)
        new_text = partial(TextStream, tokenizer, config.stop, skip_special_tokens=not readers.is_marked)
        plan = plan_answer(self._loaded, config, prompt.tokens, prompt.limit, guide, processors, new_text())
        recorded: list[TokenLogprobs] | None = [] if prompt.logprobs is not None else None
        return PreparedChoice(prompt, plan, new_text(), readers, recorded)

    def _guide(self, grammar: Grammar | None) -> Guide | None:
        if grammar and len(grammar.text) > MAX_REQUEST_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"the {grammar.kind.label} has {len(grammar.text):,} characters, "
                f"and at most {MAX_REQUEST_GRAMMAR_CHARACTERS:,} are "
                "accepted"
            )
        return self._grammars.guide_for(grammar)

    def _limit(self, ids: Sequence[int], given: int | None) -> int:
        """Return the maximum number of tokens in an answer; raise ContextError if the prompt fills the context."""
        max_tokens = self._decoding.max_new_tokens if given is None else given
        room, _ = room_for(self._loaded.target, ids, max_tokens)
        return room

    def _ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if fault := lone_surrogate(prompt):
            raise RequestError(f"the prompt is not valid Unicode ({fault})", param="prompt")
        return encode_text(self._loaded.tokenizer, prompt, special=True)

    def _biases(self, given: Mapping[str, float]) -> dict[int, float]:
        vocabulary = self._loaded.target.vocabulary
        digits = len(str(vocabulary))
        wrong = next(
            (key for key in given if not re.fullmatch(f"[0-9]{{1,{digits}}}", key) or int(key) >= vocabulary), None
        )
        if wrong is not None:
            raise RequestError(
                f"logit_bias names token {wrong[:40]!r}: its keys are token ids below {vocabulary}", param="logit_bias"
            )
        return {int(key): bias for key, bias in given.items()}
