"""The cache interface: sequences whose context an engine keeps, and from which later prompts may continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

NEVER_CONTINUED = -1
"""Version of a context that no prompt may continue."""


class AnySlot(Protocol):
    """A place for one sequence in a cache; the sequence stays after its answer ends, until another one replaces it."""

    tokens: list[int]
    """Accepted tokens."""
    owner: str
    """Tenant whose prompt the slot holds; prompts of other tenants never continue it."""
    version: int
    """Number of changes to the model before the prompt was read, or ``NEVER_CONTINUED``."""
    last_use: int
    """Time of the slot's last use, counted in prompts that a prefix cache has begun."""

    @property
    def bytes(self) -> int: ...

    @property
    def valid(self) -> int:
        """Number of accepted tokens whose context is in place."""
        ...

    def resumes_at(self, shared: int) -> int:
        """Return the position from which to prefill a prompt that shares its first ``shared`` tokens with the slot."""
        ...

    def cut(self, length: int) -> None:
        """Discard all but the first ``length`` tokens."""
        ...

    def keep_states(self) -> None:
        """Keep a copy of the recurrent states, from which another prompt may continue."""
        ...

    def at(self, position: int) -> list[torch.Tensor]:
        """Return copies of the keys and values of one position, for all layers."""
        ...


class AnyCache(Protocol):
    """Slots for sequences that are decoded together; slots in use come first."""

    user: object
    """Decoding loop whose answers the cache holds; None if the cache is free."""

    @property
    def slots(self) -> Sequence[AnySlot]: ...

    @property
    def keeps_states(self) -> bool:
        """True if a prompt can continue a context only at lengths whose states were kept."""
        ...

    def copy(self, slot: int, to: int) -> None:
        """Replace a slot by a copy of another one."""
        ...

    def swap(self, first: int, second: int) -> None:
        """Exchange two slots. If memory is short, ``second`` replaces ``first`` instead."""
        ...

    def saved(self, slot: int) -> AnySlot:
        """Return a copy of a slot in newly allocated memory."""
        ...

    def load(self, slot: int, saved: Any, length: int) -> None:
        """Copy the first ``length`` tokens of ``saved``, a slot of such a cache or a copy of one, into a slot."""
        ...
