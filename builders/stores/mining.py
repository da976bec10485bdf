"""The most frequent n-grams of a model's answers: groups of continuations by prefix."""

from __future__ import annotations

import numpy as np

from hdtool.builders.stores.sequences import Answers, Frequent, most_frequent
from hdtool.runtime.stores.model_record import Group
from hdtool.runtime.stores.model_store import PHRASE, Ints

LENGTHS = range(2, PHRASE + 2)
LARGEST_COUNT = 2**31 - 1


def mined(answers: Answers, length: int, top_k: int, per_key: int) -> list[Group]:
    """The groups of the most frequent sequences of a length."""
    return groups_of(answers, length, most_frequent(answers, length, top_k), per_key)


def groups_of(answers: Answers, length: int, frequent: Frequent, per_key: int) -> list[Group]:
    """Sequences of a length as next tokens by prefix and, for the longest, also as phrases by first token."""
    places, *_ = frequent
    tokens = answers.tokens[places[:, None] + np.arange(length)]
    groups = [_group(tokens, frequent, length - 1, per_key)]
    if length == PHRASE + 1:
        groups.append(_group(tokens, frequent, 1, per_key))
    return groups


def _group(tokens: Ints, frequent: Frequent, prefix: int, per_key: int) -> Group:
    """Sequences by their prefixes, the most frequent first."""
    _, counts, totals, distinct = frequent
    counts = np.minimum(counts, LARGEST_COUNT)
    order = np.lexsort([*tokens.T[:prefix], -counts, *tokens.T[prefix:]][::-1])
    tokens, counts = tokens[order], counts[order]
    firsts = np.flatnonzero(np.append(True, (tokens[1:, :prefix] != tokens[:-1, :prefix]).any(1))[: len(tokens)])
    sizes = np.diff(np.append(firsts, len(tokens)))
    chosen = np.arange(len(tokens)) - np.repeat(firsts, sizes) < per_key
    totals, distinct = totals[order[firsts]], distinct[order[firsts]]
    if prefix + 1 < tokens.shape[1]:
        totals, distinct = np.add.reduceat(counts, firsts), sizes  # those counted are of another prefix
    return Group(
        heads=tokens[firsts, :prefix],
        totals=np.minimum(totals, LARGEST_COUNT),
        distinct=np.minimum(distinct, LARGEST_COUNT),
        stops=np.cumsum(np.minimum(sizes, per_key)),
        tokens=tokens[chosen, prefix:],
        counts=counts[chosen],
    )
