"""``hdtool build-corpus-db``: an index over what people write."""

from __future__ import annotations

from typing import Annotated

import typer

from hdtool.cli import options
from hdtool.runtime.config import BuildConfig, ModelConfig


def build_corpus_db(
    inputs: options.Inputs,
    model: options.Tokenizer = ModelConfig.model,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    tolerate: options.Tolerate = BuildConfig.tolerate,
    shard_bytes: Annotated[
        int, typer.Option(help="Bytes of tokens that are sorted as one; sorting takes seven times as much memory.")
    ] = BuildConfig.shard_bytes,
    workers: Annotated[
        int | None, typer.Option(help="Shards sorted at once, and workers of Ray here. Default: one for each core.")
    ] = BuildConfig.workers,
    engine: options.Engine = BuildConfig.engine,
    address: options.Address = BuildConfig.address,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a corpus index from texts.

    A suffix array over all text of the inputs, every turn of a conversation a document of its own.
    """
    config = BuildConfig(tolerate=tolerate, shard_bytes=shard_bytes, workers=workers, engine=engine, address=address)

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
    tokenizer = load_tokenizer(ModelConfig(model, trust_remote_code=trust_remote_code))
    mark = TokenizerFingerprint.of(tokenizer)
    folder = out or store_at_home(KIND, mark, namespace)
    with (
        engine_for(config, quiet=quiet) as who,
        reading(inputs, tokenizer, who, answers_only=False, tolerate=tolerate, quiet=quiet) as (read, documents),
    ):
        manifest = build_corpus_index(folder, documents, mark, read.sources, shard_bytes=shard_bytes, engine=who)
    report(folder, manifest, as_json=as_json)
