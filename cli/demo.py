"""``hdtool demo``: plain decoding and drafting side by side on the embedded model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from hdtool.cli.parameters.command import INPUT, option
from hdtool.cli.parameters.options import INTERRUPTED
from hdtool.cli.parameters.settings import only
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig

if TYPE_CHECKING:
    from hdtool.runtime.stats import Stats


def demo(
    *,
    num_prompts: Annotated[int, option(INPUT, "Number of the embedded prompts to answer.", "--num-prompts", min=1)] = 4,
    decoding: Annotated[DecodeConfig, only("method", "max_new_tokens", max_new_tokens=160)],
    loading: Annotated[ModelConfig, only("device")],
) -> int:
    """Compare drafting with plain decoding on the demo model.

    Answers a few embedded prompts, which were not in the training data, by plain decoding and with drafting. The text
    is the same.
    """
    from hdtool.cli.output.show_answers import colors_shown, legend, quiet_libraries, stream, summary
    from hdtool.data import demo as embedded
    from hdtool.data.prompts import read_prompts
    from hdtool.runtime.answerer import Answerer
    from hdtool.runtime.stats import Stats

    quiet_libraries()
    method = decoding.method
    store_set = StoresConfig(model_db=str(embedded.MODEL_STORE), corpus_db=str(embedded.CORPUS_INDEX))
    plain, drafting = (
        Answerer(loading, replace(decoding, method=name), SamplingConfig(), store_set=store_set)
        for name in ("ar", method)
    )
    every = read_prompts(embedded.PROMPTS)
    for answerer in (plain, drafting):  # the first use compiles
        for _ in next(answerer.answers(every[-1])):
            pass
    color = colors_shown()
    if color:
        print(legend())
    totals: dict[str, list[Stats]] = {"plain": [], "drafting": []}
    same = 0
    for prompt in every[:num_prompts]:  # they are sorted round-robin by category
        (usual,) = plain.answers(prompt)
        for _ in usual:
            pass
        (answer,) = drafting.answers(prompt)
        print(f"\n▌ {prompt.category}\n{answer.question}\n")
        stream(answer, color=color)
        if answer.interrupted:
            return INTERRUPTED
        same += answer.output_ids == usual.output_ids
        totals["plain"].append(usual.stats)
        totals["drafting"].append(answer.stats)
        print(f"\n{_beside(method, usual.stats, answer.stats)}", flush=True)
    before, after = (Stats.total(parts) for parts in totals.values())
    shown = len(totals["drafting"])
    print(f"\n▌ in total: {same} of {shown} answers are identical\n{_beside(method, before, after)}")
    print(f"\n{method}: {summary(after)}")
    print("\nThe embedded model is a toy of 7 million parameters; name your own: hdtool generate --model FOLDER")
    return 0 if same == shown else 1


def _beside(method: str, plain: Stats, drafted: Stats) -> str:
    """A line for plain decoding and one for the method."""
    width = max(len(method), len("plain"))
    lines = (
        f"  {name:{width}}  {stats.tokens:4} tokens in {stats.seconds:5.2f} s, {stats.tokens_per_second:5.0f} tokens/s"
        for name, stats in (("plain", plain), (method, drafted))
    )
    gain = plain.seconds / drafted.seconds
    return "\n".join(lines) + f", {drafted.tokens_per_step:.2f} tokens per step: {gain:.2f} times the speed"
