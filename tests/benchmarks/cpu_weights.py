"""Compares weights in 16 bits and in float32 on a CPU, in transformers' code and in compiled code.

    python -m tests.benchmarks.cpu_weights                      # random weights in the shape of a Llama of 1.2 billion
    python -m tests.benchmarks.cpu_weights --model FILE.gguf    # a model, rounded to bfloat16 first

All sides have equal weights: the checkpoint is saved in 16 bits and loaded with --dtype auto and float32. Memory is
measured in a separate process for each; passes and answers are timed in turn, in one process. Each answer is cold: its
drafter has seen no earlier question. On a busy machine, use --processor-time to measure CPU time; with one thread and
nothing else running, both clocks agree.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.budget.cost_curve import CostCurve, MeasuredCosts
from hdtool.runtime.budget.measure_passes import cost_curve_for
from hdtool.runtime.budget.node_budget import MeasuredBudget
from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.drafters.methods import drafter_with_budget
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.model.compact_layers import compact_parameters
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load, load_stock, load_tokenizer
from tests.support.one_sequence import OneSequence

SHAPE: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
"""Shape of Llama 3.2 1B."""
DTYPES = {"float32": "float32", "16 bits": "auto"}
CODE = {"library": False, "compiled": True}
ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 200
CHILD = "--memory-of"
METHODS = ("ar", "hd")
CLOCK = time.perf_counter


def checkpoint(model: str | None, dtype: torch.dtype, folder: Path) -> None:
    """Save the model, or one with random weights, in 16 bits."""
    config = ModelConfig(model, device="cpu", dtype="float32")
    if model is None:
        torch.manual_seed(0)
        shape = LlamaConfig(**SHAPE, bos_token_id=1, eos_token_id=2, pad_token_id=0)
        saved: Any = AutoModelForCausalLM.from_config(shape, dtype=dtype)
    else:
        saved = load_stock(config).to(dtype)  # type: ignore[arg-type]
    saved.save_pretrained(folder)
    load_tokenizer(config).save_pretrained(folder)


def resident() -> dict[str, int]:
    """Return this process's resident anonymous and file-mapped memory and its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":") for line in lines if line.startswith(("RssAnon", "RssFile", "VmHWM")))
    return {name: int(size.split()[0]) * 1024 for name, size in found.items()}


def memory_of(folder: str, dtype: str) -> None:
    load(ModelConfig(device="cpu"))  # load libraries first, to exclude their memory
    before = resident()
    loaded = load(ModelConfig(folder, device="cpu", dtype=dtype))
    after, parameters = resident(), list(loaded.target.model.parameters())
    compact = {id(weight): weight.stored.nbytes for weight, _ in compact_parameters(loaded.target.model)}
    weights = sum(compact.get(id(weight), weight.nbytes) for weight in parameters)
    anon, file = (after[name] - before[name] for name in ("RssAnon", "RssFile"))
    peak = after["VmHWM"] - before["RssAnon"] - before["RssFile"]
    print(f"{weights / 1e6:.0f} | {anon / 1e6:.0f} | {file / 1e6:.0f} | {peak / 1e6:.0f}")


def memory(folder: Path) -> None:
    print("| weights | their bytes, MB | own memory, MB | mapped files, MB | most while loading, MB |")
    print("|---|---|---|---|---|")
    for side, dtype in DTYPES.items():
        command = [sys.executable, "-m", "tests.benchmarks.cpu_weights", CHILD, str(folder), dtype]
        print(f"| {side} | {subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()} |")


class Side:
    """Loaded model with one kind of passes, compiled or not."""

    def __init__(self, loaded: Loaded, compiled: bool) -> None:
        self._loaded, self._compiled = loaded, loaded.target.compiled if compiled else None
        self._sequence = OneSequence(loaded.target)

    @property
    def loaded(self) -> Loaded:
        """Loaded model, switched to this side's passes."""
        self._loaded.target.use_compiled(self._compiled)
        return self._loaded

    @property
    def sequence(self) -> OneSequence:
        """Sequence on the model, which is switched to this side's passes."""
        assert self.loaded
        return self._sequence


def sides_of(folder: str) -> dict[str, Side]:
    loaded = {name: load(ModelConfig(folder, device="cpu", dtype=dtype)) for name, dtype in DTYPES.items()}
    return {f"{name}, {code}": Side(loaded[name], CODE[code]) for name in DTYPES for code in CODE}


