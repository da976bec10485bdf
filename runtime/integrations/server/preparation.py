"""From a request to the jobs that answer it: prompts are encoded, grammars compiled, settings checked."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hdtool.data.chat import conversation_text, encode_answer, encode_conversation, encode_text
from hdtool.data.grammar import Grammar, grammar_of
from hdtool.data.predictions import prediction_of
from hdtool.data.tools import tools_of
from hdtool.data.unicode import lone_surrogate
from hdtool.runtime.config import DecodeConfig, SamplingConfig
from hdtool.runtime.drafter import Drafter
from hdtool.runtime.grammar.guide import Guide
from hdtool.runtime.grammar.guided_drafter import guided
from hdtool.runtime.grammar.processor import masks_of
from hdtool.runtime.integrations.server.engine.job import Job
from hdtool.runtime.integrations.server.engine.logprobs import LogprobRecorder, TokenLogprobs
from hdtool.runtime.integrations.server.engine.penalties import AnswerPenalty, LogitBias
from hdtool.runtime.integrations.server.protocol.errors import RequestError
from hdtool.runtime.integrations.server.protocol.messages import require_text_answers, template_messages
from hdtool.runtime.integrations.server.protocol.schema import MOST_PROMPTS, Asked, ChatRequest, CompletionRequest
from hdtool.runtime.integrations.server.protocol.tool_choice import NO_TOOLS, ToolChoice
from hdtool.runtime.loop import Request
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.sampling.sampler import Sampler
from hdtool.runtime.sequence import Step, room_for
from hdtool.runtime.text_stream import text_of

MOST_GRAMMAR = 65_536
"""Characters of a grammar; larger ones would take seconds to compile."""


@dataclass(frozen=True)
class Asking:
    """A prompt and its settings; all choices of an answer share them."""

    prompt: list[int]
    most: int
    """Limit of the tokens of an answer."""
    grammar: Grammar | None = None
    prediction: Sequence[int] = ()
    logprobs: int | None = None
    """The number of alternatives to report for each token; None reports no log-probabilities."""
    tools: ToolChoice = NO_TOOLS
    prompt_text: str = ""
    """What the model reads; only where tools are presented."""
    echo: str = ""
    """Text before the answer."""


@dataclass(frozen=True)
class Choice:
    """One answer, ready to be generated."""

    asked: Asking
    sampler: Sampler
    stops: Container[int]
    stop_texts: tuple[str, ...]
    guide: Guide | None
    recorded: list[TokenLogprobs] | None


class Preparer:
    """Prepares the requests of one server."""

    def __init__(self, loaded: Loaded, decoding: DecodeConfig, defaults: SamplingConfig) -> None:
        """``defaults`` holds for what a request leaves open."""
        self._loaded, self._decoding, self._defaults = loaded, decoding, defaults
        self._lock = threading.Lock()

    def chat(self, asked: ChatRequest) -> list[Choice]:
        """The choices of a chat request."""
        tokenizer = self._loaded.tokenizer
        require_text_answers(asked)
        messages = template_messages(asked.messages)
        tools = tools_of(asked.tools, "the request")
        choice = ToolChoice.of(asked.tool_choice, tools, parallel=asked.parallel_tool_calls is not False)
        grammar = grammar_of(asked.structure, "the request")
        if grammar and choice.grammar:
            raise RequestError("response_format and tool_choice exclude each other", param="tool_choice")
        predicted = prediction_of(asked.prediction, "the request")
        ids = encode_conversation(tokenizer, messages, tools=choice.tools)
        one = Asking(
            ids,
            self._limit(ids, asked.max_completion_tokens or asked.max_tokens),
            grammar or choice.grammar,
            encode_answer(tokenizer, messages, predicted) if predicted else (),
            (asked.top_logprobs or 0) if asked.logprobs or asked.top_logprobs else None,
            choice,
            conversation_text(tokenizer, messages, chat=True, tools=choice.tools) if choice.tools else "",
        )
        return self._choices(asked, [one])

    def completion(self, asked: CompletionRequest) -> list[Choice]:
        """The choices of a completion request, prompt by prompt."""
        tokenizer, prompts = self._loaded.tokenizer, asked.prompts
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise RequestError(f"prompt must hold 1 to {MOST_PROMPTS} prompts, got {len(prompts)}", param="prompt")
        grammar = grammar_of(asked.structure, "the request")
        predicted = prediction_of(asked.prediction, "the request")
        prediction = encode_text(tokenizer, predicted, special=False) if predicted else ()
        made = []
        for prompt in prompts:
            ids = self._ids(prompt)
            echo = (prompt if isinstance(prompt, str) else text_of(tokenizer, ids)) if asked.echo else ""
            limit = self._limit(ids, asked.max_tokens)
            made.append(Asking(ids, limit, grammar, prediction, asked.logprobs, echo=echo))
        return self._choices(asked, made)

    def job(self, choice: Choice, tenant: str, deliver: Callable[[Step | Exception], None]) -> Job:
        """The job of the engine that generates a choice."""

        def request(job: Job, drafter: Drafter) -> Request[Job]:
            drafter = guided(drafter, choice.guide, self._decoding.draft_tokens)
            if choice.recorded is not None:
                drafter = LogprobRecorder(drafter, choice.asked.logprobs or 0, choice.recorded)
            return Request(
                job,
                choice.asked.prompt,
                choice.sampler,
                drafter,
                choice.stops,
                choice.asked.prediction,
                choice.asked.most,
                tenant,
            )

        return Job(tenant, request, deliver)

    def _choices(self, asked: Asked, made: Sequence[Asking]) -> list[Choice]:
        seed = secrets.randbits(63) if asked.seed is None else asked.seed
        biases = self._biases(asked.logit_bias or {})
        with self._lock:  # the library's preparation of ``generate`` is not made for several threads
            return [
                self._choice(asked, one, (seed + number) % 2**64, biases)
                for one in made
                for number in range(asked.n or 1)
            ]

    def _choice(self, asked: Asked, one: Asking, seed: int, biases: Mapping[int, float]) -> Choice:
        given: dict[str, Any] = {
            "temperature": asked.temperature,
            "top_k": None if asked.top_k is None else max(0, asked.top_k),
            "top_p": asked.top_p,
            "repetition_penalty": asked.repetition_penalty,
        }
        set_here = {name: value for name, value in given.items() if value is not None}
        config = replace(self._defaults, seed=seed, stop=asked.stops, **set_here)
        guide = self._guide(one.grammar)
        first = masks_of(guide)
        if asked.presence_penalty or asked.frequency_penalty:
            first.append(AnswerPenalty(len(one.prompt), asked.presence_penalty or 0.0, asked.frequency_penalty or 0.0))
        if biases:
            first.append(LogitBias(biases))
        sampler, stops = self._loaded.sampler(config, one.prompt, max_new_tokens=one.most, first=first)
        recorded: list[TokenLogprobs] | None = [] if one.logprobs is not None else None
        return Choice(one, sampler, stops, config.stop, guide, recorded)

    def _guide(self, grammar: Grammar | None) -> Guide | None:
        if grammar and len(grammar.text) > MOST_GRAMMAR:
            raise RequestError(
                f"the {grammar.kind.label} has {len(grammar.text):,} characters, and at most {MOST_GRAMMAR:,} are "
                "accepted"
            )
        return self._loaded.guide(grammar)

    def _limit(self, ids: Sequence[int], asked: int | None) -> int:
        """The limit of tokens of an answer; raises if the prompt leaves no room in the context."""
        most = self._decoding.max_new_tokens if asked is None else asked
        room, _ = room_for(self._loaded.target, ids, most)
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
