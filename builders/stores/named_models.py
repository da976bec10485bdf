"""Whether records of answers name the model that a store is for, as the one that answered."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from hdtool.data import demo
from hdtool.data.errors import ModelError
from hdtool.data.stores.manifest import Checkpoint
from hdtool.data.stores.store_files import printable
from hdtool.data.tally import counted
from hdtool.runtime.config import ModelConfig

SHOWN = 3


def note_on_models(
    models: Mapping[str, int], config: ModelConfig, checkpoint: Checkpoint | None, command: str = ""
) -> str | None:
    """One line if records name other models than the store's.

    ``command`` builds the store for another model, whose name replaces ``MODEL`` in it; it is given where the user has
    named none.
    """
    others = {name: count for name, count in models.items() if not _is_named(name, config, checkpoint)}
    if not others:
        return None
    every = "all " if len(others) == len(models) else ""
    shown = ", ".join(printable(name) for name in list(others)[:SHOWN])
    more = f" and {counted(len(others) - SHOWN, 'other model')}" if len(others) > SHOWN else ""
    records = counted(sum(others.values()), "record")
    verb = "names" if sum(others.values()) == 1 else "name"
    own = checkpoint.name if checkpoint else config.name
    note = (
        f"note: {every}{records} {verb} {shown}{more} as the model that answered, and the store is for {printable(own)}"
    )
    if not command:
        return f"{note}: a model's own answers make the best drafts"
    (first, *rest) = others
    if rest or not _can_be_given(first):
        return f"{note}, because no --model is given: {command}, where MODEL is its folder or hub name, rebuilds it"
    named = command.replace("MODEL", shlex.quote(printable(first)), 1)
    return f"{note}, because no --model is given: {named} builds one for that model"


def _is_named(name: str, config: ModelConfig, checkpoint: Checkpoint | None) -> bool:
    """Whether a name in a record may stand for the model of a configuration."""
    try:
        place, own = demo.located(name), config.place
    except ModelError:  # the package of the demo's model is not installed
        return name == config.name
    own_names = {config.name, own or demo.NAME, *([checkpoint.name] if checkpoint else [])}
    if place is None:
        return own is None or Path(own).expanduser() == demo.MODEL
    if _last_part(place) in map(_last_part, own_names):
        return True
    try:
        one, other = Path(place).expanduser(), demo.MODEL if own is None else Path(own).expanduser()
        return one.exists() and other.exists() and one.samefile(other)
    except (OSError, RuntimeError, ValueError):  # a name that is no path
        return False


def _last_part(name: str) -> str:
    """A model's name without its owner or folder."""
    return name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf")


def _can_be_given(name: str) -> bool:
    try:
        return name in (demo.SMOLLM2, demo.EMBEDDED) or "/" in name or Path(name).exists()
    except (OSError, ValueError):  # a name that is no path
        return False
