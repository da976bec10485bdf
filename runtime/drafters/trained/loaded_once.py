"""Keeps what was loaded or measured for a target: the drafters of a batch, and later ones, share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from hdtool.runtime.model.target import Target

Loaded = TypeVar("Loaded")
LOADED: WeakKeyDictionary[Target, dict[str, Any]] = WeakKeyDictionary()
"""By target and name."""


def loaded_once(target: Target, name: str, load: Callable[[], Loaded]) -> Loaded:
    """What ``load`` returned for this target and name at first."""
    own = LOADED.setdefault(target, {})
    if name not in own:
        own[name] = load()
    return cast(Loaded, own[name])
