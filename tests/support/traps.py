"""Files that are named like modules, and leave a mark when they are executed."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib.metadata import packages_distributions
from pathlib import Path

MARK = "executed.txt"
LIBRARIES = frozenset(name for name in packages_distributions() if name.isidentifier())
EVERY_MODULE = LIBRARIES | sys.stdlib_module_names | {"hdtool", "sitecustomize", "usercustomize"}


class Traps:
    """Files in a folder, one for each module name."""

    def __init__(self, folder: Path, names: Iterable[str] = EVERY_MODULE) -> None:
        self.folder = folder
        mark = str(folder / MARK)
        for name in names:
            lines = f"print({name!r}, file=open({mark!r}, 'a'))", "raise ImportError('a file of the user')"
            (folder / f"{name}.py").write_text("\n".join(lines))

    @property
    def executed(self) -> set[str]:
        mark = self.folder / MARK
        return set(mark.read_text().split()) if mark.exists() else set()
