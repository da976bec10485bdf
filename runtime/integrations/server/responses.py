"""Answers and errors in the JSON of OpenAI's API: as a whole, and in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from hdtool.data.errors import HdtoolError
from hdtool.runtime.integrations.server.tool_calls import ToolCall
from hdtool.runtime.stats import Stats
from hdtool.runtime.text_stream import bytes_of, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
INVALID, AUTHENTICATION, OVERLOADED, SERVER = (
    "invalid_request_error",
    "authentication_error",
    "overloaded_error",
    "server_error",
)
DISCONNECTED = 499
"""The status of a request whose client has gone, as nginx logs it; nobody reads the response."""


class RequestError(HdtoolError):
    """A request that is refused."""

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
        self.status, self._kind, self._param, self._code = status, kind, param, code

    @property
    def name(self) -> str:
        """The code of the error, or its type; neither quotes the request."""
        return self._code or self._kind

    @property
    def body(self) -> Row:
        error = {"message": str(self), "type": self._kind, "param": self._param, "code": self._code}
        return {"error": error}


class TokenLogprobs(NamedTuple):
    """The log-probability of a token, and the most probable tokens in its place, before temperature and penalties."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Delta:
    """What one step adds to an answer, or several of them."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs or self.finish)

    def add(self, later: Delta) -> None:
        self.text += later.text
        self.reasoning += later.reasoning
        self.calls += later.calls
        self.logprobs += later.logprobs
        self.finish = later.finish or self.finish


class ChatFormat:
    """The JSON of chat completions."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._made = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}
        self._calls: dict[int, int] = {}

    def whole(self, answers: Sequence[Delta], usage: Row) -> Row:
        choices = []
        for index, answer in enumerate(answers):
            message: Row = {"role": "assistant", "content": answer.text or (None if answer.calls else "")}
            if answer.reasoning:
                message["reasoning_content"] = answer.reasoning
            if answer.calls:
                message["tool_calls"] = [_call(call) for call in answer.calls]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": answer.finish,
                }
            )
        return {"object": "chat.completion", **self._made, "choices": choices, "usage": usage}

    def first(self, index: int) -> Row:
        """The chunk before the first text."""
        return self._chunk(index, {"role": "assistant", "content": ""})

    def chunk(self, index: int, delta: Delta) -> Row:
        added: Row = {"content": delta.text} if delta.text else {}
        if delta.reasoning:
            added["reasoning_content"] = delta.reasoning
        if delta.calls:
            before = self._calls.get(index, 0)
            self._calls[index] = before + len(delta.calls)
            added["tool_calls"] = [{"index": before + place, **_call(call)} for place, call in enumerate(delta.calls)]
        return self._chunk(index, added, self._logprobs(delta.logprobs), delta.finish)

    def usage_chunk(self, usage: Row) -> Row:
        return {"object": "chat.completion.chunk", **self._made, "choices": [], "usage": usage}

    def _chunk(self, index: int, delta: Row, logprobs: Row | None = None, finish: str | None = None) -> Row:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return {"object": "chat.completion.chunk", **self._made, "choices": [choice]}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> Row | None:
        if not tokens:
            return None
        content = [
            {
                **self._token(entry.token, entry.logprob),
                "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
            }
            for entry in tokens
        ]
        return {"content": content}

    def _token(self, token: int, logprob: float) -> Row:
        text = text_of(self._tokenizer, [token], skip_special_tokens=False)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(bytes_of(self._tokenizer, token))}


class CompletionFormat:
    """The JSON of text completions."""

    def __init__(self, model: str, tokenizer: PreTrainedTokenizerBase, echoes: Sequence[str]) -> None:
        """``echoes`` are the texts before the answers."""
        self._tokenizer, self._echoes = tokenizer, echoes
        self._made = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets = [len(echo) for echo in echoes]

    def whole(self, answers: Sequence[Delta], usage: Row) -> Row:
        choices = [
            self._choice(index, self._echoes[index] + answer.text, answer.logprobs, answer.finish)
            for index, answer in enumerate(answers)
        ]
        return {**self._made, "choices": choices, "usage": usage}

    def first(self, index: int) -> Row | None:
        """The chunk with the text before the answer."""
        echo = self._echoes[index]
        return {**self._made, "choices": [self._choice(index, echo, (), None)]} if echo else None

    def chunk(self, index: int, delta: Delta) -> Row:
        return {**self._made, "choices": [self._choice(index, delta.text, delta.logprobs, delta.finish)]}

    def usage_chunk(self, usage: Row) -> Row:
        return {**self._made, "choices": [], "usage": usage}

    def _choice(self, index: int, text: str, tokens: Sequence[TokenLogprobs], finish: str | None) -> Row:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, tokens), "finish_reason": finish}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprobs]) -> Row | None:
        if not tokens:
            return None
        texts = [self._text(entry.token) for entry in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in tokens],
            "top_logprobs": [
                {self._text(token): _finite(logprob) for token, logprob in entry.top} if entry.top else None
                for entry in tokens
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return text_of(self._tokenizer, [token], skip_special_tokens=False)


Format = ChatFormat | CompletionFormat


def usage_of(prompt_tokens: int, stats: Stats) -> Row:
    """The tokens of a request. The ``cached_tokens`` of its prompt were in the KV cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": stats.tokens,
        "total_tokens": prompt_tokens + stats.tokens,
        "prompt_tokens_details": {"cached_tokens": min(stats.cached_tokens, prompt_tokens)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": stats.accepted_prediction_tokens,
            "rejected_prediction_tokens": stats.rejected_prediction_tokens,
        },
    }


def _call(call: ToolCall) -> Row:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def _finite(logprob: float) -> float:
    """JSON has no infinities."""
    return max(logprob, -9999.0) if logprob == logprob else -9999.0
