"""Scratch folder with a tiny model, inputs and stores, and the commands that write files."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hdtool.cli.app import run
from hdtool.data import demo

TINY = "--max-new-tokens 4 --threads 1 --quiet"
NO_STORES = "--model-db none --corpus-db none"
BENCH = (
    f"bench --questions {{prompts}} --model {{model}} {NO_STORES} --methods ar,pld --num-prompts 1 --warm-up 0 {TINY}"
)
COST = "bench-cost --model {model} --contexts 8 --threads 1 --quiet"
REPLAY = f"replay --traces {{answers}} --model {{model}} --methods pld --limit 1 {NO_STORES} --workers 1 --quiet"
COMMANDS = {
    "build-model-db": "build-model-db {inputs} --model {model} --out {out} --replace --quiet",
    "build-corpus-db": "build-corpus-db {inputs} --model {model} --out {out} --replace --quiet",
    "merge": "merge {one} {two} --out {out} --replace",
    "add": "add {out} {more} --model {model} --quiet",
    "drop": "drop {out} --source {more.name}",
    "collect": f"collect --prompts {{prompts}} --out {{out}} --model {{model}} {TINY}",
    "convert": "convert {answers} --out {out} --quiet",
    "train-heads": (
        "train-heads --from {answers} --out {out} --model {model} --num-heads 2 --lm-head-rank 4 --mlp 8 "
        "--batch-size 3 --epochs 2 --save-every 1 --device cpu --quiet"
    ),
    "bench": BENCH + " --out {out}",
    "bench-cost": COST + " --out {out}",
    "bench --report": BENCH + " --out {root}/results --report {out}",
    "replay --steps": REPLAY + " --steps {out}",
    "replay --report": REPLAY + " --report {out}",
    "a build at home": "build-model-db {inputs} --model {model} --replace --quiet",
    "a cost at home": COST + " --out {root}/costs",
}
"""Templates of commands that write files, by name."""
INPUTS = {"model": ("answers.jsonl", "more.jsonl"), "corpus": ("corpus.txt", "more.txt")}
"""Names of the two inputs of a store, by its kind."""
FIRST, BOTH = slice(1), slice(2)
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

    def command(self, name: str, out: Path, kind: str = "corpus", inputs: slice = FIRST) -> list[str]:
        """Return the arguments of a command on stores of ``kind``; ``inputs`` selects the inputs that a build reads."""
        builds_model = COMMANDS[name].startswith("build-model-db")
        first, more = (self.inputs / each for each in INPUTS["model" if builds_model else kind])
        places: dict[str, object] = {
            "inputs": " ".join(f"--from {path}" if builds_model else f"{path}" for path in [first, more][inputs]),
            **{each: self.store(kind, each) for each in ("one", "two")},
            **{each: getattr(self, each) for each in ("root", "model", "prompts", "answers")},
        }
        return COMMANDS[name].format(out=out, more=more, **places).split()

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
    for kind in INPUTS:
        for name, inputs in (("one", FIRST), ("two", slice(1, 2)), ("both", BOTH)):
            made = run(scratch.command(f"build-{kind}-db", scratch.store(kind, name), inputs=inputs))
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
