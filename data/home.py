"""Where hdtool keeps stores when nobody says where."""

from __future__ import annotations

import os
from pathlib import Path

from hdtool.data.store import TokenizerMark


def home() -> Path:
    """``HDTOOL_HOME``, else the platform's folder for a program's data."""
    if chosen := os.environ.get("HDTOOL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_path

    return user_data_path("hdtool", appauthor=False)


def store_at_home(kind: str, tokenizer: TokenizerMark) -> Path:
    """The place of a tokenizer's store: models with the same tokenizer find the same one."""
    return home() / "stores" / tokenizer.fingerprint / kind
