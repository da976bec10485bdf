"""Selects the heads of a method: from the given folders, else those shipped with the demo model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hdtool.data import demo
from hdtool.data.errors import HeadsError
from hdtool.runtime.config import TAKE_HEADS, HeadsConfig
from hdtool.runtime.config.heads import AMPHISTA, HYDRA, HYDRA_PLUS
from hdtool.runtime.drafters.heads.checkpoint import SavedHeads, load_heads, settings_of
from hdtool.runtime.environment import fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def heads_for(method: str, folders: Sequence[str], model: PreTrainedModel) -> SavedHeads:
    """The first of the folders that holds heads for the method."""
    wanted = kinds_for(method)
    places = _places(folders, model)
    kinds = [kind_of(place) for place in places]
    for place, kind in zip(places, kinds, strict=True):
        if kind in wanted:
            return load_heads(place, model)
    if folders:
        found = ", ".join(f"{kind} heads in {place}" for kind, place in zip(kinds, places, strict=True))
        raise HeadsError(
            f"method {method} needs {' or '.join(wanted)} heads (found: {found}): name a folder that holds some"
        )
    option = "" if wanted[0] == AMPHISTA else f" --kind {wanted[0]}"
    raise HeadsError(
        f"method {method} needs trained heads, and none are given: train some with hdtool train-heads{option} and "
        "name their folder with --heads"
    )


def methods_with_heads(folders: Sequence[str], model: PreTrainedModel) -> set[str]:
    """The methods for which there are heads."""
    kinds = {kind_of(place) for place in _places(folders, model)}
    return {method for method in TAKE_HEADS if kinds & set(kinds_for(method))}


def kinds_for(method: str) -> tuple[str, ...]:
    """The kinds of heads that a method takes."""
    kind = method.removeprefix("hd+")
    return (HYDRA, HYDRA_PLUS) if kind == HYDRA else (kind,)


def method_of(kind: str) -> str:
    """The method that drafts by heads of a kind alone."""
    return HYDRA if kind == HYDRA_PLUS else kind


def kind_of(folder: Path) -> str:
    return HeadsConfig.of_checkpoint(settings_of(folder)["heads"]).kind


def _places(folders: Sequence[str], model: PreTrainedModel) -> list[Path]:
    return [Path(folder).expanduser() for folder in folders] or shipped_with(model)


def shipped_with(model: PreTrainedModel) -> list[Path]:
    """The demo's heads if this is the demo's model, else none."""
    target = fingerprint(model)
    return [folder for folder in demo.HEADS if settings_of(folder)["target"] == target]
