"""``hdtool demo``: what hdtool does, shown in a minute on the embedded model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli import options
from hdtool.cli.options import INTERRUPTED
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig

if TYPE_CHECKING:
    from hdtool.runtime.stats import Stats


def demo(
    prompts: Annotated[int, typer.Option(min=1, help="How many of the embedded prompts to answer.")] = 4,
    method: options.Method = DecodeConfig.method,
    max_new_tokens: options.MaxNewTokens = 160,
    device: options.Device = ModelConfig.device,
) -> int:
    """Show hdtool at work on the embedded model.

    Answers a few prompts of several kinds, none of which the model has learned from: first by plain
    decoding, then drafting, by default from the conversation and the two embedded stores. The text is the same.
    """
    decoding = DecodeConfig(method, max_new_tokens)

    from hdtool.cli.output.show_answers import LEGEND, quiet_libraries, run, summary
    from hdtool.data import demo as embedded
    from hdtool.data.prompts import read_prompts
    from hdtool.runtime.answerer import Answerer
    from hdtool.runtime.stats import Stats

    quiet_libraries()
    store_set = StoresConfig(str(embedded.MODEL_STORE), str(embedded.CORPUS_INDEX))
    plain, drafting = (
        Answerer(ModelConfig(device=device), DecodeConfig(name, max_new_tokens), SamplingConfig(), store_set=store_set)
        for name in ("ar", decoding.method)
    )
    every = read_prompts(embedded.PROMPTS)
    for answerer in (plain, drafting):  # compiled code is loaded, or made, at its first use
        for _ in next(answerer.answers(every[-1])):
            pass
    print(LEGEND)
    totals: dict[str, list[Stats]] = {"plain": [], "drafting": []}
    same = 0
    for prompt in every[:prompts]:  # they stand there one of each kind in turn
        (usual,) = plain.answers(prompt)
        for _ in usual:
            pass
        (answer,) = drafting.answers(prompt)
        print(f"\n▌ {prompt.category}\n{answer.asked}\n")
        run(answer, color=True)
        if answer.interrupted:
            return INTERRUPTED
        same += answer.output_ids == usual.output_ids
        totals["plain"].append(usual.stats)
        totals["drafting"].append(answer.stats)
        print(f"\n{_beside(method, usual.stats, answer.stats)}", flush=True)
    before, after = (Stats.total(parts) for parts in totals.values())
    shown = len(totals["drafting"])
    print(f"\n▌ in all: {same} of {shown} answers are the same, token for token\n{_beside(method, before, after)}")
    print(f"\n{method}: {summary(after)}")
    print("\nThe embedded model is a toy of 7 million parameters; name your own: hdtool generate --model FOLDER")
    return 0 if same == shown else 1


def _beside(method: str, plain: Stats, drafted: Stats) -> str:
    """Both ways in two lines."""
    width = max(len(method), len("plain"))
    lines = (
        f"  {name:{width}}  {stats.tokens:4} tokens in {stats.seconds:5.2f} s, {stats.tokens_per_second:5.0f} tokens/s"
        for name, stats in (("plain", plain), (method, drafted))
    )
    gain = plain.seconds / drafted.seconds
    return "\n".join(lines) + f", {drafted.tokens_per_step:.2f} tokens per step: {gain:.2f} times as fast"
