"""The cache interface: slots in which an engine keeps the contexts of sequences, for later prompts to continue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

NEVER_CONTINUED = -1
"""Version of a context that no prompt may continue."""


class AnySlot(Protocol):
    """A place for one sequence in a cache; the sequence stays after its answer ends, until another one replaces it."""

    tokens: list[int]
    """Prompt tokens, then all emitted tokens but the last, which is the root of the next tree."""
    owner: str
    """Tenant whose prompt the slot holds; prompts of other tenants never continue it."""
    version: int
    """Number of changes to the model before the prompt was read, or ``NEVER_CONTINUED``."""
    last_use: int
    """Time of the slot's last use: the number of prompts that the prefix cache had begun by then."""

    @property
    def bytes(self) -> int: ...

    @property
    def valid(self) -> int:
        """Number of leading ``tokens`` whose keys and values are in place: all of them, except after an interrupt."""
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
    """Session that last began an answer in this cache; None before the first and once that session has ended."""

    @property
    def slots(self) -> Sequence[AnySlot]: ...

    @property
    def keeps_states(self) -> bool:
        """True if a prompt can continue a context only at lengths whose states were kept."""
        ...

    def copy(self, slot: int, to: int) -> None:
        """Replace the contents of slot ``to`` by a copy of those of ``slot``."""
        ...

    def swap(self, first: int, second: int) -> None:
        """Exchange the contents of two slots; if memory is short, only copy ``second`` to ``first``."""
        ...

    def saved(self, slot: int) -> AnySlot:
        """Return a copy of a slot in newly allocated memory; raise ``torch.OutOfMemoryError`` if it does not fit."""
        ...

    def load(self, slot: int, saved: Any, length: int) -> None:
        """Copy the first ``length`` tokens of ``saved``, a slot or a copy of one, into slot number ``slot``."""
        ...
