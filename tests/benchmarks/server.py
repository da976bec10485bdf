"""Tests ``hdtool serve`` under load.

    python -m tests.benchmarks.server --model MODEL [--minutes 10] [--streams 50]

Opens many concurrent streams and cuts off a third of them. Compares complete answers with plain decoding, and the
server's memory after two minutes with that at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import openai

from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from tests.benchmarks.laboratory import parser_of
from tests.benchmarks.process_watch import ProcessWatch
from tests.server.plain import plain_text
from tests.support.server import RunningServer

QUESTIONS = [
    f"{start} {topic}?"
    for start in ("What is", "How do I use", "When would I not use", "What is a good example of", "Who invented")
    for topic in (
        "a linked list", "the Fourier transform", "photosynthesis", "a sonnet", "compound interest", "a hash table",
        "the Magna Carta", "sourdough", "plate tectonics", "binary search", "a sorting network", "the metric system",
    )
]  # fmt: skip
TOKENS = 48


async def answered(client: openai.AsyncOpenAI, model: str, question: str, cut: int | None = None) -> str:
    """Return the text of a stream, which is cut off after ``cut`` chunks."""
    create: Any = client.chat.completions.create
    messages = [{"role": "user", "content": question}]
    stream = await create(model=model, messages=messages, max_tokens=TOKENS, temperature=0, stream=True)
    text, chunks = "", 0
    async for chunk in stream:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        chunks += 1
        if cut is not None and chunks > cut:
            await stream.close()
            break
    return text


def run(options: argparse.Namespace) -> None:
    print(f"answers to {len(QUESTIONS)} questions by plain decoding", flush=True)
    loaded = load(ModelConfig(options.model, threads=1))
    expected = {question: plain_text(loaded, question, TOKENS) for question in QUESTIONS}
    del loaded
    kept = ("--prefix-cache-mib", str(options.prefix_cache_mib), "--history", options.history)
    with RunningServer(options.log, options.model, "--method", options.method, *kept) as server:
        with ProcessWatch(server.process.pid) as watch:
            counts = asyncio.run(_load(server, options, expected))
        server.end()
    print(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    print(watch.growth(60 * options.settled))


async def _load(server: RunningServer, options: argparse.Namespace, expected: dict[str, str]) -> dict[str, int]:
    client = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0, timeout=3600)
    counts = {"complete and equal": 0, "different": 0, "cut off": 0, "errors": 0}
    started = time.monotonic()

    async def stream(number: int) -> None:
        chosen = random.Random(number)
        while time.monotonic() - started < 60 * options.minutes:
            question = chosen.choice(QUESTIONS)
            cut = chosen.randrange(1, 12) if chosen.random() < 1 / 3 else None
            try:
                text = await answered(client, options.model, question, cut)
            except openai.OpenAIError as error:
                print(f"error: {error}", flush=True)
                counts["errors"] += 1
                continue
            if cut is not None and text != expected[question]:
                counts["cut off" if expected[question].startswith(text) else "different"] += 1
            else:
                counts["complete and equal" if text == expected[question] else "different"] += 1

    await asyncio.gather(*map(stream, range(options.streams)))
    await asyncio.sleep(2)
    return counts


def main() -> None:
    parser = parser_of(
        __doc__, method="hd", minutes=10.0, streams=50, prefix_cache_mib=64, settled=2.0, history="memory"
    )
    parser.add_argument("--model", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.log = Path(folder) / "log"
        run(options)


if __name__ == "__main__":
    main()
