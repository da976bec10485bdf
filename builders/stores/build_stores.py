"""Builds the corpus index and the model store, including the flat arrays that lookups read.

Documents are first streamed to disk. An index is sorted in shards, in parallel, so that memory is bounded by the shard
size. For a model store, the most frequent sequences of two to five tokens are counted, several lengths in parallel, and
lookup arrays are compiled from these counts. Vocabulary rankings need one forward pass per batch of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from hdtool.builders.stores.frequent_sequences import CountedDocuments, DocumentFile, table_size
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.builders.stores.suffix_array import ShardFiles
from hdtool.data.documents import Document, InputFile, stored_documents, token_type
from hdtool.data.errors import StoreError
from hdtool.data.progress import progress_bar
from hdtool.data.stores.kinds import CORPUS_KIND, MODEL_KIND
from hdtool.data.stores.manifest import Checkpoint, Manifest, TokenizerFingerprint
from hdtool.data.stores.store_folder import FolderCheck, building
from hdtool.runtime.kernels.compiled import Ints, compiled
from hdtool.runtime.kernels.topk import topk
from hdtool.runtime.settings.building import BuildConfig
from hdtool.runtime.stores.model_store import (
    HASH_HIGH,
    HASH_LOW,
    KEY_DISTINCT,
    KEY_START,
    KEY_STOP,
    KEY_TOTAL,
    KEY_WIDTH,
    MAX_PROBES,
    VOCABULARY_RANKING_TOKENS,
    sequence_hash,
    slot_of,
    split_hash,
)
from hdtool.runtime.stores.model_store_lmdb import (
    NGRAM_KINDS,
    PHRASE_KIND,
    PHRASE_TOKENS,
    RECORD_PART,
    ModelRecord,
    NgramGroup,
    writing,
)
from hdtool.runtime.stores.suffix_search import ShardExtent, sampled_prefixes_in
from hdtool.runtime.target.load import Loaded

MAX_DOUBLINGS = 3
"""Maximum number of times that the hash table is doubled while some keys find no slot."""


def compiled_arrays(record: ModelRecord) -> dict[str, Ints]:
    """Return the lookup arrays of a model store, keyed by part name."""
    by_length = [record.group(kind) for kind in NGRAM_KINDS if kind != PHRASE_KIND]
    return {**_prefix_arrays(by_length), **_phrase_arrays(record.group(PHRASE_KIND), record.end)}


def _prefix_arrays(by_length: list[NgramGroup]) -> dict[str, Ints]:
    """Return ``slots`` (hash table of all prefixes), ``keys`` (one row per prefix) and ``rows`` (their next tokens)."""
    keys = np.empty((sum(len(group.heads) for group in by_length), KEY_WIDTH), np.int32)
    key = row = 0
    for group in by_length:
        group_keys = keys[key : key + len(group.heads)]
        group_keys[:, KEY_START], group_keys[:, KEY_STOP] = group.starts + row, group.stops + row
        group_keys[:, KEY_TOTAL], group_keys[:, KEY_DISTINCT] = group.totals, group.distinct
        key, row = key + len(group.heads), row + len(group.counts)
    rows = np.concatenate([np.column_stack([group.tokens, group.counts]) for group in by_length])
    heads = [group.heads for group in by_length]
    return {"slots": _hash_table(keys, heads), "keys": keys, "rows": rows.astype(np.int32)}


def _hash_table(keys: Ints, heads: list[Ints]) -> Ints:
    """Return a hash table of all prefixes; a lookup in it reads at most ``MAX_PROBES`` slots.

    The hash columns of ``keys`` are filled as a side effect. Keys with equal hashes collide at any table size, so keys
    that find no slot after ``MAX_DOUBLINGS`` doublings are left out.
    """
    size = table_size(len(keys))
    for _ in range(MAX_DOUBLINGS + 1):
        slots = np.full(size, -1, np.int32)
        firsts = np.cumsum([0, *map(len, heads)])
        if not sum(
            _fill_table(slots, keys, group_heads, first) for group_heads, first in zip(heads, firsts, strict=False)
        ):
            break
        size *= 2
    return slots


@compiled
def _fill_table(slots: Ints, keys: Ints, heads: Ints, first: int) -> int:
    """Insert the prefixes ``heads``, numbered from ``first``, and set their hashes; return how many found no slot."""
    mask, left_out = len(slots) - 1, 0
    for number in range(len(heads)):
        prefix_hash = sequence_hash(heads[number], 0, heads.shape[1])
        keys[first + number, HASH_LOW], keys[first + number, HASH_HIGH] = split_hash(prefix_hash)
        slot, probes = slot_of(prefix_hash, mask), 1
        while slots[slot] >= 0 and probes < MAX_PROBES:
            slot = (slot + 1) & mask
            probes += 1
        if slots[slot] < 0:
            slots[slot] = first + number
        else:
            left_out += 1
    return left_out


def _phrase_arrays(phrases: NgramGroup, end: int) -> dict[str, Ints]:
    """Return ``phrases``, sorted by first token, and ``heads``, the offset of each token's first phrase."""
    sizes = np.zeros(end + 1, np.int32)
    sizes[phrases.heads[:, 0].astype(np.int64) + 1] = phrases.stops - phrases.starts
    rows = np.column_stack([phrases.tokens, phrases.counts])
    return {"heads": np.cumsum(sizes, dtype=np.int32), "phrases": rows.astype(np.int32)}


