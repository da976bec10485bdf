"""Measures what earlier answers to the same prompt bring: ``python -m tests.benchmarks.rollouts``.

SmolLM2 answers the six questions of the demo four times per epoch, with new seeds each time. The samples are drawn once
without drafts, because drafts never change them; then each way of drafting replays them as a batch and counts its
passes. Between epochs, the history also learns SmolLM2's answers to other questions, as if they came from a data set.
The last lines lower the temperature from epoch to epoch, like a policy that becomes more certain during training.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hdtool.data import demo
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.engine_interface import Verified
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.generate_request import Rollouts
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.weights.checkpoint_identity import place_of
from tests.benchmarks.laboratory import parser_of

SAMPLES, LENGTH, NODES, MAX_ROLLOUT_TOKENS = 4, 96, 16, 1_000_000
DRAFTING_MODES = {
    "context": (False, False),
    "history": (True, False),
    "rollouts": (False, True),
    "history and rollouts": (True, True),
}
"""What is drafted from besides the context: the history of all answers, and earlier answers to the same prompt."""
NO_LOGITS = Verified(torch.empty(0, 1))


class Sample(NamedTuple):
    prompt: list[int]
    answer: list[int]
    seed: int


Epochs = list[list[Sample]]


def conversations(file: Path) -> list[list[dict[str, str]]]:
    with file.open(encoding="utf-8") as stream:
        return [json.loads(line)["messages"] for line in stream]


def drawn(model: Any, tokenizer: Any, temperature: float, epoch: int) -> list[Sample]:
    """Return the samples of one epoch, drawn by plain decoding."""
    texts = [templated(tokenizer, messages) for messages in conversations(demo.QUESTIONS)]
    inputs, seed = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False), 1000 * epoch + 7
    options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    several = {"num_return_sequences": SAMPLES, "max_new_tokens": LENGTH, "seed": seed}
    rows = model.generate(**inputs, **options, **several, custom_generate=Generator())
    width, end, samples = inputs["input_ids"].shape[1], tokenizer.eos_token_id, []
    for number, row in enumerate(rows.tolist()):
        mask = inputs["attention_mask"][number // SAMPLES].bool()
        answer = row[width:]
        length = answer.index(end) + 1 if end in answer else LENGTH
        samples.append(Sample(inputs["input_ids"][number // SAMPLES][mask].tolist(), answer[:length], seed + number))
    return samples


def answered(tokenizer: Any) -> list[Sample]:
    """Return the recorded answers to other questions as samples."""
    samples = []
    for question, answer in conversations(demo.ANSWERS):
        prompt = tokenizer(templated(tokenizer, [question]), add_special_tokens=False)["input_ids"]
        samples.append(Sample(prompt, tokenizer(answer["content"], add_special_tokens=False)["input_ids"], 0))
    return samples


def templated(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True))


class Answering:
    """Row of a batch: a recorded answer and the drafter that drafts it."""

    def __init__(self, drafter: Hierarchy, sample: Sample, prediction: Sequence[int]) -> None:
        self.drafter, self.context, self.left = drafter, list(sample.prompt), list(sample.answer)
        drafter.set_seed(sample.seed)
        drafter.begin(sample.prompt)
        if prediction:
            drafter.predict(prediction)
        self._advance([], 1)  # the prefill

    def step(self) -> None:
        tree, path = self.drafter.draft(self.context), list[int]()
        child = tree.child(-1, self.left[0]) if len(tree) else None
        while child is not None and len(path) + 1 < len(self.left):
            path.append(child)
            child = tree.child(child, self.left[len(path)])
        self._advance(path, len(path) + 1)

    def _advance(self, path: list[int], count: int) -> None:
        tokens, self.left = self.left[:count], self.left[count:]
        self.context += tokens
        self.drafter.observe(Accepted(path, tokens), NO_LOGITS)
        if not self.left:
            self.drafter.end()


def tokens_per_step(epochs: Epochs, others: list[Sample], *, history: bool, rollouts: bool) -> Iterator[float]:
    """Yield the mean tokens per step of a row, for every epoch."""
    shared, kept = History() if history else None, Rollouts(MAX_ROLLOUT_TOKENS if rollouts else 0)
    drafters = [Hierarchy(budget=FixedBudget(NODES), history=shared) for _ in epochs[0]]
    for samples in epochs:
        rows = [
            Answering(drafter, sample, kept.prediction(sample.prompt))
            for drafter, sample in zip(drafters, samples, strict=True)
        ]
        steps = len(rows)
        while running := [row for row in rows if row.left]:
            steps += len(running)
            for row in running:
                row.step()
        for sample in samples:
            kept.add(sample.prompt, sample.answer)
        yield sum(len(sample.answer) for sample in samples) / steps
        if shared:
            for sample in others:
                drafters[0].begin(sample.prompt)
                drafters[0].observe(Accepted([], sample.answer), NO_LOGITS)
                drafters[0].end()


def main() -> None:
    given = parser_of(__doc__, temperatures=[1.0, 0.7, 0.5, 0.3], epochs=4).parse_args()
    place = place_of(ModelConfig(demo.SMOLLM2), weights=True)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32),
        AutoTokenizer.from_pretrained(place),
    )
    tokenizer.padding_side = "left"
    print(machine())
    others, falling = answered(tokenizer), list[list[Sample]]()
    for number, temperature in enumerate(given.temperatures):
        epochs = [drawn(model, tokenizer, temperature, epoch) for epoch in range(given.epochs)]
        show(f"temperature {temperature}", epochs, others)
        falling.append(epochs[min(number, given.epochs - 1)])
    show("falling temperature", falling, others)


def show(name: str, epochs: Epochs, others: list[Sample]) -> None:
    for drafts, (history, rollouts) in DRAFTING_MODES.items():
        found = tokens_per_step(epochs, others, history=history, rollouts=rollouts)
        print(f"{name}, {drafts}: tokens per step by epoch", *(f"{each:.2f}" for each in found), flush=True)


if __name__ == "__main__":
    main()