def passes(sides: dict[str, Side], repeats: int) -> None:
    print(f"\n| milliseconds of a pass, rows | {' | '.join(map(str, ROWS))} |\n|---|{'---|' * len(ROWS)}")
    taken: dict[str, list[list[float]]] = {side: [[] for _ in ROWS] for side in sides}
    same = 0
    for side in sides.values():
        side.sequence.prefill(some_context(CONTEXT, 4000))
    for place, rows in enumerate(ROWS):
        tree = DraftTree.of(1, [2 + node for node in range(rows - 1)], [-1] * (rows - 1))
        for repeat in range(repeats + 1):
            logits: dict[str, list[torch.Tensor]] = {}
            for name, side in sides.items():
                sequence = side.sequence
                started = CLOCK()
                found = sequence.verify(tree)
                if repeat:
                    taken[name][place].append(CLOCK() - started)
                logits.setdefault(name.split(", ")[1], []).append(found.clone())
            same += repeat > 0 and all(torch.equal(*pair) for pair in logits.values())
    medians = {side: [statistics.median(each) * 1e3 for each in times] for side, times in taken.items()}
    for name, times in medians.items():
        print(f"| {name} | {' | '.join(f'{each:.1f}' for each in times)} |")
    first, *_, last = medians.values()
    ratios = [f"{before / after:.2f}" for before, after in zip(first, last, strict=True)]
    print(f"| ratio of the first and the last | {' | '.join(ratios)} |")
    print(f"\nall logits with float32 and 16 bits have the same bits in {same} of {repeats * len(ROWS)} passes")


def answer(
    loaded: Loaded, curve: CostCurve, method: str, prompt: list[int], max_new_tokens: int
) -> tuple[list[int], float, int]:
    """Return the tokens, the seconds and the number of steps of an answer."""
    target, config = loaded.target, DecodeConfig(method, max_new_tokens=max_new_tokens)
    drafter = drafter_with_budget(
        partial(MeasuredBudget, target.log, MeasuredCosts(target.log, curve)), config, StoreSet(), target
    )
    started = CLOCK()
    steps = list(
        decode(target, prompt, Sampler(SamplingConfig(), prompt), max_new_tokens=max_new_tokens, drafter=drafter)
    )
    return [token for step in steps for token in step.tokens], CLOCK() - started, len(steps)


def answers(sides: dict[str, Side], questions: int, max_new_tokens: int) -> None:
    print("\n| method | weights, code | tokens/s | tokens a step | ratio | answers with the same tokens |")
    print("|---|---|---|---|---|---|")
    loaded = next(iter(sides.values())).loaded
    asked = [
        encode_conversation(loaded.tokenizer, prompt.messages) for prompt in read_prompts(demo.PROMPTS)[: questions + 1]
    ]
    curves = {name: cost_curve_for(side.loaded.target) for name, side in sides.items()}
    for method in METHODS:
        totals = {name: [0.0, 0.0, 0.0] for name in sides}
        same = 0
        for number, prompt in enumerate(asked):
            found = {
                name: answer(side.loaded, curves[name], method, prompt, max_new_tokens) for name, side in sides.items()
            }
            if number:  # the first one is the warm-up
                same += len({tuple(tokens) for tokens, _, _ in found.values()}) == 1
                for name, (tokens, seconds, steps) in found.items():
                    totals[name] = [a + b for a, b in zip(totals[name], (len(tokens), seconds, steps), strict=True)]
        first, *_ = totals.values()
        for name, (number_of_tokens, seconds, number_of_steps) in totals.items():
            speed, per_step = number_of_tokens / seconds, number_of_tokens / number_of_steps
            row = method, name, f"{speed:.2f}", f"{per_step:.2f}", f"{speed * first[1] / first[0]:.2f}"
            print(f"| {' | '.join(row)} | {same} of {questions} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a hub name or a GGUF file; default: random weights")
    parser.add_argument("--stored", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--questions", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument(CHILD, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    if options.processor_time:
        global CLOCK
        CLOCK = time.process_time
    if options.memory_of:
        return memory_of(*options.memory_of)
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    print(f"{machine(torch.device('cpu'))}; threads: {options.threads}, stored in {options.stored}\n", flush=True)
    with TemporaryDirectory() as folder:
        checkpoint(options.model, getattr(torch, options.stored), Path(folder))
        memory(Path(folder))
        sides = sides_of(folder)
    passes(sides, options.repeats)
    answers(sides, options.questions, options.tokens)


if __name__ == "__main__":
    main()
