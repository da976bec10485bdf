"""Messages to the user on standard error, which leave standard output to results."""

from __future__ import annotations

import sys


def tell(*lines: object) -> None:
    """Print lines to standard error."""
    for line in lines:
        print(line, file=sys.stderr)


def note(text: str) -> None:
    """Print a line about something that the user may not expect."""
    tell(f"note: {text}")
