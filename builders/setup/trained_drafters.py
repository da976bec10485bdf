"""Trained drafters that a set-up finds in the model's folder and in its checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hdtool.data.errors import HdtoolError
from hdtool.data.notes import note
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.drafters.heads.checkpoint import SETTINGS_FILE, read_settings
from hdtool.runtime.drafters.trained.checkpoints import SMALL_MODEL, PublishedDrafter
from hdtool.runtime.drafters.trained_drafter_factory import methods_with_drafters, trained_drafter
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.settings.decoding import (
    DRAFT_MODEL,
    HEADS_DRAFTER,
    HIERARCHIES,
    METHODS,
    MTP_DRAFTER,
    DecodeConfig,
)
from hdtool.runtime.target.load import Loaded


def with_model_drafters(decoding: DecodeConfig, loaded: Loaded, folder: Path | None) -> DecodeConfig:
    """Return ``decoding`` with the fitting heads in ``folder`` and, if it names no drafter, the first one there."""
    target = fingerprint(loaded.target.model)
    heads, drafter = list[str](), decoding.drafter
    drafter_folders = (
        [folder_entry for folder_entry in sorted(folder.iterdir()) if (folder_entry / SETTINGS_FILE).is_file()]
        if folder
        else []
    )
    for folder_entry in drafter_folders:
        try:
            if read_settings(folder_entry)["target"] == target:
                heads.append(str(folder_entry))
            continue
        except HdtoolError:
            pass  # not a folder of heads
        try:
            if PublishedDrafter.named(str(folder_entry)).kind != SMALL_MODEL:
                drafter = drafter or str(folder_entry)
        except HdtoolError:
            continue
    return replace(decoding, heads=(*decoding.heads, *heads), drafter=drafter)


def usable_drafter_methods(decoding: DecodeConfig, loaded: Loaded) -> list[str]:
    """Return the ``HIERARCHIES`` methods with a trained drafter that is usable; print a note for each unusable one."""
    methods = []
    tokenizer = TokenizerFingerprint.of(loaded.tokenizer)
    there = methods_with_drafters(decoding, loaded.target.model)
    for method in HIERARCHIES:
        if method not in there:
            continue
        try:
            trained_drafter(replace(decoding, method=method), loaded.target, tokenizer)
            methods.append(method)
        except HdtoolError as error:
            note(f"{method} is left out: {error}")
    return methods


def method_options(method: str, decoding: DecodeConfig) -> tuple[str, ...]:
    """Return the command line options that select a method and its trained drafter."""
    kind = METHODS[method].trained
    heads = (
        [part for folder in decoding.heads for part in ("--heads", folder)]
        if kind in (HEADS_DRAFTER, MTP_DRAFTER)
        else []
    )
    drafter = ["--drafter", decoding.drafter] if kind == DRAFT_MODEL and decoding.drafter else []
    return ("--method", method, *heads, *drafter)
