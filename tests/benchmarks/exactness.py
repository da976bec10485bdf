"""Compares every method with plain decoding, answer by answer: ``python -m tests.benchmarks.exactness``.

The embedded model answers its held-out prompts with its embedded stores, under each sampling configuration: first by
plain decoding, then by each method. Greedy plain decoding is also compared with ``model.generate``. Exits with an error
if a method's answer differs from plain decoding, or a greedy plain answer from that of ``model.generate``.
"""

from __future__ import annotations

import sys

import torch

from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.decoding import METHODS, DecodeConfig, StoresConfig
from hdtool.runtime.settings.measuring import WARM
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import load
from tests.benchmarks.laboratory import Outcome, Table, demo_prompts, method_contender, on_numbered_prompts, parser_of
from tests.support.oracle import generated

SAMPLINGS = {
    "greedy": [SamplingConfig()],
    "greedy, penalty 1.2": [SamplingConfig(repetition_penalty=1.2)],
    "T 0.7": [SamplingConfig(temperature=0.7, seed=seed) for seed in range(3)],
    "T 1.0": [SamplingConfig(temperature=1.0, seed=seed) for seed in range(3)],
    "T 1.0, top-p 0.9, penalty 1.2": [
        SamplingConfig(temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=seed) for seed in range(3)
    ],
}
"""Sampling configurations by name; the prompts are distributed over the seeds of each."""

PLAIN = "ar"


def main() -> int:
    parser = parser_of(__doc__, methods=[name for name in METHODS if name != PLAIN], prompts=200, tokens=128)
    parser.add_argument("--samplings", nargs="+", default=list(SAMPLINGS), choices=SAMPLINGS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(ModelConfig(device="cpu", dtype="float32"))
    prompts = demo_prompts(loaded, options.prompts)
    print(f"{machine()}; {len(prompts)} prompts, up to {options.tokens} tokens each, float32\n")
    table = Table("identical answers (tokens per step)", "plain = generate", *options.methods)
    wrong = 0
    for name in options.samplings:
        samplings = SAMPLINGS[name]

        def sampling_of(number: int, samplings: list[SamplingConfig] = samplings) -> SamplingConfig:
            return samplings[number % len(samplings)]

        contenders = {
            method: on_numbered_prompts(
                method_contender(loaded, DecodeConfig(method, options.tokens), StoresConfig()), prompts, sampling_of
            )
            for method in (PLAIN, *options.methods)
        }
        # A drafter serves all answers of a configuration only, so that no history holds an answer to its prompt.
        outcome = Outcome(contenders, range(len(prompts)), memory=WARM)
        plain = [row.turns[0].output_ids for row in outcome.rows[PLAIN]]
        cells = ["drawn otherwise"]
        if samplings[0].is_greedy:
            penalty = {"repetition_penalty": samplings[0].repetition_penalty} if samplings[0].repetition_penalty else {}
            ours = zip(prompts, plain, strict=True)
            equal = sum(generated(loaded.target.model, ids, options.tokens, **penalty) == said for ids, said in ours)
            cells = [str(equal)]
            wrong += len(prompts) - equal
        for method in options.methods:
            equal = 0
            for number, (row, said) in enumerate(zip(outcome.rows[method], plain, strict=True)):
                equal += row.output_ids == [said]
                if row.output_ids != [said]:
                    print(f"{method}, {name}, prompt {number}: {said} became {row.output_ids[0]}", file=sys.stderr)
            cells.append(f"{equal} ({outcome.totals[method].stats.tokens_per_step:.2f})")
            wrong += len(prompts) - equal
        table.row(name, *cells)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
