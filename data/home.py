"""Where hdtool keeps stores when nobody says where."""

from __future__ import annotations

import os
import re
from pathlib import Path

from hdtool.data.store import TokenizerMark


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


def store_at_home(kind: str, tokenizer: TokenizerMark) -> Path:
    """The place of a tokenizer's store: models with the same tokenizer find the same one."""
    return home() / "stores" / tokenizer.fingerprint / kind
