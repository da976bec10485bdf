"""Selects the heads of a method: from the given folders, else those shipped with the demo model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdtool.data import demo
from hdtool.data.errors import HeadsError
from hdtool.runtime.config import NEED_HEADS
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads, load_heads, settings_of
from hdtool.runtime.environment import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PLAIN = "medusa"
"""The method for heads without adaptation layers and auto-embedding."""


def heads_for(method: str, folders: Sequence[str], model: PreTrainedModel) -> SavedHeads:
    """The first of the folders that holds heads for the method."""
    wanted = kind_of_method(method)
    places = [Path(folder).expanduser() for folder in folders] or shipped_with(model)
    kinds = [kind_of(place) for place in places]
    if wanted in kinds:
        return load_heads(places[kinds.index(wanted)], model)
    if folders:
        found = ", ".join(f"{kind} heads in {place}" for kind, place in zip(kinds, places, strict=True))
        raise HeadsError(f"method {method} needs {wanted} heads (found: {found}): name a folder that holds some")
    option = " --medusa" if wanted == PLAIN else ""
    raise HeadsError(
        f"method {method} needs trained heads, and none are given: train some with hdtool train-heads{option} and "
        "name their folder with --heads"
    )


def methods_with_heads(folders: Sequence[str], model: PreTrainedModel) -> set[str]:
    """The methods for which there are heads."""
    kinds = {kind_of(place) for place in [Path(folder).expanduser() for folder in folders] or shipped_with(model)}
    return {method for method in NEED_HEADS if kind_of_method(method) in kinds}


def kind_of_method(method: str) -> str:
    return PLAIN if method == PLAIN else "amphista"


def kind_of(folder: Path) -> str:
    heads = settings_of(folder)["heads"]
    return PLAIN if not heads["adaptation"] and not heads["auto_embedding"] else "amphista"


def shipped_with(model: PreTrainedModel) -> list[Path]:
    """The demo's heads if this is the demo's model, else none."""
    target = fingerprint(model)
    return [folder for folder in demo.HEADS if settings_of(folder)["target"] == target]
