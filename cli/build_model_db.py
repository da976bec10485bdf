"""``hdtool build-model-db``: a model store of frequent n-grams of a model's answers."""

from __future__ import annotations

from typing import Annotated

from hdtool.cli.parameters import options
from hdtool.cli.parameters.command import BUILD, INPUT, option
from hdtool.runtime.config import BuildConfig, ModelConfig


def build_model_db(
    inputs: Annotated[
        list[str],
        option(INPUT, "The model's answers, as collect writes them, or any input of build-corpus-db.", "--from"),
    ],
    model: options.Tokenizer = ModelConfig.model,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    top_k: Annotated[int, option(BUILD, "Most frequent sequences kept of each length.")] = BuildConfig.top_k,
    per_key: Annotated[int, option(BUILD, "Continuations kept for each prefix.")] = BuildConfig.per_key,
    max_bad_fraction: options.MaxBadFraction = BuildConfig.max_bad_fraction,
    engine: options.Engine = BuildConfig.engine,
    address: options.Address = BuildConfig.address,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    quiet: options.Quiet = False,
    as_json: options.Json = False,
) -> None:
    """Build a model store from a model's answers.

    Keeps the most frequent sequences, by their first 1 to 4 tokens. Of conversations, only the model's turns are read.
    """
    config = BuildConfig(
        max_bad_fraction=max_bad_fraction, top_k=top_k, per_key=per_key, engine=engine, address=address
    )

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
    tokenizer = load_tokenizer(ModelConfig(model=model, trust_remote_code=trust_remote_code))
    fingerprint = TokenizerFingerprint.of(tokenizer)
    folder = out or store_at_home(KIND, fingerprint, namespace)
    with (
        engine_for(config, quiet=quiet) as backend,
        reading(inputs, tokenizer, backend, answers_only=True, tolerance=max_bad_fraction, quiet=quiet) as (
            read,
            documents,
        ),
    ):
        manifest = build_model_store(
            folder, documents, fingerprint, read.sources, top_k=top_k, per_key=per_key, engine=backend
        )
    report(folder, manifest, as_json=as_json)
