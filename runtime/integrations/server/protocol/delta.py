"""What a step adds to an answer, and the answer as a whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from hdtool.runtime.integrations.server.engine.logprobs import TokenLogprobs
from hdtool.runtime.integrations.server.protocol.tool_calls import ToolCall


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
