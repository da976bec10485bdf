"""Replays conversations of agents, turn by turn, as requests to ``hdtool serve``.

    python -m tests.benchmarks.agent_trace --trace FILE [--model smollm2] [--conversations 4]
    python -m tests.benchmarks.agent_trace --trace FILE --sessions 10 --minutes 10

Each assistant turn becomes a request with the recorded turns before it, which the served model answers. Without
``--sessions``, every request goes to a server that drafts and to one that does not. With it, this many conversations
ask one server concurrently through all three APIs, while the memory, threads and file descriptors of its process are
sampled.
"""

from __future__ import annotations

import argparse
import http.client
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.kernels.machine_name import machine
from tests.benchmarks.laboratory import Table, parser_of
from tests.benchmarks.process_watch import ProcessWatch
from tests.support.server import RunningServer

CHAT, MESSAGES, RESPONSES = APIS = ("/chat/completions", "/messages", "/responses")
TOO_LONG = "context_length_exceeded"
TURNS = ((1, 1), (2, 2), (3, 3), (4, 6), (7, 10), (11, 99))
"""Ranges of turns that share a row of the table."""
Message = dict[str, Any]
Request = list[Message]
"""Messages before an assistant turn."""


@dataclass(frozen=True)
class Reply:
    text: str
    first: float
    """Seconds to the first text."""
    seconds: float
    tokens: int
    prompt: int
    cached: int


class TooLongError(Exception):
    """Raised when a conversation exceeds the model's context."""


def conversations(paths: Sequence[Path], limit: int) -> list[list[Request]]:
    """Return the requests of up to ``limit`` conversations."""
    made = []
    for trace in read_traces(paths)[:limit]:
        messages = [dict(message) for message in trace.messages]
        made.append([messages[: answer.message_index] for answer in trace.answers if answer.message_index])
    return [requests for requests in made if requests]


def body_of(api: str, messages: Request, tokens: int) -> dict[str, Any]:
    """Return the request body of an API: greedy and streamed."""
    common = {"temperature": 0, "stream": True}
    if api == CHAT:
        return {**common, "messages": messages, "max_tokens": tokens, "stream_options": {"include_usage": True}}
    system = "\n\n".join(message["content"] for message in messages if message["role"] == "system")
    others = [message for message in messages if message["role"] != "system"]
    if api == MESSAGES:
        return {**common, "messages": others, "max_tokens": tokens} | ({"system": system} if system else {})
    return {**common, "input": others, "max_output_tokens": tokens} | ({"instructions": system} if system else {})


def ask(server: RunningServer, api: str, messages: Request, tokens: int) -> Reply:
    """Send a request and measure the reply; raise ``TooLongError`` if it exceeds the context."""
    started, first, text = time.perf_counter(), 0.0, ""
    usage: dict[str, Any] = {}
    with closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=3600)) as connection:
        connection.request("POST", f"/v1{api}", json.dumps(body_of(api, messages, tokens)))
        response = connection.getresponse()
        if response.status != 200:
            error = response.read().decode()
            raise TooLongError if TOO_LONG in error or "prompt is too long" in error else RuntimeError(error)
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            if event.get("error"):
                raise RuntimeError(line.decode())
            piece = text_of(event)
            first = first or (time.perf_counter() - started if piece else 0.0)
            text += piece
            usage |= event.get("usage") or (event.get("response") or {}).get("usage") or {}
    seconds = time.perf_counter() - started
    return Reply(text, first or seconds, seconds, *counts_of(usage))


def text_of(event: dict[str, Any]) -> str:
    """Return the text that a streaming event of any API adds."""
    if choices := event.get("choices"):
        return str(choices[0]["delta"].get("content") or "")
    delta = event.get("delta")
    if isinstance(delta, dict):
        return str(delta.get("text") or "")
    return delta if isinstance(delta, str) and event["type"].endswith("text.delta") else ""


def counts_of(usage: dict[str, Any]) -> tuple[int, int, int]:
    """Return the number of answer tokens, prompt tokens, and prompt tokens found in the cache."""
    tokens = usage.get("completion_tokens", usage.get("output_tokens", 0))
    if "cache_read_input_tokens" in usage:
        cached = usage["cache_read_input_tokens"]
        return tokens, usage["input_tokens"] + cached, cached
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return tokens, usage.get("prompt_tokens", usage.get("input_tokens", 0)), details.get("cached_tokens", 0)


def compare(options: argparse.Namespace, traces: Sequence[Sequence[Request]]) -> None:
    """Answer all requests with and without drafts, and print a table by turn."""
    log = Path(options.log)
    with (
        RunningServer(log, options.model, "--method", options.method, *options.serve) as drafting,
        RunningServer(log.with_suffix(".plain"), options.model, "--method", "ar", *options.serve) as plain,
    ):
        found: dict[tuple[str, int], list[Reply]] = defaultdict(list)
        order, different = count(), 0
        for number, requests in enumerate(traces, 1):
            for turn, messages in enumerate(requests, 1):
                servers = [("drafts", drafting), ("plain", plain)][:: 1 if next(order) % 2 else -1]
                try:
                    replies = {name: ask(server, CHAT, messages, options.tokens) for name, server in servers}
                except TooLongError:
                    break
                different += replies["drafts"].text != replies["plain"].text
                for name, reply in replies.items():
                    found[name, turn].append(reply)
            print(f"conversation {number} of {len(traces)} is answered", flush=True)
    print(f"{machine()}; {options.model}, one thread a server; answers that differ: {different}\n")
    show(found)


