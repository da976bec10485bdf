"""``hdtool build-corpus-db``: a suffix array over texts."""

from __future__ import annotations

from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import BUILD, option
from hdtool.runtime.config import BuildConfig, ModelConfig


def build_corpus_db(
    inputs: options.Inputs,
    model: options.Tokenizer = ModelConfig.model,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    max_bad_fraction: options.MaxBadFraction = BuildConfig.max_bad_fraction,
    shard_bytes: Annotated[
        int, option(BUILD, "Bytes of tokens per shard; sorting a shard takes seven times as much memory.")
    ] = BuildConfig.shard_bytes,
    workers: Annotated[
        int | None, option(BUILD, "Shards sorted in parallel, and local workers of Ray. Default: one per core.")
    ] = BuildConfig.workers,
    engine: options.Engine = BuildConfig.engine,
    address: options.Address = BuildConfig.address,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a corpus index from texts.

    The index is a suffix array over the tokens of all inputs. Each turn of a conversation is a document.
    """
    config = BuildConfig(
        max_bad_fraction=max_bad_fraction, shard_bytes=shard_bytes, workers=workers, engine=engine, address=address
    )

    from hdtool.builders.stores.build_corpus_index import build_corpus_index
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import engine_for, reading, report
    from hdtool.data.stores.home import store_at_home
    from hdtool.data.stores.store import TokenizerFingerprint, check_destination
    from hdtool.runtime.model.load import load_tokenizer
    from hdtool.runtime.stores.corpus_index import KIND

    if out:
        check_destination(out)
    quiet_libraries()
    tokenizer = load_tokenizer(ModelConfig(model=model, trust_remote_code=trust_remote_code))
    fingerprint = TokenizerFingerprint.of(tokenizer)
    folder = out or store_at_home(KIND, fingerprint, namespace)
    with (
        engine_for(config, quiet=quiet) as backend,
        reading(inputs, tokenizer, backend, answers_only=False, tolerance=max_bad_fraction, quiet=quiet) as (
            read,
            documents,
        ),
    ):
        manifest = build_corpus_index(
            folder, documents, fingerprint, read.sources, shard_bytes=shard_bytes, engine=backend
        )
    report(folder, manifest, as_json=as_json)
