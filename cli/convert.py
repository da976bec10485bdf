"""``hdtool convert`` and ``export``: rewrite conversations, and export models and stores for other programs."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, quiet_libraries, require_model
from hdtool.cli.options_from_settings import only, without
from hdtool.data.errors import OptionError, did_you_mean
from hdtool.data.notes import note, tell
from hdtool.data.progress import count_of
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.settings_base import Panel


def convert(
    *,
    inputs: options.Inputs,
    out: Annotated[Path, Option(Panel.OUTPUT, "File of conversations, JSON Lines; .gz and .zst compress it.")],
    config: Annotated[BuildConfig, only("max_bad_fraction")],
    quiet: options.Quiet = False,
    as_json: options.JsonObject = False,
) -> None:
    """Write conversations of any form as JSON Lines.

    Each line is a conversation: id, category, messages, recorded token ids if there are some, and where it came from.
    Only the messages of requests and responses are kept. A request and its answer in two files become one conversation.
    """
    from hdtool.cli.store_output import print_left_out
    from hdtool.data.conversation_files import ConversationReader, canonical_file, write_canonical
    from hdtool.data.input_files import find_inputs
    from hdtool.data.progress import progress_bar, show_bars

    show_bars(not quiet)
    paths = find_inputs(inputs)
    if any(path.exists() and out.exists() and path.samefile(out) for path in paths):
        raise OptionError(f"--out {out} is one of the inputs: name another file")
    file = canonical_file(out)
    file.check()
    reader = ConversationReader(paths, tolerance=config.max_bad_fraction)
    with progress_bar(reader.total_bytes, "reading", unit="B") as progress:
        written = write_canonical(reader, file, progress)
    print_left_out(reader.tally)
    counts = {**asdict(written), "left_out": reader.tally.bad}
    if as_json:
        print(json.dumps({"file": str(out), **counts}, ensure_ascii=False))
        return
    print(f"{out}: {written.in_words()}, {count_of(reader.tally.bad, 'record')} left out")
    if not written.answers:
        tell("no answers of a model are in it: it gives prompts and texts only")


TRANSFORMERS, SGLANG = TARGETS = "transformers", "sglang"
DEFAULT_LIMIT = 10_000_000
"""Maximum number of corpus tokens that SGLang accepts by default."""
EXAMPLE_NODES = 8
"""Number of draft tokens from the corpus in the printed command; SGLang drafts 11 tokens in all by default."""
TargetFormat = Annotated[
    str,
    Option(
        Panel.OUTPUT,
        f"Write for {TRANSFORMERS} or {SGLANG}. A folder for {TRANSFORMERS}, the stores' documents for {SGLANG}.",
        values=TARGETS,
    ),
]


DRAFTING = without("max_new_tokens", "batch_size").without_effect(
    lambda given: given["to"] == SGLANG and "with --to sglang, which writes what stores hold", "history"
)


def export(
    *,
    to: TargetFormat = TRANSFORMERS,
    out: Annotated[Path, Option(Panel.OUTPUT, "The new folder, or SGLang's new file.")],
    loading: Annotated[
        ModelConfig, only("model", "gguf_file", "revision").described(model=options.REQUIRED_MODEL_HELP).as_argument()
    ],
    decoding: Annotated[DecodeConfig, DRAFTING],
    stores: Annotated[StoresConfig, without("namespace")],
    as_json: options.JsonObject = False,
) -> None:
    """Export a model that drafts, or stores for SGLang.

    The folder links to the files of the model and holds a custom_generate, which transformers uses when it loads the
    folder with trust_remote_code=True: from_pretrained, pipeline and transformers serve then draft with hdtool, from
    the stores that fit the model or that are named here.

    With --to sglang, the documents of these stores and of --history become an external corpus for SGLang's NGRAM
    algorithm.
    """
    require_model("export", loading.model)
    if to not in TARGETS:
        raise OptionError(f"--to must be one of {', '.join(TARGETS)}, got {to}{did_you_mean(to, TARGETS)}")

    quiet_libraries()
    if to == SGLANG:
        _export_corpus(loading, out, decoding.history, stores, as_json=as_json)
    else:
        _export_folder(loading, out, decoding, stores, as_json=as_json)


def _export_folder(
    loading: ModelConfig, out: Path, decoding: DecodeConfig, stores: StoresConfig, *, as_json: bool
) -> None:
    from hdtool.builders.export import CODE_FILE, export

    files = export(loading, out, decoding, stores)
    if as_json:
        print(json.dumps({"folder": str(out), "files": len(files), "code": CODE_FILE}, ensure_ascii=False))
        return
    print(f"{out}: links to {len(files)} files, and {CODE_FILE}")
    tell(f'AutoModelForCausalLM.from_pretrained("{out}", trust_remote_code=True)')


def _export_corpus(loading: ModelConfig, out: Path, history: str, stores: StoresConfig, *, as_json: bool) -> None:
    from hdtool.builders.export import export_corpus

    exported = export_corpus(loading, out, stores, history)
    if as_json:
        row = {"file": str(out), **asdict(exported), "stores": [str(folder) for folder in exported.stores]}
        print(json.dumps(row, ensure_ascii=False))
        return
    print(
        f"{out}: {count_of(exported.documents, 'document')}, {count_of(exported.tokens, 'token')} as SGLang counts them"
    )
    for folder in exported.stores:
        tell(f"from {folder}")
    if lost := exported.lost_tokens:
        documents = count_of(exported.changed_documents, "document")
        note(f"{count_of(lost, 'token')} of {documents} come back as others when SGLang reads the text")
    if empty := exported.empty_documents:
        note(f"{count_of(empty, 'document')} left out: no text remains")
    limit = exported.tokens if exported.tokens > DEFAULT_LIMIT else None
    command = [
        f"sglang serve --model-path {shlex.quote(str(loading.model))} --speculative-algorithm NGRAM",
        f"--speculative-ngram-external-corpus-path {shlex.quote(str(out))}",
        f"--speculative-ngram-external-sam-budget {EXAMPLE_NODES}",
        *([f"--speculative-ngram-external-corpus-max-tokens {limit}"] if limit else []),
    ]
    tell(" ".join(command))
