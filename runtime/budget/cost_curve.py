"""Latency of a forward pass by number of draft nodes: a measured curve, and estimates that later passes correct."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import CostError, os_errors_as
from hdtool.data.file_origins import is_json_with
from hdtool.data.output_files import OutputFile
from hdtool.runtime.config.budgets import LARGEST_BUDGET
from hdtool.runtime.config.measuring import COST_FILE
from hdtool.runtime.kernels.compiled import Uncopyable, array_at, compiled

if TYPE_CHECKING:
    from hdtool.runtime.core.engine_interface import PassLog

COST_CURVE_FORMAT = 1
COST_CURVE_EXAMPLE = '"0:20.1,8:20.9,32:24"'

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostCurve:
    """Measured latency of a forward pass by number of draft nodes and context length.

    Latencies between measured points are interpolated linearly. Beyond the last point, they are extrapolated from the
    last two points, but never fall below the latency at the last one.
    """

    nodes: tuple[int, ...]
    milliseconds: tuple[tuple[float, ...], ...]
    """``milliseconds[i][j]`` is the time of a pass over ``nodes[j]`` nodes after ``contexts[i]`` tokens."""
    contexts: tuple[int, ...] = (0,)
    device: str = ""
    model: str = ""
    dtype: str = ""

    def __post_init__(self) -> None:
        if fault := self._fault():
            raise CostError(f"the cost of passes cannot be used: {fault}")

    def _fault(self) -> str:
        if len(self.nodes) < 2 or self.nodes[0] != 0:
            return "it must hold a pass without draft nodes and at least one with some"
        for name, values in (("numbers of nodes", self.nodes), ("contexts", self.contexts)):
            if not values or values[0] < 0 or any(after <= before for before, after in pairwise(values)):
                return f"its {name} must increase, and be 0 or more (found: {', '.join(map(str, values)) or 'none'})"
        rows = [len(row) for row in self.milliseconds]
        if rows != [len(self.nodes)] * len(self.contexts):
            return f"it must hold {len(self.contexts)} rows of {len(self.nodes)} times (found: {rows})"
        for row in self.milliseconds:
            for time in row:
                if not (0 < time < math.inf):
                    return f"times must be above 0 ms (found: {time})"
        return ""

    @classmethod
    def given(cls, text: str) -> CostCurve:
        """Return the curve that an option gives: ``nodes:milliseconds`` pairs, or the path of a file or folder."""
        if text.partition(":")[0].strip().isdigit():
            return cls.parse(text)
        path = Path(text).expanduser()
        return cls.read(path / COST_FILE if path.is_dir() else path)

    @classmethod
    def parse(cls, text: str) -> CostCurve:
        """Parse a curve from comma-separated ``nodes:milliseconds`` pairs."""
        pairs: dict[int, float] = {}
        for pair in text.split(","):
            nodes_text, _, time = pair.partition(":")
            try:
                nodes, value = int(nodes_text), float(time)
            except ValueError:
                raise CostError(
                    f"{pair.strip()!r} is not a cost: give nodes:milliseconds pairs, as in {COST_CURVE_EXAMPLE}, "
                    "or a file"
                ) from None
            if nodes in pairs:
                raise CostError(f"the cost of {nodes} nodes is given twice: give it once")
            pairs[nodes] = value
        sizes = sorted(pairs)
        return cls(tuple(sizes), (tuple(pairs[size] for size in sizes),))

    @classmethod
    def read(cls, path: Path) -> CostCurve:
        try:
            with os_errors_as(CostError, f"{path} cannot be read", "check the path"):
                row = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise CostError(f"{path} is not JSON ({error}): name a file that holds the cost of passes") from None
        format_number = row.get("format") if isinstance(row, dict) else None
        if format_number != COST_CURVE_FORMAT:
            raise CostError(
                f"{path} does not hold the cost of passes in format {COST_CURVE_FORMAT} "
                f"(found: {format_number}): measure it again"
            )
        try:
            return cls(
                nodes=tuple(_checked_int(size) for size in row["nodes"]),
                milliseconds=tuple(tuple(float(time) for time in times) for times in row["milliseconds"]),
                contexts=tuple(_checked_int(context) for context in row["contexts"]),
                **{name: str(row[name]) for name in ("device", "model", "dtype")},
            )
        except CostError as error:
            raise CostError(f"{path}: {error}") from None
        except KeyError as lacking:
            raise CostError(f"{path} is damaged ({lacking} is missing): measure it again") from None
        except (TypeError, ValueError) as error:
            raise CostError(f"{path} is damaged ({error}): measure it again") from None

    def write(self, path: Path) -> None:
        cost_file(path).write(json.dumps({"format": COST_CURVE_FORMAT, **asdict(self)}) + "\n")

    def seconds(self, nodes: int, context: int = 0) -> float:
        """Return the duration in seconds of a forward pass over ``nodes`` draft nodes after ``context`` tokens."""
        return float(self.seconds_of_passes(np.array([nodes]), np.array([context]))[0])

    def seconds_of_passes(
        self, nodes: Sequence[int] | npt.NDArray[Any], contexts: Sequence[int] | npt.NDArray[Any]
    ) -> Floats:
        """Return the seconds each pass takes; pass ``i`` covers ``nodes[i]`` nodes after ``contexts[i]`` tokens."""
        times = np.array(self.milliseconds) / 1e3
        at_each = np.stack([over_nodes(np.asarray(nodes), self.nodes, row) for row in times])
        return _over_contexts(np.asarray(contexts), self.contexts, at_each)

    def seconds_by_size(self, max_nodes: int, context: int) -> Floats:
        """Return the durations in seconds of passes over 0, 1, 2 … ``max_nodes`` nodes after ``context`` tokens."""
        sizes = np.arange(max_nodes + 1)
        return self.seconds_of_passes(sizes, np.full(len(sizes), context))


def cost_file(path: Path) -> OutputFile:
    """Return the output file for a curve; writing overwrites an existing file only if that file holds a curve."""
    is_ours = is_json_with([field.name for field in fields(CostCurve)], COST_CURVE_FORMAT)
    advice = "choose another place, or move it away"
    return OutputFile(path, "a file of hdtool bench-cost", is_ours, CostError, advice)


def _checked_int(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def over_nodes(at: npt.NDArray[Any], measured: Sequence[int], times: Floats) -> Floats:
    """Interpolate ``times`` at node counts ``at``; extrapolated times are never below the last measured one."""
    rise = max(0.0, float(times[-1] - times[-2]) / (measured[-1] - measured[-2]))
    interpolated: Floats = np.interp(at, measured, times) + rise * np.maximum(0, at - measured[-1])
    return interpolated


def _over_contexts(at: npt.NDArray[Any], measured: Sequence[int], times: Floats) -> Floats:
    """Interpolate ``times[:, i]`` at context ``at[i]`` for each pass ``i``; extrapolate as ``over_nodes`` does."""
    if len(measured) == 1:
        only: Floats = times[0]
        return only
    upper = np.clip(np.searchsorted(measured, at), 1, len(measured) - 1)
    low, high = np.array(measured)[upper - 1], np.array(measured)[upper]
    column = np.arange(len(at))
    lower_times, upper_times = times[upper - 1, column], times[upper, column]
    between = lower_times + np.maximum(0, at - low) / (high - low) * (upper_times - lower_times)
    interpolated: Floats = np.where(at > high, np.maximum(between, upper_times), between)
    return interpolated


PASS_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 48, 64)
"""Numbers of rows (the nodes and the root) for which forward passes are timed. Steps are captured for a few sizes only,
so a captured step costs as much as the next larger size; the cost of any other pass is interpolated."""
MAX_CHOSEN_NODES = PASS_SIZES[-1] - 1
"""Maximum number of nodes that a budget chooses by cost: with the root, they fill a tile of 64 rows."""
COST_LEARNING_RATE, OTHER_SIZES_LEARNING_RATE = 0.05, 0.01
"""Learning rates: how far one measured pass moves the cost of its own size, and the costs of all other sizes."""
MAX_COST_RATIO, MIN_COST_RATIO = 2.0, 0.5
"""The ratio of measured to estimated seconds is clipped to these bounds before a pass corrects the costs."""
ESTIMATE_WEIGHT = 4
"""Number of measured passes that weigh as much as the initial estimate."""
UNEXPECTED_DEVIATION, UNEXPECTED_WEIGHT = 0.3, 0.25
"""Relative error beyond which a pass confirms a cost only in part, and the weight of such a pass."""
FASTER_DEVIATION, FASTER_LEARNING_RATE = 0.15, 0.5
"""Relative error beyond which a fast pass corrects its cost at a higher rate, and this rate: other processes can slow a
pass down, but nothing makes it faster than it is."""
FADING, OUTDATED_FADING = 1 / 512, 1 / 64
"""Share of their confirming passes that the costs of smaller passes lose with each pass: usually, and if a smaller pass
seems to take longer than the pass, so that its cost must be outdated."""
MAX_CONFIRMING_PASSES = 16.0
"""Maximum number of confirming passes that count, so that they fade within a hundred passes once a cost is outdated."""
OUTDATED_RATIO = 1.15
"""A cost is outdated if it is at least this many times the cost of a larger pass."""
CONTEXT_STEP = 64
"""Number of tokens by which the context length must change before the costs are computed again."""

OWN_SIZE_INDEX = np.arange(LARGEST_BUDGET + 1)
"""Index of the cost for each number of nodes, if every number of nodes has a cost of its own."""
NEXT_SIZE_INDEX = np.minimum(np.searchsorted(PASS_SIZES, OWN_SIZE_INDEX + 1), len(PASS_SIZES) - 1)
"""For each number of nodes, the index in ``PASS_SIZES`` of the smallest size that fits, or else of the largest size."""
WHOLE_SHARES = np.ones(LARGEST_BUDGET + 1)
"""Interpolation weights for costs that are not interpolated: a pass costs as much as one of the next larger size."""
INTERPOLATED_SHARES = np.interp(OWN_SIZE_INDEX + 1, PASS_SIZES, np.arange(len(PASS_SIZES))) - NEXT_SIZE_INDEX + 1
"""Interpolation weights of the next larger size; the next smaller size gets the remaining weight."""

Seconds = npt.NDArray[np.float64]
Sizes = npt.NDArray[np.int64]
Shares = npt.NDArray[np.float64]

COSTS = np.dtype(
    [
        # With s = sizes[n] and f = shares[n], a pass over n nodes is estimated to take
        # f * seconds[s] * corrections[s] + (1 - f) * seconds[s - 1] * corrections[s - 1].
        ("seconds", np.float64, LARGEST_BUDGET + 1),
        ("corrections", np.float64, LARGEST_BUDGET + 1),
        ("passes", np.float64, LARGEST_BUDGET + 1),  # number of passes that confirmed each cost
        ("sizes", np.int64, LARGEST_BUDGET + 1),
        ("shares", np.float64, LARGEST_BUDGET + 1),
    ],
    align=True,
)


class PassCosts(Uncopyable):
    """Known costs of passes over 0, 1, 2 … nodes, in a record that compiled code reads at ``address``."""

    def __init__(self, sizes: Sizes = OWN_SIZE_INDEX, shares: Shares = WHOLE_SHARES, passes: float = np.inf) -> None:
        """``sizes`` and ``shares`` determine how the cost of each number of nodes is interpolated; see ``COSTS``.

        ``passes`` is the number of passes that count as having confirmed each cost.
        """
        self._memory = np.zeros(1, COSTS)
        self._record: Any = self._memory[0]
        self._record["seconds"] = self._record["corrections"] = 1.0
        self._record["passes"], self._record["sizes"], self._record["shares"] = passes, sizes, shares
        self.address = self._memory.ctypes.data

    def set(self, seconds: Seconds) -> None:
        self._record["seconds"][: len(seconds)] = seconds


class MeasuredCosts(PassCosts):
    """Costs from a measured curve, corrected by later passes; the budgets of an engine may share one instance."""

    def __init__(
        self, log: PassLog, curve: CostCurve, slots: range = range(1, 2), *, only_timed_sizes: bool = False
    ) -> None:
        """Only passes whose number of trees is in ``slots`` correct the costs.

        With ``only_timed_sizes``, as for captured steps, a pass costs as much as the next larger timed size.
        """
        super().__init__(NEXT_SIZE_INDEX, WHOLE_SHARES if only_timed_sizes else INTERPOLATED_SHARES, 0.0)
        self._log, self._curve, self._slots = log, curve, slots
        self._passes = log.passes
        learn_cost(self.address, 0, 1.0)  # compiles the function; all costs are still 1, so nothing is learned
        self._record["passes"] = 0.0
        self._set_context(0)

    def update(self) -> None:
        """Learn from the last pass; recompute the costs if the context length changed by at least ``CONTEXT_STEP``."""
        log = self._log
        if log.passes != self._passes:
            self._passes, nodes = log.passes, log.nodes
            if 0 <= nodes <= MAX_CHOSEN_NODES and log.slots in self._slots:
                learn_cost(self.address, nodes, log.last_seconds)
        if len(self._curve.contexts) > 1 and abs(log.context - self._context) >= CONTEXT_STEP:
            self._set_context(log.context)

    def _set_context(self, context: int) -> None:
        self._context = context
        self.set(self._curve.seconds_of_passes(np.array(PASS_SIZES) - 1, np.full(len(PASS_SIZES), context)))


@compiled
def estimated_cost(costs: Any, nodes: int) -> float:
    """Return the estimated duration in seconds of a forward pass over ``nodes`` draft nodes."""
    size, share = costs.sizes[nodes], costs.shares[nodes]
    smaller = max(0, size - 1)
    cost = share * costs.seconds[size] * costs.corrections[size]
    return cost + (1 - share) * costs.seconds[smaller] * costs.corrections[smaller]  # type: ignore[no-any-return]


@compiled
def confirming_passes(costs: Any, nodes: int) -> float:
    """Return how many passes have confirmed the cost of ``nodes`` nodes; the number is interpolated as the cost is."""
    size, share = costs.sizes[nodes], costs.shares[nodes]
    return share * costs.passes[size] + (1 - share) * costs.passes[max(0, size - 1)]  # type: ignore[no-any-return]


@compiled
def learn_cost(at: int, nodes: int, seconds: float) -> None:
    """Correct the costs in the record at address ``at``, given that a pass over ``nodes`` nodes took ``seconds``."""
    costs = array_at(at, 1, COSTS)[0]
    size, share = costs.sizes[nodes], costs.shares[nodes]
    smaller, expected = max(0, size - 1), estimated_cost(costs, nodes)
    change = min(MAX_COST_RATIO, max(MIN_COST_RATIO, seconds / expected)) - 1 if expected > 0 else 0.0
    # A longer context slows passes of all sizes, but most of an error is specific to one size.
    for size_nodes in range(LARGEST_BUDGET + 1):
        costs.corrections[size_nodes] *= 1 + OTHER_SIZES_LEARNING_RATE * change
    confirmed = 1.0 if abs(change) <= UNEXPECTED_DEVIATION else UNEXPECTED_WEIGHT
    for size_index, part in ((size, share), (smaller, 1 - share)):
        rate = max(COST_LEARNING_RATE, 1 / (ESTIMATE_WEIGHT + costs.passes[size_index] + 1))
        if change < -FASTER_DEVIATION:
            rate = max(rate, FASTER_LEARNING_RATE)
        costs.corrections[size_index] *= 1 + rate * part * change
        costs.passes[size_index] = min(MAX_CONFIRMING_PASSES, costs.passes[size_index] + part * confirmed)
    limit = OUTDATED_RATIO * estimated_cost(costs, nodes)
    for size_index in range(size if share == 1 else smaller):
        is_outdated = costs.seconds[size_index] * costs.corrections[size_index] > limit
        costs.passes[size_index] *= 1 - (OUTDATED_FADING if is_outdated else FADING)
