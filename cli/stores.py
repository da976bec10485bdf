"""``hdtool stores``, ``merge``, ``add`` and ``drop``: list, remove and edit existing stores."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, completion, quiet_libraries
from hdtool.cli.options_from_settings import only
from hdtool.cli.store_output import (
    history_in_words,
    open_documents,
    print_built,
    rankings_for,
    store_in_words,
    store_record,
    store_table,
)
from hdtool.data.artifact import Artifact, artifacts
from hdtool.data.errors import OptionError, StoreError, did_you_mean
from hdtool.data.home import home
from hdtool.data.notes import note, tell
from hdtool.data.progress import count_of
from hdtool.data.stores.kinds import MODEL_KIND
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import holds_history
from hdtool.data.stores.store_folder import read_manifest, refuse_replacing, require_store
from hdtool.data.stores.stores_at_home import (
    SHOWN_FINGERPRINT_DIGITS,
    StoredItem,
    find_item,
    remove_store,
    stored_items,
    with_unique_names,
)
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.settings_base import Panel, Use

if TYPE_CHECKING:
    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.model_store import ModelStore

    AnyStore = CorpusIndex | ModelStore


LIST_ACTION, REMOVE_ACTION = "list", "remove"
ON_REMOVING = Use(no_effect=lambda given: given["action"] != REMOVE_ACTION and f"without {REMOVE_ACTION}")
ARTIFACT_KINDS = ("gguf", "quantized")
"""Kinds of listed models: configurations of GGUF files, and checkpoints quantized on loading."""


def stores(
    action: Annotated[
        str,
        typer.Argument(
            help=f"{LIST_ACTION} or {REMOVE_ACTION}.",
            metavar="ACTION",
            autocompletion=completion((LIST_ACTION, REMOVE_ACTION)),
        ),
    ] = LIST_ACTION,
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="What to remove, by its name.")] = None,
    yes: Annotated[bool, Option(Panel.INPUT, "Remove without asking.", "--yes", use=ON_REMOVING)] = False,
    as_json: options.JsonObject = False,
) -> None:
    """List the stores in hdtool's home, or remove some.

    A model store belongs to one model, a corpus index to all models of its tokenizer. Stores in other folders are
    shown by inspect. Configurations of GGUF files and models quantized on loading are listed too, and so are set-ups,
    which keep copies of the conversations in their logs.
    """

    items = _all_items()
    if action == REMOVE_ACTION:
        _remove(names or [], items, yes=yes)
    elif action != LIST_ACTION:
        meant = did_you_mean(action, (LIST_ACTION, REMOVE_ACTION))
        raise OptionError(
            f"hdtool stores can {LIST_ACTION} and {REMOVE_ACTION}, got {action}{meant}: hdtool stores lists them, "
            f"hdtool stores {REMOVE_ACTION} NAME removes one, and hdtool inspect NAME shows one"
        )
    elif names:
        raise OptionError(f"hdtool stores {LIST_ACTION} takes no names, got {names[0]}: hdtool inspect shows one store")
    elif as_json:
        print(json.dumps({"home": str(home()), "stores": [store_record(item) for item in items]}, ensure_ascii=False))
    else:
        print(store_table(items, str(home())))


def _all_items() -> list[StoredItem]:
    from hdtool.builders.setup.work_folder import stored_setups

    models = [
        StoredItem(
            f"{artifact.kind}-{artifact.fingerprint[:SHOWN_FINGERPRINT_DIGITS]}",
            kind,
            artifact.folder,
            artifact.folder.stat().st_mtime,
            artifact.bytes,
            model=Checkpoint(artifact.fingerprint, artifact.folder.name.rpartition("-")[0]),
        )
        for kind in ARTIFACT_KINDS
        for artifact in artifacts(kind)
    ]
    return with_unique_names(
        [*stored_items(), *sorted(models, key=lambda item: (item.name, item.folder)), *stored_setups()]
    )


def _remove(names: list[str], items: list[StoredItem], *, yes: bool) -> None:

    if not names:
        raise OptionError("nothing to remove: give the names that hdtool stores lists")
    chosen = {item.folder: item for item in (find_item(name, items) for name in names)}.values()
    if not yes:
        if not sys.stdin.isatty():
            raise OptionError("hdtool stores remove asks before it removes, and there is no terminal: give --yes")
        for item in chosen:
            tell(store_in_words(item))
        typer.confirm("Remove?" if len(chosen) == 1 else f"Remove these {len(chosen)}?", abort=True, err=True)
    for item in chosen:
        _remove_one(item)
        tell(f"removed {store_in_words(item)}")


def _remove_one(item: StoredItem) -> None:
    from hdtool.builders.setup.work_folder import SETUP_KIND, remove_setup

    if item.kind == SETUP_KIND:
        remove_setup(item)
    elif item.kind not in ARTIFACT_KINDS:
        remove_store(item)
    elif artifact := Artifact.read(item.folder):
        artifact.remove()


MAX_AGE_DAYS = 36_500
"""Largest number of days that ``--older-than`` accepts."""


def merge(
    stores: Annotated[
        list[Path],
        typer.Argument(metavar="STORE...", parser=options.store_by_name, help="Stores of one kind and one tokenizer."),
    ],
    out: Annotated[Path, Option(Panel.OUTPUT, "Folder of the merged store; it may be one of the inputs.")],
    replace: options.Replace = False,
    as_json: options.JsonObject = False,
) -> None:
    """Merge stores of one kind.

    An input that several of them hold is counted once.
    """
    from hdtool.builders.stores import edit_store as rework

    check = None if replace else refuse_replacing
    if check and not any(out.exists() and store.exists() and out.samefile(store) for store in stores):
        check(out)
    print_built(out, rework.merge(stores, out, check), as_json=as_json)


def add(
    *,
    store: options.StoreFolder,
    inputs: options.OptionalInputs = None,
    loading: Annotated[ModelConfig, options.TOKENIZER_OF_STORE],
    rankings: options.Rankings = False,
    config: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Add texts, or the model's rankings, to a store.

    The result equals a build from all inputs together.
    """
    if not inputs and not rankings:
        raise OptionError("nothing to add: name FILES, or give --rankings")

    from hdtool.builders.stores import edit_store as rework
    from hdtool.builders.stores.edit_store import note_on_models
    from hdtool.builders.stores.local_executor import BuildExecutor
    from hdtool.runtime.target.load import load_tokenizer
    from hdtool.runtime.target.store_tokenizer import model_of_store

    quiet_libraries(quiet=quiet)
    before = read_manifest(store)
    kind = before.kind
    if loading.model is None and not rankings:  # rankings need the model itself
        loading = model_of_store(store, before.tokenizer, before.model)
        note(f"the tokenizer is that of {loading.name}, with which {store} was built")
    else:
        _check_model(store, before, loading, rankings=rankings)
    tokenizer = load_tokenizer(loading)
    mark, tolerance = TokenizerFingerprint.of(tokenizer), config.max_bad_fraction
    ranked = None
    if rankings:
        require_store(before, store, MODEL_KIND, mark)
        ranked = rankings_for(loading, mark)
    on_models = partial(note_on_models, config=loading, checkpoint=before.model) if before.model else None
    with open_documents(inputs or [], tokenizer, mark, BuildExecutor(), kind, tolerance, on_models=on_models) as (
        sources,
        documents,
    ):
        manifest = rework.add(store, documents, sources, mark, kind, ranked)
    print_built(store, manifest, as_json=as_json)


