"""Times passes of a model that is loaded in several ways on a CPU: ``python -m tests.benchmarks.passes WHAT``.

    python -m tests.benchmarks.passes weights --model MODEL        # float32 and 16 bits, in both kinds of code
    python -m tests.benchmarks.passes torchao --model MODEL        # int8 weights of torchao
    python -m tests.benchmarks.passes activations --model FILE.gguf [--threads 1 2]
    python -m tests.benchmarks.passes families [--families Gemma2 Qwen3Moe]

The first two round the model to bfloat16 first. ``activations`` computes with the blocks of a GGUF file, and llama.cpp
takes part if llama-cpp-python is installed. With ``--products``, bare loops of vector products take turns with the
passes, and both print their billions of products per second. ``families`` compares transformers' layers in float32 with
compiled ones, on random bfloat16 weights in the shapes of small models.

All sides take turns in one process, and medians are printed: passes over a token and over trees after the context, and
prompts. Times are CPU times with one thread, else wall-clock times. ``--questions`` answers held-out prompts as well,
each with a fresh drafter.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from math import nan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch

from hdtool.data import demo
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.kernels.linear_layers import compile_linear_layers
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.kernels.mixture_of_experts import compile_experts
from hdtool.runtime.model.compact_layers import compact_weights
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import INT8, ModelConfig
from hdtool.runtime.target.load import Loaded, load, load_stock, load_tokenizer
from hdtool.runtime.target.target import Target
from hdtool.runtime.weights.gguf_file import GGUFFile
from hdtool.runtime.weights.gguf_formats import stays_packed
from tests.benchmarks.laboratory import (
    Outcome,
    Table,
    clock_of,
    demo_prompts,
    method_contender,
    on_prompts,
    parser_of,
    run_in_turn,
)
from tests.benchmarks.shapes import SHAPES, random_model
from tests.benchmarks.vector_products import LOOPS, VectorProducts
from tests.support.one_sequence import OneSequence

LIBRARY = {"fused_layers": False}
SIDES: dict[str, dict[str, dict[str, Any]]] = {
    "weights": {
        "float32, library": {"dtype": "float32", **LIBRARY},
        "float32, compiled": {"dtype": "float32"},
        "16 bits, library": LIBRARY,
        "16 bits, compiled": {},
    },
    "torchao": {
        "torchao": {"quantization": "int8", "dtype": "float32"},
        "packed, library": {"quantization": "int8", **LIBRARY},
        "packed, compiled": {"quantization": "int8"},
        "packed, compiled, activations in 8 bits": {"quantization": "int8", "activations": INT8},
    },
    "activations": {"float32": {}, "int8": {"activations": INT8}},
}
"""Options with which each side loads the model, by benchmark."""
FAMILIES = "families"
SOME_TOKENS = 4000


class ModelWithContext(Protocol):
    """Protocol of a model that reads a context and verifies drafts after it."""

    def prefill(self, context: Sequence[int]) -> object: ...

    def verify(self, tree: DraftTree) -> object: ...


class LlamaCppSequence:
    """llama.cpp, computing the logits of all rows."""

    def __init__(self, file: str) -> None:
        from llama_cpp import Llama

        self._llama: Any = Llama(file, n_ctx=8192, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)
        self._length = 0

    def prefill(self, context: Sequence[int]) -> None:
        self._llama.reset()
        self._llama.eval(context)
        self._length = len(context)

    def verify(self, tree: DraftTree) -> None:
        self._llama.n_tokens = self._length
        self._llama.eval(some_context(len(tree) + 1, SOME_TOKENS))


class BareLoop(VectorProducts):
    """Loop of vector products in place of a model."""

    def prefill(self, context: Sequence[int]) -> None:
        self.run()

    def verify(self, tree: DraftTree) -> None:
        self.run()


def of_checkpoint(what: str, options: argparse.Namespace, folder: str) -> dict[str, Loaded]:
    """Load the model in the ways of ``SIDES``, rounded to bfloat16 first unless ``activations`` are compared."""
    config = ModelConfig(options.model, device="cpu", dtype="float32")
    place, sides = str(demo.located(options.model)), dict(SIDES[what])
    if what != "activations":
        load_stock(config).to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]
        load_tokenizer(config).save_pretrained(folder)
        place = folder
    elif not any(map(stays_packed, GGUFFile.open(Path(place)).tensors.values())):
        del sides[INT8]  # needs packed weights
    return {name: load(ModelConfig(place, device="cpu", **ways)) for name, ways in sides.items()}


def of_family(name: str) -> Iterator[tuple[str, OneSequence]]:
    """Yield a model with random weights, computed by transformers' layers and by compiled ones."""
    yield f"{name}, library", OneSequence(Target(random_model(name).float()))
    model = random_model(name)
    compact_weights(model)
    model.config.dtype = torch.float32
    compile_linear_layers(model)
    compile_experts(model)
    target = Target(model)
    target.compile()
    assert target.compiled
    yield f"{name}, compiled", OneSequence(target)


