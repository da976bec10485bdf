"""Turns a request into jobs: checks settings, compiles grammars, and encodes prompts and quotable text.

Drafters match an answer with its prompt token by token. When an answer quotes a tool result, the quote differs from the
result: it has no line numbers, and inside the JSON of a call it is escaped, so every line end breaks a match.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from threading import Lock
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import LogitsProcessor

from hdtool.data.chat import (
    LINE_END,
    conversation_text,
    encode_answer,
    encode_text,
    has_chat_template,
    read_conversation,
)
from hdtool.data.conversation import lone_surrogate
from hdtool.data.errors import PromptError, ToolsError
from hdtool.data.prompts import Grammar, grammar_of, prediction_of, tools_of
from hdtool.runtime.config import DecodeConfig, SamplingConfig
from hdtool.runtime.config.decoding import HIERARCHIES
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.drafter import Drafter, WrappedDrafter
from hdtool.runtime.core.engine import Verified
from hdtool.runtime.core.loop import Request
from hdtool.runtime.core.sampler import Sampler, seed_of
from hdtool.runtime.core.sequence import Step, room_for
from hdtool.runtime.generation.grammar import Guide, guided_drafter, masks_of
from hdtool.runtime.generation.text_stream import text_of
from hdtool.runtime.integrations.server.formats import RequestError, TokenLogprobs
from hdtool.runtime.integrations.server.requests import (
    MAX_PROMPTS,
    NO_TOOLS,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    ToolChoice,
    require_text_answers,
    template_messages,
)
from hdtool.runtime.integrations.server.scheduler import AnswerJob
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.samplers import compiler_for, sampler_for
from hdtool.runtime.target.load import Loaded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PARAGRAPH = "\n\n"
SYSTEM, USER = "system", "user"
LATE_INSTRUCTIONS = ("after a question", "after an answer", "at the end")
CONVERSATION = (
    {"role": SYSTEM, "content": "first instruction"},
    {"role": USER, "content": "question"},
    {"role": SYSTEM, "content": LATE_INSTRUCTIONS[0]},
    {"role": "assistant", "content": "answer"},
    {"role": SYSTEM, "content": LATE_INSTRUCTIONS[1]},
    {"role": USER, "content": "next question"},
    {"role": SYSTEM, "content": LATE_INSTRUCTIONS[2]},
)


def takes_late_instructions(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return True if the chat template renders system messages wherever they occur in a conversation."""
    if not has_chat_template(tokenizer):
        return True
    try:
        text = conversation_text(tokenizer, CONVERSATION, chat=True)
    except PromptError:
        return False
    return all(instruction in text for instruction in LATE_INSTRUCTIONS)


