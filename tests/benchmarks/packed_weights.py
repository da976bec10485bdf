"""Times passes and prompts of a model that computes with the blocks of a GGUF file, in float32 and in 8 bits.

    python -m tests.benchmarks.packed_weights activations --model FILE.gguf [--threads 1,2] [--context 4000]

llama.cpp takes part if llama-cpp-python is installed. All sides are measured in turn, in one process; times are
wall-clock times.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.load import load
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_formats import stays_packed
from tests.benchmarks.cpu_weights import CONTEXT, ROWS
from tests.support.one_sequence import OneSequence

PROMPTS = (64, 256, 1024)
"""Prompt lengths in tokens."""


class LlamaCppPasses:
    """Forward passes of llama.cpp that compute the logits of all rows."""

    def __init__(self, file: str) -> None:
        from llama_cpp import Llama

        self._llama: Any = Llama(file, n_ctx=2048, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)

    def compute(self, rows: int, context: int) -> None:
        """Run a pass over ``rows`` tokens after ``context`` tokens."""
        if context and self._llama.n_tokens < context:
            self._llama.eval(some_context(context, 4000))
        self._llama.n_tokens = context
        self._llama.eval(some_context(rows, 4000))


def activations(file: str, repeats: int, threads: list[int], context: int) -> None:
    """Time passes and prompts with activations in float32 and in 8 bits, by wall-clock time."""
    peer = LlamaCppPasses(file) if find_spec("llama_cpp") else None
    is_packed = any(map(stays_packed, GGUFFile.open(Path(file)).tensors.values()))
    names = ACTIVATIONS if is_packed else ACTIVATIONS[:1]  # int8 activations need packed weights, not 16-bit ones
    sequences = {name: OneSequence(load(ModelConfig(file, device="cpu", activations=name)).target) for name in names}
    trees = {rows: DraftTree.of(1, [2 + node for node in range(rows - 1)], [-1] * (rows - 1)) for rows in ROWS}
    contexts = {length: some_context(length, 4000) for length in PROMPTS}
    for title, runs, times in (
        ("a pass, rows", {rows: partial(OneSequence.verify, tree=tree) for rows, tree in trees.items()}, repeats),
        (
            "a prompt, tokens",
            {length: partial(OneSequence.prefill, context=some) for length, some in contexts.items()},
            3,
        ),
    ):
        print(f"\n| milliseconds of {title} | {' | '.join(map(str, runs))} |\n|---|{'---|' * len(runs)}")
        medians: dict[str, list[float]] = {}
        for size, run in runs.items():
            taken: dict[str, list[float]] = {}
            for one in sequences.values():
                one.prefill(some_context(context, 4000))
            for _ in range(times + 1):
                for name, one in sequences.items():
                    for count in threads:
                        torch.set_num_threads(count)
                        started = time.perf_counter()
                        run(one)
                        taken.setdefault(f"{name}, threads: {count}", []).append(time.perf_counter() - started)
                if peer:
                    started = time.perf_counter()
                    peer.compute(size, context if runs.keys() == trees.keys() else 0)
                    taken.setdefault("llama.cpp, threads: 1", []).append(time.perf_counter() - started)
            for name, seconds in taken.items():
                medians.setdefault(name, []).append(1e3 * statistics.median(seconds[1:]))
        for name, found in medians.items():
            print(f"| {name} | {' | '.join(f'{each:.1f}' for each in found)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("activations",))
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens before a pass")
    parser.add_argument("--threads", default="1", help="numbers of threads, by commas")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{machine(torch.device('cpu'))}\n", flush=True)
    threads = [int(count) for count in options.threads.split(",")]
    activations(options.model, options.repeats, threads, options.context)


if __name__ == "__main__":
    main()
