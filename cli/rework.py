"""``hdtool merge``, ``add`` and ``drop``: stores made from stores."""

from __future__ import annotations

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
    from hdtool.builders import rework
    from hdtool.cli.stores import report

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

    from hdtool.builders import rework
    from hdtool.builders.engine import LocalEngine
    from hdtool.cli.answers import quiet_libraries
    from hdtool.cli.stores import reading, report
    from hdtool.data.store import TokenizerMark, read_manifest
    from hdtool.runtime.load import load_tokenizer

    quiet_libraries()
    answers_only = read_manifest(store).kind == "model"
    tokenizer = load_tokenizer(ModelConfig(model, trust_remote_code=trust_remote_code))
    here = LocalEngine()
    with reading(inputs, tokenizer, here, answers_only=answers_only, tolerate=config.tolerate, quiet=quiet) as (
        read,
        documents,
    ):
        manifest = rework.add(store, documents, read.sources, TokenizerMark.of(tokenizer))
    report(store, manifest, as_json=as_json)


def drop(
    store: options.StoreFolder,
    source: Annotated[str, typer.Option(help="The source to remove, as inspect names it, or its file name alone.")],
    as_json: options.Json = False,
) -> None:
    """Remove what one source brought to a store.

    For privacy or licence: nothing that only this source brought is left in any file.
    """
    from hdtool.builders import rework
    from hdtool.cli.stores import report

    report(store, rework.drop(store, source), as_json=as_json)
