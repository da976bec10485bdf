"""Checks the acceptance probabilities that hdtool estimates inside vLLM against recorded answers.

    python -m tests.benchmarks.vllm_estimates --traces traces.jsonl --model MODEL    # only its tokenizer is read

Requests run one after another, without stores. Prints tokens and drafts per step for each minimum probability, and the
share of accepted draft tokens by estimated probability.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hdtool.builders.evaluation.recording import RecordedTurn, TurnReader
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.config import MEMORY, ModelConfig, VllmConfig
from hdtool.runtime.integrations.vllm.batch_drafter import BatchDrafter
from hdtool.runtime.stores.store_set import StoreSet

MAX_MODEL_LENGTH = 4096
BOUNDS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 1.0)


class Replayed(NamedTuple):
    tokens: int
    steps: int
    estimates: list[float]
    accepted: list[bool]


def replayed(turns: list[RecordedTurn], minimum: float, max_draft_tokens: int) -> Replayed:
    drafter = BatchDrafter(
        StoreSet(), VllmConfig(max_draft_tokens, minimum, 256, MEMORY), rows=1, max_length=MAX_MODEL_LENGTH
    )
    work = drafter._hierarchy.work[0]
    tokens = steps = 0
    estimates: list[float] = []
    accepted: list[bool] = []
    for turn in turns:
        context = np.zeros((1, MAX_MODEL_LENGTH), np.int32)
        context[0, : len(turn.prompt) + len(turn.answer)] = [*turn.prompt, *turn.answer]
        done = new = 1
        while done < len(turn.answer):
            length = np.array([len(turn.prompt) + done], np.int32)
            (draft,) = drafter.draft([[0] * new], length, context)
            rest = turn.answer[done:]
            right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(draft, rest, strict=False)))
            estimates += work["probs"][1 : len(draft) + 1].tolist()
            accepted += [place < right for place in range(len(draft))]
            new = min(right + 1, len(rest))
            done, tokens, steps = done + new, tokens + new, steps + 1
    return Replayed(tokens, steps, estimates, accepted)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="+", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--limit", type=int, default=96, help="answers")
    parser.add_argument("--minima", type=float, nargs="+", default=[0.02, 0.05, 0.17, 0.4])
    parser.add_argument("--draft-tokens", type=int, default=8)
    options = parser.parse_args()
    reader = TurnReader.of_model(ModelConfig(options.model), chat=False)
    turns = [turn for trace in read_traces(options.traces) for turn in reader.turns(trace)]
    turns = [turn for turn in turns if len(turn.prompt) + len(turn.answer) < MAX_MODEL_LENGTH][: options.limit]
    print("| minimum | tokens per step | drafts per step | estimated / accepted |\n|---|---|---|---|", flush=True)
    found = {minimum: replayed(turns, minimum, options.draft_tokens) for minimum in options.minima}
    for minimum, one in found.items():
        ratio = sum(one.estimates) / max(1, sum(one.accepted))
        drafts = len(one.estimates) / one.steps
        print(f"| {minimum} | {one.tokens / one.steps:.3f} | {drafts:.2f} | {ratio:.2f} |")
    print("\n| minimum | estimate | drafts | estimated | accepted |\n|---|---|---|---|---|")
    for minimum, one in found.items():
        estimates, accepted = np.array(one.estimates), np.array(one.accepted)
        for low, high in itertools.pairwise(BOUNDS):
            inside = (estimates > low) & (estimates <= high)
            if inside.any():
                means = f"{estimates[inside].mean():.2f} | {accepted[inside].mean():.2f}"
                print(f"| {minimum} | {low} to {high} | {inside.sum():,} | {means} |")


if __name__ == "__main__":
    main()
