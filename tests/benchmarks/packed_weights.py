"""Measures models that compute with the blocks of GGUF files: passes, answers, loading and memory.

    python -m tests.benchmarks.packed_weights passes --model FILE.gguf     # quantized again to each format
    python -m tests.benchmarks.packed_weights passes --formats Q4_K,Q6_K   # random blocks, the shape of Llama 3.2 1B
    python -m tests.benchmarks.packed_weights answers --model FILE.gguf    # with llama-cpp-python if it is installed
    python -m tests.benchmarks.packed_weights activations --model FILE.gguf --threads 1,2    # also in 8 bits
    python -m tests.benchmarks.packed_weights activations --formats Q4_0,Q8_0,BF16    # random, the shape of a 1B Llama
    python -m tests.benchmarks.packed_weights loading --model FILE.gguf    # or --formats Q4_K: a random file

Passes and answers of all sides are measured in turn, in one process with one thread. Times are CPU time, which equals
wall-clock time on an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from hdtool.builders.evaluation.llama_cpp_peer import LlamaCppContender
from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.budget.measure_passes import cost_curve_for
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.config.model import ACTIVATIONS, INT8
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.engines.cpu.compiled_model import CompiledModel
from hdtool.runtime.kernels.compact_weight import CompactWeight
from hdtool.runtime.kernels.linear import compile_linear_layers
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from hdtool.runtime.model.compact_layers import ParameterRef, compact_parameters, replace_parameter, weight_parameters
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.target import Target
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_formats import stays_packed
from tests.benchmarks import cpu_weights
from tests.benchmarks.cpu_weights import CONTEXT, ROWS, SHAPE, answer, resident
from tests.support.one_sequence import OneSequence
from tests.support.packed_blocks import NAMES, some_matrix
from tests.support.random_gguf import write_random_gguf

PLAIN = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPTS = (64, 256, 1024)
"""Prompt lengths in tokens."""
CHILD = "--loads"


@dataclass
class Side:
    """Weights of a model in one format."""

    weights: list[tuple[list[ParameterRef], torch.Tensor]]
    _compiled: CompiledModel | None = None

    def place(self) -> None:
        """Put the weights into the model."""
        for places, weight in self.weights:
            replace_parameter(places, weight)

    def use(self, target: Target) -> None:
        """Switch the target to these weights, in compiled code."""
        self.place()
        if self._compiled:
            target.use_compiled(self._compiled)
        else:
            target.compile(proved=True)
            self._compiled = target.compiled
        assert self._compiled

    @property
    def bytes(self) -> int:
        stored = [weight.stored if isinstance(weight, CompactWeight) else weight for _, weight in self.weights]
        return sum(one.nbytes for one in stored)


def side_of(model: Any, name: str, stored: Callable[[torch.Tensor, str], torch.Tensor]) -> Side:
    matrices = [(places, weight) for places, weight in weight_parameters(model) if weight.dim() == 2]
    return Side([(places, stored(weight, name)) for places, weight in matrices])


def quantized(weight: torch.Tensor, name: str) -> torch.Tensor:
    if name == "float32":
        return weight.detach()
    if name in PLAIN:
        return CompactWeight(weight.detach().bfloat16())
    blocks = quantize(weight.detach().numpy(), GGMLQuantizationType[name])
    return CompactWeight(PackedMatrix(torch.from_numpy(blocks), NAMES[name]))


def random_weight(weight: torch.Tensor, name: str) -> torch.Tensor:
    if name in PLAIN:
        found = torch.empty(weight.shape, dtype=PLAIN[name]).normal_(0, 0.02)
        return found if name == "float32" else CompactWeight(found)
    return CompactWeight(some_matrix(NAMES[name], *weight.shape))


def target_and_sides(model: str | None, formats: list[str]) -> tuple[Target, dict[str, Side]]:
    if model:
        target = load(ModelConfig(model, device="cpu", dtype="float32")).target
        return target, {name: side_of(target.model, name, quantized) for name in formats}
    shape = LlamaConfig(**SHAPE, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(shape)
    sides = {name: side_of(empty, name, random_weight) for name in formats}
    return _target(empty, sides), sides


def _target(model: Any, sides: dict[str, Side]) -> Target:
    """Return the target of a model on the meta device, with norm weights of 1 and the matrices of the first side."""
    for places, weight in weight_parameters(model):
        if weight.dim() == 1:
            replace_parameter(places, torch.ones(weight.shape))
    next(iter(sides.values())).place()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(model.config)
    compile_linear_layers(model)
    return Target(model.eval())


def passes(target: Target, sides: dict[str, Side], repeats: int) -> None:
    print(f"| milliseconds of a pass, rows | MB | {' | '.join(map(str, ROWS))} |\n|---|---|{'---|' * len(ROWS)}")
    next(iter(sides.values())).use(target)
    one = OneSequence(target)
    one.prefill(some_context(CONTEXT, 4000))
    medians: dict[str, list[float]] = {name: [] for name in sides}
    for rows in ROWS:
        tree = DraftTree.of(1, [2 + node for node in range(rows - 1)], [-1] * (rows - 1))
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats + 1):
            for name, side in sides.items():
                side.use(target)
                started = time.process_time()
                one.verify(tree)
                taken[name].append((time.process_time() - started) * 1e3)
        for name, times in taken.items():
            medians[name].append(statistics.median(times[1:]))
    for name, found in medians.items():
        print(f"| {name} | {sides[name].bytes / 1e6:.0f} | {' | '.join(f'{each:.1f}' for each in found)} |")


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
    is_packed = any(map(stays_packed, GGUFFile.open(Path(file)).tensors))
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


def answers(file: str, questions: int, max_new_tokens: int) -> None:
    sides = {
        "float32": load(ModelConfig(file, device="cpu", dtype="float32")),
        "packed": load(ModelConfig(file, device="cpu")),
        "packed, int8": load(ModelConfig(file, device="cpu", activations=INT8)),
    }
    first = next(iter(sides.values()))
    asked = [
        encode_conversation(first.tokenizer, prompt.messages) for prompt in read_prompts(demo.PROMPTS)[: questions + 1]
    ]
    curves = {side: cost_curve_for(loaded.target) for side, loaded in sides.items()}
    peer = LlamaCppContender(first, Path(file), max_new_tokens, lookup=False) if find_spec("llama_cpp") else None
    totals: dict[tuple[str, str], list[float]] = {}
    equal: dict[tuple[str, str], list[float]] = {}
    for number, prompt in enumerate(asked):
        given: dict[tuple[str, str], list[int]] = {}
        for method in ("ar", "hd"):
            for side, loaded in sides.items():
                tokens, seconds, steps = answer(loaded, curves[side], method, prompt, max_new_tokens)
                given[method, side] = tokens
                if number:  # the first one is the warm-up
                    _add(totals, (method, side), len(tokens), seconds, steps)
                    alike = tokens == given["ar", side], tokens == given["ar", "float32"]
                    _add(equal, (method, side), *alike)
        if peer:
            started = time.process_time()
            length = len(peer.answer(prompt).output_ids)
            if number:
                _add(totals, ("llama.cpp", "packed"), length, time.process_time() - started, length)
    print("\n| method | weights | tokens/s | tokens a step | answers as by `ar` | as by `ar` in float32 |")
    print("|---|---|---|---|---|---|")
    for (method, side), (number_of_tokens, passed, number_of_steps) in totals.items():
        counts = " | ".join(f"{count:.0f} of {questions}" for count in equal.get((method, side), ()))
        speed, per_step = number_of_tokens / passed, number_of_tokens / number_of_steps
        print(f"| {method} | {side} | {speed:.1f} | {per_step:.2f} | {counts or ' | '} |", flush=True)


def _add(totals: dict[tuple[str, str], list[float]], side: tuple[str, str], *numbers: float) -> None:
    totals[side] = [a + b for a, b in zip(totals.get(side, [0.0] * len(numbers)), numbers, strict=True)]


def loads(file: str, activations: str) -> None:
    """Load a model in this process, and print the time and memory that it takes."""
    load(ModelConfig(device="cpu"))  # load libraries first, to exclude their memory
    before = resident()
    started, clock = time.perf_counter(), time.process_time()
    loaded = load(ModelConfig(file, device="cpu", activations=activations))
    seconds, busy = time.perf_counter() - started, time.process_time() - clock
    _use(loaded)
    after = resident()
    own, mapped = (after[name] - before[name] for name in ("RssAnon", "RssFile"))
    peak = after["VmHWM"] - before["RssAnon"] - before["RssFile"]
    cells = f"{seconds:.2f}", f"{busy:.2f}", *(f"{size / 1e6:.0f}" for size in (own, mapped, own + mapped, peak))
    print(" | ".join(cells))


def _use(loaded: Loaded) -> None:
    one = OneSequence(loaded.target)
    one.prefill(some_context(64, 4000))
    one.verify(DraftTree.bare(1))
    assert compact_parameters(loaded.target.model) or loaded.target.dtype == torch.float32


def loading(file: str) -> None:
    print(f"{Path(file).stat().st_size / 1e6:.0f} MB in the file\n")
    print("| weights | seconds | of the processor | own memory, MB | mapped files, MB | both, MB | most, MB |")
    print("|---|---|---|---|---|---|---|")
    starts = {"first start": ACTIVATIONS[0], "later": ACTIVATIONS[0], "first with int8": INT8, "later with int8": INT8}
    for name, kind in starts.items():
        command = [sys.executable, "-m", "tests.benchmarks.packed_weights", "loading", CHILD, file, kind]
        found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip().splitlines()
        print(f"| {name} | {found[-1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("passes", "activations", "answers", "loading"))
    parser.add_argument("--model", help="a GGUF file")
    parser.add_argument("--formats", default="float32,bfloat16,Q8_0,Q4_1,Q4_0")
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--context", type=int, default=CONTEXT, help="of activations: tokens before a pass")
    parser.add_argument("--threads", default="1", help="of activations: numbers of threads, by commas")
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument(CHILD, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.loads:
        return loads(*options.loads)
    print(f"{machine(torch.device('cpu'))}; one thread\n", flush=True)
    cpu_weights.CLOCK = time.process_time
    if options.part == "answers":
        return answers(options.model, options.questions, options.tokens)
    threads = [int(count) for count in options.threads.split(",")]
    if options.part == "activations" and options.model:
        return activations(options.model, options.repeats, threads, options.context)
    if options.part == "passes":
        with torch.inference_mode(False), torch.no_grad():
            return passes(*target_and_sides(options.model, options.formats.split(",")), options.repeats)
    if options.model:
        return loading(options.model)
    with TemporaryDirectory() as folder:
        os.environ["HDTOOL_HOME"] = f"{folder}/home"
        shape = LlamaConfig(**SHAPE, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        for kind in options.formats.split(","):
            file = Path(folder) / "random.gguf"
            write_random_gguf(file, shape, kind, "Q6_K" if "_K" in kind else kind if kind == "BF16" else "Q8_0")
            print(f"\n{kind}")
            if options.part == "loading":
                loading(str(file))
            else:
                activations(str(file), options.repeats, threads, options.context)


if __name__ == "__main__":
    main()
