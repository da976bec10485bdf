"""``hdtool build-model-db`` and ``hdtool build-corpus-db``: stores built from inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, option
from hdtool.cli.parameters.settings import without
from hdtool.data.errors import ModelError, OptionError
from hdtool.runtime.config import BuildConfig, ModelConfig

if TYPE_CHECKING:
    from hdtool.data.stores.store import Checkpoint, FolderCheck, Manifest, TokenizerFingerprint


def build_model_db(
    *,
    inputs: Annotated[
        list[str] | None,
        option(
            INPUT, "The model's answers: a history store, a file of collect, or any input of build-corpus-db.", "--from"
        ),
    ] = None,
    loading: options.Tokenizer,
    rankings: options.Rankings = False,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    replace: options.Replace = False,
    config: Annotated[BuildConfig, without("shard_bytes", "workers")],
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a model store from a model's answers.

    Keeps the most frequent sequences, by their first 1 to 4 tokens. Of conversations, only the model's turns are read.
    In hdtool's home, each model has a store of its own. Without answers, --rankings alone makes a store.
    """
    if not inputs and not rankings:
        raise OptionError("nothing to build from: give the model's answers with --from, or --rankings")

    from hdtool.builders.stores.build_model_store import build_model_store
    from hdtool.runtime.stores.model_store import KIND

    how = {"top_k": config.top_k, "per_key": config.per_key}
    place = Destination(KIND, out, namespace, replace)
    _build(
        place, build_model_store, how, inputs or [], loading, config, rankings=rankings, quiet=quiet, as_json=as_json
    )


def build_corpus_db(
    *,
    inputs: options.Inputs,
    loading: options.Tokenizer,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    replace: options.Replace = False,
    config: Annotated[BuildConfig, without("top_k", "per_key")],
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a corpus index from texts.

    The index is a suffix array over the tokens of all inputs. Each turn of a conversation is a document.
    """
    from hdtool.builders.stores.build_corpus_index import build_corpus_index
    from hdtool.runtime.stores.corpus_index import KIND

    how = {"shard_bytes": config.shard_bytes}
    place = Destination(KIND, out, namespace, replace)
    _build(place, build_corpus_index, how, inputs, loading, config, quiet=quiet, as_json=as_json)


@dataclass(frozen=True)
class Destination:
    """Where a store goes."""

    kind: str
    out: Path | None
    namespace: str | None
    replace: bool

    @property
    def replacement_check(self) -> FolderCheck | None:
        """Raises if a store is there, unless it may be replaced."""
        from hdtool.data.stores.store import refuse_replacing

        return None if self.replace else refuse_replacing

    def check(self) -> None:
        """Refuse a folder that was named, before the tokenizer is loaded."""
        if self.out:
            self._check(self.out)

    def folder(self, model: Checkpoint | None, tokenizer: TokenizerFingerprint, name: str) -> Path:
        from hdtool.data.stores.home import corpus_index_at_home, model_store_at_home
        from hdtool.data.stores.store_files import MODEL

        if self.out:
            return self.out
        if self.kind != MODEL:
            folder = corpus_index_at_home(tokenizer, self.namespace)
        elif model:
            folder = model_store_at_home(model, tokenizer, self.namespace)
        else:
            raise ModelError(
                f"{name} has no weights on this machine, and hdtool's home keeps model stores by the weights of their "
                "models: name the folder with --out and draft from it with --model-db, or get the weights first"
            )
        self._check(folder)
        return folder

    def _check(self, folder: Path) -> None:
        from hdtool.data.stores.store import check_destination

        check_destination(folder)
        if check := self.replacement_check:
            check(folder)


def _build(
    place: Destination,
    build: Callable[..., Manifest],
    how: dict[str, Any],
    inputs: list[str],
    loading: ModelConfig,
    config: BuildConfig,
    *,
    rankings: bool = False,
    quiet: bool,
    as_json: bool,
) -> None:
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import engine_for, rankings_for, reading, report
    from hdtool.data.stores.store import TokenizerFingerprint
    from hdtool.data.stores.store_files import MODEL
    from hdtool.runtime.model.checkpoint.identity import checkpoint_of
    from hdtool.runtime.model.load import load_tokenizer

    place.check()
    quiet_libraries(quiet=quiet)
    tokenizer = load_tokenizer(loading)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    kind = place.kind
    model = checkpoint_of(loading) if kind == MODEL else None
    folder = place.folder(model, fingerprint, loading.name)
    if kind == MODEL:
        how = {**how, "model": model, "rankings": rankings_for(loading, fingerprint, quiet=quiet) if rankings else None}
    with (
        engine_for(config, quiet=quiet) as engine,
        reading(inputs, tokenizer, fingerprint, engine, kind, config.max_bad_fraction, quiet=quiet) as (
            read,
            documents,
        ),
    ):
        manifest = build(
            folder, documents, fingerprint, read.sources, engine=engine, check=place.replacement_check, **how
        )
    report(folder, manifest, as_json=as_json)
