"""``hdtool build-model-db``, ``build-corpus-db`` and ``train-heads``: build stores and train drafting heads."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, quiet_libraries
from hdtool.cli.options_from_settings import only, without
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.notes import note, tell
from hdtool.data.stores.kinds import BUILT_KINDS, CORPUS_KIND, MODEL_KIND
from hdtool.data.stores.manifest import Checkpoint, TokenizerFingerprint
from hdtool.data.stores.store_folder import check_replaceable, refuse_replacing
from hdtool.runtime.settings.building import AMPHISTA, MEDUSA, BuildConfig, HeadsConfig, TrainConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.settings_base import Panel, Use


def build_model_db(
    *,
    inputs: Annotated[
        list[str] | None,
        Option(
            Panel.INPUT,
            "The model's answers. A history store, a file of collect, or any input of build-corpus-db.",
            "--from",
        ),
    ] = None,
    loading: options.ModelOfStore,
    rankings: options.Rankings = False,
    out: options.StoreOut = None,
    namespace: options.Namespace = None,
    replace: options.Replace = False,
    config: Annotated[BuildConfig, without("shard_bytes", "workers")],
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Build a model store from a model's answers.

    Keeps the most frequent sequences, by their first 1 to 4 tokens. Only the model's turns of conversations are read.
    In hdtool's home, each model has a store of its own. Without answers, --rankings alone makes a store.
    """
    if not inputs and not rankings:
        raise OptionError("nothing to build from: give the model's answers with --from, or --rankings")
    _build(
        MODEL_KIND,
        inputs or [],
        loading,
        config,
        out,
        namespace,
        replace=replace,
        rankings=rankings,
        quiet=quiet,
        as_json=as_json,
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
    as_json: options.JsonObject = False,
) -> None:
    """Build a corpus index from texts.

    The index is a suffix array over the tokens of all inputs. Each turn of a conversation is a document.
    """
    _build(CORPUS_KIND, inputs, loading, config, out, namespace, replace=replace, quiet=quiet, as_json=as_json)


def _build(
    kind: str,
    inputs: list[str],
    loading: ModelConfig,
    config: BuildConfig,
    out: Path | None,
    namespace: str | None,
    *,
    replace: bool,
    rankings: bool = False,
    quiet: bool,
    as_json: bool,
) -> None:
    from hdtool.builders.stores.build_stores import BUILDS
    from hdtool.builders.stores.edit_store import note_on_models
    from hdtool.cli.store_output import executor_for, open_documents, print_built, rankings_for
    from hdtool.runtime.target.load import load_tokenizer
    from hdtool.runtime.weights.checkpoint_identity import checkpoint_of

    check = None if replace else refuse_replacing
    if out:  # reject an unusable --out before loading the tokenizer
        check_replaceable(out, check)
    quiet_libraries(quiet=quiet)
    if loading.model is None and kind == CORPUS_KIND:  # the name of a model store's model is printed with its result
        note("the tokenizer is that of the embedded toy model: --model MODEL names another")
    tokenizer = load_tokenizer(loading)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    model = checkpoint_of(loading) if kind == MODEL_KIND else None
    folder = out
    if folder is None:
        folder = _folder_at_home(kind, model, fingerprint, namespace, loading.name)
        check_replaceable(folder, check)
    settings: dict[str, Any] = {name: getattr(config, name) for name in BUILT_KINDS[kind].options}
    on_models = None
    if kind == MODEL_KIND:
        ranked = rankings_for(loading, fingerprint) if rankings else None
        settings |= {"model": model, "rankings": ranked}
        command = shlex.join(
            ["hdtool", "build-model-db", "MODEL", *(word for name in inputs for word in ("--from", name))]
        )
        on_models = partial(note_on_models, config=loading, checkpoint=model, command="" if loading.model else command)
    with (
        executor_for(config) as executor,
        open_documents(
            inputs, tokenizer, fingerprint, executor, kind, config.max_bad_fraction, on_models=on_models
        ) as (
            sources,
            documents,
        ),
    ):
        manifest = BUILDS[kind](folder, documents, fingerprint, sources, executor=executor, check=check, **settings)
    print_built(folder, manifest, as_json=as_json)


def _folder_at_home(
    kind: str, model: Checkpoint | None, tokenizer: TokenizerFingerprint, namespace: str | None, name: str
) -> Path:
    from hdtool.data.stores.stores_at_home import corpus_index_at_home, model_store_at_home

    if kind != MODEL_KIND:
        return corpus_index_at_home(tokenizer, namespace)
    if model:
        return model_store_at_home(model, tokenizer, namespace)
    raise ModelError(
        f"{name} has no weights on this machine, and hdtool's home keeps model stores by the weights of their models: "
        "name the folder with --out and draft from it with --model-db, or get the weights first"
    )


def train_heads(
    *,
    inputs: Annotated[
        list[str],
        Option(Panel.INPUT, "The model's answers. Files, folders or globs, as build-model-db takes them.", "--from"),
    ],
    out: Annotated[
        Path, Option(Panel.OUTPUT, "Folder of the heads. The same command resumes an interrupted training.")
    ],
    hidden_states: Annotated[
        Path | None,
        Option(
            Panel.OUTPUT, "File for the model's hidden states. Computed once, read by each epoch and each training."
        ),
    ] = None,
    chat: options.Chat = None,
    loading: Annotated[ModelConfig, only("model", "gguf_file", "device", "dtype", "trust_remote_code").as_argument()],
    medusa: Annotated[
        bool,
        Option(
            Panel.HEADS,
            "Short for --kind medusa.",
            "--medusa",
            use=Use(no_effect=lambda given: given["kind"] not in (AMPHISTA, MEDUSA) and "with another --kind"),
        ),
    ] = False,
    heads: HeadsConfig,
    config: TrainConfig,
    quiet: options.Quiet = False,
) -> None:
    """Train drafting heads (Amphista, Medusa, Hydra, MTP).

    The model itself does not change. Its own answers to prompts like yours, as hdtool collect writes them, are the best
    training data. Several GPUs: accelerate launch -m hdtool.cli train-heads ...
    """
    from hdtool.builders.head_training.train_heads import train

    quiet_libraries(quiet=quiet)
    chosen = heads.plain if medusa else heads.resolved
    for line in train(inputs, out, loading, chosen, config, chat=chat, hidden_states=hidden_states):
        tell(line)
