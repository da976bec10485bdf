"""The folder in which a set-up keeps the results of its stages, so that the same command goes on where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from hdtool.data.errors import ResultError, worded
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.locking import exclusive
from hdtool.data.files.ownership import json_object, json_with
from hdtool.data.stores.home import setups

FORMAT = 1
RESULTS, LEARNED, HELD_OUT, COST = "setup.json", "learned.jsonl", "held-out.jsonl", "cost.json"
LOCK = "lock"
ADVICE = "make room, or set HDTOOL_HOME to another folder"


class WorkFolder:
    """The files of one set-up: finished stages, both parts of the logs, and the cost of forward passes."""

    def __init__(self, model: str, identity: Sequence[str]) -> None:
        """``identity`` is all that the parts of the logs depend on; a set-up with another one has another folder."""
        digest = hashlib.sha256("\n".join(identity).encode("utf-8", "surrogatepass")).hexdigest()[:16]
        self.path = setups(model) / digest
        self.learned, self.held_out, self.cost = (self.path / part for part in (LEARNED, HELD_OUT, COST))
        self._file = OutputFile(
            self.path / RESULTS, "the results of a set-up", json_with(("stages",), FORMAT), ResultError, ADVICE
        )
        self.stages: dict[str, dict[str, Any]] = {}
        self._conditions: dict[str, list[str]] = {}
        """What each measurement was made of and with."""

    @contextmanager
    def opened(self) -> Iterator[WorkFolder]:
        """Read the results while no other process writes them."""
        busy = ResultError(f"another setup of these logs is running in {self.path}: wait for it")
        with worded(ResultError, f"{self.path} cannot be written", ADVICE):
            self.path.mkdir(parents=True, exist_ok=True)
        with exclusive(self.path / LOCK, busy):
            if self._file.exists():
                kept = json_object(self._file.path)
                self.stages, self._conditions = kept["stages"], kept.get("conditions", {})
            yield self

    def finish(self, stage: str, result: dict[str, Any]) -> None:
        """Record that a stage is done, with what later stages and the verdict need of it."""
        self.stages[stage] = result
        self._write()

    def forget(self, *stages: str) -> None:
        """Have stages run again."""
        if self.stages.keys() & set(stages):
            self.stages = {name: result for name, result in self.stages.items() if name not in stages}
            self._write()

    def keep_measurements(self, conditions: Mapping[str, Sequence[str]]) -> None:
        """Forget the measurements that were made under other conditions; these hold for those that follow."""
        changed = [stage for stage, now in conditions.items() if self._conditions.get(stage) != list(now)]
        self._conditions = {stage: list(now) for stage, now in conditions.items()}
        self.forget(*changed)

    def _write(self) -> None:
        row = {"format": FORMAT, "conditions": self._conditions, "stages": self.stages}
        self._file.write(json.dumps(row, indent=1, ensure_ascii=False) + "\n")
