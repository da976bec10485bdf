"""Measures tokens per step and per second by the number of MTP passes: ``python -m tests.benchmarks.mtp_depth``.

The hybrid demo model answers its held-out prompts. Methods and numbers of passes take turns at each prompt, each with a
separate drafter, and all answers are compared with plain decoding.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hdtool.data import demo
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from tests.benchmarks.laboratory import Outcome, Table, demo_prompts, drafting, on_prompts, parser_of

PASSES = (0, 1, 2, 3, 4, 6, 8)
"""Numbers of MTP passes after the first one of a step, which reads the accepted tokens."""
NODES = 24


def drafter_of(method: str, passes: int | None, loaded: Loaded, stores: StoreSet) -> Any:
    """Return a drafter with a fixed number of passes and of nodes, or with measured ones if ``passes`` is None."""
    config = DecodeConfig(method, draft_tokens=None if passes is None else NODES)
    drafter: Any = drafter_for(config, loaded.target, stores)
    trained = getattr(drafter, "trained", None) or getattr(drafter, "_trained", None)
    if trained is not None and passes is not None:
        trained._passes = passes
    return drafter


def main() -> None:
    parser = parser_of(__doc__, model=str(demo.HYBRID), model_db="none", num_prompts=16, max_new_tokens=128, threads=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    loaded = load(options.model)
    stores = loaded.store_opener(StoresConfig(model_db=options.model_db, corpus_db="none")).open()
    cases: list[tuple[str, int | None]] = [("ar", None), ("hd", None), ("hd", 0), ("mtp", None), ("hd+mtp", None)]
    cases += [(method, passes) for method in ("mtp", "hd+mtp") for passes in PASSES]
    every = demo_prompts(loaded)
    prompts = every[:: len(every) // options.num_prompts or 1][: options.num_prompts]
    contenders = {}
    for method, passes in cases:
        new = partial(drafter_of, method, passes, loaded, stores)
        contenders[f"{method} {passes}"] = on_prompts(drafting(loaded, new, options.max_new_tokens))
    outcome = Outcome(contenders, prompts)
    table = Table("method", "passes", "tokens per step", "tokens/s", "speed-up")
    for name, (method, passes) in zip(contenders, cases, strict=True):
        shown = "" if method in ("ar", "hd") else "as many as pay" if passes is None else f"1 + {passes}"
        total = outcome.totals[name]
        speed_up = total.tokens_per_second / outcome.totals["ar None"].tokens_per_second
        nodes = "" if passes is None else f", {NODES} nodes"
        figures = f"{total.stats.tokens_per_step:.2f}", f"{total.tokens_per_second:.1f}", f"{speed_up:.2f}"
        table.row(f"`{method}`{nodes}", shown, *figures)
    print(f"answers to {outcome.identical} of {len(prompts)} prompts are identical")


if __name__ == "__main__":
    main()
