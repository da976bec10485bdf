"""``hdtool inspect``: show the contents of a store, its drafts and its latency."""

from __future__ import annotations

import json
from collections.abc import Iterable
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hdtool.cli import options
from hdtool.cli.command import INPUT_PANEL, OUTPUT_PANEL, option, quiet_libraries
from hdtool.cli.store_output import counts_in_words, history_in_words, store_description, verify_conversations
from hdtool.data.errors import OptionError, StoreError
from hdtool.data.progress import count_of
from hdtool.data.stores.manifest import Checkpoint, InputShare, Manifest, TokenizerFingerprint
from hdtool.data.stores.store import damaged_files, read_store, require_store
from hdtool.data.stores.store_files import holds_history, printable
from hdtool.runtime.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.data.stores.manifest import HistoryManifest
    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.model_store import ModelStore

    AnyStore = CorpusIndex | ModelStore


def inspect(
    store: options.StoreFolder,
    after: Annotated[str | None, option(INPUT_PANEL, "Show what the store would draft after this text.")] = None,
    latency: Annotated[
        bool, option(OUTPUT_PANEL, "Time lookups of contexts from the store itself.", "--latency")
    ] = False,
    ngrams: Annotated[
        str | None,
        option(INPUT_PANEL, "List a model store's most frequent n-grams that begin with this text; all with ''."),
    ] = None,
    verify: Annotated[bool, option(OUTPUT_PANEL, "Read every file and compare its checksum.", "--verify")] = False,
    *,
    config: options.Tokenizer,
    as_json: options.JsonObject = False,
) -> None:
    """Show what a store holds and what it would draft."""

    if after == "":
        raise OptionError("--after is empty: give the text after which the store shall draft")

    if holds_history(store):
        shown = _history_description(store, after, ngrams, config, latency=latency, verify=verify)
        print(
            json.dumps(shown, ensure_ascii=False)
            if as_json
            else "\n".join(history_in_words(shown) + _lookup_lines(shown))
        )
        return

    def read(manifest: Manifest) -> tuple[Manifest, AnyStore | None, list[str], list[dict[str, Any]]]:
        opened = None
        if after is not None or latency:
            from hdtool.runtime.stores.store_set import store_of

            opened = store_of(store, manifest)
        listed = _ngrams(store, manifest, ngrams, config) if ngrams is not None else []
        return manifest, opened, damaged_files(store, manifest) if verify else [], listed

    manifest, opened, bad, listed = read_store(store, read)
    if bad:
        raise StoreError(f"{store} is damaged ({', '.join(bad)} changed since the build): build it again")
    shown = store_description(store, manifest)
    if verify:
        shown["verified"] = len(manifest.files)
    if ngrams is not None:
        shown["ngrams"] = listed
    if opened:
        from hdtool.runtime.stores.inspect_store import continuations, latency_of

        if after is not None:
            tokenizer = _tokenizer(store, manifest, config)
            shown["after"] = _rows(tokenizer, continuations(opened, _ids(tokenizer, "--after", after)))
        shown |= latency_of(opened) if latency else {}
    print(json.dumps(shown, ensure_ascii=False) if as_json else _in_words(shown))


def _history_description(
    folder: Path, after: str | None, ngrams: str | None, config: ModelConfig, *, latency: bool, verify: bool
) -> dict[str, Any]:
    from hdtool.runtime.stores.history_store import HistoryStore
    from hdtool.runtime.stores.inspect_store import description, history_continuations, history_latency

    if ngrams is not None:
        raise OptionError("--ngrams lists a model store, and this is a history store: leave it out, or take --after")
    store = HistoryStore(folder, read_only=True)
    shown = description(store)
    if verify:
        shown["verified"] = verify_conversations(store)
    if after is not None:
        tokenizer = _tokenizer(folder, store.manifest, config)
        shown["after"] = _rows(tokenizer, history_continuations(store, _ids(tokenizer, "--after", after)))
    return shown | (history_latency(store) if latency else {})


def _rows(tokenizer: PreTrainedTokenizerBase, rows: Iterable[tuple[int, list[int], int]]) -> list[dict[str, Any]]:
    return [
        {"matched": matched, "text": tokenizer.decode(path), "ids": path, "count": count}
        for matched, path, count in rows
    ]


def _ngrams(folder: Path, manifest: Manifest, text: str, config: ModelConfig) -> list[dict[str, Any]]:
    """Return the n-grams that begin with a text, those with the most frequent prefix first."""
    from hdtool.runtime.stores.inspect_store import MAX_SHOWN
    from hdtool.runtime.stores.model_store import ModelRecord

    require_store(manifest, folder, "model")
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
    """Load the model's tokenizer. Raises StoreError if the store was built with another one."""
    from hdtool.data.stores.manifest import HistoryManifest, require_history
    from hdtool.runtime.model.load import load_tokenizer

    quiet_libraries()
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


def _in_words(shown: dict[str, Any]) -> str:

    lines = [
        f"{shown['store']}: {shown['kind']} store, format {shown['format']}",
        *([f"model      {Checkpoint(**shown['model']).label}"] if shown["model"] else []),
        f"tokenizer  {printable(shown['tokenizer'])}, {shown['vocab_size']:,} tokens",
        f"holds      {counts_in_words(shown['counts'])}",
        f"on disk    {shown['bytes']:,} bytes",
        "options    " + ", ".join(f"{name} {printable(str(value))}" for name, value in shown["options"].items()),
    ]
    for row in shown["sources"]:
        share = InputShare(**row)
        lines.append(
            f"source     {share.label}: {count_of(share.records, 'document')}, {count_of(share.tokens, 'token')}"
        )
    if "verified" in shown:
        lines.append(f"verified   all {shown['verified']} files are as they were written")
    return "\n".join(lines + _lookup_lines(shown))


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
