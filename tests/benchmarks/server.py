"""Tests ``hdtool serve`` under load, and compares its speed with other servers.

    python -m tests.benchmarks.server streams --model MODEL [--minutes 10] [--streams 50]
    python -m tests.benchmarks.server peers --model FILE.gguf [--llama-cpp PYTHON] [--no-transformers]

``streams`` opens many concurrent streams and cuts off a third of them. It compares complete answers with plain
decoding, and the server's memory after two minutes with that at the end. ``peers`` asks the same questions of
``transformers serve`` and of llama-cpp-python's server, which is started by a Python with that package.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil

from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.target.load import load, load_stock, load_tokenizer
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


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=3600)


async def answered(client: openai.AsyncOpenAI, model: str, question: str, cut: int | None = None) -> tuple[str, int]:
    """Return the text and the number of tokens of a stream, which is cut off after ``cut`` chunks."""
    create: Any = client.chat.completions.create
    stream = await create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, tokens, chunks = "", 0, 0
    async for chunk in stream:
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        chunks += 1
        if cut is not None and chunks > cut:
            await stream.close()
            break
    return text, tokens or chunks  # llama-cpp-python reports no usage and sends a chunk for each token


def streams(options: argparse.Namespace) -> None:
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
    client, model = client_of(server.url), options.model
    counts = {"complete and equal": 0, "different": 0, "cut off": 0, "errors": 0}
    started = time.monotonic()

    async def stream(number: int) -> None:
        chosen = random.Random(number)
        while time.monotonic() - started < 60 * options.minutes:
            question = chosen.choice(QUESTIONS)
            cut = chosen.randrange(1, 12) if chosen.random() < 1 / 3 else None
            try:
                text, _ = await answered(client, model, question, cut)
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


@dataclass(frozen=True)
class _Peer:
    """A server that is measured."""

    url: str
    model: str
    process: psutil.Process

    @property
    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)


def peers(options: argparse.Namespace) -> None:
    """Print tokens per second of each server, with one stream and with several; servers take turns."""
    with (
        _folder_of(options.model) as folder,
        RunningServer(options.log, options.model, "--method", options.method) as ours,
        RunningServer(options.log.with_suffix(".plain"), options.model, "--method", "ar") as plain,
        _transformers(options, folder, options.log.with_suffix(".transformers")) as library,
        _llama_cpp(options, options.log.with_suffix(".llama")) as llama,
    ):
        servers = {
            f"hdtool serve ({options.method})": _Peer(ours.url, options.model, psutil.Process(ours.process.pid)),
            "hdtool serve (ar)": _Peer(plain.url, options.model, psutil.Process(plain.process.pid)),
            "transformers serve": library,
            "llama-cpp-python, Q4_1": llama,
        }
        _compare({name: peer for name, peer in servers.items() if peer}, options)


def _compare(servers: dict[str, _Peer], options: argparse.Namespace) -> None:
    rates: dict[tuple[str, int], list[tuple[float, float]]] = {}
    texts: dict[str, dict[str, str]] = {server: {} for server in servers}
    fresh = iter(QUESTIONS)  # ask each question once, because drafters keep earlier answers
    for at_once in options.at_once:
        for _ in range(options.times):
            asked = list(islice(fresh, options.questions))
            for server, peer in servers.items():
                by_clock, by_cpu, answers = asyncio.run(_rate(peer, asked, at_once))
                rates.setdefault((server, at_once), []).append((by_clock, by_cpu))
                texts[server] |= answers
    first, *_ = servers
    print(
        "server | at once | tokens/s | tokens/CPU s | the first one, by the clock | by CPU time | answers as the first"
    )
    for (server, at_once), found in rates.items():
        ours, theirs = np.array(rates[first, at_once]), np.array(found)
        shown = *np.median(theirs, axis=0), *np.median(ours / theirs, axis=0)
        equal = sum(texts[first][question] == text for question, text in texts[server].items())
        print(
            f"{server} | {at_once} | {' | '.join(f'{number:.2f}' for number in shown)} | {equal}/{len(texts[server])}"
        )


@contextmanager
def _folder_of(model: str) -> Iterator[str]:
    """Yield a folder in the layout of save_pretrained, as ``transformers serve`` needs."""
    if not model.endswith(".gguf"):
        yield model
        return
    config = ModelConfig(model, device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        load_stock(config).save_pretrained(folder)
        load_tokenizer(config).save_pretrained(folder)
        yield folder


async def _rate(peer: _Peer, questions: list[str], at_once: int) -> tuple[float, float, dict[str, str]]:
    """Return tokens per second by the clock and by the server's CPU time, and the answers."""
    places = asyncio.Semaphore(at_once)
    client = client_of(peer.url)

    async def one(question: str) -> tuple[str, int]:
        async with places:
            return await answered(client, peer.model, question)

    started, busy = time.perf_counter(), peer.cpu_seconds
    found = await asyncio.gather(*map(one, questions))
    seconds, busy = time.perf_counter() - started, peer.cpu_seconds - busy
    await client.close()
    answers = {question: text for question, (text, _) in zip(questions, found, strict=True)}
    tokens = sum(tokens for _, tokens in found)
    return tokens / seconds, tokens / busy, answers


@contextmanager
def _transformers(options: argparse.Namespace, folder: str, log: Path) -> Iterator[_Peer | None]:
    if not options.transformers:
        yield None
        return
    port = _free_port()
    command = [str(Path(sys.executable).parent / "transformers"), "serve", "--port", str(port), "--device", "cpu"]
    with _started([*command, "--dtype", "float32"], log, port) as process:
        yield _Peer(f"http://localhost:{port}/v1", folder, process)


@contextmanager
def _llama_cpp(options: argparse.Namespace, log: Path) -> Iterator[_Peer | None]:
    if not options.llama_cpp:
        yield None
        return
    port = _free_port()
    command = [options.llama_cpp, "-m", "llama_cpp.server", "--model", options.model, "--port", str(port)]
    with _started([*command, "--n_threads", "1", "--n_threads_batch", "1", "--n_ctx", "2048"], log, port) as process:
        yield _Peer(f"http://localhost:{port}/v1", "model", process)


@contextmanager
def _started(command: list[str], log: Path, port: int) -> Iterator[psutil.Process]:
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            with socket.socket() as tried:
                if tried.connect_ex(("localhost", port)) == 0:
                    break
            time.sleep(0.5)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait(60)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> None:
    parser = parser_of(
        __doc__, method="hd", minutes=10.0, streams=50, prefix_cache_mib=64, settled=2.0, history="memory", times=3,
        questions=6,
    )  # fmt: skip
    parser.add_argument("part", choices=[part.__name__ for part in (streams, peers)])
    parser.add_argument("--model", required=True)
    parser.add_argument("--at-once", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4])
    parser.add_argument("--transformers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--llama-cpp", help="A Python with llama-cpp-python[server].")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.log = Path(folder) / "log"
        globals()[options.part](options)


if __name__ == "__main__":
    main()
