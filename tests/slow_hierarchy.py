"""The drafting policy in plain Python: slow, obvious, and what the compiled one is compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from hdtool.runtime import growth, mixture, weights
from hdtool.runtime.corpus_index import CorpusIndex
from hdtool.runtime.model_store import LONGEST_PREFIX, ModelStore
from hdtool.runtime.sources import SourceName
from hdtool.runtime.sources.context_table import LONGEST_MATCH, PLACES
from hdtool.runtime.sources.corpus_levels import FEWEST_SAMPLES, LONGEST_RANGE, SAMPLES

Counts = dict[int, int]


@dataclass
class Evidence:
    level: int
    source: SourceName
    counts: Counts
    read: int
    total: int
    distinct: int


@dataclass
class Node:
    context: list[int]
    above: Node | None = None
    token: int = -1
    odds: float = 1.0
    depth: int = 0
    source: int = 0
    known: int = 0
    searched: set[int] = field(default_factory=set)
    """Orders at which the corpus was asked; those of a child are searched for within these."""


class SlowHierarchy:
    """The same levels, weights and tree, by brute force over the context and the stores' own documents."""

    def __init__(self, model: ModelStore | None, corpus: CorpusIndex | None, use_context: bool) -> None:
        learned = weights.new_weights()[0]
        self.weight, self.credit, self.asked = (learned[name].copy() for name in ("weight", "credit", "asked"))
        self.model, self.use_context = model, use_context
        self.context: list[int] = []
        self.shards: list[list[int]] = []
        self.end = corpus.end if corpus else 0
        self.samples: dict[int, int] = {}  # of the root, by order: what was read for a draft is not read again
        if corpus:
            for token, tokens, *_ in corpus.shards.places.tolist():
                self.shards.append(corpus.tokens[token : token + tokens].tolist())

    def ask_context(self, context: list[int], order: int) -> Evidence | None:
        """Those of the latest 16 places with three tokens alike, or for short orders with one."""
        if not self.use_context:
            return None
        least, longest = (3, LONGEST_MATCH) if order >= 3 else (1, 2)
        alike = {at: self._alike(context, at) for at in range(len(self.context) - 1, 0, -1)}
        places = [at for at, length in alike.items() if length >= least][:PLACES]
        # Among equals the order counts: the longest match first.
        places.sort(key=lambda at: -min(longest, alike[at]))
        counts = Counter(self.context[at] for at in places if alike[at] >= order)
        total = sum(counts.values())
        level = weights.CONTEXT_LEVELS + order - 1
        return Evidence(level, SourceName.CONTEXT, counts, total, total, len(counts)) if total else None

    def _alike(self, context: list[int], at: int) -> int:
        length = 0
        while length < min(LONGEST_MATCH, at, len(context)) and self.context[at - 1 - length] == context[-1 - length]:
            length += 1
        return length

    def ask_model(self, node: Node, order: int) -> Evidence | None:
        deepest = min(LONGEST_PREFIX, node.above.known + 1) if node.above else LONGEST_PREFIX
        if not self.model or order > deepest or order > len(node.context):
            return None
        found = self.model.after(node.context[-order:])
        if not len(found.lengths) or found.lengths[0] != order:
            return None
        node.known = max(node.known, order)
        stop = found.stops[0]
        counts = dict(zip(found.tokens[:stop].tolist(), found.counts[:stop].tolist(), strict=True))
        total, distinct = int(found.totals[0]), int(found.distinct[0])
        return Evidence(weights.MODEL_LEVELS + order - 1, SourceName.MODEL, counts, total, total, distinct)

    def ask_corpus(self, node: Node, order: int, most: int) -> Evidence | None:
        """Followers of all places that the last tokens have, or of as many as are read, evenly spread."""
        if node.above:
            if order > 1 and node.above.above and order - 1 not in node.above.searched:
                return None
            node.searched.add(order)
        places = self._range(node.context[-order:], order)
        if not places:
            return None
        if not node.above:
            most = self.samples.setdefault(order, most)
        read = min(len(places), most)
        step = (len(places) << 16) // read
        followers = [self._follower(*places[turn * step >> 16], order) for turn in range(read)]
        counts = Counter(token for token in followers if token != self.end)
        level = weights.CORPUS_LEVELS + order - 1
        return Evidence(level, SourceName.CORPUS, counts, read, len(places), len(counts)) if counts else None

    def _range(self, tail: list[int], order: int) -> list[tuple[int, int]]:
        found = []
        for number, tokens in enumerate(self.shards):
            places = [at for at in range(len(tokens)) if tokens[at : at + order] == tail and self.end not in tail]
            found += [(number, at) for at in sorted(places, key=lambda at: tokens[at:])]
        return found if len(tail) == order else []

    def _follower(self, shard: int, at: int, order: int) -> int:
        return self.shards[shard][at + order]

    def expand(self, node: Node, least: float, floor: float) -> tuple[dict[int, dict[int, float]], list[Evidence]]:
        """The parts of the chance of each candidate, by source; and all that was said."""
        parts: dict[int, dict[int, float]] = {}
        said: list[Evidence] = []
        left_open = 1.0
        node.known = 0

        def weigh(evidence: Evidence | None) -> None:
            nonlocal left_open
            if evidence:
                said.append(evidence)
                weight = self.weight[evidence.level, bucket(evidence)]
                for token, count in evidence.counts.items():
                    if (part := left_open * weight / evidence.read * count) >= floor:
                        of = parts.setdefault(token, {})
                        of[evidence.source] = of.get(evidence.source, 0.0) + part
                left_open *= 1 - weight

        for order in range(LONGEST_MATCH, 0, -1):
            weigh(self.ask_context(node.context, order))
            if left_open < least:
                break
            weigh(self.ask_model(node, order))
            if left_open < least:
                break
            if self.shards and order <= LONGEST_RANGE and left_open >= mixture.WORTH_A_SEARCH * least:
                weigh(self.ask_corpus(node, order, max(FEWEST_SAMPLES, min(SAMPLES, int(left_open / least)))))
                if left_open < least:
                    break
        if not node.known and left_open < least:
            node.known = LONGEST_PREFIX
        return parts, said

    def draft(self, most: int) -> list[Node]:
        root = Node(self.context)
        nodes, waiting, bar, node = [root], list[Node](), 0.0, root
        while True:
            if node.depth < growth.DEEPEST and node.odds > growth.WORTH_EXPANDING * bar:
                least = max(growth.WORTH_EXPANDING * bar / node.odds, growth.LEAST_OPEN)
                floor = max(growth.WORTH_ADDING * bar / node.odds, growth.LEAST_PART)
                for token, part in self.expand(node, least, floor)[0].items():
                    source = max(range(len(SourceName)), key=lambda name: part.get(name, 0.0))
                    odds = sum(part.values()) * node.odds
                    if len(nodes) - 1 + len(waiting) == most:
                        if odds <= bar:
                            continue
                        waiting.pop()
                    place = next((at for at, other in enumerate(waiting) if other.odds < odds), len(waiting))
                    context = [*node.context, token]
                    waiting.insert(place, Node(context, node, token, odds, node.depth + 1, source))
                    if len(nodes) - 1 + len(waiting) == most:
                        bar = waiting[-1].odds
            if not waiting:
                return nodes[1:]
            node = waiting.pop(0)
            nodes.append(node)

    def hear(self, token: int) -> None:
        """One step of expectation maximisation, and the token is part of the context."""
        said = self.expand(Node(self.context), growth.OPEN_TO_LEARN, 0.0)[1]
        explained, left_open = [], 1.0
        for evidence in said:
            weight = self.weight[evidence.level, bucket(evidence)]
            explained.append(left_open * weight * evidence.counts.get(token, 0) / evidence.read)
            left_open *= 1 - weight
        heard = sum(explained) + left_open * weights.UNHEARD
        left = 1.0
        for evidence, part in zip(said, explained, strict=True):
            at = evidence.level, bucket(evidence)
            fading = min(1.0, weights.MEMORY / self.asked[at])
            self.credit[at] = self.credit[at] * fading + part / heard
            self.asked[at] = self.asked[at] * fading + left
            self.weight[at] = self.credit[at] / self.asked[at]
            left -= part / heard
            if left < weights.NOTHING_LEFT:
                break
        self.go_to([*self.context, token])

    def go_to(self, context: list[int]) -> None:
        self.context = context
        self.samples = {}


def bucket(evidence: Evidence) -> int:
    size = min(int(np.log2(evidence.total)), weights.SIZES - 1)
    spread = 0 if evidence.distinct <= 1 else 1 if 4 * evidence.distinct <= evidence.total else 2
    return 3 * size + spread
