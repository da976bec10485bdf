"""The default folders of stores, measurements and converted models."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from hdtool.data.errors import OptionError, StoreError
from hdtool.data.stores.store import MANIFEST, Checkpoint, TokenizerFingerprint, read_manifest
from hdtool.data.stores.store_files import CORPUS, HISTORY, MODEL

LONGEST_FOLDER = 200
"""Characters of a namespace's folder name: file systems allow 255, and some of them fewer."""
LONGEST_NAME = 100
"""Characters of a model's name in the name of a folder."""
KEPT = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
"""Bytes that a folder name keeps; all others are percent-encoded."""
DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9])")
"""Names that Windows reserves for devices, as far as a folder name could equal one."""


def home() -> Path:
    """``HDTOOL_HOME``, else the platform's folder for a program's data."""
    if chosen := os.environ.get("HDTOOL_HOME"):
        return Path(chosen).expanduser()
    from platformdirs import user_data_path

    return user_data_path("hdtool", appauthor=False)


def cost_at_home(fingerprint: str, device: str, dtype: str, threads: int) -> Path:
    """The file of a model's cost curve on this machine, per device name, dtype and number of threads."""
    words = re.sub(r"\W+", "-", device).strip("-")
    return home() / "costs" / fingerprint / f"{words}-{dtype}-{threads}.json"


def quick_costs_at_home() -> Path:
    """The folder of quick measurements, which are made again after a while."""
    return home() / "costs" / "quick"


def proofs_at_home() -> Path:
    """The folder of what was proved of models on this machine."""
    return home() / "proofs"


def import_structure_at_home() -> Path:
    """The folder of the names that the packages of transformers have."""
    return home() / "imports"


def converted_models() -> Path:
    """The folder of models converted from GGUF files."""
    return home() / "gguf"


def quantized_models() -> Path:
    """The folder of checkpoints whose weights were quantized to blocks."""
    return home() / "quantized"


def quantized_at_home(name: str, fingerprint: str) -> Path:
    """The folder of a quantized checkpoint: the name is for people, the fingerprint is of its content."""
    return quantized_models() / f"{_folder_name(name)}-{fingerprint}".lstrip("-")


def setups(model: str) -> Path:
    """The folder of a model's set-ups."""
    return home() / "setups" / _folder_name(model)


def converted_at_home(name: str, fingerprint: str) -> Path:
    """The folder of a converted model: the name is for people, the fingerprint is of the file's content."""
    return converted_models() / f"{_folder_name(name)}-{fingerprint}".lstrip("-")


def _folder_name(name: str) -> str:
    """A name for people as a part of a folder's name; different names may become equal."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII).strip(".-")[:LONGEST_NAME]


def store_at_home(kind: str, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a tokenizer's stores of a kind; tenants have their own."""
    return (home() / "stores" if namespace is None else _namespace(namespace)) / tokenizer.fingerprint / kind


def corpus_index_at_home(tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a corpus index: models with the same tokenizer share it."""
    return store_at_home(CORPUS, tokenizer, namespace)


def model_store_at_home(model: Checkpoint, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a model's store; a fine-tune has another one than its base, as it gives other answers."""
    return store_at_home(MODEL, tokenizer, namespace) / model.fingerprint


def model_stores_at_home(
    tokenizer: TokenizerFingerprint, namespace: str | None = None
) -> list[tuple[Path, Checkpoint | None]]:
    """The model stores of a tokenizer with their models; a store of an earlier version names none."""
    place = store_at_home(MODEL, tokenizer, namespace)
    found = []
    for path in sorted([place / MANIFEST, *place.glob(f"*/{MANIFEST}")]):
        with suppress(StoreError):
            found.append((path.parent, read_manifest(path.parent, check=False).model))
    return found


def history_at_home(model: str, tokenizer: TokenizerFingerprint, namespace: str | None = None) -> Path:
    """The folder of a model's history store; models do not share it, as each repeats its own answers."""
    return store_at_home(HISTORY, tokenizer, namespace) / model


def history_of_tenant(folder: Path, tenant: str) -> Path:
    """The folder of a tenant's history in a folder that the user named; without a tenant it is that folder."""
    return folder / _folder_of(tenant) if tenant else folder


def namespace_among(names: Iterable[str]) -> str | None:
    """The first of these names that has stores; a name that cannot be a namespace has none."""
    return next((name for name in names if _is_possible(name) and has_stores(name)), None)


def has_stores(namespace: str) -> bool:
    """Whether any store was built for this namespace; raises if the name cannot be one.

    A history is none of these: a server that keeps one for a tenant drafts from the same stores when it starts again.
    """
    place = _namespace(namespace)
    try:
        return place.is_dir() and {path.name for path in place.glob("*/*")} != {HISTORY}
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False  # a file system with shorter names cannot hold this folder


def _namespace(name: str) -> Path:
    """The folder of a tenant's stores, which never lies outside hdtool's home."""
    return home() / "namespaces" / _folder_of(name)


def _folder_of(name: str) -> str:
    """The name of a namespace's folder; two namespaces never share one."""
    if not _is_possible(name):
        raise OptionError(
            f"namespace {name!r} cannot name a folder: its encoded name has {len(_encoded(name))} characters and must "
            f"have 1 to {LONGEST_FOLDER}, where each byte other than a to z, 0 to 9, - and _ counts as 3: "
            f"take {'a shorter one' if name else 'another one'}"
        )
    return _encoded(name)


def _is_possible(name: str) -> bool:
    return 0 < len(_encoded(name)) <= LONGEST_FOLDER


def _encoded(name: str) -> str:
    """A folder name that is valid on every file system, and different for different names even without case."""
    written = "".join(chr(byte) if byte in KEPT else f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass"))
    return f"%{ord(written[0]):02x}{written[1:]}" if DEVICE.fullmatch(written) else written
