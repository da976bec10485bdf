"""Measures what quantized weights and 8-bit activations cost in quality.

    python -m tests.benchmarks.quality --model smollm2 --answers 24

Reads answers to questions and computes the probabilities of their tokens with each form of the model:

- perplexity of the answers. It is low, because the shipped answers are the model's own greedy ones.
- divergence: mean Kullback-Leibler divergence, in bits, from the unquantized model in float32.
- same token: how often both have the same argmax.

``--weights`` takes values of ``--quantization``, and ``none`` for the unquantized model.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from hdtool.data import demo
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.compact_weight import stored_of
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.model import ACTIVATIONS, BLOCKS, ModelConfig
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.target import Target
from tests.benchmarks.laboratory import Table, parser_of

NONE = "none"
PIECE = 48
"""Answer tokens per pass."""
MAX_ANSWER_TOKENS = 300
"""Maximum number of answer tokens that are read."""


class Answer(NamedTuple):
    prompt: list[int]
    tokens: list[int]


class Figures(NamedTuple):
    """Sums over all tokens."""

    tokens: int = 0
    surprise: float = 0.0
    divergence: float = 0.0
    same: int = 0


def answers_of(loaded: Loaded, file: Path, count: int) -> Iterator[Answer]:
    with file.open(encoding="utf-8") as lines:
        for line in islice(lines, count):
            asked, answered = json.loads(line)["messages"][:2]
            text = loaded.tokenizer.apply_chat_template([asked], add_generation_prompt=True, tokenize=False)
            prompt = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
            yield Answer(
                prompt, loaded.tokenizer(answered["content"], add_special_tokens=False)["input_ids"][:MAX_ANSWER_TOKENS]
            )


@torch.inference_mode()
def logits_of(target: Target, answer: Answer) -> torch.Tensor:
    """Return the logits of each answer token, computed by the passes that verify drafts."""
    cache = target.allocate()
    found = [target.prefill(cache, 0, answer.prompt, 0, room=len(answer.tokens) + 2).logits.clone()]
    read = answer.tokens[:-1]
    for first in range(0, len(read), PIECE):
        root, *others = read[first : first + PIECE]
        chain = DraftTree.of(root, others, list(range(-1, len(others) - 1)))
        found.append(target.verify(cache, [chain])[0].logits.clone())
        target.commit(cache, 0, list(range(len(others))))
    return torch.cat(found)


def added(figures: Figures, logits: torch.Tensor, expected: torch.Tensor, answer: Answer) -> Figures:
    own, wanted = (one.double().log_softmax(-1) for one in (logits, expected))
    tokens = torch.tensor(answer.tokens)
    return Figures(
        figures.tokens + len(tokens),
        figures.surprise - float(own.gather(1, tokens[:, None]).sum()),
        figures.divergence + float((wanted.exp() * (wanted - own)).sum()) / math.log(2),
        figures.same + int((own.argmax(1) == wanted.argmax(1)).sum()),
    )


def megabytes(target: Target) -> float:
    weights = {id(weight): stored_of(weight) for weight in target.model.parameters()}
    return sum(one.nbytes for one in weights.values()) / 1e6


def main() -> None:
    parser = parser_of(__doc__, model="smollm2", answers=24)
    parser.add_argument("--weights", nargs="+", default=[NONE, *BLOCKS], choices=[NONE, *BLOCKS])
    parser.add_argument("--from", dest="file", type=Path, default=demo.ANSWERS, help="JSON Lines with messages.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reference = load(ModelConfig(options.model, device="cpu"))
    answers = list(answers_of(reference, options.file, options.answers))
    expected = [logits_of(reference.target, answer) for answer in answers]
    count = sum(len(answer.tokens) for answer in answers)
    print(f"{machine()}; {options.model}, {len(answers)} answers, {count:,} tokens\n")
    table = Table("weights", "activations", "MB", "perplexity", "divergence, bits", "same token", "processor time")
    for scheme in options.weights:
        for activations in ACTIVATIONS:
            chosen = None if scheme == NONE else scheme
            config = ModelConfig(options.model, device="cpu", quantization=chosen, activations=activations)
            target, figures, started = load(config).target, Figures(), time.process_time()
            for answer, wanted in zip(answers, expected, strict=True):
                figures = added(figures, logits_of(target, answer), wanted, answer)
            spent = time.process_time() - started
            perplexity, bits = math.exp(figures.surprise / count), figures.divergence / count
            name = "as they are" if scheme == NONE else scheme
            shown = f"{perplexity:.4f}", f"{bits:.5f}", f"{figures.same / count:.2%}", f"{spent:.1f} s"
            table.row(name, activations, f"{megabytes(target):.0f}", *shown)


if __name__ == "__main__":
    main()
