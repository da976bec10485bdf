"""Exported model folders: links to a model's files, and a ``generate`` that drafts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

from hdtool.data.errors import ModelError
from hdtool.data.output_files import OutputFile
from hdtool.runtime.config import DecodeConfig, ModelConfig, StoresConfig
from hdtool.runtime.model.checkpoint_identity import place_of
from hdtool.runtime.model.load import CONFIG_FILES, load_tokenizer
from hdtool.runtime.stores.store_set import NO_STORE, StoreSet

CODE_FOLDER = "custom_generate"
CODE_FILE, REQUIREMENTS_FILE = f"{CODE_FOLDER}/generate.py", f"{CODE_FOLDER}/requirements.txt"
FIRST_LINE = '"""Written by ``hdtool export``: answers of this model are drafted by hdtool."""'
CODE_TEMPLATE = """{first_line}

from typing import Any

DECODING = {decoding}
STORES = {stores}


def generate(*arguments: Any, model: Any, **options: Any) -> Any:
    from hdtool.runtime.integrations.exported import generate as drafted

    return drafted(model, DECODING, STORES, *arguments, **options)
"""


def export(model: ModelConfig, out: Path, decoding: DecodeConfig, stores: StoresConfig) -> list[Path]:
    """Write the folder; returns the files of the model that it links to."""
    code = OutputFile(out / CODE_FILE, "a file of hdtool export", _is_ours, ModelError)
    _check_destination(out)
    code.check()
    source = place_of(model, CONFIG_FILES, weights=True).resolve()
    if out.resolve() == source or source in out.resolve().parents:
        raise ModelError(f"{out} lies in the folder of the model: choose another place")
    files = list(_files(source))
    if source / CODE_FILE in files:
        raise ModelError(f"{source} has a {CODE_FILE} of its own, which an export would replace: export another model")
    _check_drafting(source, decoding, stores)
    # First, so that the folder of an export that was killed is known and completed by the next one.
    code.write(
        CODE_TEMPLATE.format(
            first_line=FIRST_LINE, decoding=_changed_settings_code(decoding), stores=_stores_code(stores)
        )
    )
    try:
        for file in files:
            _link(file, out / file.relative_to(source))
        (out / REQUIREMENTS_FILE).write_text("hdtool\n", encoding="utf-8")
    except OSError as error:
        raise ModelError(
            f"{out} cannot be written ({error.strerror or error}): correct the permissions, or choose another place"
        ) from error
    return files


def _check_drafting(source: Path, decoding: DecodeConfig, stores: StoresConfig) -> None:
    """Raise for a model without a tokenizer, and for named stores that do not fit it."""
    tokenizer = load_tokenizer(ModelConfig(str(source)))
    named_stores = StoresConfig(stores.model_db or NO_STORE, stores.corpus_db or NO_STORE)
    StoreSet.for_tokenizer(tokenizer, named_stores, decoding.databases)


def _check_destination(out: Path) -> None:
    """Raise unless the folder is new, empty, or an exported one."""
    if out.is_dir():
        if any(out.iterdir()) and not (out / CODE_FILE).is_file():
            raise ModelError(f"{out} holds other files: choose an empty or a new folder")
    elif os.path.lexists(out):
        raise ModelError(f"{out} is not a folder: choose another place")


def _is_ours(path: Path) -> bool:
    with path.open(encoding="utf-8", errors="replace") as stream:
        return stream.readline().rstrip("\n") == FIRST_LINE


def _files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(names) if not name.startswith("."))


def _link(file: Path, to: Path) -> None:
    """Link to a file, symbolically or, where the system has no such links for users, by a second name."""
    target = file.resolve()
    if os.path.lexists(to):
        if to.resolve() == target or (to.exists() and to.samefile(target)):
            return
        if not to.is_symlink():
            raise ModelError(f"{to} is another file: choose an empty or a new folder")
        to.unlink()
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        to.symlink_to(target)
    except OSError:
        os.link(target, to)


def _changed_settings_code(settings: DecodeConfig) -> str:
    """The settings that are not the defaults, as Python code."""
    defaults = {field.name: field.default for field in fields(settings)}
    return repr({name: value for name, value in asdict(settings).items() if value != defaults[name]})


def _stores_code(stores: StoresConfig) -> str:
    """The stores as Python code; folders are named in full, so that the working directory does not matter."""
    arguments: dict[str, str] = {}
    for name, value in asdict(stores).items():
        if value is not None:
            path = Path(value).expanduser()
            arguments[name] = str(path.resolve()) if path.exists() else value
    return repr(arguments)
