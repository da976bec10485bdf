"""``hdtool inspect``: show what a store or a history holds, what it would draft, and how fast it is looked up in."""

from __future__ import annotations

import json
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hdtool.cli import options_from_settings as options
from hdtool.cli.command import Option, quiet_libraries
from hdtool.cli.store_output import (
    counts_in_words,
    history_in_words,
    source_lines,
    store_description,
    verify_conversations,
)
from hdtool.data.errors import OptionError, StoreError
from hdtool.data.progress import count_of
from hdtool.data.stores.history_manifest import HistoryManifest, require_history
from hdtool.data.stores.kinds import MODEL_KIND
from hdtool.data.stores.manifest import Checkpoint, InputShare, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_file_names import holds_history, printable
from hdtool.data.stores.store_folder import damaged_files, read_store, require_store
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.settings_base import Panel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.history_store import HistoryStore
    from hdtool.runtime.stores.model_store import ModelStore

TOKENIZER = options.TOKENIZER_OF_STORE.without_effect(
    lambda given: given["after"] is None and given["ngrams"] is None and "without --after or --ngrams"
)


def inspect(
    store: options.StoreFolder,
    after: Annotated[str | None, Option(Panel.INPUT, "Show what the store would draft after this text.")] = None,
    latency: Annotated[
        bool, Option(Panel.OUTPUT, "Time lookups of contexts from the store itself.", "--latency")
    ] = False,
    ngrams: Annotated[
        str | None,
        Option(Panel.INPUT, "List a model store's most frequent n-grams that begin with this text; all with ''."),
    ] = None,
    verify: Annotated[bool, Option(Panel.OUTPUT, "Read every file and compare its checksum.", "--verify")] = False,
    *,
    config: Annotated[ModelConfig, TOKENIZER],
    as_json: options.JsonObject = False,
) -> None:
    """Show what a store holds and what it would draft."""
    if after == "":
        raise OptionError("--after is empty: give the text after which the store shall draft")
    if holds_history(store):
        if ngrams is not None:
            raise OptionError(
                "--ngrams lists a model store, and this is a history store: leave it out, or take --after"
            )
        shown = _history(store, after, config, latency=latency, verify=verify)
        lines = history_in_words(shown)
    else:
        shown = read_store(
            store, lambda manifest: _built(store, manifest, after, ngrams, config, latency=latency, verify=verify)
        )
        lines = _built_in_words(shown)
    print(json.dumps(shown, ensure_ascii=False) if as_json else "\n".join(lines + _lookup_lines(shown)))


def _history(folder: Path, after: str | None, config: ModelConfig, *, latency: bool, verify: bool) -> dict[str, Any]:
    from hdtool.runtime.stores.history_store import HistoryStore
    from hdtool.runtime.stores.inspect_store import description

    store = HistoryStore(folder, read_only=True)
    shown = description(store)
    if verify:
        shown["verified"] = verify_conversations(store)
    return shown | _lookups(store, after, config, latency=latency)


def _built(
    folder: Path,
    manifest: Manifest,
    after: str | None,
    ngrams: str | None,
    config: ModelConfig,
    *,
    latency: bool,
    verify: bool,
) -> dict[str, Any]:
    shown = store_description(folder, manifest)
    if verify:
        if bad := damaged_files(folder, manifest):
            raise StoreError(f"{folder} is damaged ({', '.join(bad)} changed since the build): build it again")
        shown["verified"] = len(manifest.files)
    if ngrams is not None:
        shown["ngrams"] = _ngrams(folder, manifest, ngrams, config)
    if after is not None or latency:
        from hdtool.runtime.stores.store_set import store_of

        shown |= _lookups(store_of(folder, manifest), after, config, latency=latency)
    return shown


def _lookups(
    store: CorpusIndex | ModelStore | HistoryStore, after: str | None, config: ModelConfig, *, latency: bool
) -> dict[str, Any]:
    from hdtool.runtime.stores.inspect_store import continuations, latency_of

    shown: dict[str, Any] = {}
    if after is not None:
        tokenizer = _tokenizer(store.folder, store.manifest, config)
        shown["after"] = [
            {"matched": matched, "text": tokenizer.decode(path), "ids": path, "count": count}
            for matched, path, count in continuations(store, _ids(tokenizer, "--after", after))
        ]
    return shown | (latency_of(store) if latency else {})


