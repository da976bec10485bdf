"""Formats answers and errors as JSON for OpenAI's completion APIs: as whole responses or as stream events."""

from __future__ import annotations

import secrets
import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from hdtool.data.errors import HdtoolError
from hdtool.runtime.core.step import Stats
from hdtool.runtime.generation.text_stream import bytes_of, token_text
from hdtool.runtime.integrations.server.tool_calls import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

JsonDict = dict[str, Any]
INVALID, AUTHENTICATION, OVERLOADED, SERVER = (
    "invalid_request_error",
    "authentication_error",
    "overloaded_error",
    "server_error",
)
STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
"""Reasons why answers end; other APIs than OpenAI's completions translate them."""
DISCONNECTED = 499
"""Status to log for a request whose client has disconnected, as nginx does."""


class RequestError(HdtoolError):
    """Raised to refuse a request; holds the HTTP status and the fields of the error response."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code

    @property
    def name(self) -> str:
        """Code of the error, or its type if it has no code; safe to log, because neither quotes the request."""
        return self.code or self.kind

    @property
    def body(self) -> JsonDict:
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a token and of the top tokens at its position, before temperature and penalties apply."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Delta:
    """What one or more steps add to an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None
    stop_text: str | None = None
    """Stop string that ended the answer, else None."""
    steps: int = 0
    """Number of steps that ``drafted`` describes."""
    drafted: list[JsonDict] = field(default_factory=list)
    """Source and completed text of each token; empty unless the request asks for sources."""

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs or self.finish or self.drafted)

    def add(self, later: Delta) -> None:
        self.text += later.text
        self.reasoning += later.reasoning
        self.calls += later.calls
        self.logprobs += later.logprobs
        self.finish = later.finish or self.finish
        self.stop_text = later.stop_text or self.stop_text
        self.steps += later.steps
        self.drafted += later.drafted


class Format(Protocol):
    """Formats the answers to one request as the JSON that an API returns."""

    last_event: str | None = None
    """Data of a last event that is not JSON; None if the API has no such event."""

    def whole(self, answers: Sequence[Delta], usage: JsonDict) -> JsonDict:
        """Return the body of a response that is not streamed."""

    def opening(self, prompt_tokens: int) -> Iterable[JsonDict]:
        """Return the events to send before any generated text."""

    def added(self, index: int, delta: Delta) -> Iterable[JsonDict]:
        """Return the events that add ``delta`` to the answer with this ``index``."""

    def closing(self, usage: JsonDict) -> Iterable[JsonDict]:
        """Return the events to send once all answers are complete."""

    def failed(self, error: RequestError) -> JsonDict:
        """Return the event for an error that ends a stream."""
        return error.body


