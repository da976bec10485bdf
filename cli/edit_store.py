"""``hdtool merge``, ``add`` and ``drop``: stores made from stores."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli import options
from hdtool.runtime.config import BuildConfig, ModelConfig


def merge(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="Stores of one kind and one tokenizer.")],
    out: Annotated[Path, typer.Option(help="The folder of the united store; it may be one of them.")],
    as_json: options.Json = False,
) -> None:
    """Unite stores.

    A source that several of them hold is taken once.
    """
    from hdtool.builders.stores import edit_store as rework
    from hdtool.cli.output.store_output import report

    report(out, rework.merge(stores, out), as_json=as_json)


def add(
    store: options.StoreFolder,
    inputs: options.Inputs,
    model: options.Tokenizer = ModelConfig.model,
    tolerate: options.Tolerate = BuildConfig.tolerate,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Add texts to a store.

    The result is what a build from all the inputs together would have given.
    """
    config = BuildConfig(tolerate=tolerate)

    from hdtool.builders.stores import edit_store as rework
    from hdtool.builders.stores.engine import LocalEngine
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import reading, report
    from hdtool.data.stores.store import TokenizerFingerprint, read_manifest
    from hdtool.runtime.model.load import load_tokenizer
    from hdtool.runtime.stores.model_store import KIND as MODEL

    quiet_libraries()
    kind = read_manifest(store).kind
    tokenizer = load_tokenizer(ModelConfig(model, trust_remote_code=trust_remote_code))
    here = LocalEngine()
    with reading(inputs, tokenizer, here, answers_only=kind == MODEL, tolerate=config.tolerate, quiet=quiet) as (
        read,
        documents,
    ):
        manifest = rework.add(store, documents, read.sources, TokenizerFingerprint.of(tokenizer), kind)
    report(store, manifest, as_json=as_json)


def drop(
    store: options.StoreFolder,
    source: Annotated[
        str,
        typer.Option(
            help="The source to remove: its name as inspect shows it, its file name if only one source has it, "
            "or 8 or more digits of its hash."
        ),
    ],
    as_json: options.Json = False,
) -> None:
    """Remove what one source brought to a store.

    For privacy or licence: nothing that only this source brought is left in any file.
    """
    from hdtool.builders.stores import edit_store as rework
    from hdtool.cli.output.store_output import report

    dropped = rework.drop(store, source)
    for share in dropped.removed:
        print(f"removed {share.label}: {share.records:,} documents, {share.tokens:,} tokens", file=sys.stderr)
    report(store, dropped.manifest, as_json=as_json)
