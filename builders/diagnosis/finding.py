"""One result of a check."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, MEND = "ok", "note", "mend"
"""All is well; worth knowing; something does not work until it is mended."""


@dataclass(frozen=True)
class Finding:
    """What was found at one place, and what to do about it."""

    name: str
    found: str
    state: str = OK
    advice: str = ""
    """The command or the step that mends it."""
