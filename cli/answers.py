"""How answers are told: as a stream, as JSON, as a line of figures."""

from __future__ import annotations

import warnings
from typing import Any

from hdtool.runtime.answers import Answer
from hdtool.runtime.decode import Finish
from hdtool.runtime.stats import Stats


def run(answer: Answer, *, show: bool = True) -> None:
    """Make an answer, shown while it comes; Ctrl-C ends it and keeps what there is."""
    try:
        for piece in answer:
            if show:
                print(piece, end="", flush=True)
    except KeyboardInterrupt:
        answer.interrupt()
    if show:
        print(flush=True)


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
        "sources": {},
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
    )


def quiet_libraries() -> None:
    """Keep the libraries' own progress bars, notes and warnings off a command's output."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    hub_logging.set_verbosity_error()
    logging.disable_progress_bar()
