"""``hdtool merge``, ``add`` and ``drop``: stores made from stores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, OUTPUT, option
from hdtool.cli.parameters.settings import only
from hdtool.runtime.config import BuildConfig


def merge(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="Stores of one kind and one tokenizer.")],
    out: Annotated[Path, option(OUTPUT, "Folder of the merged store; it may be one of the inputs.")],
    as_json: options.Json = False,
) -> None:
    """Merge stores of one kind.

    An input that several of them hold is counted once.
    """
    from hdtool.builders.stores import edit_store as rework
    from hdtool.cli.output.store_output import report

    report(out, rework.merge(stores, out), as_json=as_json)


def add(
    *,
    store: options.StoreFolder,
    inputs: options.Inputs,
    loading: options.Tokenizer,
    config: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Add texts to a store.

    The result equals a build from all inputs together.
    """
    from hdtool.builders.stores import edit_store as rework
    from hdtool.builders.stores.engine import LocalEngine
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import reading, report
    from hdtool.data.stores.store import TokenizerFingerprint, read_manifest
    from hdtool.runtime.model.load import load_tokenizer

    quiet_libraries()
    kind = read_manifest(store).kind
    tokenizer = load_tokenizer(loading)
    with reading(inputs, tokenizer, LocalEngine(), kind, config.max_bad_fraction, quiet=quiet) as (read, documents):
        manifest = rework.add(store, documents, read.sources, TokenizerFingerprint.of(tokenizer), kind)
    report(store, manifest, as_json=as_json)


def drop(
    store: options.StoreFolder,
    source: Annotated[
        str,
        option(
            INPUT,
            "Input to remove: its name as inspect shows it, its file name if unique, or 8 or more digits of its hash.",
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Remove the contribution of one input from a store.

    For privacy or licences: no file keeps anything that only this input contributed.
    """
    from hdtool.builders.stores import edit_store as rework
    from hdtool.cli.output.store_output import report

    dropped = rework.drop(store, source)
    for share in dropped.removed:
        print(f"removed {share.label}: {share.records:,} documents, {share.tokens:,} tokens", file=sys.stderr)
    report(store, dropped.manifest, as_json=as_json)
