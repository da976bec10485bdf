"""``hdtool build-model-db`` and ``hdtool build-corpus-db``: stores built from inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import INPUT, option
from hdtool.cli.parameters.settings import without
from hdtool.runtime.config import BuildConfig, ModelConfig

if TYPE_CHECKING:
    from hdtool.data.stores.store import Manifest


def build_model_db(
    *,
    inputs: Annotated[
        list[str],
        option(
            INPUT, "The model's answers: a history store, a file of collect, or any input of build-corpus-db.", "--from"
        ),
    ],
    loading: options.Tokenizer,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    config: Annotated[BuildConfig, without("shard_bytes", "workers")],
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a model store from a model's answers.

    Keeps the most frequent sequences, by their first 1 to 4 tokens. Of conversations, only the model's turns are read.
    """
    from hdtool.builders.stores.build_model_store import build_model_store
    from hdtool.runtime.stores.model_store import KIND

    how = {"top_k": config.top_k, "per_key": config.per_key}
    _build(KIND, build_model_store, how, inputs, loading, out, namespace, config, quiet=quiet, as_json=as_json)


def build_corpus_db(
    *,
    inputs: options.Inputs,
    loading: options.Tokenizer,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
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
    _build(KIND, build_corpus_index, how, inputs, loading, out, namespace, config, quiet=quiet, as_json=as_json)


def _build(
    kind: str,
    build: Callable[..., Manifest],
    how: dict[str, Any],
    inputs: list[str],
    loading: ModelConfig,
    out: Path | None,
    namespace: str | None,
    config: BuildConfig,
    *,
    quiet: bool,
    as_json: bool,
) -> None:
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import engine_for, reading, report
    from hdtool.data.stores.home import store_at_home
    from hdtool.data.stores.store import TokenizerFingerprint, check_destination
    from hdtool.runtime.model.load import load_tokenizer

    if out:
        check_destination(out)
    quiet_libraries()
    tokenizer = load_tokenizer(loading)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    folder = out or store_at_home(kind, fingerprint, namespace)
    with (
        engine_for(config, quiet=quiet) as engine,
        reading(inputs, tokenizer, fingerprint, engine, kind, config.max_bad_fraction, quiet=quiet) as (
            read,
            documents,
        ),
    ):
        manifest = build(folder, documents, fingerprint, read.sources, engine=engine, **how)
    report(folder, manifest, as_json=as_json)
