"""Data sets of the Hugging Face hub, named ``hf:owner/name``, as files of this machine.

The library datasets downloads a data set once and keeps it as Arrow files in its cache, which are read like any other
input.
"""

from __future__ import annotations

import re
from pathlib import Path

from hdtool.data.errors import RecordError, reason_of

START = "hf:"
DEFAULT_SPLIT = "train"
NAME = re.compile(r"(?P<name>[^/:]+/[^/:]+)(?:/(?P<config>[^/:]+))?(?::(?P<split>.+))?")


def is_hub_name(name: str) -> bool:
    return name.startswith(START)


def files_of(name: str) -> list[Path]:
    """The files of a split of a data set, downloaded if the cache lacks them."""
    found = NAME.fullmatch(name.removeprefix(START))
    if found is None:
        raise RecordError(
            f"{name} is no name of a data set: write it as hf:OWNER/NAME, hf:OWNER/NAME/CONFIG or with :SPLIT"
        )
    from datasets import load_dataset

    try:
        split = load_dataset(found["name"], found["config"], split=found["split"] or DEFAULT_SPLIT)
    except Exception as error:  # datasets, huggingface_hub and the formats raise errors of many classes
        raise RecordError(
            f"{name} cannot be loaded ({reason_of(error)}): check the name and the network, or name a split as in "
            f"{START}{found['name']}:SPLIT"
        ) from None
    if not (files := [Path(file["filename"]) for file in split.cache_files]):
        raise RecordError(f"{name} holds no rows: name another split")
    return list(dict.fromkeys(files))
