"""Paths of hdtool's home and of the measurements, proofs, artifacts and set-ups in it."""

from __future__ import annotations

import os
import re
from pathlib import Path

MAX_MODEL_NAME = 100
"""Maximum number of characters of a model's name in a folder name."""


def home() -> Path:
    """Return hdtool's home: ``HDTOOL_HOME``, or else the platform's folder for user data."""
    if chosen := os.environ.get("HDTOOL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_path

    return user_data_path("hdtool", appauthor=False)


def cost_at_home(fingerprint: str, device: str, dtype: str, threads: int) -> Path:
    """Return the path of a model's cost curve for a device, dtype and number of threads on this machine."""
    words = re.sub(r"\W+", "-", device).strip("-")
    return home() / "costs" / fingerprint / f"{words}-{dtype}-{threads}.json"


def quick_costs_at_home() -> Path:
    """Return the folder of quick cost measurements, which expire."""
    return home() / "costs" / "quick"


def proofs_at_home() -> Path:
    """Return the folder of stored proofs that hdtool's code matches transformers for a model on this machine."""
    return home() / "proofs"


def import_structure_at_home() -> Path:
    """Return the folder that caches the names that each package in transformers defines."""
    return home() / "imports"


def artifacts_at_home(kind: str) -> Path:
    """Return the folder of the artifacts of a kind; kinds that differ only after a hyphen share it."""
    return home() / kind.partition("-")[0]


def artifact_at_home(kind: str, name: str, digest: str) -> Path:
    """Return an artifact's folder. ``digest`` identifies the content; ``name`` is for human readers."""
    return artifacts_at_home(kind) / f"{folder_name(name)}-{digest[:16]}".lstrip("-")


def setups_at_home(model: str) -> Path:
    """Return the folder in which ``hdtool setup`` keeps the work folders of a model's set-ups."""
    return home() / "setups" / folder_name(model)


def folder_name(name: str) -> str:
    """Turn a name into a readable folder name without special characters; different names may give the same result."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-")[:MAX_MODEL_NAME]
