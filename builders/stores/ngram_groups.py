"""Groups the most frequent sequences of a model's answers by their first tokens, as model stores hold them."""

from __future__ import annotations

import numpy as np

from hdtool.builders.stores.frequent_sequences import CountedDocuments, FrequentSequences, most_frequent
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.stores.model_store_lmdb import PHRASE_TOKENS, NgramGroup

SEQUENCE_LENGTHS = range(2, PHRASE_TOKENS + 2)
MAX_COUNT = 2**31 - 1


def mine_groups(answers: CountedDocuments, length: int, top_k: int, per_key: int) -> list[NgramGroup]:
    """Find the ``top_k`` most frequent sequences of ``length`` tokens; return them as n-gram groups."""
    return sequence_groups(answers, length, most_frequent(answers, length, top_k), per_key)


def sequence_groups(
    answers: CountedDocuments, length: int, frequent: FrequentSequences, per_key: int
) -> list[NgramGroup]:
    """Group sequences by prefix; sequences of the maximum length are also grouped by first token, as phrases."""
    positions, *_ = frequent
    tokens = answers.tokens[positions[:, None] + np.arange(length)]
    groups = [_group(tokens, frequent, length - 1, per_key)]
    if length == PHRASE_TOKENS + 1:
        groups.append(_group(tokens, frequent, 1, per_key))
    return groups


def _group(tokens: Ints, frequent: FrequentSequences, prefix: int, per_key: int) -> NgramGroup:
    """Group sequences by their first ``prefix`` tokens, keeping the ``per_key`` most frequent of each group."""
    _, counts, totals, distinct = frequent
    counts = np.minimum(counts, MAX_COUNT)
    order = np.lexsort([*tokens.T[:prefix], -counts, *tokens.T[prefix:]][::-1])
    tokens, counts = tokens[order], counts[order]
    firsts = np.flatnonzero(np.append(True, (tokens[1:, :prefix] != tokens[:-1, :prefix]).any(1))[: len(tokens)])
    sizes = np.diff(np.append(firsts, len(tokens)))
    chosen = np.arange(len(tokens)) - np.repeat(firsts, sizes) < per_key
    totals, distinct = totals[order[firsts]], distinct[order[firsts]]
    if prefix + 1 < tokens.shape[1]:
        totals, distinct = np.add.reduceat(counts, firsts), sizes  # the given totals belong to a longer prefix
    return NgramGroup(
        heads=tokens[firsts, :prefix],
        totals=np.minimum(totals, MAX_COUNT),
        distinct=np.minimum(distinct, MAX_COUNT),
        stops=np.cumsum(np.minimum(sizes, per_key)),
        tokens=tokens[chosen, prefix:],
        counts=counts[chosen],
    )
