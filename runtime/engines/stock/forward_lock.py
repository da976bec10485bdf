"""A lock per model, to hold while a pass over trees replaces the model's ``forward`` methods."""

from __future__ import annotations

from threading import RLock
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module

_LOCKS: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()


def forward_lock(model: Module) -> Any:
    """Return the lock to hold while replacing or inspecting ``forward`` methods; all targets of a model share it."""
    return _LOCKS.setdefault(model, RLock())