def compare(sides: dict[str, ModelWithContext], options: argparse.Namespace, table: Table) -> None:
    for one in sides.values():
        one.prefill(some_context(options.context, SOME_TOKENS))
    trees = [DraftTree.of(1, list(range(2, 1 + rows)), list(range(-1, rows - 2))) for rows in options.rows]
    prompts = [some_context(length, SOME_TOKENS) for length in options.prompts]
    runs = [partial(_verify, tree) for tree in trees] + [partial(_prefill, prompt) for prompt in prompts]
    timed = {
        f"{name}, threads: {count}": (one, count)
        for name, one in sides.items()
        for count in (options.threads if isinstance(one, OneSequence) else [1])
    }
    numbered = {str(number): run for number, run in enumerate(runs)}
    medians = run_in_turn(timed, numbered, options.repeats, clock_of(max(options.threads)))
    for name, seconds in medians.items():
        if not isinstance(timed[name][0], BareLoop):
            table.row(name, *(f"{1e3 * one:.1f}" for one in seconds))
    if options.products:
        print("\nbillions of products per second, without those of attention\n")
        speeds = Table("side", *(f"rows: {rows}" for rows in options.rows))
        for name, seconds in medians.items():
            products = [_products(timed[name][0], rows) for rows in options.rows]
            speeds.row(name, *(f"{count / one / 1e9:.0f}" for count, one in zip(products, seconds, strict=False)))


def _products(side: ModelWithContext, rows: int) -> float:
    """Return the number of products in a pass's matmuls or in a loop; NaN for llama.cpp."""
    if isinstance(side, BareLoop):
        return side.products
    if not isinstance(side, OneSequence):
        return nan
    layers: list[Any] = [layer for layer in side.target.model.modules() if hasattr(layer, "out_features")]
    return float(rows * sum(layer.in_features * layer.out_features for layer in layers))


def _verify(tree: DraftTree, side: tuple[ModelWithContext, int]) -> None:
    torch.set_num_threads(side[1])
    side[0].verify(tree)


def _prefill(prompt: list[int], side: tuple[ModelWithContext, int]) -> None:
    torch.set_num_threads(side[1])
    side[0].prefill(prompt)


def answer(loaded: dict[str, Loaded], questions: int, tokens: int) -> None:
    """Answer prompts by plain decoding and by ``hd``, on all sides in turn."""
    contenders = {
        f"{method}, {name}": on_prompts(method_contender(one, DecodeConfig(method, tokens)))
        for method in ("ar", "hd")
        for name, one in loaded.items()
    }
    warm_up, *prompts = demo_prompts(next(iter(loaded.values())), questions + 1)
    outcome = Outcome(contenders, prompts, warm_up=[warm_up])
    table = Table("answers", "tokens per CPU second", "tokens per step")
    for name, total in outcome.totals.items():
        table.row(name, f"{total.tokens_per_cpu_second:.2f}", f"{total.stats.tokens_per_step:.2f}")
    print(f"\nidentical answers to {outcome.identical} of {questions} questions")


def main() -> None:
    parser = parser_of(
        __doc__, model=None, families=list(SHAPES), threads=[1], rows=[1, 8, 32], prompts=[256], context=200,
        repeats=7, questions=0, tokens=64, products=False,
    )  # fmt: skip
    parser.add_argument("what", choices=[*SIDES, FAMILIES])
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(max(options.threads))
    torch.set_num_threads(max(options.threads))
    print(f"{machine(torch.device('cpu'))}; milliseconds of passes after {options.context} tokens\n")
    heads = [f"rows: {rows}" for rows in options.rows] + [f"prompt: {length}" for length in options.prompts]
    if options.what == FAMILIES:
        table = Table("family", *heads)
        for family in options.families:
            compare(dict(of_family(family)), options, table)
        return
    with TemporaryDirectory() as folder:
        loaded = of_checkpoint(options.what, options, folder)
    sides: dict[str, ModelWithContext] = {name: OneSequence(one.target) for name, one in loaded.items()}
    if options.what == "activations" and find_spec("llama_cpp"):
        sides["llama.cpp"] = LlamaCppSequence(str(demo.located(options.model)))
    if options.products:
        sides |= {f"bare loop, {data_type}": BareLoop(data_type) for data_type in LOOPS}
    compare(sides, options, Table("side", *heads))
    if options.questions:
        answer(loaded, options.questions, options.tokens)


if __name__ == "__main__":
    main()