RANKING_BATCH = 256
"""Number of tokens ranked per forward pass."""
PROBABILITY_UNITS = 1_000_000
"""Probabilities are stored as integers, in millionths."""


def vocabulary_rankings(loaded: Loaded, vocabulary: int) -> Ints:
    """Return the model's top-k next tokens after each token of the vocabulary.

    The result has the shape ``[vocabulary, 2 * VOCABULARY_RANKING_TOKENS]``: each row holds the token ids, best first,
    and then their probabilities in millionths. Missing entries have id -1 and probability 0.
    """
    target, begin = loaded.target, loaded.tokenizer.bos_token_id
    rows: Ints = np.full((vocabulary, 2 * VOCABULARY_RANKING_TOKENS), -1, np.int32)
    rows[:, VOCABULARY_RANKING_TOKENS:] = 0
    readable = min(vocabulary, target.vocabulary)
    with progress_bar(vocabulary, "rankings", unit="tokens") as progress, torch.inference_mode():
        for start in range(0, readable, RANKING_BATCH):
            ids = torch.arange(start, min(readable, start + RANKING_BATCH), device=target.device)[:, None]
            if begin is not None:
                ids = torch.cat([torch.full_like(ids, begin), ids], 1)
            logits = target.model(input_ids=ids, use_cache=False).logits[:, -1, :readable].float()
            best, scores = topk(logits, VOCABULARY_RANKING_TOKENS)
            probs = np.exp(scores - logits.logsumexp(-1, keepdim=True).cpu().numpy())
            usable = np.isfinite(probs)
            rows[start : start + len(ids), :VOCABULARY_RANKING_TOKENS] = np.where(usable, best, -1)
            rows[start : start + len(ids), VOCABULARY_RANKING_TOKENS:] = np.where(usable, probs * PROBABILITY_UNITS, 0)
            progress.to(start + len(ids))
    return rows


MIN_SHARD_TOKENS = 2
"""A shard holds at least one token and an end token."""