class ChoicesFormat(Format):
    """Formats answers as the choices of OpenAI's older APIs, whole or chunk by chunk."""

    last_event = "[DONE]"

    def __init__(
        self, model: str, tokenizer: PreTrainedTokenizerBase, prefix: str, object_name: str, *, with_usage: bool
    ) -> None:
        """If ``with_usage`` is True, the last event before ``[DONE]`` reports the token counts."""
        self._tokenizer, self._with_usage = tokenizer, with_usage
        made = {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._made: JsonDict = made | {"object": object_name}
        self._chunk_fields: JsonDict = self._made

    def whole(self, answers: Sequence[Delta], usage: JsonDict) -> JsonDict:
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        return {**self._made, "choices": choices, "usage": usage}

    def added(self, index: int, delta: Delta) -> Iterable[JsonDict]:
        return [self._chunk(self._added_choice(index, delta))]

    def closing(self, usage: JsonDict) -> Iterable[JsonDict]:
        return [{**self._chunk(), "usage": usage}] if self._with_usage else []

    def _chunk(self, *choices: JsonDict) -> JsonDict:
        return {**self._chunk_fields, "choices": list(choices)}

    def _choice(self, index: int, answer: Delta, content: JsonDict) -> JsonDict:
        logprobs = self._logprobs(index, answer.logprobs) if answer.logprobs else None
        extension = {"hdtool": {"steps": answer.steps, "tokens": answer.drafted}} if answer.drafted else {}
        return {"index": index, **content, "logprobs": logprobs, "finish_reason": answer.finish, **extension}

    @abstractmethod
    def _whole_choice(self, index: int, answer: Delta) -> JsonDict: ...

    @abstractmethod
    def _added_choice(self, index: int, delta: Delta) -> JsonDict: ...

    @abstractmethod
    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> JsonDict: ...


class ChatFormat(ChoicesFormat):
    """Formats answers as OpenAI's chat completions."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, choices: int, *, with_usage: bool) -> None:
        super().__init__(model, tokenizer, "chatcmpl", "chat.completion", with_usage=with_usage)
        self._chunk_fields = self._made | {"object": "chat.completion.chunk"}
        self._num_calls = [0] * choices

    def opening(self, prompt_tokens: int) -> Iterable[JsonDict]:
        first = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(self._choice(index, Delta(), first)) for index in range(len(self._num_calls))]

    def _whole_choice(self, index: int, answer: Delta) -> JsonDict:
        message: JsonDict = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
        message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        message |= {"tool_calls": list(map(_call, answer.calls))} if answer.calls else {}
        return self._choice(index, answer, {"message": message})

    def _added_choice(self, index: int, delta: Delta) -> JsonDict:
        added: JsonDict = {"content": delta.text} if delta.text else {}
        added |= {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.calls:
            added["tool_calls"] = [
                {"index": number, **_call(call)} for number, call in enumerate(delta.calls, self._num_calls[index])
            ]
            self._num_calls[index] += len(delta.calls)
        return self._choice(index, delta, {"delta": added})

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> JsonDict:
        return {"content": logprob_rows(self._tokenizer, tokens)}


class CompletionFormat(ChoicesFormat):
    """Formats answers as OpenAI's text completions."""

    def __init__(
        self, model: str, tokenizer: PreTrainedTokenizerBase, echoes: Sequence[str], *, with_usage: bool
    ) -> None:
        """``echoes`` holds the text to return before each answer."""
        super().__init__(model, tokenizer, "cmpl", "text_completion", with_usage=with_usage)
        self._echoes = echoes
        self._offsets = [0] * len(echoes)

    def opening(self, prompt_tokens: int) -> Iterable[JsonDict]:
        return [
            self._chunk(self._choice(index, Delta(), {"text": echo})) for index, echo in enumerate(self._echoes) if echo
        ]

    def _whole_choice(self, index: int, answer: Delta) -> JsonDict:
        return self._choice(index, answer, {"text": self._echoes[index] + answer.text})

    def _added_choice(self, index: int, delta: Delta) -> JsonDict:
        return self._choice(index, delta, {"text": delta.text})

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> JsonDict:
        texts = [token_text(self._tokenizer, entry.token) for entry in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in tokens],
            "top_logprobs": [self._by_text(entry.top) or None for entry in tokens],
            "text_offset": offsets,
        }

    def _by_text(self, top: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Return log-probabilities by text, each that of the most probable token with this text.

        Several tokens may have one text, such as those that end within a character.
        """
        by_text: dict[str, float] = {}
        for token, logprob in top:  # best first
            by_text.setdefault(token_text(self._tokenizer, token), _finite(logprob))
        return by_text


def usage_of(prompt_tokens: int, stats: Stats, *, is_predicted: bool = True) -> JsonDict:
    """Return a request's token counts in the form of OpenAI's ``usage`` object.

    Prediction tokens are only counted if the request had a prediction (``is_predicted``).
    """
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": min(stats.cached_tokens, prompt_tokens)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted_prediction_tokens if is_predicted else 0,
            "rejected_prediction_tokens": stats.rejected_prediction_tokens if is_predicted else 0,
        },
    }


def logprob_rows(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[TokenLogprobs]) -> list[JsonDict]:
    """Return log-probabilities in the form that chat completions use."""

    def row(token: int, logprob: float) -> JsonDict:
        return {
            "token": token_text(tokenizer, token),
            "logprob": _finite(logprob),
            "bytes": list(bytes_of(tokenizer, token)),
        }

    return [
        {**row(entry.token, entry.logprob), "top_logprobs": [row(token, logprob) for token, logprob in entry.top]}
        for entry in tokens
    ]


def _call(call: ToolCall) -> JsonDict:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _finite(logprob: float) -> float:
    """Replace NaN and log-probabilities below -9999 with -9999, because JSON has neither infinities nor NaN."""
    return max(logprob, -9999.0) if logprob == logprob else -9999.0