def show(found: dict[tuple[str, int], list[Reply]]) -> None:
    """Print a table with a row per range of turns and one for all."""
    heads = "prompt tokens", "in the cache", "first token, s", "plain", "tokens/s", "plain", "ratio"
    table = Table("turn", "requests", *heads)
    for low, high in (*TURNS, (1, 99)):
        ours, plain = (
            [reply for (of, turn), some in found.items() if of == name and low <= turn <= high for reply in some]
            for name in ("drafts", "plain")
        )
        if not ours:
            continue
        name = "all" if (low, high) == (1, 99) else str(low) if low == high else f"{low} and later"
        name = f"{low} to {high}" if low < high < 99 else name
        ratios = [rate(one) / rate(other) for one, other in zip(ours, plain, strict=True) if one.tokens > 1]
        table.row(
            name,
            len(ours),
            f"{median(reply.prompt for reply in ours):,.0f}",
            f"{sum(reply.cached for reply in ours) / sum(reply.prompt for reply in ours):.1%}",
            *(f"{median(reply.first for reply in some):.2f}" for some in (ours, plain)),
            *(f"{median(map(rate, some)):.1f}" for some in (ours, plain)),
            f"{median(ratios):.2f}" if ratios else "",
        )


def rate(reply: Reply) -> float:
    """Return tokens per second after the first text."""
    return (reply.tokens - 1) / max(reply.seconds - reply.first, 1e-9)


class Soak:
    """Concurrent sessions against one server."""

    def __init__(self, server: RunningServer, options: argparse.Namespace, traces: Sequence[Sequence[Request]]) -> None:
        self._server, self._options, self._traces = server, options, traces
        self._started = time.monotonic()
        self.outcomes, self.replies = Counter[str](), list[Reply]()

    def run(self) -> None:
        with ThreadPoolExecutor(self._options.sessions) as sessions:
            list(sessions.map(self._session, range(self._options.sessions)))

    def _session(self, number: int) -> None:
        """Run one conversation after another, switching to the next API each time, until time is up."""
        for round_, place in enumerate(count(number, self._options.sessions)):
            if not self._converse(self._traces[place % len(self._traces)], APIS[(number + round_) % len(APIS)]):
                return

    def _converse(self, requests: Sequence[Request], api: str) -> bool:
        """Run one conversation; return False if time was up before its end."""
        for messages in requests:
            if time.monotonic() - self._started > 60 * self._options.minutes:
                return False
            try:
                self.replies.append(ask(self._server, api, messages, self._options.tokens))
                self.outcomes[f"answers of {api}"] += 1
            except TooLongError:
                self.outcomes["conversations that outgrew the context"] += 1
                break
            except (RuntimeError, OSError, http.client.HTTPException) as error:
                print(f"error: {error!r}", flush=True)
                self.outcomes["errors"] += 1
        return True


def soak(options: argparse.Namespace, traces: Sequence[Sequence[Request]]) -> None:
    """Run concurrent sessions, and print their outcomes and the growth of the server's process."""
    with RunningServer(Path(options.log), options.model, "--method", options.method, *options.serve) as server:
        sessions = Soak(server, options, traces)
        with ProcessWatch(server.process.pid) as watch:
            sessions.run()
        server.end()
    outcomes, replies = sessions.outcomes, sessions.replies
    print(f"{machine()}; {options.model}, one thread, {options.sessions} sessions, {options.minutes:g} minutes")
    print(
        ", ".join(f"{number:,} {name}" for name, number in sorted(outcomes.items())) + f"; {outcomes['errors']} errors"
    )
    read, firsts = sum(reply.prompt for reply in replies), [reply.first for reply in replies]
    print(
        f"{sum(reply.tokens for reply in replies):,} tokens of answers, {read:,} of prompts, "
        f"{sum(reply.cached for reply in replies) / read:.1%} of them in the cache; first text after "
        f"{median(firsts):.1f} s (median), {max(firsts):.1f} s (most)"
    )
    print(watch.growth())


def main() -> None:
    parser = parser_of(
        __doc__, model="smollm2", method="hd", conversations=4, tokens=64, sessions=0, minutes=10.0,
        log=str(Path(tempfile.gettempdir()) / "agent_trace.log"),
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=Path, action="append", required=True, help="a log that any command reads; repeatable"
    )
    parser.add_argument("serve", nargs="*", help="options of hdtool serve, after --")
    options = parser.parse_args()
    traces = conversations(options.trace, options.conversations)
    (soak if options.sessions else compare)(options, traces)


if __name__ == "__main__":
    main()
