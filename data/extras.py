"""The packages of hdtool's extras, and the command that installs them.

hdtool is on no package index, so pip finds no extra by its name, and ``pip install ".[server]"`` works in a checkout
alone. The packages themselves can be installed from anywhere.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def requirements_of(extra: str) -> list[Requirement]:
    """What an extra adds to the packages that hdtool always needs."""
    from packaging.requirements import Requirement

    needed = [Requirement(line) for line in metadata.requires("hdtool") or ()]
    return [each for each in needed if each.marker and each.marker.evaluate({"extra": extra})]


def install_command(extra: str) -> str:
    """The command that installs an extra, in any folder."""
    return " ".join(["pip install", *(f'"{each.name}{each.specifier}"' for each in requirements_of(extra))])
