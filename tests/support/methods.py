"""Methods that can draft for the embedded demo model."""

from __future__ import annotations

from hdtool.data import demo
from hdtool.runtime.settings.decoding import DRAFT_MODEL, METHODS

SHIPPED = ("medusa", "amphista", "hd+amphista")
"""Methods whose heads ship with the demo model."""
METHODS_WITHOUT_DRAFT_MODEL = tuple(name for name, method in METHODS.items() if not method.trained or name in SHIPPED)
DEMO_METHODS = tuple(
    name for name in METHODS if name in METHODS_WITHOUT_DRAFT_MODEL or METHODS[name].trained == DRAFT_MODEL
)
"""Methods of ``METHODS_WITHOUT_DRAFT_MODEL``, and methods with a draft model, which can be the demo model itself."""


def drafter_for(method: str) -> str | None:
    """Return the draft model that a method needs, or None."""
    return str(demo.MODEL) if METHODS[method].trained == DRAFT_MODEL else None
