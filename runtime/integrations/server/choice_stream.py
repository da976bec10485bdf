"""Generates the answers to one request: submits jobs, and turns decoding steps into text, reasoning and tool calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from functools import partial

from hdtool.data.errors import HdtoolError, ModelError
from hdtool.runtime.core.step import Finish, Stats, Step
from hdtool.runtime.integrations.server.engine_thread import AnswerJob, EngineThread, OverloadError
from hdtool.runtime.integrations.server.metrics import Metrics
from hdtool.runtime.integrations.server.openai_formats import (
    LENGTH,
    OVERLOADED,
    SERVER,
    STOP,
    TOOL_CALLS,
    Delta,
    JsonDict,
    RequestError,
    TokenLogprobs,
    usage_of,
)
from hdtool.runtime.integrations.server.request_preparation import PreparedChoice
from hdtool.runtime.integrations.server.tool_calls import ToolCall, calls_of


class ChoiceStream:
    """Generates the choices of one request."""

    def __init__(self, engine: EngineThread, metrics: Metrics, choices: Sequence[PreparedChoice]) -> None:
        self._engine, self._metrics, self._choices = engine, metrics, choices
        self._texts = list(map(AnswerText, choices))
        self._queue: asyncio.Queue[tuple[int, Step | Exception]] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set(range(len(choices)))
        self._jobs: list[AnswerJob] = []

    def submit(self, tenant: str) -> None:
        """Submit the choices to the engine; raise RequestError if its queue is full or it is stopping."""
        self._jobs = [choice.job(tenant, partial(self._deliver, index)) for index, choice in enumerate(self._choices)]
        try:
            self._engine.submit(self._jobs)
        except OverloadError as error:
            raise _refusal(error) from None

    def _deliver(self, index: int, outcome: Step | Exception) -> None:
        """Queue the outcome of a step; called in the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, outcome))
        except RuntimeError:  # the event loop is closed, so nobody waits for the answer
            self.cancel()

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield ``(index, delta)``: a choice's index and what a step adds to the choice.

        Ending the iteration early cancels the request's jobs. Raise RequestError if an answer fails.
        """
        try:
            while self._open:
                index, outcome = await self._queue.get()
                if not isinstance(outcome, Step):
                    raise _refusal(outcome)
                text = self._texts[index]
                submitted, is_first = self._jobs[index].submitted, not text.stats.steps
                self._metrics.step(outcome, self._new_prompt_tokens(index), submitted, is_first=is_first)
                delta = text.add(outcome)
                if outcome.finish:
                    self._open.discard(index)
                if delta:
                    yield index, delta
        finally:
            self.cancel()
            self._jobs.clear()  # jobs refer to this object, and a cycle is only freed by a full garbage collection
            self._count_drafts()

    def cancel(self) -> None:
        """Cancel the answers that are not complete."""
        for index in self._open:
            if index < len(self._jobs):
                self._jobs[index].is_cancelled = True

    @property
    def stats(self) -> Stats:
        return Stats.total(text.stats for text in self._texts)

    @property
    def prompt_tokens(self) -> int:
        """Total number of prompt tokens; a prompt counts once for all of its choices."""
        prompts = {id(choice.prompt): len(choice.prompt.tokens) for choice in self._choices}
        return sum(prompts.values())

    def _new_prompt_tokens(self, index: int) -> int:
        """Return the number of prompt tokens of a choice; 0 unless it is the first choice of its prompt."""
        prompt = self._choices[index].prompt
        return 0 if index and self._choices[index - 1].prompt is prompt else len(prompt.tokens)

    @property
    def usage(self) -> JsonDict:
        """Token counts of the request, as ``usage_of`` returns them."""
        is_predicted = any(choice.prompt.prediction for choice in self._choices)
        return usage_of(self.prompt_tokens, self.stats, is_predicted=is_predicted)

    def _count_drafts(self) -> None:
        stats = self.stats
        for source in stats.sources:
            self._metrics.drafts(str(source), int(stats.drafted[source]), int(stats.accepted[source]))


class AnswerText:
    """Converts the steps of one answer to text, reasoning, tool calls and log-probabilities."""

    def __init__(self, choice: PreparedChoice) -> None:
        self.stats = Stats()
        self._choice = choice
        self._text, self._reader, self._thinking = choice.text, choice.readers.calls, choice.readers.thinking
        tools = choice.prompt.tools
        self._must_call = bool(tools.required) and not tools.is_generic
        self._num_calls = 0
        self._num_reported = 0
        self._required_text = ""

    def add(self, step: Step) -> Delta:
        """Return what a step adds to the answer, including the finish reason if it is the last step."""
        self.stats.add(step)
        if not self._choice.prompt.extension.sources:
            return self._add(step.tokens, step.finish)
        whole = Delta(steps=1)
        for number, (token, source) in enumerate(zip(step.tokens, step.sources, strict=True), 1):
            delta = self._add([token], step.finish if number == len(step.tokens) else None)
            texts = {"text": delta.text, "reasoning": delta.reasoning}
            delta.drafted.append({"source": str(source)} | {name: text for name, text in texts.items() if text})
            whole.add(delta)
        return whole

    def _add(self, tokens: list[int], finish: Finish | None) -> Delta:
        if finish is Finish.STOP and tokens[-1] in self._choice.plan.stops:  # not a part of the text
            tokens = tokens[:-1]
        text = self._text.add(tokens) + (self._text.end() if finish else "")
        reasoning: str = ""
        calls: list[ToolCall] = []
        if self._thinking:
            text, reasoning = self._thinking.add(text, is_last=finish is not None)
        if self._must_call:
            text, calls = self._required_calls(text, is_last=finish is not None)
        elif self._reader:
            text, more_reasoning, calls = self._reader.add(text)
            reasoning += more_reasoning
            if finish:
                more = self._reader.end()
                text, reasoning, calls = text + more[0], reasoning + more[1], calls + more[2]
        if (max_calls := self._choice.prompt.tools.max_calls) is not None:
            calls = calls[: max_calls - self._num_calls]
        self._num_calls += len(calls)
        stop_text = self._text.shown.found if finish else None
        return Delta(text, reasoning, calls, self._new_logprobs(len(tokens)), self._reason(finish), stop_text)

    def _reason(self, finish: Finish | None) -> str | None:
        if finish is None:
            return None
        if finish is not Finish.STOP:
            return LENGTH
        return TOOL_CALLS if self._num_calls else STOP

    def _required_calls(self, text: str, *, is_last: bool) -> tuple[str, list[ToolCall]]:
        """Collect the text of an answer that must be a JSON array of calls; return ``("", [])`` until the last piece.

        At the end, return ``("", calls)``, or ``(text, [])`` if the text is not such an array.
        """
        self._required_text += text
        if not is_last:
            return "", []
        calls = calls_of(_json_of(self._required_text))
        return ("", calls) if calls else (self._required_text, [])

    def _new_logprobs(self, tokens: int) -> list[TokenLogprobs]:
        recorded = self._choice.recorded
        if recorded is None:
            return []
        first = self._num_reported
        self._num_reported += tokens
        return recorded[first : self._num_reported]


def _refusal(error: Exception) -> RequestError:
    """Return the error to show to the client; internal errors are described only in the server's log."""
    if isinstance(error, OverloadError):
        return RequestError(str(error), status=503, kind=OVERLOADED)
    if isinstance(error, ModelError):  # such as logits that aren't numbers: no fault of the request
        return RequestError(str(error), status=500, kind=SERVER)
    if isinstance(error, HdtoolError):
        return RequestError(str(error))
    return RequestError("the answer failed inside the server; its log has the reason", status=500, kind=SERVER)


def _json_of(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
