"""What a step adds to an answer, and the answer as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hdtool.runtime.integrations.server.engine.logprobs import TokenLogprobs
from hdtool.runtime.integrations.server.protocol.tool_calls import ToolCall


@dataclass(frozen=True)
class Delta:
    """What one step adds to an answer."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[ToolCall] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish: str | None = None

    def __bool__(self) -> bool:
        return bool(self.text or self.reasoning or self.calls or self.logprobs or self.finish)


@dataclass
class Collected:
    """An answer as a whole."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: str | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.reasoning += delta.reasoning
        self.calls += delta.calls
        self.logprobs += delta.logprobs
        self.finish = delta.finish or self.finish
