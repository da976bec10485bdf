"""Other forwards of modules for the pass of one thread; other threads that use the model meanwhile see its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any
from weakref import WeakKeyDictionary

from torch.nn import Module

Forward = Callable[..., Any]

_LOCKS: WeakKeyDictionary[Module, Any] = WeakKeyDictionary()


def lock_of(model: Module) -> Any:
    """A lock for passes that change forwards of a model, and for looking at those; all its targets share it."""
    return _LOCKS.setdefault(model, RLock())


def has_own_forward(module: Module) -> bool:
    """Whether the forward of a module is another one than that of its class, as with hooks of accelerate."""
    return "forward" in vars(module)


@contextmanager
def other_forwards(changes: Iterable[tuple[Module, Forward]]) -> Iterator[None]:
    """In this block modules have other forwards in this thread."""
    held: list[tuple[Module, Forward | None]] = []
    try:
        for module, forward in changes:
            own = module.forward
            held.append((module, vars(module).get("forward")))
            vars(module)["forward"] = _in_thread(get_ident(), forward, own)
        yield
    finally:
        for module, before in reversed(held):
            if before is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = before


def _in_thread(owner: int, forward: Forward, own: Forward) -> Forward:
    return lambda *args, **kwargs: (forward if get_ident() == owner else own)(*args, **kwargs)