def with_early_instructions(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join the system messages at the beginning into one, and convert later system messages to user messages.

    A converted message is joined with the user messages next to it.
    """
    made: list[dict[str, Any]] = []
    joins = False
    for message in messages:
        is_late = message["role"] == SYSTEM and any(before["role"] != SYSTEM for before in made)
        if is_late:
            message = {**message, "role": USER}
        last = made[-1] if made else {}
        joins = message["role"] == last.get("role") and (is_late or joins or message["role"] == SYSTEM)
        if joins:
            made[-1] = {**last, "content": last["content"] + PARAGRAPH + message["content"]}
        else:
            made.append(message)
            joins = is_late
    return made


QUOTING_ROLES = ("user", "tool")
"""Roles whose messages may contain text for the answer to quote."""
NUMBERED_LINE = re.compile(r" *L?([0-9]{1,7})(?:→|\t| ?\| ?|: ?)")
"""Matches a line number as tools print it before the text of a line."""
MIN_NUMBERED_LINES = 3
"""Minimum number of consecutively numbered lines that count as a listing."""
MAX_KEPT_CHARACTERS = 4_000_000


def without_line_numbers(text: str) -> str:
    """Remove line numbers from runs of at least ``MIN_NUMBERED_LINES`` lines that are numbered consecutively."""
    lines = text.split(LINE_END)
    numbers = [NUMBERED_LINE.match(line) for line in lines]
    offsets = [int(number[1]) - line_index if number else None for line_index, number in enumerate(numbers)]
    for offset, line_indices in groupby(range(len(lines)), offsets.__getitem__):
        listing = list(line_indices)
        if offset is not None and len(listing) >= MIN_NUMBERED_LINES:
            for line_index in listing:
                number = numbers[line_index]
                lines[line_index] = lines[line_index][number.end() :] if number else lines[line_index]
    return LINE_END.join(lines)


def quoted_forms(text: str, *, in_json: bool) -> Iterator[str]:
    """Yield the forms, besides the text itself, in which an answer may quote a multi-line text.

    These are the text without its line numbers, if it has any, and with ``in_json``, that text escaped as in a JSON
    string.
    """
    if LINE_END not in text:
        return
    bare = without_line_numbers(text)
    if bare != text:
        yield bare
    if in_json:
        yield json.dumps(bare, ensure_ascii=False)[1:-1]


class Quotes:
    """Encodes text that answers may quote; caches the tokens, because each request repeats the conversation so far."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_characters: int = MAX_KEPT_CHARACTERS) -> None:
        self._tokenizer, self._max_characters = tokenizer, max_characters
        self._kept: OrderedDict[tuple[str, str, bool], Ints] = OrderedDict()
        self._characters = 0
        self._lock = Lock()

    def tokens(self, messages: Sequence[Mapping[str, Any]], owner: str, *, in_json: bool) -> Sequence[int]:
        """Return the tokens of all ``quoted_forms`` of the user and tool messages.

        The cache is separate for each ``owner``, so that response times reveal nothing about other owners' messages.
        """
        quoted = [str(message["content"]) for message in messages if message["role"] in QUOTING_ROLES]
        encoded = [self._encoded(text, owner, in_json) for text in quoted if LINE_END in text]
        return np.concatenate(encoded).tolist() if encoded else ()

    def _encoded(self, text: str, owner: str, in_json: bool) -> Ints:
        key = owner, text, in_json
        with self._lock:
            if (kept := self._kept.get(key)) is not None:
                self._kept.move_to_end(key)
                return kept
        ids = [
            token
            for form in quoted_forms(text, in_json=in_json)
            for token in encode_text(self._tokenizer, LINE_END + form, special=False)
        ]
        encoded = np.array(ids, np.int32)
        with self._lock:
            self._characters += len(text) if key not in self._kept else 0
            self._kept[key] = encoded
            while self._characters > self._max_characters:
                (_, oldest, _), _ = self._kept.popitem(last=False)
                self._characters -= len(oldest)
        return encoded


MAX_GRAMMAR_CHARACTERS = 65_536
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


@dataclass(frozen=True)
class PreparedChoice:
    """One answer, ready to be generated."""

    prompt: PreparedPrompt
    sampler: Sampler
    stops: Container[int]
    stop_texts: tuple[str, ...]
    guide: Guide | None
    recorded: list[TokenLogprobs] | None


class Preparer:
    """Prepares the requests of one server."""

    def __init__(self, loaded: Loaded, decoding: DecodeConfig, defaults: SamplingConfig) -> None:
        """``defaults`` holds the sampling settings to use where a request sets none."""
        self._loaded, self._decoding, self._defaults = loaded, decoding, defaults
        self._takes_late_instructions = takes_late_instructions(loaded.tokenizer)
        self._lock = threading.Lock()
        self._quotes = Quotes(loaded.tokenizer)
        self._grammars = compiler_for(loaded)

    def chat(self, body: ChatRequest, tenant: str) -> list[PreparedChoice]:
        """Prepare the choices of a chat request; raise HdtoolError if the request is invalid."""
        tokenizer, variables = self._loaded.tokenizer, body.template_variables
        messages, choice = self._conversation(body)
        grammar = grammar_of(body.structure, "the request")
        if grammar and choice.grammar:
            raise RequestError("response_format and tool_choice exclude each other", param="tool_choice")
        predicted = prediction_of(body.prediction, "the request")
        rendered, ids = self._read(messages, choice, variables)
        is_quoted = not predicted and self._decoding.method in HIERARCHIES
        in_json = bool(choice.tools or grammar)
        prompt = PreparedPrompt(
            ids,
            self._limit(ids, body.max_completion_tokens or body.max_tokens),
            grammar or choice.grammar,
            encode_answer(tokenizer, messages, predicted, variables=variables) if predicted else (),
            self._quotes.tokens(messages, tenant, in_json=in_json) if is_quoted else (),
            (body.top_logprobs or 0) if body.logprobs or body.top_logprobs else None,
            choice,
            rendered,
        )
        return self._choices(body, [prompt])

    def tokens(self, body: ChatRequest) -> int:
        """Return the number of prompt tokens of a chat request."""
        messages, choice = self._conversation(body)
        return len(self._read(messages, choice, body.template_variables)[1])

    def _read(
        self, messages: list[dict[str, Any]], choice: ToolChoice, variables: Mapping[str, Any]
    ) -> tuple[str, list[int]]:
        """Return the rendered conversation and its token ids; the error for tools of no use names the model."""
        try:
            return read_conversation(self._loaded.tokenizer, messages, tools=choice.tools, variables=variables)
        except ToolsError as error:
            message = f'{self._loaded.name}: {error}, as tool_choice "none" does'
            raise RequestError(message, param="tools", code="tools_not_supported") from None

    def _conversation(self, body: ChatRequest) -> tuple[list[dict[str, Any]], ToolChoice]:
        require_text_answers(body)
        tools = tools_of(body.tools, "the request")
        choice = ToolChoice.of(body.tool_choice, tools, parallel=body.parallel_tool_calls is not False)
        messages = template_messages(body.messages)
        return (messages if self._takes_late_instructions else with_early_instructions(messages)), choice

    def completion(self, body: CompletionRequest) -> list[PreparedChoice]:
        """Prepare the choices of a completion request, ordered by prompt."""
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
            prepared.append(PreparedPrompt(ids, limit, grammar, prediction, logprobs=body.logprobs, echo=echo))
        return self._choices(body, prepared)

    def job(self, choice: PreparedChoice, tenant: str, deliver: Callable[[Step | Exception], None]) -> AnswerJob:
        """Return the job that generates a choice; the engine calls ``deliver`` with each step, or with an error."""

        def request(job: AnswerJob, drafter: Drafter) -> Request[AnswerJob]:
            drafter = guided_drafter(drafter, choice.guide, self._decoding.draft_tokens)
            if choice.recorded is not None:
                drafter = LogprobRecorder(drafter, choice.prompt.logprobs or 0, choice.recorded)
            return Request(
                job,
                choice.prompt.tokens,
                choice.sampler,
                drafter,
                choice.stops,
                choice.prompt.prediction or choice.prompt.quotes,
                choice.prompt.limit,
                tenant,
            )

        return AnswerJob(tenant, request, deliver, choice.prompt.tokens)

    def _choices(self, body: GenerationRequest, prepared: Sequence[PreparedPrompt]) -> list[PreparedChoice]:
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
            "repetition_penalty": body.repetition_penalty,
        }
        set_here = {name: value for name, value in given.items() if value is not None}
        config = replace(self._defaults, seed=seed, stop=body.stops, **set_here)
        guide = self._guide(prompt.grammar)
        first = masks_of(guide)
        if body.presence_penalty or body.frequency_penalty:
            first.append(AnswerPenalty(len(prompt.tokens), body.presence_penalty or 0.0, body.frequency_penalty or 0.0))
        if biases:
            first.append(LogitBias(biases))
        sampler, stops = sampler_for(self._loaded, config, prompt.tokens, max_new_tokens=prompt.limit, first=first)
        recorded: list[TokenLogprobs] | None = [] if prompt.logprobs is not None else None
        return PreparedChoice(prompt, sampler, stops, config.stop, guide, recorded)

    def _guide(self, grammar: Grammar | None) -> Guide | None:
        if grammar and len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
            raise RequestError(
                f"the {grammar.kind.label} has {len(grammar.text):,} characters, "
                f"and at most {MAX_GRAMMAR_CHARACTERS:,} are "
                "accepted"
            )
        return self._grammars.guide(grammar) if grammar else None

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
        wrong = next((key for key in given if not (key.isascii() and key.isdigit() and int(key) < vocabulary)), None)
        if wrong is not None:
            raise RequestError(
                f"logit_bias names token {wrong[:40]!r}: its keys are token ids below {vocabulary}", param="logit_bias"
            )
        return {int(key): bias for key, bias in given.items()}


