"""Computes tokens per step of prompt lookup without hdtool's drafter and replay, as an independent check.

    python -m tests.benchmarks.prompt_lookup --traces FILE --model MODEL

Implements the published method: find the first earlier occurrence of the last three tokens, else of the last two, else
of the last one. Up to ten tokens that follow it are compared with the recorded answer.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hdtool.builders.evaluation.recording import TurnReader
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.target.load import load_stops, load_tokenizer

MAX_MATCH_LENGTH = 3
TOKENS = 10


def drafted(context: Sequence[int]) -> Sequence[int]:
    for size in range(MAX_MATCH_LENGTH, 0, -1):
        key = context[-size:]
        for start in range(len(context) - size):
            if context[start : start + size] == key:
                return context[start + size : start + size + TOKENS]
    return []


def accept_lengths(prompt: list[int], answer: list[int], drafts_first: bool = False) -> list[int]:
    """Return the number of tokens per step; the first step is the prefill.

    ``drafts_first`` drafts for the prefill too, as Spec-Bench's loop does.
    """
    lengths: list[int] = []
    done = 0
    while done < len(answer):
        draft = drafted(prompt + answer[:done]) if done or drafts_first else []
        rest = answer[done:-1]
        taken = 0
        while taken < min(len(draft), len(rest)) and draft[taken] == rest[taken]:
            taken += 1
        lengths.append(taken + 1)
        done += taken + 1
    return lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--model", required=True, help="whose answers they are; its tokenizer is enough")
    options = parser.parse_args()
    config = ModelConfig(options.model)
    tokenizer = load_tokenizer(config)
    reader = TurnReader(tokenizer, load_stops(config, tokenizer), tokenizer.eos_token_id)
    found: dict[str, list[int]] = defaultdict(list)
    drafting_first: dict[str, list[int]] = defaultdict(list)
    for trace in read_traces([options.traces]):
        for turn in reader.turns(trace):
            for group in ("all", trace.category):
                found[group] += accept_lengths(turn.prompt, turn.answer)
                drafting_first[group] += accept_lengths(turn.prompt, turn.answer, drafts_first=True)
    print("| | tokens per step | if the prompt's own pass drafts too |\n|---|---|---|")
    for group in found:
        means = (sum(lengths) / len(lengths) for lengths in (found[group], drafting_first[group]))
        print(f"| {group} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")


if __name__ == "__main__":
    main()
