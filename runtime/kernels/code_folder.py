"""Keeps compiled code in a folder whose name depends on hdtool's sources, numba, Python and the processor.

numba reuses a function's code if the function's own file is unchanged, even if functions in other files that were
compiled into the code have changed. Code of an earlier release could then be reused, so each state of the sources has a
folder. Installing the same release again changes nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
import numba

from hdtool.data.home import home

PREFIX = "hdtool-"
KEPT_FOLDERS = 3
"""Number of folders to keep: environments with other releases of hdtool, numba or Python may share a home."""
_config: Any = numba.config


@cache
def code_folder() -> Path:
    """Return the folder for compiled code, in ``NUMBA_CACHE_DIR`` or in hdtool's home."""
    return _root() / f"{PREFIX}{digest_of(Path(__file__).parents[2])}"


def _root() -> Path:
    return Path(_config.CACHE_DIR) if _config.CACHE_DIR else home() / "compiled"


def digest_of(package: Path) -> str:
    """Return a hash of sources that have compiled functions, the versions of numba and Python, and the processor."""
    processor = (
        _config.CPU_NAME or llvm.get_host_cpu_name(),
        _config.CPU_FEATURES or llvm.get_host_cpu_features().flatten(),
    )
    digest = hashlib.sha256(repr((numba.__version__, sys.implementation.cache_tag, processor)).encode())
    for file in sorted(file for folder in ("builders", "runtime") for file in (package / folder).rglob("*.py")):
        source = file.read_bytes()
        if b"numba" in source or b"kernels.compiled" in source:
            digest.update(f"{file.relative_to(package)} {len(source)} ".encode() + source)
    return digest.hexdigest()[:16]


@contextmanager
def keeping_code() -> Iterator[None]:
    """In this block, make numba keep the code of new functions in ``code_folder``.

    Functions of other packages keep their own places. If the folder can't be written, numba chooses another one.
    """
    folder, before = str(code_folder()), _config.CACHE_DIR
    _config.CACHE_DIR = folder
    try:
        yield
    finally:
        _config.CACHE_DIR = before


def keeps_code() -> bool:
    """Create the folder for compiled code; return False if it can't be written, so that numba uses another one."""
    with suppress(OSError):
        code_folder().mkdir(parents=True, exist_ok=True)
    return os.access(code_folder(), os.W_OK | os.X_OK)


def is_compiled(part: str) -> bool:
    """Return True if ``mark_compiled`` was called for a part of the program in this or an earlier process."""
    return _mark(part).exists()


def mark_compiled(part: str) -> None:
    """Record that the code of a part of the program is complete."""
    if not is_compiled(part) and keeps_code():
        with suppress(OSError):  # such as a full disk; the part is then compiled again
            _mark(part).touch()


def _mark(part: str) -> Path:
    return code_folder() / f"{part}.complete"


def remove_outdated() -> None:
    """Remove the code folders of other releases and environments, except the latest ones."""
    with suppress(OSError):
        others = [folder for folder in _root().glob(f"{PREFIX}*") if folder != code_folder()]
        for folder in sorted(others, key=lambda folder: folder.stat().st_mtime)[: -KEPT_FOLDERS + 1]:
            shutil.rmtree(folder, ignore_errors=True)
