"""Where hdtool keeps stores when nobody says where."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from hdtool.data.errors import OptionError
from hdtool.data.store import TokenizerMark

LONGEST_NAME = 200
"""Of a namespace, as file systems take it."""


def home() -> Path:
    """``HDTOOL_HOME``, else the platform's folder for a program's data."""
    if chosen := os.environ.get("HDTOOL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_path

    return user_data_path("hdtool", appauthor=False)


def cost_at_home(fingerprint: str, device: str, dtype: str, threads: int) -> Path:
    """The place of what a model's forward passes take here: for each device, in words, dtype and number of threads."""
    words = re.sub(r"\W+", "-", device).strip("-")
    return home() / "costs" / fingerprint / f"{words}-{dtype}-{threads}.json"


def store_at_home(kind: str, tokenizer: TokenizerMark, namespace: str | None = None) -> Path:
    """The place of a tokenizer's store: models with the same tokenizer find the same one, tenants only their own."""
    return (_namespace(namespace) if namespace else home() / "stores") / tokenizer.fingerprint / kind


def namespace_among(names: Iterable[str]) -> str | None:
    """The first of these names that has stores of its own."""
    return next((name for name in names if _namespace(name).is_dir()), None)


def _namespace(name: str) -> Path:
    """The folder of a tenant's stores; no two names share one, and none leads out of hdtool's home."""
    folder = quote(name, safe="")
    if not 0 < len(folder) <= LONGEST_NAME or not folder.strip("."):
        raise OptionError(
            f"namespace {name!r} cannot name a folder: take 1 to {LONGEST_NAME} letters that are not all dots"
        )
    return home() / "namespaces" / folder
