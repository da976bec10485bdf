"""What forward passes take on this machine, for trees of several sizes behind contexts of several lengths."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from hdtool.data.errors import CostError, OptionError
from hdtool.data.home import cost_at_home
from hdtool.runtime.budget import ROWS
from hdtool.runtime.config import CostConfig
from hdtool.runtime.cost import CostCurve
from hdtool.runtime.load import Loaded
from hdtool.runtime.surroundings import device_name, dtype_name, fingerprint

TIMES, PATIENCE = 20, 10.0
"""Each size is timed so often behind each context, for about so many seconds; the fastest counts."""


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
    nodes = tuple(rows - 1 for rows in ROWS)
    rows = []
    for length in lengths:
        taken = target.seconds_of_trees(nodes, TIMES, PATIENCE, length - 1)
        rows.append(tuple(round(1e3 * float(seconds), 5) for seconds in taken))
        told(len(rows))
    threads = f", threads: {torch.get_num_threads()}" if target.device.type == "cpu" else ""
    return CostCurve(
        nodes,
        tuple(rows),
        tuple(lengths),
        device=device_name(target.device) + threads,
        model=loaded.name,
        dtype=dtype_name(target.dtype),
    )


def keep_at_home(loaded: Loaded, curve: CostCurve) -> None:
    """Where whoever loads the same model on the same device finds it again."""
    target = loaded.target
    path = cost_at_home(
        fingerprint(target.model), device_name(target.device), dtype_name(target.dtype), torch.get_num_threads()
    )
    write_curve(curve, path)


def write_curve(curve: CostCurve, path: Path) -> None:
    """In one step: whoever reads it meanwhile finds the old one or the new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        curve.write(beside)
        beside.replace(path)
    except OSError as error:
        raise CostError(f"{path} cannot be written ({error.strerror or error}): choose another place") from None
