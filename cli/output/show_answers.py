"""How answers are told: as a stream, as JSON, as a line of figures."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from logging import getLogger
from typing import Any

from hdtool.runtime.answer import Answer
from hdtool.runtime.decode import Finish
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stats import Stats
from hdtool.runtime.stores.store_set import StoreSet

COLORS = {
    SourceName.CONTEXT: 32,
    SourceName.MODEL: 34,
    SourceName.CORPUS: 35,
    SourceName.LOOKAHEAD: 36,
    SourceName.RECYCLED: 33,
    SourceName.COPIED: 93,
    SourceName.LAST: 31,
}
"""Of the terminal: green, blue, magenta, cyan, yellow, bright yellow, red."""


def painted(text: str, source: SourceName) -> str:
    return f"\033[{COLORS[source]}m{text}\033[0m" if text and source in COLORS else text


LEGEND = "drafted by: " + ", ".join(painted(str(source), source) for source in COLORS) + "; the model's own: plain"


def tell_sources(store_set: StoreSet) -> None:
    """Say what is drafted from, if anything is."""
    if store_set.databases:
        print(f"drafting from {store_set}", file=sys.stderr)


def run(answer: Answer, *, show: bool = True, color: bool = False) -> None:
    """Make an answer, shown while it comes; Ctrl-C ends it and keeps what there is."""
    pieces = (painted(*piece) for piece in answer.by_source()) if color else iter(answer)
    try:
        for piece in pieces:
            if show:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        answer.interrupt()
    if show:
        print(flush=True)


def numbered(answers: Iterable[Answer]) -> Iterator[tuple[int, Answer]]:
    """Each answer with the number of its prompt, which those to later turns share."""
    number, before = 0, None
    for answer in answers:
        number += answer.prompt is not before
        before = answer.prompt
        yield number, answer


def record(answer: Answer) -> dict[str, Any]:
    """The answer as ``--json`` prints it; names stay as they are once they have shipped."""
    stats = answer.stats
    return {
        "id": answer.prompt.id,
        "category": answer.prompt.category,
        "prompt": answer.asked,
        "text": answer.text,
        "output_ids": answer.output_ids,
        "prompt_tokens": answer.prompt_tokens,
        "tokens": stats.tokens,
        "steps": stats.steps,
        "tokens_per_step": round(stats.tokens_per_step, 3),
        "seconds": round(stats.seconds, 6),
        "tokens_per_second": round(stats.tokens_per_second, 2),
        "draft_us_per_step": round(stats.draft_us_per_step, 1),
        "verify_ms_per_step": round(stats.verify_ms_per_step, 4),
        "outside_us_per_step": round(stats.outside_us_per_step, 1),
        "finish": stats.finish,
        "sources": stats.sources_json(),
    }


ENDINGS = {
    Finish.LENGTH: "; stopped at the length asked for",
    Finish.CONTEXT: "; stopped where the model's context is full",
    Finish.INTERRUPT: "; interrupted",
}


def summary(stats: Stats) -> str:
    """The figures of an answer in a line."""
    ending = ENDINGS.get(stats.finish, "") if stats.finish else ""
    return (
        f"{stats.tokens} tokens in {stats.seconds:.2f} s ({stats.tokens_per_second:.1f} tokens/s), "
        f"{stats.steps} steps ({stats.tokens_per_step:.2f} tokens per step), a step {stats.verify_ms_per_step:.2f} ms "
        f"in the model and {stats.outside_us_per_step:.0f} µs around it{ending}"
        + "".join(f"\n{_contribution(stats, source)}" for source in stats.sources)
    )


def in_all(tokens: int, seconds: float, batch_size: int) -> str:
    """The figures of answers that were made side by side; the times of each contain the others'."""
    return (
        f"in all {tokens:,} tokens in {seconds:.2f} s ({tokens / seconds:.1f} tokens/s), {batch_size} answers at once"
    )


def _contribution(stats: Stats, source: SourceName) -> str:
    drafted, accepted = stats.drafted[source], stats.accepted[source]
    share = f" ({accepted / drafted:.0%})" if drafted else ""
    return (
        f"  {source}: drafted {drafted:,}, of which {accepted:,}{share} were accepted, "
        f"in {stats.hits[source]:,} of {stats.steps:,} steps, {stats.source_us_per_step(source):.0f} µs a step"
    )


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars, notes and warnings off a command's output."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
    for library in ("bitsandbytes", "torchao", "torch.utils._pytree"):
        getLogger(library).setLevel("ERROR")