def _check_model(store: Path, manifest: Manifest, loading: ModelConfig, *, rankings: bool) -> None:
    """Print a note if a store holds answers of a model other than the one that ``loading`` names.

    Raise StoreError instead if ``rankings`` is True, because rankings must come from the model that gave the
    answers.
    """
    from hdtool.runtime.weights.checkpoint_identity import checkpoint_of

    if not manifest.model or not (model := checkpoint_of(loading)) or model == manifest.model:
        return
    if rankings:
        raise StoreError(
            f"{store} holds answers of {manifest.model.label}, and the rankings of {model.label} do not belong to "
            "them: build a store of that model with hdtool build-model-db"
        )
    note(f"{store} holds answers of {manifest.model.label}, and those of {model.label} are added")


def drop(
    store: options.StoreFolder,
    source: Annotated[
        str | None,
        Option(
            Panel.INPUT,
            "Input to remove: its name as inspect shows it, its file name if unique, or 8 or more digits of its hash.",
        ),
    ] = None,
    older_than: Annotated[
        float | None, Option(Panel.INPUT, "Remove conversations older than this many days from a history store.")
    ] = None,
    as_json: options.JsonObject = False,
) -> None:
    """Remove the contribution of one input from a store.

    For privacy or licences: no file keeps anything that only this input contributed. In a history store, conversations
    are removed by their source, their age, or both.
    """
    from hdtool.builders.stores import edit_store as rework

    if source is None and older_than is None:
        raise OptionError("nothing to remove: give --source, or --older-than for a history store")
    if holds_history(store):
        _drop_conversations(store, source, older_than, as_json=as_json)
        return
    if older_than is not None or source is None:
        raise OptionError(f"--older-than is for history stores, and {store} is none: give --source")
    dropped = rework.drop(store, source)
    for share in dropped.removed:
        held = f"{count_of(share.records, 'document')}, {count_of(share.tokens, 'token')}"
        tell(f"removed {share.label}: {held}")
    print_built(store, dropped.manifest, as_json=as_json)


def _drop_conversations(store: Path, source: str | None, days: float | None, *, as_json: bool) -> None:
    from hdtool.builders.stores.edit_store import drop_conversations
    from hdtool.runtime.stores.history_store import HistoryStore
    from hdtool.runtime.stores.inspect_store import description

    if days is not None and not 0 <= days <= MAX_AGE_DAYS:
        raise OptionError(f"--older-than must be between 0 and {MAX_AGE_DAYS} days, got {days:g}")
    dropped = drop_conversations(store, source=source, older_than=None if days is None else timedelta(days=days))
    tokens = count_of(sum(conversation.tokens for conversation in dropped), "token")
    tell(f"removed {count_of(len(dropped), 'conversation')}, {tokens}")
    shown = description(HistoryStore(store, read_only=True))
    print(json.dumps(shown, ensure_ascii=False) if as_json else "\n".join(history_in_words(shown)))