def build_corpus_index(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerFingerprint,
    sources: Sequence[InputFile],
    *,
    shard_bytes: int = BuildConfig.shard_bytes,
    executor: BuildExecutor | None = None,
    check: FolderCheck | None = None,
) -> Manifest:
    """Build a corpus index of ``documents``, atomically replacing any store in ``folder``.

    ``executor`` sorts the shards; by default, local processes do, at most one per core. ``check`` is called with the
    folder and raises if the existing store must not be replaced. Raise a ``StoreError`` if the documents hold no text.
    """
    end = tokenizer.vocab_size
    width = token_type(end)
    with building(folder, check) as build:
        with DocumentFile(build.path("documents"), end, sources) as file:
            shards = _write_documents(file, documents, max(MIN_SHARD_TOKENS, shard_bytes // width.itemsize))
        if not shards:
            raise StoreError("the corpus holds no text at all: name files that do")
        text, suffixes, heads, prefixes = map(build.path, ("documents", "suffixes", "heads", "signposts"))
        files = ShardFiles(text, suffixes, heads, prefixes, width, end)
        files.create()
        (executor or BuildExecutor(quiet=True)).sort(files, shards)
        np.array(shards, np.int64).tofile(build.path("shards"))
        tokens = sum(shard.suffixes for shard in shards)
        counts = {"tokens": tokens, "documents": file.documents, "shards": len(shards)}
        options = {"token_bytes": width.itemsize, "shard_bytes": shard_bytes}
        return build.commit(Manifest(CORPUS_KIND, tokenizer, counts, options, file.shares()))


def _write_documents(file: DocumentFile, documents: Iterable[Document], max_tokens: int) -> list[ShardExtent]:
    """Write documents in shards of at most ``max_tokens`` tokens, end tokens included; return the shards' extents."""
    borders = [(0, 0)]  # before each shard: number of tokens, and of end tokens among them
    for document in documents:
        for at in range(0, len(document.ids), max_tokens - 1):
            piece = document.ids[at : at + max_tokens - 1]
            if file.size - borders[-1][0] + len(piece) + 1 > max_tokens:
                borders.append((file.size, file.documents))
            file.add(piece, document.source)
    shards: list[ShardExtent] = []
    prefix = 0
    for (start, ends), (stop, more_ends) in pairwise([*borders, (file.size, file.documents)]):
        if suffixes := stop - more_ends - (start - ends):  # 0 if there are no documents
            shards.append(ShardExtent(start, stop - start, start - ends, suffixes, prefix))
            prefix += sampled_prefixes_in(suffixes)
    return shards


def build_model_store(
    folder: Path,
    documents: Iterable[Document],
    tokenizer: TokenizerFingerprint,
    sources: Sequence[InputFile],
    *,
    top_k: int = BuildConfig.top_k,
    per_key: int = BuildConfig.per_key,
    executor: BuildExecutor | None = None,
    model: Checkpoint | None = None,
    rankings: Ints | None = None,
    check: FolderCheck | None = None,
) -> Manifest:
    """Build a model store of ``documents``, atomically replacing any store in ``folder``.

    The ``top_k`` most frequent sequences of each length are kept as prefixes with a next token, at most ``per_key`` per
    prefix. Sequences of five tokens are also kept as phrases after their first token, at most ``per_key`` phrases per
    first token. Ties are broken in favor of smaller token ids.

    ``model`` is the checkpoint that wrote the documents, and ``rankings`` are its ``vocabulary_rankings``. ``check`` is
    called with the folder and raises if the existing store must not be replaced. Raise a ``StoreError`` if no document
    has at least five tokens; with ``rankings`` and no sources, there need not be any document.
    """
    end = tokenizer.vocab_size
    with building(folder, check) as build:
        text = build.scratch("documents")
        with DocumentFile(text, end, sources) as file:
            for document in documents:
                file.add(document.ids, document.source)
        if not file.longest and (sources or rankings is None):
            raise StoreError("the answers hold no text at all: name files that do")
        if file.longest <= PHRASE_TOKENS and file.documents:
            raise StoreError(f"the longest answer has {file.longest} tokens: name files with answers of more than 4")
        kind = token_type(end)
        # np.memmap rejects an empty file.
        tokens = np.asarray(np.memmap(text, kind, "r")) if file.size else np.empty(0, kind)
        mined = (executor or BuildExecutor(quiet=True)).mine(CountedDocuments(tokens, end), top_k, per_key)
        ngrams = len(NGRAM_KINDS) * min(top_k, len(tokens))
        with writing(build.path(RECORD_PART), end, tokens.nbytes, file.documents + ngrams) as record:
            record.put_documents(stored_documents(tokens, end))
            for number, group in zip(NGRAM_KINDS, mined, strict=True):
                record.put_ngrams(number, group)
        arrays = compiled_arrays(ModelRecord.opened(build.path(RECORD_PART), end))
        if rankings is not None:
            arrays["rankings"] = rankings
        for part, array in arrays.items():
            array.tofile(build.path(part))
        shares = file.shares()
        counts = {
            "tokens": sum(share.tokens for share in shares),
            "documents": file.documents,
            "keys": len(arrays["keys"]),
            "continuations": len(arrays["rows"]),
            "phrases": len(arrays["phrases"]),
            **({"rankings": len(rankings)} if rankings is not None else {}),
        }
        options = {
            "token_bytes": tokens.itemsize,
            "top_k": top_k,
            "per_key": per_key,
            "once_per_document": True,
        }
        return build.commit(Manifest(MODEL_KIND, tokenizer, counts, options, shares, model=model))


BUILDS: dict[str, Callable[..., Manifest]] = {CORPUS_KIND: build_corpus_index, MODEL_KIND: build_model_store}
"""Functions that build a store, by kind."""
