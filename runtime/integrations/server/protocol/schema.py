"""The bodies of requests, as OpenAI's API describes them; fields that it does not have are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

MOST_CHOICES, MOST_STOPS, MOST_LOGPROBS, MOST_PROMPTS = 16, 16, 20, 64
LogitBias = dict[str, Annotated[float, Field(ge=-100, le=100)]]


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)
    include_usage: bool | None = None


class Asked(BaseModel):
    """The fields that chat and text completions share."""

    model_config = ConfigDict(strict=True)

    model: str | None = None
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = None
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    stop: str | list[str] | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    prediction: Any = None
    response_format: Any = None
    json_schema: Any = None
    regex: str | None = None
    grammar: str | None = None

    @field_validator("stop")
    @classmethod
    def _stop(cls, stop: str | list[str] | None) -> str | list[str] | None:
        texts = [stop] if isinstance(stop, str) else stop or []
        if len(texts) > MOST_STOPS or not all(texts) or any(len(text) > 1000 for text in texts):
            raise ValueError(f"at most {MOST_STOPS} texts of 1 to 1,000 characters each")
        return stop

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def structure(self) -> dict[str, Any]:
        """The fields that say what the answer must match."""
        names = ("json_schema", "regex", "grammar", "response_format")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


class Part(BaseModel):
    """A part of a message. Parts of other types than text are refused by their type."""

    model_config = ConfigDict(strict=True)
    type: str
    text: str | None = None


class CalledFunction(BaseModel):
    model_config = ConfigDict(strict=True)
    name: str
    arguments: str | None = None


class Call(BaseModel):
    model_config = ConfigDict(strict=True)
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    model_config = ConfigDict(strict=True)
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        return (
            "".join(part.text or "" for part in self.content) if isinstance(self.content, list) else self.content or ""
        )


class ChatRequest(Asked):
    """The body of ``/v1/chat/completions``."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: None = Field(None, description="the former name of tools")
    modalities: list[str] | None = None
    audio: Any = None


class CompletionRequest(Asked):
    """The body of ``/v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    best_of: Literal[1] | None = None
    suffix: Literal[""] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]
