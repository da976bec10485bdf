"""``hdtool inspect``: look into a store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hdtool.cli import options
from hdtool.data.errors import OptionError, StoreError
from hdtool.runtime.config import ModelConfig

if TYPE_CHECKING:
    from hdtool.data.stores.store import Manifest
    from hdtool.runtime.stores.corpus_index import CorpusIndex
    from hdtool.runtime.stores.model_store import ModelStore

    AnyStore = CorpusIndex | ModelStore


def inspect(
    store: options.StoreFolder,
    after: Annotated[str | None, typer.Option(help="Show what the store would draft after this text.")] = None,
    latency: Annotated[
        bool, typer.Option("--latency", help="Time look-ups of contexts from the store itself.")
    ] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every file and compare its checksum.")] = False,
    model: options.Tokenizer = ModelConfig.model,
    trust_remote_code: options.TrustRemoteCode = ModelConfig.trust_remote_code,
    as_json: options.Json = False,
) -> None:
    """Show what a store is, from what it was built, and what it would draft."""
    from hdtool.cli.output.store_output import description
    from hdtool.data.stores.store import damaged, read_store

    if after == "":
        raise OptionError("--after is empty: give the text after which the store shall draft")

    def read(found: Manifest) -> tuple[Manifest, AnyStore | None, list[str]]:
        opened = None
        if after is not None or latency:
            from hdtool.runtime.stores.inspect_store import open_store

            opened = open_store(store, found)
        return found, opened, damaged(store, found) if verify else []

    manifest, opened, bad = read_store(store, read)
    if bad:
        raise StoreError(f"{store} is damaged ({', '.join(bad)} changed since the build): build it again")
    shown = description(store, manifest)
    if verify:
        shown["verified"] = len(manifest.files)
    if opened and after is not None:
        shown["after"] = _after(opened, after, ModelConfig(model, trust_remote_code=trust_remote_code))
    if opened and latency:
        from hdtool.runtime.stores.inspect_store import latency_of

        shown |= latency_of(opened)
    print(json.dumps(shown, ensure_ascii=False) if as_json else _in_words(shown))


def _after(store: AnyStore, text: str, config: ModelConfig) -> list[dict[str, Any]]:
    from hdtool.cli.output.show_answers import quiet_libraries
    from hdtool.data.stores.store import TokenizerFingerprint, require
    from hdtool.runtime.model.load import load_tokenizer
    from hdtool.runtime.stores.inspect_store import continuations

    quiet_libraries()
    tokenizer = load_tokenizer(config)
    require(store.manifest, store.folder, store.manifest.kind, TokenizerFingerprint.of(tokenizer))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not ids:
        raise OptionError(f"--after {text!r} has no token in this model's tokenizer: give another text")
    return [
        {"matched": matched, "text": tokenizer.decode(path), "ids": path, "count": count}
        for matched, path, count in continuations(store, ids)
    ]


def _in_words(shown: dict[str, Any]) -> str:
    from hdtool.data.stores.store import InputShare
    from hdtool.data.stores.store_files import printable

    lines = [
        f"{shown['store']}: {shown['kind']} store, format {shown['format']}",
        f"tokenizer  {printable(shown['tokenizer'])}, {shown['vocab_size']:,} tokens",
        "holds      " + ", ".join(f"{count:,} {name}" for name, count in shown["counts"].items()),
        f"on disk    {shown['bytes']:,} bytes",
        "options    " + ", ".join(f"{name} {printable(str(value))}" for name, value in shown["options"].items()),
    ]
    for row in shown["sources"]:
        share = InputShare(**row)
        lines.append(f"source     {share.label}: {share.records:,} documents, {share.tokens:,} tokens")
    if "verified" in shown:
        lines.append(f"verified   all {shown['verified']} files are as they were written")
    if "lookup_us_p50" in shown:
        lines.append(f"look-up    {shown['lookup_us_p50']:.1f} µs at the median, {shown['lookup_us_p99']:.1f} at p99")
    if "after" in shown:
        lines.append("after      count  matched  continuation")
        lines += [f"  {row['count']:>13,}  {row['matched']:>7}  {row['text']!r}" for row in shown["after"]]
        if not shown["after"]:
            lines.append("           nothing: no end of this text is in the store")
    return "\n".join(lines)
