"""Print answers as streamed text or as JSON, and their statistics."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from hdtool.cli.result_tables import rounded
from hdtool.cli.terminal import without_control_characters
from hdtool.data.notes import tell
from hdtool.runtime.answering.streamed_answer import Answer
from hdtool.runtime.core.step import Finish, Stats
from hdtool.runtime.kernels.linear_layers import has_compiled_layers
from hdtool.runtime.settings.draft_sources import SourceId, registered
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target


def colors_shown() -> bool:
    """Return True if output may be colored: NO_COLOR is unset, and FORCE_COLOR is set or output is a terminal."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or sys.stdout.isatty()


def colored(text: str, source: SourceId) -> str:
    color = registered()[source].terminal
    return f"\033[{color}m{text}\033[0m" if text and color else text


def legend(sources: Iterable[SourceId]) -> str:
    """Return a line that names each source in its color or, without sources, says that no draft was accepted."""
    named = [colored(str(source), source) for source in sources]
    return f"drafted by: {', '.join(named)}; without colour: the model" if named else "no drafted token was accepted"


def print_stores(store_set: StoreSet) -> None:
    """Print the opened stores to standard error, if there are any."""
    if store_set.databases:
        tell(f"drafting from {store_set}")


def passes_summary(target: Target) -> str:
    """Return a line that says how the model's forward passes are computed."""
    if target.captures:
        how = "captured steps on the device"
    elif target.compiled:
        how = "compiled CPU layers"
    else:
        matmuls = "compiled matmuls" if has_compiled_layers(target.model) else "torch's matmuls"
        how = f"transformers' layers with {matmuls}"
    return f"forward passes by {how}{'' if target.takes_trees else ', which verify chains only'}"


def stream_answer(answer: Answer, *, show: bool = True, color: bool = False) -> None:
    """Generate an answer, streaming it to stdout if ``show`` is True; Ctrl-C ends the answer and keeps its tokens."""
    printable = without_control_characters if sys.stdout.isatty() else str
    length = 0  # of the text that was streamed
    try:
        for text, source in answer.by_source() if color else ((text, SourceId.NONE) for text in answer):
            length += len(text)
            if show:
                print(colored(printable(text), source), end="", flush=True)
    except KeyboardInterrupt:
        answer.interrupt()
        if show:  # tokens whose text was not streamed yet
            print(printable(answer.text[length:]), end="")
    if show:
        print(flush=True)


def numbered(answers: Iterable[Answer]) -> Iterator[tuple[int, Answer]]:
    """Yield ``(number, answer)``; prompts are numbered from 1, and all turns of a conversation share a number."""
    number, before = 0, None
    for answer in answers:
        number += answer.prompt is not before
        before = answer.prompt
        yield number, answer


def answer_record(answer: Answer) -> dict[str, Any]:
    """Return the ``--json`` record of an answer."""
    stats = answer.stats
    return {
        "id": answer.prompt.id,
        "category": answer.prompt.category,
        "prompt": answer.question,
        "text": answer.text,
        "output_ids": answer.output_ids,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": stats.cached_tokens,
        "tokens": stats.tokens,
        "steps": stats.steps,
        **rounded(stats, tokens_per_step=3, seconds=6, tokens_per_second=2),
        **rounded(stats, draft_us_per_step=1, verify_ms_per_step=4, outside_us_per_step=1),
        "finish": stats.finish,
        "accepted_prediction_tokens": stats.accepted_prediction_tokens,
        "rejected_prediction_tokens": stats.rejected_prediction_tokens,
        "sources": stats.sources_json(),
    }


FINISH_TEXTS = {
    Finish.LENGTH: "; stopped at --max-new-tokens",
    Finish.CONTEXT: "; stopped at the end of the context",
    Finish.INTERRUPT: "; interrupted",
}


def answer_summary(stats: Stats) -> str:
    """Return the statistics of an answer: a line on the whole answer, and a line per source."""
    ending = FINISH_TEXTS.get(stats.finish, "") if stats.finish else ""
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} tokens/s), "
        f"{stats.steps} steps ({stats.tokens_per_step:.2f} tokens per step), a step {stats.verify_ms_per_step:.2f} ms "
        f"in the model and {stats.outside_us_per_step:.0f} µs around it{ending}"
        + "".join(f"\n{_source_summary(stats, source)}" for source in stats.sources)
    )


def gain_summary(stats: Stats, *, color: bool = False) -> str:
    """Return a line that compares tokens per step, in all and by source, with plain decoding's one token per step."""
    shares = [
        f"{stats.accepted[source] / stats.steps:.2f} by {colored(str(source), source) if color else source}"
        for source in stats.that_helped
    ]
    if not shares:
        return "gained: nothing, as no drafted token was accepted"
    return (
        f"gained: {stats.tokens_per_step:.2f} tokens per step instead of 1 ({', '.join(shares)}): "
        f"{stats.steps:,} steps instead of {stats.tokens:,}"
    )


def batch_summary(tokens: int, seconds: float, batch_size: int) -> str:
    """Return a line with the throughput over all answers, whose times overlap within a batch."""
    return f"in total {tokens:,} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s), batch size {batch_size}"


def _source_summary(stats: Stats, source: SourceId) -> str:
    drafted, accepted = stats.drafted[source], stats.accepted[source]
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    rejected = f" and {drafted - accepted:,} rejected" if source is SourceId.PREDICTION else ""
    return (
        f"  {source}: drafted {drafted:,}, of which {accepted:,}{share} were accepted{rejected}, "
        f"in {stats.hits[source]:,} of {stats.steps:,} steps, {stats.source_us_per_step(source):.0f} µs a step"
    )
