"""``hdtool demo``: what hdtool does, shown in a minute on the embedded model."""

from __future__ import annotations

from typing import Annotated

import typer

from hdtool.cli import options
from hdtool.cli.options import INTERRUPTED
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig


def demo(
    prompts: Annotated[int, typer.Option(min=1, help="How many of the embedded prompts to answer.")] = 3,
    max_new_tokens: options.MaxNewTokens = 160,
    device: options.Device = ModelConfig.device,
) -> int:
    """Show hdtool at work on the embedded model.

    Answers a few prompts of several kinds, none of which the model has learned from.
    """
    from hdtool.cli.answers import quiet_libraries, run, summary
    from hdtool.data import demo as embedded
    from hdtool.data.prompts import read_prompts
    from hdtool.runtime.answers import Answerer
    from hdtool.runtime.stats import Stats

    quiet_libraries()
    every = read_prompts(embedded.PROMPTS)
    kinds = list(dict.fromkeys(prompt.category for prompt in every))
    shown = [[prompt for prompt in every if prompt.category == kind] for kind in kinds]
    answerer = Answerer(ModelConfig(device=device), DecodeConfig(max_new_tokens=max_new_tokens), SamplingConfig())
    parts: list[Stats] = []
    for number in range(min(prompts, len(every))):
        group = shown[number % len(shown)]
        prompt = group[number // len(shown) % len(group)]
        for answer in answerer.answers(prompt):
            print(f"\n▌ {prompt.category}\n{answer.asked}\n")
            run(answer)
            print(f"\n  {summary(answer.stats)}", flush=True)
            parts.append(answer.stats)
            if answer.interrupted:
                return INTERRUPTED
    print(f"\nin all: {summary(Stats.total(parts))}")
    print("The embedded model is a toy of 7 million parameters; name your own: hdtool generate --model FOLDER")
    return 0
