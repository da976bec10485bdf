"""Checks of the folders: hdtool's home, the compiled functions, the cache of the hub, and the stores."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hdtool
from hdtool.builders.diagnosis.finding import MEND, NOTE, OK, Finding
from hdtool.data.stores.home import home
from hdtool.data.stores.inventory import StoredItem, stored_items
from hdtool.data.tally import counted

LITTLE = 2 * 10**9
"""Bytes free on a disk below which a converted or downloaded model does not fit."""


def folder_findings() -> Iterator[Finding]:
    yield _writable("home", home(), "HDTOOL_HOME")
    yield _compiled()
    yield from _hub()


def store_findings() -> Iterator[Finding]:
    items = stored_items()
    for item in items:
        yield _store(item)
    if not items:
        advice = "hdtool build-model-db --model MODEL --from answers.jsonl"
        yield Finding("stores", "none: drafts come from the conversation and the history alone", NOTE, advice)


def _writable(name: str, folder: Path, variable: str) -> Finding:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return Finding(name, f"{folder} cannot be written", MEND, f"correct the permissions, or set {variable}")
    free = shutil.disk_usage(there).free
    state, advice = (NOTE, f"make room, or set {variable} to a folder on another disk") if free < LITTLE else (OK, "")
    return Finding(name, f"{folder}, {free / 1e9:.1f} GB free", state, advice)


def _compiled() -> Finding:
    """numba keeps compiled functions beside their files, or in a folder of the user where those are read-only."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    places = [Path(chosen)] if chosen else [Path(place) for place in hdtool.__path__]
    kept = sum(1 for place in places for part in _parts(place) for _ in part.rglob("*.nbi"))
    if kept:
        return Finding("compiled", f"{kept} functions kept in {places[-1]}")
    return Finding("compiled", "none yet: the first answer compiles the drafter, which takes a minute", NOTE)


def _parts(place: Path) -> Iterator[Path]:
    """The folders of hdtool; in a checkout there are others beside them, such as an environment."""
    own = [place / name for name in ("runtime", "builders") if (place / name).is_dir()]
    yield from own or [place]


def _hub() -> Iterator[Finding]:
    from huggingface_hub import constants, get_token

    cache = Path(constants.HF_HUB_CACHE)
    models = sum(1 for _ in cache.glob("models--*"))
    found = _writable("hub cache", cache, "HF_HOME")
    yield replace(found, found=f"{found.found}, {counted(models, 'model')}")
    if constants.HF_HUB_OFFLINE:
        yield Finding("hub", "HF_HUB_OFFLINE is set: nothing is downloaded", NOTE, "unset HF_HUB_OFFLINE to download")
    elif get_token() is None:
        yield Finding("hub", "no token: gated and private models cannot be downloaded", NOTE, "hf auth login")
    else:
        yield Finding("hub", "a token is there")


def _store(item: StoredItem) -> Finding:
    if item.fault:
        return Finding(item.name, item.fault, MEND, f"build it again, or hdtool stores remove {item.name}")
    tokens = f", {item.tokens:,} tokens" if item.tokens is not None else ""
    if item.kind == "model" and not item.model:
        command = f"hdtool build-model-db --model MODEL --from {item.folder}"
        return Finding(item.name, f"names no model, so none finds it{tokens}", NOTE, command)
    whose = item.model.name if item.model else f"any model of the tokenizer {item.tokenizer}"
    return Finding(item.name, f"{whose}{tokens}")
