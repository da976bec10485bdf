"""``hdtool stores``: what hdtool's home holds, and the removal of a part of it."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, completion, option
from hdtool.data.errors import OptionError

if TYPE_CHECKING:
    from hdtool.data.stores.inventory import StoredItem

LIST, REMOVE = "list", "remove"
CONVERTED, QUANTIZED = "gguf", "quantized"
"""The kinds of models that were converted from a GGUF file, and of those that were quantized on loading."""


def stores(
    action: Annotated[
        str,
        typer.Argument(help=f"{LIST} or {REMOVE}.", metavar="ACTION", autocompletion=completion((LIST, REMOVE))),
    ] = LIST,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="What to remove, by its name.")] = None,
    yes: Annotated[bool, option(INPUT, "Remove without asking.", "--yes")] = False,
    as_json: options.JsonObject = False,
) -> None:
    """List the stores in hdtool's home, or remove some.

    A model store belongs to one model, a corpus index to all models of its tokenizer. Stores in other folders are
    shown by inspect. Models converted from GGUF files or quantized on loading are listed too, and so are set-ups, which
    keep copies of the conversations in their logs.
    """
    from hdtool.cli.output.stored_items import as_row, listed
    from hdtool.data.stores.home import home

    found = _everything()
    if action == REMOVE:
        _remove(names or [], found, yes=yes)
    elif action != LIST:
        raise OptionError(f"hdtool stores can {LIST} and {REMOVE}, got {action}: leave it out for the list")
    elif names:
        raise OptionError(f"hdtool stores {LIST} takes no names, got {names[0]}: hdtool inspect shows one store")
    elif yes:
        raise OptionError(f"--yes has no effect without {REMOVE}: leave it out")
    elif as_json:
        print(json.dumps({"home": str(home()), "stores": [as_row(item) for item in found]}, ensure_ascii=False))
    else:
        print(listed(found, str(home())))


def _everything() -> list[StoredItem]:
    from hdtool.builders.setup.work_folder import kept_setups
    from hdtool.data.stores.inventory import DIGITS, StoredItem, stored_items, with_single_names
    from hdtool.data.stores.manifest import Checkpoint
    from hdtool.runtime.model.gguf.manifest import MANIFEST, manifests
    from hdtool.runtime.model.quantized_manifest import MANIFEST as QUANTIZED_MANIFEST
    from hdtool.runtime.model.quantized_manifest import quantized_manifests

    models = [
        StoredItem(
            f"{CONVERTED}-{manifest.sha256[:DIGITS]}",
            CONVERTED,
            folder,
            (folder / MANIFEST).stat().st_mtime,
            sum(manifest.files.values()),
            model=Checkpoint(manifest.sha256[:16], folder.name.rpartition("-")[0]),
        )
        for folder, manifest in manifests()
    ]
    models += [
        StoredItem(
            f"{QUANTIZED}-{manifest.scheme}-{manifest.sha256[:DIGITS]}",
            QUANTIZED,
            folder,
            (folder / QUANTIZED_MANIFEST).stat().st_mtime,
            sum(file.bytes for file in manifest.files.values()),
            model=Checkpoint(manifest.fingerprint, folder.name.rpartition("-")[0]),
        )
        for folder, manifest in quantized_manifests()
    ]
    return with_single_names(
        [*stored_items(), *sorted(models, key=lambda item: (item.name, item.folder)), *kept_setups()]
    )


def _remove(names: list[str], found: list[StoredItem], *, yes: bool) -> None:
    from hdtool.cli.output.stored_items import in_words
    from hdtool.data.stores.inventory import found_item

    if not names:
        raise OptionError("nothing to remove: give the names that hdtool stores lists")
    chosen = {item.folder: item for item in (found_item(name, found) for name in names)}.values()
    if not yes:
        if not sys.stdin.isatty():
            raise OptionError("hdtool stores remove asks before it removes, and there is no terminal: give --yes")
        for item in chosen:
            print(in_words(item), file=sys.stderr)
        typer.confirm("Remove?" if len(chosen) == 1 else f"Remove these {len(chosen)}?", abort=True, err=True)
    for item in chosen:
        _remove_one(item)
        print(f"removed {in_words(item)}", file=sys.stderr)


def _remove_one(item: StoredItem) -> None:
    from hdtool.builders.setup.work_folder import KIND, remove_setup
    from hdtool.data.stores.inventory import remove_store
    from hdtool.runtime.model.gguf.converted import remove_converted
    from hdtool.runtime.model.gguf.manifest import Manifest

    if item.kind == KIND:
        remove_setup(item)
    elif item.kind == QUANTIZED:
        from hdtool.runtime.model.quantized_manifest import remove_quantized

        remove_quantized(item.folder)
    elif item.kind != CONVERTED:
        remove_store(item)
    elif manifest := Manifest.read(item.folder):
        remove_converted(item.folder, manifest)
