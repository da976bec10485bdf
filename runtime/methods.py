"""The methods by their names: one line makes a drafter known to every command."""

from __future__ import annotations

from collections.abc import Callable

from hdtool.runtime.budget import Budget, FixedBudget, MeasuredBudget
from hdtool.runtime.config import DecodeConfig
from hdtool.runtime.drafter import Drafter, NoDraft
from hdtool.runtime.shelf import Shelf
from hdtool.runtime.target import Target

Maker = Callable[[DecodeConfig, Target, Shelf], Drafter]


def drafter_for(config: DecodeConfig, target: Target, shelf: Shelf) -> Drafter:
    """The drafter of a method; it may be kept for as long as the target, and learns over conversations."""
    return MAKERS[config.method](config, target, shelf)


def _plain(config: DecodeConfig, target: Target, shelf: Shelf) -> Drafter:
    return NoDraft()


def _budget(config: DecodeConfig, target: Target) -> Budget:
    return MeasuredBudget(target) if config.budget is None else FixedBudget(config.budget)


MAKERS: dict[str, Maker] = {
    "ar": _plain,
}
