"""Measures memory and time of the context tables in a long conversation: ``python -m tests.benchmarks.context_table``.

A conversation of 32,000 tokens, half of which repeat earlier ones, arrives token by token; then a second one of the
same size arrives as a prompt.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from hdtool.runtime.config import PaperConfig
from hdtool.runtime.drafters.hd_paper import SEQUENCE_LENGTH, SequenceTable
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.stores.live_tables import ContextTable

TOKENS, VOCABULARY, PIECE = 32_000, 32_000, 8
COMMON = 4_000
"""Number of frequent tokens that texts are drawn from."""


def conversation(seed: int) -> list[int]:
    chance = np.random.default_rng(seed)
    said: list[int] = []
    while len(said) < TOKENS:
        if said and chance.random() < 0.5:
            start = int(chance.integers(len(said)))
            said += said[start : start + PIECE]
        else:
            said += (COMMON * chance.random(PIECE) ** 3).astype(int).tolist()
    return said[:TOKENS]


def time_tokens(add: Callable[[int], None]) -> str:
    spent = np.empty(TOKENS)
    for place in range(TOKENS):
        started = time.perf_counter()
        add(place)
        spent[place] = time.perf_counter() - started
    low, high = np.percentile(spent * 1e6, (50, 99))
    return f"{low:.2f} / {high:.2f} µs"


def time_prompt(read: Callable[[list[int]], object], tokens: list[int]) -> str:
    started = time.perf_counter()
    read(tokens)
    return f"{(time.perf_counter() - started) / len(tokens) * 1e6:.2f} µs"


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    first, second = conversation(1), conversation(2)
    live, paper = ContextTable(), SequenceTable(PaperConfig().sequences)
    live.read(second[:100])  # warm-up: compiles
    paper.add_text(second[:100])
    live.reset()
    paper.clear()
    words = np.array(first)
    steps = np.lib.stride_tricks.sliding_window_view(words, SEQUENCE_LENGTH + 1)
    singly = (
        time_tokens(lambda place: live.add(words[place : place + 1])),
        time_tokens(lambda place: paper.add(steps[place : place + 1])),
    )
    paper_bytes = paper.nbytes
    paper.clear()
    at_once = time_prompt(live.read, second), time_prompt(paper.add_text, second)
    print(f"{machine()}; {TOKENS:,} tokens\n")
    print("| context table of | MiB | a token, p50 / p99 | a token of a prompt |\n|---|---|---|---|")
    for name, size, single, many in zip(("hd", "hd-paper"), (live.nbytes, paper_bytes), singly, at_once, strict=True):
        print(f"| {name} | {size / 2**20:.2f} | {single} | {many} |")


if __name__ == "__main__":
    main()
