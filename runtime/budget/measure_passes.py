"""What forward passes take on this machine, for trees of several sizes behind contexts of several lengths."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from hdtool.data.errors import CostError, OptionError
from hdtool.data.stores.home import cost_at_home
from hdtool.runtime.batch import BatchSlots
from hdtool.runtime.budget.cost_curve import CostCurve, Floats, cost_file
from hdtool.runtime.budget.node_budget import ROWS
from hdtool.runtime.config import CostConfig
from hdtool.runtime.environment import device_name, dtype_name, fingerprint
from hdtool.runtime.kernels.small_batch_linear import has_own_products
from hdtool.runtime.model.load import Loaded
from hdtool.runtime.model.target import Target, some_context
from hdtool.runtime.tree import DraftTree

NODES = tuple(rows - 1 for rows in ROWS)
TIMES, PATIENCE = 20, 10.0
"""Each size is timed so often behind each context, for about so many seconds; the fastest counts."""
QUICK_TIMES, QUICK_PATIENCE = 4, 1.0
"""The same where somebody waits for an answer."""
SHORT = 4
"""A context that costs next to nothing."""


def lengths_for(loaded: Loaded, config: CostConfig) -> tuple[int, ...]:
    """The contexts to measure behind, the last token included; there must be room for one token more."""

    def fits(length: int) -> bool:
        limit = loaded.target.context_limit(length)
        return limit is None or length < limit

    if config.contexts is None:
        powers = [2**power for power in range(1, 64) if 2**power <= config.longest and fits(2**power)]
        return tuple(length for length in powers if length >= config.shortest) or tuple(powers[-1:])
    for length in config.contexts:
        if not fits(length):
            raise OptionError(
                f"contexts holds {length:,}, but the context of {loaded.name} ends at "
                f"{loaded.target.context_limit(length):,} tokens, drafts included: name shorter ones"
            )
    return tuple(sorted(set(config.contexts)))


def cost_of_passes(
    loaded: Loaded, lengths: Sequence[int], told: Callable[[int], None] = lambda measured: None
) -> CostCurve:
    """Measured behind each context in turn; ``told`` hears how many are done."""
    target = loaded.target
    rows = []
    for length in lengths:
        taken = seconds_of_trees(target, NODES, TIMES, PATIENCE, length - 1)
        rows.append(tuple(round(1e3 * float(seconds), 5) for seconds in taken))
        told(len(rows))
    threads = f", threads: {torch.get_num_threads()}" if target.device.type == "cpu" else ""
    return CostCurve(
        NODES,
        tuple(rows),
        tuple(lengths),
        device=device_name(target.device) + threads,
        model=loaded.name,
        dtype=dtype_name(target.dtype),
    )


def seconds_of_trees(
    target: Target, sizes: Sequence[int], times: int, patience: float, length: int = SHORT, batch: int = 1
) -> Floats:
    """What a forward pass takes for trees of so many nodes, behind a context; forgets the conversation.

    ``length`` is that of the context without the root; in a ``batch`` there is such a context, and such a tree,
    in each seat. The fastest of several ``times`` counts, of fewer when ``patience``, in seconds, is over.
    """
    began = time.perf_counter()
    check = _checking(target, some_context(length, target.config.vocab_size), max(sizes), batch)
    taken = np.full(len(sizes), np.inf)
    for _ in range(times):
        for place, size in enumerate(sizes):
            tree = DraftTree.of(0, [1] * size, [-1] * size)
            before = target.seconds_in_model
            check(tree)
            taken[place] = min(taken[place], target.seconds_in_model - before)
        if time.perf_counter() - began > patience:
            break
    return taken


def _checking(target: Target, context: Sequence[int], room: int, batch: int) -> Callable[[DraftTree], object]:
    if batch == 1:
        target.prefill(context, room)
        target.commit([])
        return target.verify
    slots = BatchSlots(target, batch)
    for slot in range(batch):
        slots.prefill(slot, context, room)
        slots.commit(slot, [])
    return lambda tree: slots.verify([tree] * batch)


def cost_here(target: Target, batch: int = 1) -> CostCurve:
    """What ``hdtool bench --cost`` measured of this model on this device, else a quick measurement."""
    # What is kept was measured in one process.
    if batch == 1 and target.processes == 1 and (kept := kept_at_home(target)):
        return kept
    taken = seconds_of_trees(target, NODES, QUICK_TIMES, QUICK_PATIENCE, batch=batch)
    return CostCurve(NODES, (tuple(1e3 * taken),))


def _place_at_home(target: Target) -> Path:
    computed = dtype_name(target.dtype) + "-own-products" * has_own_products(target.model)
    return cost_at_home(fingerprint(target.model), device_name(target.device), computed, torch.get_num_threads())


def keep_at_home(target: Target, curve: CostCurve) -> None:
    """Where whoever loads the same model on the same device finds it again."""
    curve.write(_place_at_home(target))


def check_home(target: Target) -> None:
    """Refuse to measure what could not be kept in hdtool's home."""
    cost_file(_place_at_home(target)).check()


def kept_at_home(target: Target) -> CostCurve | None:
    """What was kept; a file that cannot be used costs a measurement and a note, not the answer."""
    path = _place_at_home(target)
    try:
        return CostCurve.read(path) if path.exists() else None
    except CostError as error:
        print(f"note: {error}; until then it is measured quickly each time", file=sys.stderr)
        return None
