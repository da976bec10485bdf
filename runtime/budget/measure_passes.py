"""Measure the latency of forward passes on this machine, for several tree sizes and context lengths."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hdtool.data.durable_files import MAX_CACHE_AGE, CachedValue
from hdtool.data.errors import CostError, OptionError
from hdtool.data.home import cost_at_home, quick_costs_at_home
from hdtool.data.notes import note
from hdtool.data.progress import progress_bar
from hdtool.runtime.budget.cost_curve import CostCurve, Floats, cost_file, interpolated
from hdtool.runtime.budget.pass_costs import PASS_SIZES
from hdtool.runtime.core.tree import LARGEST_TREE, DraftTree
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.kernels.linear_layers import has_compiled_layers
from hdtool.runtime.kernels.machine_name import device_name, dtype_name
from hdtool.runtime.model.compact_layers import has_compact_weights
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.settings.measuring import CostConfig
from hdtool.runtime.target.load import Loaded
from hdtool.runtime.target.target import Target

MEASURED_NODES = tuple(rows - 1 for rows in PASS_SIZES)
REPETITIONS, MAX_SECONDS = 20, 10.0
"""Number of passes timed per tree size, of which the median is taken, and time limit per context in seconds."""
MIN_QUICK_REPETITIONS, MAX_QUICK_REPETITIONS = 4, 16
"""Minimum and maximum number of passes per tree size in the quick measurement that precedes an answer."""
QUICK_SECONDS, MAX_QUICK_SECONDS = 0.25, 1.0
"""Seconds after which the quick measurement of a context ends: with the minimum of passes, and with fewer."""
QUICK_QUANTILE = 0.25
"""Quantile of a size's times that the quick measurement uses: on a busy machine, most passes may be slowed down."""
SHORT_CONTEXT = 4
"""Length of a context that hardly affects the latency of a pass."""
LONG_CONTEXT, MIN_LONG_CONTEXT, LONG_CONTEXT_BYTES = 4096, 256, 128 * 2**20
"""Length of the long context in the quick measurement, its minimum, and a limit on the KV cache of all sequences in
bytes. The limit shortens the context; below the minimum, no long context is timed."""
CAPTURED_CONTEXT = 16384
"""Length of the long context for captured steps, if the target's own cache has room for it: on a GPU, reading the keys
and values of a shorter context takes hardly any time."""
LONG_CONTEXT_NODES = (0, 7, 15, 31, 63)
"""Numbers of nodes for which passes are timed after the long context."""
SLOW_SECONDS = 0.03
"""Duration of a pass over a single token above which the quick measurement times fewer tree sizes."""
SLOW_NODES, SLOW_LONG_CONTEXT_NODES = (0, 1, 3, 7, 15, 23, 31, 63), (0, 31)
"""Numbers of nodes for which passes of slow models are timed after the short and after the long context."""


def context_lengths_for(loaded: Loaded, config: CostConfig) -> tuple[int, ...]:
    """Return the context lengths, root included, at which to time a model's passes; see ``lengths_within``."""
    return lengths_within(loaded.target.context_limit, loaded.name, config)


def lengths_within(limit_of: Callable[[int], int | None], name: str, config: CostConfig) -> tuple[int, ...]:
    """Return the context lengths at which to time passes of the model called ``name``.

    ``limit_of`` returns the model's context limit, which may depend on the length; None if there is no limit. Raise
    OptionError if ``config`` names a length that is not below the limit.
    """

    def fits(length: int) -> bool:
        limit = limit_of(length)
        return limit is None or length < limit

    if config.contexts is None:
        powers = [2**power for power in range(1, 64) if 2**power <= config.longest and fits(2**power)]
        return tuple(length for length in powers if length >= config.shortest) or tuple(powers[-1:])
    for length in config.contexts:
        if not fits(length):
            raise OptionError(
                f"contexts holds {length:,}, but the context of {name} ends at {limit_of(length):,} tokens, drafts "
                "included: name shorter ones"
            )
    return tuple(sorted(set(config.contexts)))


def measure_cost_curve(
    loaded: Loaded, lengths: Sequence[int], on_progress: Callable[[int], None] = lambda measured: None
) -> CostCurve:
    """Measure a model's cost curve after contexts of these ``lengths``, which include the root.

    ``on_progress`` is called with the number of finished contexts.
    """
    target = loaded.target
    rows = []
    for length in lengths:
        times = time_tree_passes(target, MEASURED_NODES, _is_enough, length - 1)
        rows.append(tuple(round(1e3 * float(seconds), 5) for seconds in np.median(times, axis=0)))
        on_progress(len(rows))
    threads = f", threads: {torch.get_num_threads()}" if target.device.type == "cpu" else ""
    return CostCurve(
        MEASURED_NODES,
        tuple(rows),
        tuple(lengths),
        device=device_name(target.device) + threads,
        model=loaded.name,
        dtype=dtype_name(target.dtype),
    )


