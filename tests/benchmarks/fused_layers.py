"""Times everything in a forward pass except matmuls, in transformers' code and in compiled code.

    python -m tests.benchmarks.fused_layers                      # random weights in the shape of a Llama of 1.2 billion
    python -m tests.benchmarks.fused_layers --model FILE.gguf

Matmuls are replaced by zeros, so a pass consists of norms, rotary embeddings, attention, gated units, residuals and
call overhead. Both sides are timed in turn, by CPU time or, with several threads, by wall-clock time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from numba import cfunc, types
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from hdtool.runtime.config import ModelConfig
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.checks.probes import some_context
from hdtool.runtime.engines.cpu import weight_table
from hdtool.runtime.kernels.compiled import array_at
from hdtool.runtime.kernels.gemm import STEP, Kernels
from hdtool.runtime.kernels.linear import CompiledLinear
from hdtool.runtime.kernels.machine import machine
from hdtool.runtime.target.load import load, load_tokenizer
from hdtool.runtime.target.target import Target
from tests.benchmarks.cpu_weights import SHAPE
from tests.support.one_sequence import OneSequence

ROWS = (1, 2, 4, 8, 16, 32, 64)


@cfunc(STEP)
def zeros(
    kernels: int,
    matrix: int,
    out_features: int,
    columns: int,
    inputs: int,
    rows: int,
    outputs: int,
    bias: int,
    first: int,
    end: int,
) -> None:
    """Stand in for a matmul: write zeros without reading any weights."""
    array_at(outputs, (rows, out_features), types.float32)[:, first:end] = 0


def without_matmuls(model: str, is_compiled: bool, context: int) -> OneSequence:
    target = load(ModelConfig(model, device="cpu")).target
    if is_compiled:
        kernels = Kernels(multiply=int(zeros.address or 0))
        with mock.patch.object(weight_table, "matmul_of", lambda *_: kernels):
            target.compile(proved=True)
            assert target.compiled, "a model of another kind"
            return after(target, context)
    target.use_compiled(None)
    for layer in target.model.modules():
        if isinstance(layer, CompiledLinear):
            replaced: Any = layer
            replaced.forward = lambda input, outs=layer.out_features: input.new_zeros(*input.shape[:-1], outs)
    return after(target, context)


def after(target: Target, context: int) -> OneSequence:
    one = OneSequence(target)
    one.prefill(some_context(context, 4000), room=max(ROWS))
    return one


def random_model(folder: str) -> str:
    torch.manual_seed(0)
    shape = LlamaConfig(**SHAPE, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    return folder


def milliseconds(sides: dict[str, OneSequence], rows: int, repeats: int) -> dict[str, float]:
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    tree = DraftTree.of(1, [2 + node for node in range(rows - 1)], [-1] * (rows - 1))
    taken: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats + 1):
        for side, one in sides.items():
            started = clock()
            one.verify(tree)
            if repeat:
                taken[side].append((clock() - started) * 1e3)
    return {side: statistics.median(each) for side, each in taken.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, a hub name or a GGUF file; default: random weights")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=31)
    parser.add_argument("--context", type=int, default=200, help="tokens in the cache")
    options = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    print(f"{machine(torch.device('cpu'))}; threads: {options.threads}, after {options.context} tokens\n", flush=True)
    with TemporaryDirectory() as folder:
        model = options.model or random_model(folder)
        sides = {
            name: without_matmuls(model, is_compiled, options.context)
            for name, is_compiled in (("library", False), ("compiled", True))
        }
    print(f"| milliseconds outside of matmuls, rows | {' | '.join(map(str, ROWS))} |\n|---|{'---|' * len(ROWS)}")
    found = [milliseconds(sides, rows, options.repeats) for rows in ROWS]
    for side in sides:
        print(f"| {side} | {' | '.join(f'{each[side]:.1f}' for each in found)} |")


if __name__ == "__main__":
    main()