class AnswerPenalty(LogitsProcessor):
    """Lowers the score of each token in the answer so far: by ``presence`` once, by ``frequency`` per occurrence."""

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self._start, self._presence, self._frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        tokens, counts = input_ids[0, self._start :].unique(return_counts=True)
        lowered = scores.clone()
        lowered[0, tokens] -= self._presence + self._frequency * counts
        return cast(torch.FloatTensor, lowered)


class LogitBias(LogitsProcessor):
    """Adds a bias to the score of each token in ``biases``."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self._tokens, self._biases = torch.tensor(list(biases)), torch.tensor(list(biases.values()))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        biased = scores.clone()
        biased[0, self._tokens.to(scores.device)] += self._biases.to(scores.device, scores.dtype)
        return cast(torch.FloatTensor, biased)


class LogprobRecorder(WrappedDrafter):
    """Wraps a drafter to record the log-probabilities of accepted tokens."""

    reads_logits = True

    def __init__(self, drafter: Drafter, num_alternatives: int, recorded: list[TokenLogprobs]) -> None:
        """``num_alternatives`` is how many top tokens to record per position; results are appended to ``recorded``."""
        super().__init__(drafter)
        self._num_alternatives, self._recorded = num_alternatives, recorded

    @torch.inference_mode()
    def observe(self, accepted: Accepted, verified: Verified) -> None:
        rows = [0, *(node + 1 for node in accepted.path)][: len(accepted.tokens)]
        scores = verified.logits[rows].float().log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(accepted.tokens, device=scores.device)[:, None])[:, 0].tolist()
        best = scores.topk(min(self._num_alternatives, scores.shape[1])) if self._num_alternatives else None
        for index, token in enumerate(accepted.tokens):
            pairs = zip(best.indices[index].tolist(), best.values[index].tolist(), strict=True) if best else ()
            self._recorded.append(TokenLogprobs(token, chosen[index], list(pairs)))
        super().observe(accepted, verified)
