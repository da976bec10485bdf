"""Measures resident memory over many answers in a row: ``python -m tests.benchmarks.memory``.

The held-out prompts are answered one after another by ``hd``, then several at once, in one process. After a warm-up
that answers every prompt once, the resident memory is compared with that at the end.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path

from transformers.utils import logging

from hdtool.data import demo
from hdtool.data.prompts import Prompt, read_prompts
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.kernels.machine import machine

MAX_NEW_TOKENS = 32


def resident() -> int:
    """Return the resident memory of this process in bytes (Linux only)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def generate(answerer: Answerer, prompts: list[Prompt], every: int) -> Iterator[int]:
    """Yield the resident memory after every ``every`` answers."""
    for number, answer in enumerate(answerer.all_answers(prompts), start=1):
        for _ in answer:
            pass
        if number % every == 0:
            yield resident()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=500)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    prompts = list(read_prompts(demo.PROMPTS))
    print(f"{machine()}; {options.generations} generations of {MAX_NEW_TOKENS} tokens at most\n")
    print("| batch | before, MB | after each fifth of them, MB | growth |")
    print("|---|---|---|---|")
    for batch in options.batches:
        decoding = DecodeConfig(max_new_tokens=MAX_NEW_TOKENS, batch_size=batch)
        answerer = Answerer(ModelConfig(device="cpu"), decoding, SamplingConfig())
        for _ in generate(answerer, prompts, 1):
            pass
        before = resident()
        asked = list(islice(cycle(prompts), options.generations))
        after = list(generate(answerer, asked, max(1, options.generations // 5)))
        told = ", ".join(f"{size / 1e6:.1f}" for size in after)
        print(f"| {batch} | {before / 1e6:.1f} | {told} | {after[-1] / before - 1:+.2%} |", flush=True)


if __name__ == "__main__":
    main()
