"""A measured curve of the latency of forward passes by number of draft nodes."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import CostError, os_errors_as
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import is_json_with
from hdtool.runtime.settings.measuring import COST_FILE

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
        """Return the curve given by ``nodes:milliseconds`` pairs, a file or its folder; raise CostError if invalid."""
        if text.partition(":")[0].strip().isdigit():
            return cls.parse(text)
        path = Path(text).expanduser()
        return cls.read(path / COST_FILE if path.is_dir() else path)

    @classmethod
    def parse(cls, text: str) -> CostCurve:
        """Parse a curve from comma-separated ``nodes:milliseconds`` pairs; raise CostError if they are not a curve."""
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
        at_each = np.stack([interpolated(np.asarray(nodes), self.nodes, row[:, None]) for row in times])
        return interpolated(np.asarray(contexts), self.contexts, at_each)

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


def interpolated(at: npt.NDArray[Any], measured: Sequence[int], times: Floats) -> Floats:
    """Return the time at each point ``at[i]``, given ``times[:, i]`` at the ``measured`` points.

    Points before the first one get its time; times beyond the last one are extrapolated, but never below its time.
    ``times`` may have a single column for all points.
    """
    places, times = np.array(measured), np.broadcast_to(times, (len(measured), len(at)))
    if len(measured) == 1:
        return np.array(times[0])
    upper, column = np.clip(np.searchsorted(measured, at), 1, len(measured) - 1), np.arange(len(at))
    low, high = places[upper - 1], places[upper]
    share, last = np.maximum(0, at - low) / (high - low), times[upper, column]
    between = (1 - share) * times[upper - 1, column] + share * last
    return np.array(np.where(share > 1, np.maximum(between, last), between))
