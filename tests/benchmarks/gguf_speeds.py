"""Compares prefill and plain decoding of GGUF files with llama.cpp's ``llama-bench``.

    python -m tests.benchmarks.gguf_speeds --llama-bench build/bin/llama-bench --files MODEL-Q4_0.gguf MODEL-Q8_0.gguf
    python -m tests.benchmarks.gguf_speeds --llama-bench build/bin/llama-bench --shapes llama lfm2 --formats Q4_0 Q4_K

With ``--openvino FOLDER``, OpenVINO GenAI takes part with a converted model of the first file.

A shape is a file of random blocks in the size of Llama 3.2 1B, LFM2 1.2B or four layers of gpt-oss-20b. hdtool runs
with activations in float32 and in int8. All contenders take turns: a prompt of each length, then single tokens, each
from an empty cache. Prints median tokens per second of CPU time, or of wall-clock time with several threads. The CPU
time of ``llama-bench`` excludes its start.
"""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from hdtool.data.errors import HdtoolError
from hdtool.runtime.config.model import ACTIVATIONS, ModelConfig
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.target.load import load
from tests.benchmarks.laboratory import Table, parser_of
from tests.benchmarks.llama_bench import LlamaBench
from tests.benchmarks.openvino_peer import OpenVinoContender
from tests.benchmarks.shapes import SHAPES_OF_FILES
from tests.support.one_sequence import OneSequence
from tests.support.random_gguf import write_random_gguf

Run = Callable[[int], tuple[float, float]]
"""Returns wall-clock and CPU seconds for the given number of tokens."""


def runs_of(file: Path, program: Path, threads: int, converted: Path | None = None) -> dict[str, dict[str, Run]]:
    """Return the prefill and decoding functions of each contender."""
    bench = LlamaBench(program, file, threads)
    contenders: dict[str, dict[str, Run]] = {"llama.cpp": {"read": bench.reading, "decode": bench.decoding}}
    for activations in ACTIVATIONS:
        try:
            loaded = load(ModelConfig(str(file), device="cpu", threads=threads, activations=activations))
        except HdtoolError as error:
            print(f"without {activations}: {error}")
            continue
        one = OneSequence(loaded.target)
        runs: dict[str, Run] = {"read": partial(read, one), "decode": partial(decode, one)}
        contenders[f"hdtool, {activations}"] = runs
    if converted:
        peer = OpenVinoContender(loaded, converted, 1, lookup=False)
        contenders[f"OpenVINO, {converted.name}"] = {
            "read": lambda tokens: timed(lambda: peer.answer(some_context(tokens, 4000))),
            "decode": partial(decode_by, peer),
        }
    return contenders


def decode_by(peer: OpenVinoContender, tokens: int) -> tuple[float, float]:
    """Return the time of ``tokens`` tokens after the first one, extrapolated if the answer ends early."""
    first = timed(lambda: peer.answer([1]))
    found: list[int] = []
    whole = timed(lambda: found.extend(peer.with_limit(tokens + 1).answer([1]).output_ids))
    wall, cpu = (after - before for before, after in zip(first, whole, strict=True))
    share = tokens / max(1, len(found) - 1)
    return wall * share, cpu * share


def read(one: OneSequence, tokens: int) -> tuple[float, float]:
    context = some_context(tokens, 4000)
    return timed(lambda: one.prefill(context))


def decode(one: OneSequence, tokens: int) -> tuple[float, float]:
    one.prefill([1])

    def steps() -> None:
        for _ in range(tokens):
            one.verify(DraftTree.bare(1))
            one.commit()

    return timed(steps)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare(table: Table, name: str, file: Path, options: argparse.Namespace, converted: Path | None = None) -> None:
    contenders = runs_of(file, options.llama_bench, options.threads, converted)
    parts = [("read", tokens) for tokens in options.read] + [("decode", options.decode)]
    speeds = defaultdict[tuple[str, str, int], list[float]](list)
    clock = 0 if options.threads > 1 else 1
    for number in range(options.rounds + 1):  # the first round is the warm-up
        for kind, tokens in parts:
            for contender, runs in contenders.items():
                spent = runs[kind](tokens)[clock]
                if number:
                    speeds[contender, kind, tokens].append(tokens / spent)
    for contender in contenders:
        cells = []
        for part in parts:
            own, peer = median(speeds[contender, *part]), median(speeds["llama.cpp", *part])
            cells.append(f"{own:.1f}" if contender == "llama.cpp" else f"{own:.1f} ({own / peer:.2f})")
        table.row(name, contender, *cells)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, formats=["Q4_0", "Q4_K", "Q8_0"], read=[256, 1024], decode=48, rounds=5, threads=1)
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--files", type=Path, nargs="*", default=[])
    parser.add_argument("--openvino", type=Path)
    parser.add_argument("--shapes", nargs="*", choices=SHAPES_OF_FILES, default=[])
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    clock = "wall clock" if options.threads > 1 else "CPU time"
    print(f"{machine(torch.device('cpu'))}; tokens per second of {clock}, and in brackets against llama.cpp\n")
    heads = [f"read {tokens}" for tokens in options.read] + [f"decode {options.decode}"]
    table = Table("file", "", *heads)
    for file in options.files:
        compare(table, file.name, file, options, options.openvino if file == options.files[0] else None)
    with TemporaryDirectory() as folder:
        os.environ["HDTOOL_HOME"] = f"{folder}/home"
        for shape in options.shapes:
            for kind in options.formats:
                file = Path(folder) / f"{shape}-{kind}.gguf"
                write_random_gguf(file, SHAPES_OF_FILES[shape](), kind, "Q6_K" if kind.endswith("_K") else "Q8_0")
                compare(table, f"{shape}, {kind}", file, options)
                file.unlink()


if __name__ == "__main__":
    main()
