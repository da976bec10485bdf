"""Models of the Hugging Face hub: their folder in its cache, downloaded with a progress bar where files are missing."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

from tqdm import tqdm

from hdtool.data.errors import ModelError
from hdtool.data.progress import Bar, bar
from hdtool.runtime.model.checkpoint.hub_errors import hub_errors_worded
from hdtool.runtime.model.checkpoint.weight_files import ADAPTERS, INDEXES, SINGLE, shards, weight_files

CONFIGURATION = ["*.json", "*.jinja", "*.txt", "*.model", "*.py", "*.tiktoken"]
"""Files beside the weights: settings, tokenizers, chat templates and code."""
OTHER_FORMATS = ["onnx/*", "original/*", "coreml/*", "openvino/*", "runs/*"]
"""Folders of repositories that transformers does not read."""
SPARE = 1 << 26
"""Bytes that stay free on the disk after a download."""


@cache  # a look-up asks the hub for the newest version
def snapshot(name: str, revision: str | None = None, *, weights: bool = False) -> Path:
    """The folder of a model in the cache of the hub; what it lacks is downloaded."""
    with hub_errors_worded(name, revision):
        folder = _with_configuration(name, revision)
    if weights and not weight_files(folder):
        _download_weights(name, folder)
    return folder


def cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """The folder of a model in the cache, without asking the hub."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "config.json", revision=revision)
    except (HFValidationError, OSError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


@cache
def file_of(repository: str, name: str, revision: str | None = None) -> Path:
    """A file of a repository in the cache, downloaded if it is not there."""
    from huggingface_hub import hf_hub_download

    with hub_errors_worded(repository, revision, name), _progress(repository) as counted:
        return Path(hf_hub_download(repository, name, revision=revision, tqdm_class=counted))


def _with_configuration(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=CONFIGURATION, ignore_patterns=OTHER_FORMATS, tqdm_class=_Silent
        )
    except LocalEntryNotFoundError:  # of files that may not be needed
        if cached := cached_snapshot(name, revision):
            return cached
        raise
    return Path(found)


def _download_weights(name: str, folder: Path) -> None:
    """Download the weights of the version whose other files are in a folder of the cache."""
    from huggingface_hub import snapshot_download

    commit = folder.name
    with hub_errors_worded(name, commit):
        for wanted in _forms(folder):
            plan = snapshot_download(name, revision=commit, allow_patterns=wanted, dry_run=True, tqdm_class=_Silent)
            missing = [file for file in plan if not file.is_cached]
            if not missing:
                continue
            size = sum(file.file_size or 0 for file in missing)
            _check_room(name, size, folder)
            print(f"note: downloading {name}, once: {size:,} bytes in {folder}", file=sys.stderr)
            with _progress(name, size) as counted:
                snapshot_download(name, revision=commit, allow_patterns=wanted, tqdm_class=counted)
            if weight_files(folder):
                return
    raise ModelError(
        f"{name} has no weights that can be loaded (no {' and no '.join(SINGLE)}; see "
        f"https://huggingface.co/{name}/tree/main): take another model, or a GGUF file of it with --gguf-file"
    )


def _forms(folder: Path) -> Iterator[list[str]]:
    """The names of the files with weights, in the order in which transformers looks for them."""
    adapters = list(ADAPTERS)
    if not (folder / INDEXES[0]).is_file():
        yield [SINGLE[0], *adapters]
    if listed := shards(folder):
        yield [*listed, *adapters]
    yield [SINGLE[1], *adapters]


def _check_room(name: str, needed: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed + SPARE:
        raise ModelError(
            f"{name} needs {needed:,} bytes in {folder}, whose disk has {free:,}: make room, or let HF_HOME name a "
            "folder on another one"
        )


class _Silent(tqdm):  # type: ignore[misc]
    """A bar that is not shown, for downloads of a few kilobytes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        options.pop("name", None)
        super().__init__(*arguments, **{**options, "disable": True})


@contextmanager
def _progress(name: str, size: int = 0) -> Iterator[type[tqdm[Any]]]:
    """A class of bars for the library, which counts the bytes of all of them in one bar on standard error."""
    with bar(size, name, unit="B") as shown:
        yield _counting(shown)


def _counting(shown: Bar) -> type[tqdm[Any]]:
    lock, total = Lock(), 0

    class Counting(_Silent):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            # Of what one process receives and writes, the library counts both; what is written is counted here.
            self._counts = options.get("unit") == "B" and not str(options.get("desc")).startswith("Downloading bytes")
            super().__init__(*arguments, **options)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal total
            if self._counts:
                with lock:
                    total += int(n or 0)
                    shown.to(total)
            return None

    return Counting
