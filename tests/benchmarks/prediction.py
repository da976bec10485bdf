"""Measures predicted outputs on the demo model: useless, misleading, half right and exact ones against none.

    python -m tests.benchmarks.prediction [--prompts 24] [--rounds 5] [--draft-tokens 32]

All kinds answer each prompt in turn, each with a separate drafter and the demo's stores. Times of a step and of an
answer are medians of the ratios to the same answer without a prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from statistics import median

import torch

from hdtool.builders.evaluation.experiment import Answering
from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.draft_token_limits import FIXED_BUDGET
from hdtool.runtime.config.measuring import WARM
from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.target.load import load
from tests.benchmarks.laboratory import DEMO_STORES, Outcome, Table, demo_prompts, method_contender, parser_of

NONE, FOREIGN, SHUFFLED, HALF, EXACT = "none", "useless", "misleading", "half right", "exact"
KINDS = (NONE, FOREIGN, SHUFFLED, HALF, EXACT)
RUN = 8
"""Length of alternating right and wrong runs in a half right prediction, in tokens."""
PIECE = 3
"""Length of right runs in a misleading prediction, in tokens: after two that match, only one more is right."""

Ids = list[int]


def predictions(answers: Sequence[Ids], number: int) -> dict[str, Ids]:
    """Return the predictions for the answer to a prompt, by kind."""
    true, other = answers[number], answers[(number + 1) % len(answers)]
    filled = (other * (len(true) // len(other) + 1))[: len(true)]
    half = [(filled if at // RUN % 2 else true)[at] for at in range(len(true))]
    pieces = [true[at : at + PIECE] for at in range(0, len(true), PIECE)]
    # Reordered pieces often match the context but continue wrongly.
    return {
        NONE: [],
        FOREIGN: other,
        SHUFFLED: [*chain.from_iterable(pieces[1::2] + pieces[::2])],
        HALF: half,
        EXACT: true,
    }


def main() -> None:
    parser = parser_of(__doc__, prompts=24, rounds=5, tokens=256, draft_tokens=FIXED_BUDGET, threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(ModelConfig(device="cpu", dtype="float32"))
    decoding = DecodeConfig("hd", options.tokens, draft_tokens=options.draft_tokens)
    contender = method_contender(loaded, decoding, DEMO_STORES)
    prompts = demo_prompts(loaded, options.prompts)
    plain = method_contender(loaded, DecodeConfig("ar", options.tokens))
    answers = [plain.answer(prompt).output_ids for prompt in prompts]

    def drafting(kind: str) -> Answering[int]:
        fresh = contender.fresh()
        return lambda number: [fresh.answer(prompts[number], prediction=predictions(answers, number)[kind])]

    # Drafters are new in each round, because they remember earlier answers.
    contenders = {kind: partial(drafting, kind) for kind in KINDS}
    outcome = Outcome(contenders, range(len(prompts)), options.rounds, WARM)
    assert outcome.identical == len(prompts)
    print(f"{machine()}; {len(prompts)} prompts, {sum(map(len, answers)):,} tokens, {options.rounds} rounds\n")
    table = Table(
        "prediction", "tokens per step", "accepted", "rejected", "µs a step around the model", "a step", "an answer"
    )
    for kind, rows in outcome.rows.items():
        total = outcome.totals[kind].stats
        pairs = [(one.turns[0], none.turns[0]) for one, none in zip(rows, outcome.rows[NONE], strict=True)]
        step = median(one.seconds / len(one.step_tokens) * len(none.step_tokens) / none.seconds for one, none in pairs)
        table.row(
            kind,
            f"{total.tokens_per_step:.2f}",
            f"{total.accepted_prediction_tokens // options.rounds:,}",
            f"{total.rejected_prediction_tokens // options.rounds:,}",
            f"{total.outside_us_per_step:.0f}",
            f"{step - 1:+.1%}",
            f"{median(one.seconds / none.seconds for one, none in pairs) - 1:+.1%}",
        )


if __name__ == "__main__":
    main()