def _ngrams(folder: Path, manifest: Manifest, text: str, config: ModelConfig) -> list[dict[str, Any]]:
    """Return the ``MAX_SHOWN`` most frequent prefixes that begin with ``text``'s tokens, with their continuations."""
    from hdtool.runtime.stores.inspect_store import MAX_SHOWN
    from hdtool.runtime.stores.model_store_lmdb import ModelRecord

    require_store(manifest, folder, MODEL_KIND)
    tokenizer = _tokenizer(folder, manifest, config)
    matches = ModelRecord.of(folder, manifest).ngrams(_ids(tokenizer, "--ngrams", text) if text else [])
    return [
        {
            "text": tokenizer.decode(prefix),
            "ids": prefix,
            "total": total,
            "distinct": distinct,
            "continuations": [
                {"text": tokenizer.decode(path), "ids": path, "count": count} for path, count in continuations
            ],
        }
        for prefix, total, distinct, continuations in nlargest(MAX_SHOWN, matches, key=lambda ngrams: ngrams.total)
    ]


def _tokenizer(folder: Path, manifest: Manifest | HistoryManifest, config: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the store's tokenizer; raise StoreError if the user names a model with another tokenizer."""
    from hdtool.runtime.target.load import load_tokenizer
    from hdtool.runtime.target.store_tokenizer import model_of_store

    quiet_libraries()
    if config.model is None:
        model = None if isinstance(manifest, HistoryManifest) else manifest.model
        config = model_of_store(folder, manifest.tokenizer, model)
    tokenizer = load_tokenizer(config)
    fingerprint = TokenizerFingerprint.of(tokenizer)
    if isinstance(manifest, HistoryManifest):
        require_history(manifest, folder, fingerprint)
    else:
        require_store(manifest, folder, manifest.kind, fingerprint)
    return tokenizer


def _ids(tokenizer: PreTrainedTokenizerBase, name: str, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise OptionError(f"{name} {text!r} has no token in this model's tokenizer: give another text")
    return ids


def _documents_in_words(row: dict[str, Any]) -> str:
    share = InputShare(**row)
    return f"{share.label}: {count_of(share.records, 'document')}, {count_of(share.tokens, 'token')}"


def _built_in_words(shown: dict[str, Any]) -> list[str]:
    lines = [
        f"{shown['store']}: {shown['kind']} store, format {shown['format']}",
        *([f"model      {Checkpoint(**shown['model']).label}"] if shown["model"] else []),
        f"tokenizer  {printable(shown['tokenizer'])}, {shown['vocab_size']:,} tokens",
        f"holds      {counts_in_words(shown['counts'])}",
        f"on disk    {shown['bytes']:,} bytes",
        "options    " + ", ".join(f"{name} {printable(str(value))}" for name, value in shown["options"].items()),
    ]
    lines += source_lines(shown["sources"], _documents_in_words)
    if "verified" in shown:
        lines.append(f"verified   all {shown['verified']} files are as they were written")
    return lines


def _lookup_lines(shown: dict[str, Any]) -> list[str]:
    """Format the results of ``--latency``, ``--after`` and ``--ngrams``."""
    lines = []
    if "lookup_us_p50" in shown:
        lines.append(f"look-up    {shown['lookup_us_p50']:.1f} µs at the median, {shown['lookup_us_p99']:.1f} at p99")
    if "after" in shown:
        lines.append("after      count  matched  continuation")
        lines += [f"  {row['count']:>13,}  {row['matched']:>7}  {row['text']!r}" for row in shown["after"]]
        if not shown["after"]:
            lines.append("           nothing: no end of this text is in the store")
    if "ngrams" in shown:
        lines.append("n-grams    total  continuations")
        for row in shown["ngrams"]:
            continuations = ", ".join(
                f"{continuation['text']!r} {continuation['count']:,}" for continuation in row["continuations"]
            )
            lines.append(f"  {row['total']:>13,}  {row['text']!r}: {continuations}")
        if not shown["ngrams"]:
            lines.append("           nothing: no n-gram in the store begins with this text")
    return lines
