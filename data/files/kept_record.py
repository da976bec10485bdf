"""What was found out once, kept in hdtool's home for later runs: read only if it belongs to the same circumstances."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from tempfile import mkstemp
from typing import Any, TypeVar

T = TypeVar("T")

KEPT_SECONDS = 24 * 3600.0
"""Maximum age of a kept measurement; older ones are repeated, because the machine may have been busy."""


@dataclass(frozen=True)
class KeptRecord:
    """A value in a file of its own, whose name is a hash of the circumstances.

    A file that is damaged, or was written for other circumstances, counts as none. Where nothing can be written, the
    value is found out again each time.
    """

    folder: Path
    circumstances: dict[str, Any]

    @property
    def path(self) -> Path:
        return self.folder / f"{sha256(self._key.encode()).hexdigest()[:32]}.json"

    @property
    def _key(self) -> str:
        return json.dumps(self.circumstances, sort_keys=True)

    def read(self, parse: Callable[[Any], T], *, most_seconds: float = inf) -> T | None:
        """What ``parse`` makes of the kept value; None if there is none, or it is older than ``most_seconds``."""
        try:
            if most_seconds < inf and abs(time.time() - self.path.stat().st_mtime) > most_seconds:
                return None
            row = json.loads(self.path.read_bytes())
            if row["key"] != self._key or row["sha256"] != checksum(row["value"]):
                return None
            return parse(row["value"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            return None

    def write(self, value: Any) -> None:
        """Keep a value that JSON can hold, atomically."""
        row = json.dumps({"key": self._key, "value": value, "sha256": checksum(value)})
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            number, name = mkstemp(prefix=".", suffix=".json", dir=self.folder)
            try:
                with open(number, "w", encoding="utf-8") as file:
                    file.write(row)
                os.replace(name, self.path)
            except OSError:
                Path(name).unlink(missing_ok=True)
                raise

    def forget(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)


def checksum(value: Any) -> str:
    return sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
