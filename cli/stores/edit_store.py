"""``hdtool merge``, ``add`` and ``drop``: stores made from stores."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, OUTPUT, option
from hdtool.cli.parameters.settings import only
from hdtool.data.errors import OptionError, StoreError
from hdtool.data.stores.store import Manifest, TokenizerFingerprint, read_manifest, require
from hdtool.data.stores.store_files import MODEL, holds_history
from hdtool.data.stores.store_replacement import refuse_replacing
from hdtool.data.tally import counted
from hdtool.runtime.config import BuildConfig, ModelConfig

LARGEST_AGE = 36_500
"""Days."""


def merge(
    stores: Annotated[
        list[Path],
        typer.Argument(metavar="STORE...", parser=options.store_of_name, help="Stores of one kind and one tokenizer."),
    ],
    out: Annotated[Path, option(OUTPUT, "Folder of the merged store; it may be one of the inputs.")],
    replace: options.Replace = False,
    as_json: options.Json = False,
) -> None:
    """Merge stores of one kind.

    An input that several of them hold is counted once.
    """
    from hdtool.builders.stores import edit_store as rework
    from hdtool.cli.output.store_output import report

    check = None if replace else refuse_replacing
    if check and not any(out.exists() and store.exists() and out.samefile(store) for store in stores):
        check(out)
    report(out, rework.merge(stores, out, check), as_json=as_json)


def add(
    *,
    store: options.StoreFolder,
    inputs: options.OptionalInputs = None,
    loading: options.Tokenizer,
    rankings: options.Rankings = False,
    config: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Add texts, or the model's rankings, to a store.

    The result equals a build from all inputs together.
    """
    if not inputs and not rankings:
        raise OptionError("nothing to add: name FILES, or give --rankings")

    from hdtool.builders.stores import edit_store as rework
    from hdtool.builders.stores.engine import LocalEngine
    from hdtool.builders.stores.named_models import note_on_models
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import rankings_for, reading, report
    from hdtool.runtime.model.load import load_tokenizer

    quiet_libraries(quiet=quiet)
    before = read_manifest(store)
    kind = before.kind
    _check_model(store, before, loading, rankings=rankings)
    tokenizer = load_tokenizer(loading)
    mark, tolerance = TokenizerFingerprint.of(tokenizer), config.max_bad_fraction
    found = None
    if rankings:
        require(before, store, MODEL, mark)
        found = rankings_for(loading, mark, quiet=quiet)
    on_models = partial(note_on_models, config=loading, checkpoint=before.model) if before.model else None
    with reading(inputs or [], tokenizer, mark, LocalEngine(), kind, tolerance, quiet=quiet, on_models=on_models) as (
        sources,
        documents,
    ):
        manifest = rework.add(store, documents, sources, mark, kind, found)
    report(store, manifest, as_json=as_json)


def _check_model(store: Path, manifest: Manifest, loading: ModelConfig, *, rankings: bool) -> None:
    """Print a note if a store holds answers of another model; raise if rankings of this one would join them."""
    from hdtool.runtime.model.checkpoint.identity import checkpoint_of

    if not manifest.model or not (model := checkpoint_of(loading)) or model == manifest.model:
        return
    if rankings:
        raise StoreError(
            f"{store} holds answers of {manifest.model.label}, and the rankings of {model.label} do not belong to "
            "them: build a store of that model with hdtool build-model-db"
        )
    print(
        f"note: {store} holds answers of {manifest.model.label}, and those of {model.label} are added",
        file=sys.stderr,
    )


def drop(
    store: options.StoreFolder,
    source: Annotated[
        str | None,
        option(
            INPUT,
            "Input to remove: its name as inspect shows it, its file name if unique, or 8 or more digits of its hash.",
        ),
    ] = None,
    older_than: Annotated[
        float | None, option(INPUT, "Of a history store, remove the conversations that are older than so many days.")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Remove the contribution of one input from a store.

    For privacy or licences: no file keeps anything that only this input contributed. Of a history store, conversations
    are removed by their source, by their age, or by both.
    """
    from hdtool.builders.stores import edit_store as rework
    from hdtool.cli.output.store_output import report

    if source is None and older_than is None:
        raise OptionError("nothing to remove: give --source, or --older-than for a history store")
    if holds_history(store):
        _drop_conversations(store, source, older_than, as_json=as_json)
        return
    if older_than is not None or source is None:
        raise OptionError(f"--older-than is for history stores, and {store} is none: give --source")
    dropped = rework.drop(store, source)
    for share in dropped.removed:
        held = f"{counted(share.records, 'document')}, {counted(share.tokens, 'token')}"
        print(f"removed {share.label}: {held}", file=sys.stderr)
    report(store, dropped.manifest, as_json=as_json)


def _drop_conversations(store: Path, source: str | None, days: float | None, *, as_json: bool) -> None:
    from hdtool.builders.stores.history_documents import drop_conversations
    from hdtool.cli.output.show_history import history_in_words
    from hdtool.runtime.stores.history.history_store import HistoryStore
    from hdtool.runtime.stores.history.inspect_history import description

    if days is not None and not 0 <= days <= LARGEST_AGE:
        raise OptionError(f"--older-than must be between 0 and {LARGEST_AGE} days, got {days:g}")
    before = None if days is None else timedelta(days=days)
    dropped = drop_conversations(store, source=source, before=before)
    held = f"{counted(dropped.conversations, 'conversation')}, {counted(dropped.tokens, 'token')}"
    print(f"removed {held}", file=sys.stderr)
    shown = description(HistoryStore(store, read_only=True))
    print(json.dumps(shown, ensure_ascii=False) if as_json else "\n".join(history_in_words(shown)))
