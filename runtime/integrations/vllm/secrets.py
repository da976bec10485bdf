"""Removes passwords and keys from vLLM's options before they are printed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

KNOWN = ("--api-key", "--hf-token", "--ssl-keyfile-password")
"""Secret options of vLLM; argparse also accepts abbreviations."""
SECRET = re.compile(
    r"(?:^|[-_.])(?:api-?keys?|keys?|passwords?|passphrases?|secrets?|token|credentials?)$", re.IGNORECASE
)
"""The last word of a secret option, or of a secret key in a JSON option."""
NEGATIVE_NUMBER = re.compile(r"-\d+|-\d*\.\d+")
"""argparse reads these as values, not as options."""


def without_secrets(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The words of a command line without secret options and their values, and the names of these options."""
    kept: list[str] = []
    names: list[str] = []
    option, in_secret = "", False
    for word in words:
        if _is_option(word):
            option, equals, value = word.partition("=")
            in_secret = _is_secret(option)
            if in_secret:
                names.append(option)
            else:
                kept.append(option + equals + _without_secret_keys(value, option, names))
        elif not in_secret:
            kept.append(_without_secret_keys(word, option, names))
    return kept, list(dict.fromkeys(names))


def _is_option(word: str) -> bool:
    """Whether argparse reads this word as an option."""
    name = word.partition("=")[0]
    return len(word) > 1 and word[0] == "-" and " " not in name and not NEGATIVE_NUMBER.fullmatch(word)


def _is_secret(name: str) -> bool:
    dashed = name.replace("_", "-")
    if dashed == "--ssl-keyfile":  # a path, although it is a prefix of a secret option
        return False
    shortened = len(dashed) > len("--a") and any(known.startswith(dashed) for known in KNOWN)
    return shortened or bool(SECRET.search(dashed))


def _without_secret_keys(value: str, option: str, names: list[str]) -> str:
    """Remove entries with secret keys from a JSON object; other text is returned unchanged."""
    if not value.lstrip().startswith("{"):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    secret: list[str] = []
    pruned = _pruned(found, option, secret)
    names += secret
    return json.dumps(pruned) if secret else value


def _pruned(found: Any, place: str, secret: list[str]) -> Any:
    if isinstance(found, list):
        return [_pruned(item, place, secret) for item in found]
    if not isinstance(found, dict):
        return found
    kept = {}
    for key, value in found.items():
        if SECRET.search(key):
            secret.append(f"{place}.{key}")
        else:
            kept[key] = _pruned(value, f"{place}.{key}", secret)
    return kept
