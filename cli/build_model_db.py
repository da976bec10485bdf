"""``hdtool build-model-db``: what a model often says."""

from __future__ import annotations

from typing import Annotated

import typer

from hdtool.cli import options
from hdtool.runtime.config import BuildConfig, ModelConfig


def build_model_db(
    inputs: Annotated[
        list[str],
        typer.Option("--from", help="The model's answers, as collect writes them; any input of build-corpus-db goes."),
    ],
    model: options.Tokenizer = ModelConfig.model,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    top_k: Annotated[
        int, typer.Option(help="Sequences kept of each length, the most frequent ones.")
    ] = BuildConfig.top_k,
    per_key: Annotated[int, typer.Option(help="Continuations kept for each prefix.")] = BuildConfig.per_key,
    tolerate: options.Tolerate = BuildConfig.tolerate,
    engine: options.Engine = BuildConfig.engine,
    address: options.Address = BuildConfig.address,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a model store from a model's own answers.

    Keeps the sequences that the model says most often, by their first 1 to 4 tokens. Of conversations
    only the model's turns are read.
    """
    config = BuildConfig(tolerate=tolerate, top_k=top_k, per_key=per_key, engine=engine, address=address)

    from hdtool.builders.stores.build_model_store import build_model_store
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.cli.output.store_output import engine_for, reading, report
    from hdtool.data.stores.home import store_at_home
    from hdtool.data.stores.store import TokenizerFingerprint, check_destination
    from hdtool.runtime.model.load import load_tokenizer
    from hdtool.runtime.stores.model_store import KIND

    if out:
        check_destination(out)
    quiet_libraries()
    tokenizer = load_tokenizer(ModelConfig(model, trust_remote_code=trust_remote_code))
    mark = TokenizerFingerprint.of(tokenizer)
    folder = out or store_at_home(KIND, mark, namespace)
    with (
        engine_for(config, quiet=quiet) as who,
        reading(inputs, tokenizer, who, answers_only=True, tolerate=tolerate, quiet=quiet) as (read, documents),
    ):
        manifest = build_model_store(folder, documents, mark, read.sources, top_k=top_k, per_key=per_key, engine=who)
    report(folder, manifest, as_json=as_json)
