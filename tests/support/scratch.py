"""Scratch folder with a tiny model, inputs and stores, and the commands that write files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hdtool.cli.app import run
from hdtool.data import demo

QUIET = ["--quiet"]
TINY = ["--max-new-tokens", "4", "--threads", "1"]
NO_STORES = ["--model-db", "none", "--corpus-db", "none"]
WORDS = ("lists", "tuples", "dictionaries", "sets", "strings", "numbers")


@dataclass(frozen=True)
class Scratch:
    """Paths in a scratch folder."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def inputs(self) -> Path:
        return self.root / "inputs"

    @property
    def prompts(self) -> Path:
        return self.inputs / "prompts.jsonl"

    @property
    def answers(self) -> Path:
        """Recorded answers, which ``collect`` writes and ``replay`` reads."""
        return self.inputs / "answers.jsonl"

    @property
    def corpus(self) -> Path:
        return self.inputs / "corpus.txt"

    def store(self, kind: str, name: str) -> Path:
        """Return the folder of a store. ``one`` and ``two`` hold one input each, and ``both`` holds both inputs."""
        return self.root / "stores" / kind / name

    def copied_to(self, folder: Path) -> Scratch:
        shutil.copytree(self.root, folder, symlinks=True)
        return Scratch(folder)


def new_scratch(root: Path) -> Scratch:
    """Create a scratch folder with all its contents."""
    scratch = Scratch(root)
    scratch.inputs.mkdir(parents=True)
    _save_model(scratch.model)
    rows = [{"id": f"p{n}", "prompt": f"What are {word}?"} for n, word in enumerate(WORDS)]
    scratch.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, path in enumerate((scratch.answers, scratch.inputs / "more.jsonl")):
        path.write_text("".join(json.dumps(_chat(word, number)) + "\n" for word in WORDS))
    for number, path in enumerate((scratch.corpus, scratch.inputs / "more.txt")):
        path.write_text("".join(f"In Python, {word} are values of kind {number}.\n\n" for word in WORDS))
    for kind, (first, second) in INPUTS.items():
        build = BUILDS[kind]
        paths = [str(scratch.inputs / name) for name in (first, second)]
        for name, given in (("one", paths[:1]), ("two", paths[1:]), ("both", paths)):
            made = run(build(scratch, scratch.store(kind, name), given))
            assert made == 0, f"{kind} {name}"
    return scratch


def _chat(word: str, number: int) -> dict[str, object]:
    said = f"In Python, {word} are values of kind {number}. They are used in many programs, as {word} of all kinds."
    asked = {"role": "user", "content": f"What are {word}?"}
    return {"messages": [asked, {"role": "assistant", "content": said}]}


def _save_model(folder: Path) -> None:
    """Save a random Llama with the demo's tokenizer."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


INPUTS = {"model": ("answers.jsonl", "more.jsonl"), "corpus": ("corpus.txt", "more.txt")}


def build_model_db(scratch: Scratch, out: Path, inputs: list[str]) -> list[str]:
    given = [part for path in inputs for part in ("--from", path)]
    return ["build-model-db", *given, "--model", str(scratch.model), "--out", str(out), "--replace", *QUIET]


def build_corpus_db(scratch: Scratch, out: Path, inputs: list[str]) -> list[str]:
    return ["build-corpus-db", *inputs, "--model", str(scratch.model), "--out", str(out), "--replace", *QUIET]


BUILDS: dict[str, Callable[[Scratch, Path, list[str]], list[str]]] = {
    "model": build_model_db,
    "corpus": build_corpus_db,
}


def merge(scratch: Scratch, out: Path, kind: str = "corpus") -> list[str]:
    return ["merge", str(scratch.store(kind, "one")), str(scratch.store(kind, "two")), "--out", str(out), "--replace"]


def add(scratch: Scratch, out: Path, kind: str = "corpus") -> list[str]:
    return ["add", str(out), str(scratch.inputs / INPUTS[kind][1]), "--model", str(scratch.model), *QUIET]


def drop(scratch: Scratch, out: Path, kind: str = "corpus") -> list[str]:
    return ["drop", str(out), "--source", INPUTS[kind][1]]


REWORKED: dict[str, Callable[[Scratch, Path, str], list[str]]] = {"merge": merge, "add": add, "drop": drop}


def collect(scratch: Scratch, out: Path) -> list[str]:
    asked = ["--prompts", str(scratch.prompts), "--out", str(out), "--model", str(scratch.model)]
    return ["collect", *asked, *TINY, *QUIET]


def convert(scratch: Scratch, out: Path) -> list[str]:
    return ["convert", str(scratch.answers), "--out", str(out), *QUIET]


def train_heads(scratch: Scratch, out: Path) -> list[str]:
    small = [
        "--num-heads",
        "2",
        "--lm-head-rank",
        "4",
        "--mlp",
        "8",
        "--batch-size",
        "3",
        "--epochs",
        "2",
        "--save-every",
        "1",
    ]
    given = ["--from", str(scratch.answers), "--out", str(out), "--model", str(scratch.model)]
    return ["train-heads", *given, *small, "--device", "cpu", *QUIET]


def bench(scratch: Scratch, out: Path) -> list[str]:
    few = ["--methods", "ar,pld", "--num-prompts", "1", "--warm-up", "0", *TINY]
    given = ["--questions", str(scratch.prompts), "--model", str(scratch.model), "--out", str(out)]
    return ["bench", *given, *NO_STORES, *few, *QUIET]


def bench_cost(scratch: Scratch, out: Path) -> list[str]:
    few = ["--contexts", "8", "--threads", "1"]
    return ["bench-cost", "--model", str(scratch.model), "--out", str(out), *few, *QUIET]


def bench_report(scratch: Scratch, out: Path) -> list[str]:
    return [*bench(scratch, scratch.root / "results"), "--report", str(out)]


def replay(scratch: Scratch) -> list[str]:
    given = ["--traces", str(scratch.answers), "--model", str(scratch.model), "--methods", "pld", "--limit", "1"]
    return ["replay", *given, *NO_STORES, "--workers", "1", *QUIET]


def replay_steps(scratch: Scratch, out: Path) -> list[str]:
    return [*replay(scratch), "--steps", str(out)]


def replay_report(scratch: Scratch, out: Path) -> list[str]:
    return [*replay(scratch), "--report", str(out)]