def _is_enough(rounds: int, seconds: float) -> bool:
    return rounds >= REPETITIONS or seconds > MAX_SECONDS


def _is_once(rounds: int, seconds: float) -> bool:
    return rounds > 0


def _is_enough_quickly(rounds: int, seconds: float) -> bool:
    limit = QUICK_SECONDS if rounds >= MIN_QUICK_REPETITIONS else MAX_QUICK_SECONDS
    return rounds >= MAX_QUICK_REPETITIONS or seconds > limit


def time_tree_passes(
    target: Target,
    sizes: Sequence[int],
    is_enough: Callable[[int, float], bool],
    length: int = SHORT_CONTEXT,
    batch: int = 1,
    *,
    unread: bool = False,
) -> Floats:
    """Return the duration in seconds of forward passes, with a row per round and a column per tree size.

    Each of the ``batch`` slots gets a context of ``length`` tokens, root excluded, and a tree of the given size. If the
    target does not pad trees, a size is one less than the rows of the whole pass (the roots and nodes of all slots).
    If ``unread``, no prefill computes the context's keys and values, which does not change the latency.

    Each round runs one pass of each size, after an untimed pass of the first size, because the largest pass, which ends
    a round, evicts a small model from the cache. ``is_enough`` gets the number of rounds and the seconds since the
    start, and returns True to end the measurement.

    The median of a column predicts the duration of a step; the minimum would not, as the fastest pass is a tenth faster
    than a typical pass.
    """
    began = time.perf_counter()
    uses_own = batch == 1 and (target.captures or not unread) and _has_free_cache(target)
    cache = target.cache if uses_own else target.allocate(batch)  # steps captured for target.cache also serve answers
    context = some_context(length, target.config.vocab_size)
    random = np.random.default_rng(0)
    rounds: list[list[float]] = []
    try:
        for slot in range(batch):
            if unread:
                cache.fill_unread(slot, context, LARGEST_TREE + 1)
            else:
                target.prefill(cache, slot, context, room=max(sizes))
        while not rounds or not is_enough(len(rounds), time.perf_counter() - began):
            rounds.append([])
            for size in (sizes[0], *sizes):
                slots = batch if target.pads else min(size + 1, batch)
                nodes = [size] * slots if target.pads else [(size + 1 - slots + turn) // slots for turn in range(slots)]
                trees = [_random_tree(target, n, random) for n in nodes]
                before = target.log.seconds
                target.verify(cache, trees)
                rounds[-1].append(target.log.seconds - before)
    finally:
        cache.slots[0].cut(0)  # its keys may be unread
    return np.array(rounds)[:, 1:]


def _has_free_cache(target: Target) -> bool:
    """Return True if the target's own cache holds no context, and no answer uses it."""
    return target.cache.user is None and not target.cache.slots[0].tokens


def _random_tree(target: Target, nodes: int, random: np.random.Generator) -> DraftTree:
    """Return a tree of random tokens: equal tokens would all be routed to the same experts in a mixture of experts."""
    root, *tokens = random.integers(target.vocabulary, size=nodes + 1).tolist()
    return DraftTree.of(root, tokens, [-1] * nodes if target.takes_trees else range(-1, nodes - 1))


def cost_curve_for(target: Target, batch: int = 1) -> CostCurve:
    """Return the saved cost curve for this model and device, or else measure one quickly.

    A quick measurement for one sequence is kept for ``MAX_CACHE_AGE``, if the model runs in a single process.
    """
    # Saved curves were measured in one process.
    if batch == 1 and target.processes == 1 and (saved := saved_at_home(target)):
        return saved
    contexts = _quick_contexts(target, batch)
    kept = quick_record(target, nodes=MEASURED_NODES, contexts=contexts) if batch == 1 else None
    rows = kept.read(partial(_milliseconds, len(contexts)), max_age=MAX_CACHE_AGE) if kept else None
    if rows is None:
        rows = _quick_milliseconds(target, contexts, batch)
        if kept:
            kept.write([list(row) for row in rows])
    return CostCurve(MEASURED_NODES, rows, contexts)


def _quick_contexts(target: Target, batch: int = 1) -> tuple[int, ...]:
    """Return the length of the short context and, if attention can be timed without a prefill, that of a long one.

    Captured steps are timed after a long context only where that needs no memory: in the target's own cache.
    """
    if target.processes > 1 or not target.takes_trees:
        return (SHORT_CONTEXT,)
    bytes_per_token = sum(
        tensor.heads * tensor.width * tensor.dtype.itemsize for layer in target.facts.shapes for tensor in layer.kept
    )
    if not bytes_per_token or (target.captures and (batch > 1 or not _has_free_cache(target))):
        return (SHORT_CONTEXT,)
    if target.captures:
        most, room = CAPTURED_CONTEXT, target.cache.capacity - LARGEST_TREE - 1
    else:
        most, room = LONG_CONTEXT, LONG_CONTEXT_BYTES // (batch * bytes_per_token)
    longest = min(most, room, (target.context_limit(1) or most) - LARGEST_TREE - 1)
    return (SHORT_CONTEXT, longest) if longest >= MIN_LONG_CONTEXT else (SHORT_CONTEXT,)


def _quick_milliseconds(target: Target, contexts: Sequence[int], batch: int) -> tuple[tuple[float, ...], ...]:
    """Return milliseconds by context and tree size: timed for some sizes, fewer after long contexts, else interpolated.

    The time that a long context adds grows with the tree, so it is extrapolated beyond the largest size timed.
    """
    with progress_bar(len(contexts), "contexts timed", is_left=False) as progress:
        is_slow = time_tree_passes(target, (0,), _is_once, batch=batch).max() > SLOW_SECONDS
        short_nodes, long_nodes = (
            (SLOW_NODES, SLOW_LONG_CONTEXT_NODES) if is_slow else (MEASURED_NODES, LONG_CONTEXT_NODES)
        )
        measured = _increasing(time_tree_passes(target, short_nodes, _is_enough_quickly, batch=batch))
        short = np.interp(MEASURED_NODES, short_nodes, measured)
        rows = [short]
        for length in contexts[1:]:
            progress.advance()
            times = time_tree_passes(target, long_nodes, _is_enough_quickly, length, batch, unread=True)
            added = np.maximum(0, _increasing(times) - np.interp(long_nodes, MEASURED_NODES, short))
            rows.append(short + interpolated(np.array(MEASURED_NODES), long_nodes, added[:, None]))
    return tuple(tuple(map(float, row)) for row in rows)


def _increasing(times: Floats) -> Floats:
    """Return milliseconds for each tree size from a few rounds, none above that of a larger tree."""
    milliseconds = 1e3 * np.quantile(times, QUICK_QUANTILE, axis=0)
    return np.minimum.accumulate(milliseconds[::-1])[::-1]


def quick_record(target: Target, **circumstances: Any) -> CachedValue | None:
    """Return the cached record of a quick measurement of this model on this device; None if processes share the model.

    Its key has the ``circumstances`` and a fingerprint of all weights, which processes could compute only together.
    """
    if target.processes > 1:
        return None
    words = {"hdtool": metadata.version("hdtool"), "torch": torch.__version__, **circumstances}
    return CachedValue(quick_costs_at_home(), {"curve": str(_saved_file(target)), **words})


def _milliseconds(contexts: int, rows: list[Any]) -> tuple[tuple[float, ...], ...]:
    medians = tuple(tuple(map(float, row)) for row in rows)
    if len(medians) != contexts:
        raise ValueError
    for row in medians:
        if len(row) != len(MEASURED_NODES) or not all(0 < milliseconds < np.inf for milliseconds in row):
            raise ValueError
    return medians


def _saved_file(target: Target) -> Path:
    compiled = target.compiled
    computed = dtype_name(target.dtype) + "-own-products" * has_compiled_layers(target.model)
    computed += "-compact" * has_compact_weights(target.model) + "-fused" * (compiled is not None)
    computed += "-int8-activations" * (compiled is not None and compiled.activations_are_int8)
    return cost_at_home(fingerprint(target.model), device_name(target.device), computed, torch.get_num_threads())


def save_at_home(target: Target, curve: CostCurve) -> None:
    """Save a cost curve for later runs of the same model on the same device; raise CostError if that fails."""
    curve.write(_saved_file(target))


def check_saving(target: Target) -> None:
    """Raise CostError if ``save_at_home`` could not write its file."""
    cost_file(_saved_file(target)).check()


def saved_at_home(target: Target) -> CostCurve | None:
    """Return the saved curve, or None. If there is a file that cannot be used, print the reason to stderr."""
    path = _saved_file(target)
    try:
        return CostCurve.read(path) if path.exists() else None
    except CostError as error:
        note(f"{error}; until then it is measured quickly each time")
        return None
