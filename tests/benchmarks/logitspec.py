"""Measures tokens per step of drafting from logits, on the embedded model and its held-out prompts.

    python -m tests.benchmarks.logitspec [--temperature T] [--budgets 64]

Each contender answers all prompts with one drafter, which keeps the rankings that it has seen and has no history.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from hdtool.runtime.config.decoding import DecodeConfig
from hdtool.runtime.config.draft_token_limits import LARGEST_BUDGET
from hdtool.runtime.config.measuring import WARM
from hdtool.runtime.config.model import ModelConfig, SamplingConfig
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.target.load import load
from tests.benchmarks.laboratory import (
    DEMO_STORES,
    Outcome,
    Table,
    demo_prompts,
    method_contender,
    on_prompts,
    parser_of,
)


def main() -> None:
    parser = parser_of(__doc__, prompts=200, tokens=160, temperature=0.0, budgets=[32, LARGEST_BUDGET],
                       methods=["pld", "logitspec", "hd", "hd+logitspec"])  # fmt: skip
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded = load(ModelConfig(device="cpu", dtype="float32"))
    prompts = demo_prompts(loaded, options.prompts)
    sampling = SamplingConfig(temperature=options.temperature, top_k=0 if options.temperature else None)
    contenders = {}
    for method in options.methods:
        for nodes in options.budgets:
            config = replace(DecodeConfig(method, options.tokens, history="none"), draft_tokens=nodes)
            contender = method_contender(loaded, config, DEMO_STORES, sampling)
            contenders[f"{method}, {nodes} nodes"] = on_prompts(contender)
    outcome = Outcome(contenders, prompts, memory=WARM)
    print(f"{machine()}; {len(prompts)} prompts, up to {options.tokens} tokens each, one thread\n")
    table = Table("method", "tokens per step")
    for name, total in outcome.totals.items():
        table.row(name, f"{total.stats.tokens_per_step:.3f}")


if __name__ == "__main__":
    main()
