"""Trained drafters that a checkpoint offers: layers of its own, and heads or published drafters in its folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hdtool.data.errors import HdtoolError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.config import METHODS, DecodeConfig
from hdtool.runtime.config.methods import DRAFTER, HEADS, HIERARCHIES, MTP
from hdtool.runtime.drafters.heads.checkpoint import SETTINGS, settings_of
from hdtool.runtime.drafters.trained.published_drafter import MODEL, PublishedDrafter
from hdtool.runtime.drafters.trained.select_drafter import methods_with_drafters, trained_drafter
from hdtool.runtime.environment import fingerprint
from hdtool.runtime.model.load import Loaded


def with_offered(decoding: DecodeConfig, loaded: Loaded, folder: Path | None) -> DecodeConfig:
    """The settings with the heads and the drafter that lie in the folder of a model, if there are any."""
    target = fingerprint(loaded.target.model)
    heads, drafter = list[str](), decoding.drafter
    places = [place for place in sorted(folder.iterdir()) if (place / SETTINGS).is_file()] if folder else []
    for place in places:
        try:
            if settings_of(place)["target"] == target:
                heads.append(str(place))
            continue
        except HdtoolError:
            pass  # it holds something else
        try:
            if PublishedDrafter.named(str(place)).kind != MODEL:
                drafter = drafter or str(place)
        except HdtoolError:
            continue
    return replace(decoding, heads=(*decoding.heads, *heads), drafter=drafter)


def offered_methods(decoding: DecodeConfig, loaded: Loaded) -> list[str]:
    """The hierarchies with a trained drafter that is there and fits; a note says why another one does not."""
    found = []
    tokenizer = TokenizerFingerprint.of(loaded.tokenizer)
    there = methods_with_drafters(decoding, loaded.target.model)
    for method in HIERARCHIES:
        if method not in there:
            continue
        try:
            trained_drafter(replace(decoding, method=method), loaded.target, tokenizer)
            found.append(method)
        except HdtoolError as error:
            print(f"note: {method} is left out: {error}", file=sys.stderr)
    return found


def options_for(method: str, decoding: DecodeConfig) -> tuple[str, ...]:
    """The options that a command needs for a method: its name, and where its drafter is."""
    kind = METHODS[method].trained
    heads = [part for folder in decoding.heads for part in ("--heads", folder)] if kind in (HEADS, MTP) else []
    drafter = ["--drafter", decoding.drafter] if kind == DRAFTER and decoding.drafter else []
    return ("--method", method, *heads, *drafter)
