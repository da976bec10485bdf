"""The cost curve: milliseconds of a forward pass by the number of draft nodes, measured or given by the user."""

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

from hdtool.data.errors import CostError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import json_with

FORMAT = 1
EXAMPLE = '"0:20.1,8:20.9,32:24"'

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CostCurve:
    """Milliseconds of a pass, measured at some numbers of nodes and some context lengths.

    Linear interpolation between measured points. Beyond the last point, linear extrapolation through the last two,
    but never below the last.
    """

    nodes: tuple[int, ...]
    milliseconds: tuple[tuple[float, ...], ...]
    """``[context][number of nodes]``"""
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
        """From the value of an option: a file, or the figures themselves."""
        return cls.parse(text) if text.partition(":")[0].strip().isdigit() else cls.read(Path(text).expanduser())

    @classmethod
    def parse(cls, text: str) -> CostCurve:
        """From ``nodes:milliseconds`` pairs."""
        pairs: dict[int, float] = {}
        for pair in text.split(","):
            nodes, _, time = pair.partition(":")
            try:
                place, value = int(nodes), float(time)
            except ValueError:
                raise CostError(
                    f"{pair.strip()!r} is not a cost: give nodes:milliseconds pairs, as in {EXAMPLE}, or a file"
                ) from None
            if place in pairs:
                raise CostError(f"the cost of {place} nodes is given twice: give it once")
            pairs[place] = value
        sizes = sorted(pairs)
        return cls(tuple(sizes), (tuple(pairs[size] for size in sizes),))

    @classmethod
    def read(cls, path: Path) -> CostCurve:
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CostError(f"{path} cannot be read ({error.strerror or error}): check the path") from None
        except (ValueError, RecursionError) as error:
            raise CostError(f"{path} is not JSON ({error}): name a file that holds the cost of passes") from None
        found = row.get("format") if isinstance(row, dict) else None
        if found != FORMAT:
            raise CostError(
                f"{path} does not hold the cost of passes in format {FORMAT} (found: {found}): measure it again"
            )
        try:
            return cls(
                nodes=tuple(_whole(size) for size in row["nodes"]),
                milliseconds=tuple(tuple(float(time) for time in times) for times in row["milliseconds"]),
                contexts=tuple(_whole(context) for context in row["contexts"]),
                **{name: str(row[name]) for name in ("device", "model", "dtype")},
            )
        except CostError as error:
            raise CostError(f"{path}: {error}") from None
        except KeyError as lacking:
            raise CostError(f"{path} is damaged ({lacking} is missing): measure it again") from None
        except (TypeError, ValueError) as error:
            raise CostError(f"{path} is damaged ({error}): measure it again") from None

    def write(self, path: Path) -> None:
        cost_file(path).write(json.dumps({"format": FORMAT, **asdict(self)}) + "\n")

    def seconds(self, nodes: int, context: int = 0) -> float:
        """Seconds of a pass with this number of nodes after a context of this length."""
        return float(self.of_passes(np.array([nodes]), np.array([context]))[0])

    def of_passes(self, nodes: Sequence[int] | npt.NDArray[Any], contexts: Sequence[int] | npt.NDArray[Any]) -> Floats:
        """Seconds of many passes at once."""
        times = np.array(self.milliseconds) / 1e3
        at_each = np.stack([_over_nodes(np.asarray(nodes), self.nodes, row) for row in times])
        return _over_contexts(np.asarray(contexts), self.contexts, at_each)

    def of_all_sizes(self, most: int, context: int) -> Floats:
        """Seconds of passes with 0, 1, 2 … up to ``most`` nodes after one context."""
        sizes = np.arange(most + 1)
        return self.of_passes(sizes, np.full(len(sizes), context))


def cost_file(path: Path) -> OutputFile:
    """The output file of a curve; an existing file is replaced only if it holds a curve."""
    is_ours = json_with([field.name for field in fields(CostCurve)], FORMAT)
    advice = "choose another place, or move it away"
    return OutputFile(path, "a file of hdtool bench-cost", is_ours, CostError, advice)


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _over_nodes(at: npt.NDArray[Any], measured: Sequence[int], times: Floats) -> Floats:
    """Interpolate over the nodes; extrapolate with the last slope, if it is positive."""
    rise = max(0.0, float(times[-1] - times[-2]) / (measured[-1] - measured[-2]))
    interpolated: Floats = np.interp(at, measured, times) + rise * np.maximum(0, at - measured[-1])
    return interpolated


def _over_contexts(at: npt.NDArray[Any], measured: Sequence[int], times: Floats) -> Floats:
    """Interpolate over the contexts in the same way; ``times`` has a row for each measured context."""
    if len(measured) == 1:
        only: Floats = times[0]
        return only
    above = np.clip(np.searchsorted(measured, at), 1, len(measured) - 1)
    low, high = np.array(measured)[above - 1], np.array(measured)[above]
    column = np.arange(len(at))
    before, after = times[above - 1, column], times[above, column]
    between = before + np.maximum(0, at - low) / (high - low) * (after - before)
    interpolated: Floats = np.where(at > high, np.maximum(between, after), between)
    return interpolated
