"""Slow and simple implementation of the drafting policy, with which the compiled one is compared."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hdtool.runtime.core.accept import Accepted
from hdtool.runtime.core.exponential_race import ExponentialRace
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore

# The constants of the compiled policy are repeated here, so that changing one there fails the tests.
MAX_MATCH_LENGTH, MAX_MATCHES, MAX_CHILD_MATCHES = 32, 64, 16
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
"""Longest match length of each order."""
MAX_HISTORY_MATCHES, MAX_CHILD_HISTORY_MATCHES, OVERLAP = 32, 8, 8
MAX_MODEL_ORDER = 4
MAX_CORPUS_ORDER, SAMPLES, MIN_SAMPLES = 6, 64, 16
MAX_RECYCLED_ORDER, BEST, HASHED_ROWS, SHARPNESS, WHOLE = 5, 8, 2**15, 1.5, 1000
MAX_CANDIDATES, MILLION, LAST_SHARPNESS = 60, 10**6, 0.5
CONTEXT_ORDERS, MODEL_ORDERS, CORPUS_ORDERS, RECYCLED_ORDERS, HISTORY_ORDERS = 0, 12, 16, 22, 27
LAST_ORDERS, ORDERS = 39, 40
PRIORS = {
    CONTEXT_ORDERS: (len(LEVELS), 1.0, 1.0, 0.0, 0.25),
    MODEL_ORDERS: (MAX_MODEL_ORDER, 0.9, 0.75, 0.4, 0.05),
    CORPUS_ORDERS: (MAX_CORPUS_ORDER, 0.9, 0.75, 0.35, 0.12),
    RECYCLED_ORDERS: (MAX_RECYCLED_ORDER, 0.9, 0.9, 0.0, 0.0),
    HISTORY_ORDERS: (len(LEVELS), 1.0, 1.0, 0.0, 0.06),
    LAST_ORDERS: (1, 0.7, 1.0, 0.0, 0.0),
}
"""Initial weights of each source, keyed by its first row in the weight table.

The values are the number of orders, the remainder of unanimous evidence and its decay per size, and the weights of
evidence with few and with many distinct tokens.
"""
SIZES, STRENGTH, EMA_WINDOW, UNSEEN, NEGLIGIBLE = 8, 20.0, 100.0, 1 / 32_000, 1e-6
GAINS = (13.0, 9.0, 6.0, 4.0, 3.0, 2.0, 1.5, 1.3)
"""Factors for candidates that neighboring rankings name, by the binary magnitude of their share."""
RECENCY = (
    (0.42, 0.47, 0.37, 0.93),
    (0.51, 0.72, 1.13, 1.13),
    (0.78, 0.74, 0.95, 1.04),
    (0.74, 1.09, 1.90, 1.36),
    (0.79, 1.24, 2.44, 2.30),
    (0.87, 1.38, 2.31, 2.65),
    (0.85, 1.24, 1.88, 2.98),
    (0.67, 0.83, 1.53, 2.20),
    (0.55, 0.60, 1.06, 1.95),
    (0.61, 0.50, 0.94, 1.17),
    (0.70, 0.61, 0.68, 0.95),
    (0.70, 0.61, 0.68, 0.95),
)
"""Factors by the bit length of the distance to the last occurrence, 0 if there is none, and by range of probability."""
NEIGHBOR_KINDS, NEIGHBOR_DEPTHS, NEIGHBOR_TOKENS, NEIGHBOR_SHARPNESS = 8, 8, 32, 0.7
MAX_DEPTH, MIN_REMAINDER, MIN_SHARE, LEARNING_REMAINDER, WORTH_ADDING, WORTH_EXPANDING = 64, 0.002, 1e-4, 0.02, 0.1, 1.6
WORTH_A_SEARCH = 5.0

Counts = dict[int, int]
Row = tuple[int, int]
Ranking = tuple[tuple[int, ...], Counts]
"""Tail of tokens that a ranking follows, and the share of each ranked token in thousandths."""
NO_RANKING: Ranking = ((), {})


@dataclass
class Evidence:
    level: int
    source: SourceId
    counts: Counts
    read: int
    bucket: int


@dataclass
class Node:
    context: list[int]
    parent: Node | None = None
    token: int = -1
    probs: float = 1.0
    depth: int = 0
    source: int = 0
    known: int = 0
    searched: set[int] = field(default_factory=set)
    """Orders at which the corpus was searched, which limit the orders of the children."""
    matches: list[tuple[int, int]] = field(default_factory=list)
    """Matches in the conversation: index of the next token, and length of the match."""
    capped: set[int] = field(default_factory=set)
    """Indices of ``matches`` found by a search for shorter ones; they count as short matches, whatever their length."""
    shortest: int = 1
    """Length from which all matches have been searched."""
    history_matches: list[tuple[list[int], int]] = field(default_factory=list)
    """Matches in earlier answers: tokens of the answer, and index of the next token."""
    longest_matches: list[tuple[int, int]] = field(default_factory=list)
    """Corpus positions after the matches of the longest order, if all of them were read."""


class SlowHierarchy:
    """Brute-force drafter with the levels, weights and trees of the compiled hierarchy."""

    def __init__(
        self, model: ModelStore | None, corpus: CorpusIndex | None, letters: str, seed: int | None = None
    ) -> None:
        self.seed = seed
        self.last: Counts = {}  # share of each candidate in millionths
        self.neighbor_kinds: list[dict[int, int]] = []  # kind of each token that the rankings of a position name
        self.rankings: dict[Row, Ranking] = {}
        self.letters, use_context = letters, "C" in letters
        self.weight = prior_weights()
        self.credit, self.asked = STRENGTH * self.weight, np.full(self.weight.shape, STRENGTH)
        self.model, self.use_context = model, use_context
        self.context: list[int] = []
        self.history: list[tuple[list[int], int]] = []
        """Earlier answers, each after the last tokens of its prompt, and the number of those tokens."""
        self.current_answer: tuple[list[int], int] = [], 0
        self.shards: list[list[int]] = []
        self.end = corpus.end if corpus else 0
        self.samples: dict[int, int] = {}  # samples at the root by order, fixed until the context changes
        if corpus:
            for token, tokens, *_ in corpus.shards.extents.tolist():
                self.shards.append(corpus.tokens[token : token + tokens].tolist())

    def ask_context(self, node: Node, order: int) -> Evidence | None:
        """Count the tokens that follow the matches of at least this order.

        If the known matches are too long for it, shorter ones are searched.
        """
        if not self.use_context:
            return None
        if node.shortest > 1 and order == min(2, node.shortest - 1):
            shorter = self._latest_matches(node, 1, MAX_CHILD_MATCHES if node.parent else MAX_MATCHES)
            new = [(at, length) for at, length in shorter if length < node.shortest or not node.matches]
            node.matches = [*node.matches, *new][:MAX_MATCHES]
            node.shortest = 1
            # They count as short matches, whatever their length.
            node.capped = {at for at, _ in new}
        orders = [(at, min(2, order_of(n)) if at in node.capped else order_of(n)) for at, n in node.matches]
        # Insertion order breaks ties, so the longest match comes first.
        orders.sort(key=lambda place: -place[1])
        counts = Counter(self.context[at] for at, of in orders if of >= order)
        total = sum(counts.values())
        level = CONTEXT_ORDERS + order - 1
        return Evidence(level, SourceId.CONTEXT, counts, total, 3 * size_of(total) + 2) if total else None

    def look_up(self, node: Node) -> None:
        """Find the matches of a node. The root, and a child without any, search for the latest ones.

        Other children keep those matches of their parent that continue with their token.
        """
        if node.parent:
            node.shortest = node.parent.shortest + 1
            node.matches = [
                (at + 1, min(MAX_MATCH_LENGTH, length + 1))
                for at, length in node.parent.matches
                if self.context[at] == node.token and at + 1 < len(self.context)
            ]
            if not node.matches:
                node.shortest, node.matches = 1, self._latest_matches(node, 1, MAX_CHILD_MATCHES)
            node.history_matches = [
                (answer, at + 1) for answer, at in node.parent.history_matches if token_at(answer, at) == node.token
            ]
        else:
            node.shortest, node.matches = 3, self._latest_matches(node, 3, MAX_MATCHES)
        if not node.history_matches:
            node.history_matches = self._history_matches(node)

    def _latest_matches(self, node: Node, min_length: int, max_matches: int) -> list[tuple[int, int]]:
        matches = ((at, self._match_length(node.context, at)) for at in range(len(self.context) - 1, 0, -1))
        return [(at, length) for at, length in matches if length >= min_length][:max_matches]

    def _match_length(self, context: list[int], at: int) -> int:
        length = 0
        while (
            length < min(MAX_MATCH_LENGTH, at, len(context)) and self.context[at - 1 - length] == context[-1 - length]
        ):
            length += 1
        return length

    def ask_history(self, node: Node, order: int) -> Evidence | None:
        """Count the tokens that follow the matches in earlier answers."""
        if "H" not in self.letters or order < 2:
            return None
        counts = Counter[int]()
        ordered = sorted(
            node.history_matches, key=lambda place: -order_of(match_length(place[0], place[1], node.context))
        )
        for answer, at in ordered:
            if at < len(answer) and order_of(match_length(answer, at, node.context)) >= order:
                counts[answer[at]] += 1
        total = sum(counts.values())
        level = HISTORY_ORDERS + order - 1
        return Evidence(level, SourceId.HISTORY, counts, total, 3 * size_of(total) + 2) if total else None

    def _history_matches(self, node: Node) -> list[tuple[list[int], int]]:
        wanted = MAX_CHILD_HISTORY_MATCHES if node.parent else MAX_HISTORY_MATCHES
        answers = [*self.history, self.current_answer]
        places = [
            (answer, at)
            for answer, linked in reversed(answers)
            for at in range(len(answer) - 1, linked - 1, -1)
            if match_length(answer, at, node.context) >= 2
        ]
        # Matches in the current answer are skipped, because the context contains them.
        return [place for place in places[: 2 * wanted] if place[0] is not self.current_answer[0]][:wanted]

    def ask_model(self, node: Node, order: int) -> Evidence | None:
        deepest = min(MAX_MODEL_ORDER, node.parent.known + 1) if node.parent else MAX_MODEL_ORDER
        if not self.model or order > deepest or order > len(node.context):
            return None
        entries = self.model.after(node.context[-order:])
        if not entries or entries[0].length != order:
            return None
        node.known = max(node.known, order)
        _, total, distinct, tokens, found = entries[0]
        counts = dict(zip(tokens.tolist(), found.tolist(), strict=True))
        return Evidence(MODEL_ORDERS + order - 1, SourceId.MODEL, counts, total, bucket(total, distinct))

    def ask_corpus(self, node: Node, order: int, max_samples: int) -> Evidence | None:
        """Count the tokens after the last ``order`` tokens in the corpus, at all matches or at ``max_samples`` of them.

        The matches that are read are evenly spread.
        """
        follows = False
        if node.parent:
            parent = node.parent
            if order > 1 and parent.parent and order - 1 not in parent.searched:
                follows = order == MAX_CORPUS_ORDER and bool(parent.longest_matches)
                if not follows:
                    return None
            node.searched.add(order)
        if follows:
            assert node.parent
            goes_on = [
                (shard, at + 1) for shard, at in node.parent.longest_matches if self._token(shard, at) == node.token
            ]
        else:
            goes_on = [(shard, at + order) for shard, at in self._range(node.context[-order:], order)]
        if not goes_on:
            return None
        if not node.parent:
            max_samples = self.samples.setdefault(order, max_samples)
        read = min(len(goes_on), max_samples)
        step = (len(goes_on) << 16) // read
        followers = [self._token(*goes_on[turn * step >> 16]) for turn in range(read)]
        if order == MAX_CORPUS_ORDER and read == len(goes_on):
            node.longest_matches = goes_on
        counts = Counter(token for token in followers if token != self.end)
        level = CORPUS_ORDERS + order - 1
        return Evidence(level, SourceId.CORPUS, counts, read, bucket(len(goes_on), len(counts))) if counts else None

    def _range(self, tail: list[int], order: int) -> list[tuple[int, int]]:
        found = []
        for number, tokens in enumerate(self.shards):
            places = [at for at in range(len(tokens)) if tokens[at : at + order] == tail and self.end not in tail]
            found += [(number, at) for at in sorted(places, key=lambda at: tokens[at:])]
        return found if len(tail) == order else []

    def _token(self, shard: int, at: int) -> int:
        return self.shards[shard][at] if at < len(self.shards[shard]) else self.end

    def ask_recycled(self, node: Node, order: int) -> Evidence | None:
        tail = tail_of(node.context, order)
        owner, counts = self.rankings.get(row_of(tail), NO_RANKING)
        if order > MAX_RECYCLED_ORDER or owner != tail:
            return None
        sure = min(SIZES - 1, SIZES * max(counts.values()) // WHOLE)
        level = RECYCLED_ORDERS + order - 1
        return Evidence(level, SourceId.RECYCLED, counts, WHOLE, 3 * sure)

    def observe_logits(self, nodes: list[Node], accepted: Accepted, logits: torch.Tensor) -> None:
        """Update the rankings from the logits of the root and each node."""
        if "R" in self.letters:
            self._combine_rankings(nodes[1:], logits[1:], len(accepted.path))
        rows = [0, *(node + 1 for node in accepted.path)]
        if "L" in self.letters:
            best = logits[rows[-1]].topk(min(MAX_CANDIDATES + 1, logits.shape[1]))
            shares = np.exp(LAST_SHARPNESS * (best.values - best.values[0]).double().numpy())
            shares[best.indices.numpy() == accepted.tokens[-1]] = 0.0
            millionths = (shares * (MILLION / shares.sum())).astype(int).tolist()
            found = [
                pair for pair in zip(best.indices.tolist(), millionths, strict=True) if pair[0] != accepted.tokens[-1]
            ]
            self.last = dict(found[:MAX_CANDIDATES])
        for row in reversed(range(len(logits)) if "R" in self.letters else []):
            best = logits[row].topk(BEST)
            shares = np.exp(SHARPNESS * (best.values - best.values[0]).double().numpy())
            whole = (shares * (WHOLE / shares.sum())).astype(int).tolist()
            ranking = dict(zip(best.indices.tolist(), whole, strict=True))
            for order in range(1, MAX_RECYCLED_ORDER + 1):
                tail = tail_of(nodes[row].context, order)
                self.rankings[row_of(tail)] = tail, ranking

    def _combine_rankings(self, nodes: list[Node], logits: torch.Tensor, passed: int) -> None:
        """Combine the rankings of each depth after the new root, weighted by the probabilities of their nodes."""
        shares = [Counter[int]() for _ in range(NEIGHBOR_DEPTHS)]
        for node, row in zip(nodes, logits, strict=True):
            if 0 <= (place := node.depth - passed - 1) < NEIGHBOR_DEPTHS:
                best = row.topk(BEST)
                chances = np.exp(NEIGHBOR_SHARPNESS * (best.values - best.values[0]).double().numpy())
                for token, chance in zip(best.indices.tolist(), chances / chances.sum(), strict=True):
                    if token in shares[place] or len(shares[place]) < NEIGHBOR_TOKENS:
                        shares[place][token] += node.probs * chance
        wholes = [sum(node.probs for node in nodes if node.depth - passed - 1 == place) for place in range(len(shares))]
        self.neighbor_kinds = [
            {token: kind_of(int(MILLION * (share / whole))) for token, share in of.items()}
            for of, whole in zip(shares, wholes, strict=True)
            if of
        ]

    def _weigh_recency(self, node: Node, chances: dict[int, float]) -> dict[int, float]:
        """Scale probabilities by recency, keeping their sum. Positions with a neighboring ranking stay unchanged."""
        if not self.use_context or not chances or node.depth < len(self.neighbor_kinds):
            return chances
        gained = {
            token: chance
            * RECENCY[self._distance(node, token).bit_length()][sum(chance < p for p in (0.1, 0.01, 1e-3))]
            for token, chance in chances.items()
        }
        scale = sum(chances.values()) / sum(gained.values())
        return {token: chance * scale for token, chance in gained.items()}

    def _distance(self, node: Node, token: int) -> int:
        """Return the distance to the last occurrence of a token in the conversation; 0 if there is none."""
        before = self.context[:-1]
        return (
            len(node.context) - max(at for at, other in enumerate(before) if other == token) if token in before else 0
        )

    def _agree(self, node: Node, chances: dict[int, float]) -> dict[int, float]:
        """Raise the probabilities of candidates that a neighboring ranking names, keeping their sum."""
        named = self.neighbor_kinds[node.depth] if node.depth < len(self.neighbor_kinds) else {}
        if not chances:
            return {}
        more = {token: chance * (GAINS[named[token]] if token in named else 1) for token, chance in chances.items()}
        scale = sum(chances.values()) / sum(more.values())
        return {token: chance * scale for token, chance in more.items()}

    def expand(
        self, node: Node, least: float, floor: float
    ) -> tuple[dict[int, dict[int, float]], dict[int, float], list[Evidence]]:
        """Return the parts of each candidate's probability by source, the probabilities, and all evidence."""
        parts: dict[int, dict[int, float]] = {}
        evidences: list[Evidence] = []
        left_open = 1.0
        node.known = 0
        self.look_up(node)

        def weigh(evidence: Evidence | None) -> None:
            nonlocal left_open
            if evidence:
                evidences.append(evidence)
                weight = self.weight[evidence.level, evidence.bucket]
                for token, count in evidence.counts.items():
                    if (part := left_open * weight / evidence.read * count) >= floor:
                        of = parts.setdefault(token, {})
                        of[evidence.source] = of.get(evidence.source, 0.0) + part
                left_open *= 1 - weight

        for order in range(len(LEVELS), 0, -1):
            weigh(self.ask_context(node, order))
            if left_open < least:
                break
            weigh(self.ask_history(node, order))
            if left_open < least:
                break
            weigh(self.ask_recycled(node, order))
            if left_open < least:
                break
            weigh(self.ask_model(node, order))
            if left_open < least:
                break
            if self.shards and order <= MAX_CORPUS_ORDER and left_open >= WORTH_A_SEARCH * least:
                weigh(self.ask_corpus(node, order, max(MIN_SAMPLES, min(SAMPLES, int(left_open / least)))))
                if left_open < least:
                    break
        chances = self._weigh_recency(node, {token: sum(part.values()) for token, part in parts.items()})
        if not node.known and left_open < least:
            node.known = MAX_MODEL_ORDER
        if not node.parent and left_open >= least and self.last:
            weigh(
                Evidence(
                    LAST_ORDERS,
                    SourceId.LAST,
                    self.last,
                    MILLION,
                    3 * min(SIZES - 1, SIZES * max(self.last.values()) // MILLION),
                )
            )
            for token, part in parts.items():
                chances[token] = chances.get(token, 0.0) + part.get(SourceId.LAST, 0.0)
        return parts, chances, evidences

    def _draw(self, node: Node, chances: dict[int, float]) -> dict[int, float]:
        """Weight probabilities by the candidates' times in the exponential race, if the answer is sampled."""
        if self.seed is None or not chances:
            return chances
        uniforms = ExponentialRace(self.seed).uniforms(len(node.context), max(chances) + 1)
        weights = {token: chance / (-np.log1p(-uniforms[token])) ** 0.5 for token, chance in chances.items()}
        scale = sum(weights.values()) + (1 - sum(chances.values())) ** 0.5
        return {token: weight / scale for token, weight in weights.items()}

    def draft(self, max_nodes: int) -> list[Node]:
        root = Node(self.context)
        nodes, waiting, bar, node = [root], list[Node](), 0.0, root
        while True:
            if node.depth < MAX_DEPTH and node.probs > WORTH_EXPANDING * bar:
                least = max(WORTH_EXPANDING * bar / node.probs, MIN_REMAINDER)
                floor = max(WORTH_ADDING * bar / node.probs, MIN_SHARE)
                parts, chances, _ = self.expand(node, least, floor)
                chances = self._agree(node, chances)
                chances = self._draw(node, chances)
                for token, part in parts.items():
                    source = max(range(len(SourceId)), key=lambda name: part.get(name, 0.0))
                    probs = chances[token] * node.probs
                    if len(nodes) - 1 + len(waiting) == max_nodes:
                        if probs <= bar:
                            continue
                        waiting.pop()
                    place = next((at for at, other in enumerate(waiting) if other.probs < probs), len(waiting))
                    context = [*node.context, token]
                    waiting.insert(place, Node(context, node, token, probs, node.depth + 1, source))
                    if len(nodes) - 1 + len(waiting) == max_nodes:
                        bar = waiting[-1].probs
            if not waiting:
                return nodes[1:]
            node = waiting.pop(0)
            nodes.append(node)

    def observe_token(self, token: int) -> None:
        """Update the weights with one step of expectation maximisation, and append the token to the context."""
        *_, evidences = self.expand(Node(self.context), LEARNING_REMAINDER, 0.0)
        explained, left_open = [], 1.0
        for evidence in evidences:
            weight = self.weight[evidence.level, evidence.bucket]
            explained.append(left_open * weight * evidence.counts.get(token, 0) / evidence.read)
            left_open *= 1 - weight
        token_prob = sum(explained) + left_open * UNSEEN
        left = 1.0
        for evidence, part in zip(evidences, explained, strict=True):
            at = evidence.level, evidence.bucket
            fading = min(1.0, EMA_WINDOW / self.asked[at])
            self.credit[at] = self.credit[at] * fading + part / token_prob
            self.asked[at] = self.asked[at] * fading + left
            self.weight[at] = self.credit[at] / self.asked[at]
            left -= part / token_prob
            if left < NEGLIGIBLE:
                break
        self.set_context([*self.context, token])
        self.current_answer[0].append(token)
        self.neighbor_kinds = self.neighbor_kinds[1:]

    def begin(self, context: list[int]) -> None:
        self.history.append(self.current_answer)
        before = context[-OVERLAP:]
        self.current_answer = before, len(before)
        self.set_context(context)
        self.neighbor_kinds = []

    def set_context(self, context: list[int]) -> None:
        self.context = context
        self.samples = {}
        self.last = {}


def order_of(length: int) -> int:
    """Return the order of a match: its length up to 8, then one order per range of lengths."""
    return next(order for order, longest in enumerate(LEVELS, start=1) if length <= longest)


def match_length(answer: list[int], at: int, context: list[int]) -> int:
    length = 0
    while length < min(MAX_MATCH_LENGTH, at, len(context)) and answer[at - 1 - length] == context[-1 - length]:
        length += 1
    return length


def token_at(answer: list[int], at: int) -> int:
    return answer[at] if at < len(answer) else -1


def tail_of(context: list[int], order: int) -> tuple[int, ...]:
    """Return the last ``order`` tokens, padded with -1 before the start of the context."""
    return tuple([*[-1] * order, *context][-order:])


def row_of(tail: tuple[int, ...]) -> Row:
    """Return the table row of a tail. Tails may share a row, which then holds the later ranking only."""
    mixed = 0
    for token in reversed(tail):
        mixed = (mixed ^ (token + 1) % 2**64) * 0x9E3779B97F4A7C15 % 2**64
        mixed ^= mixed >> 29
    return len(tail), tail[-1] if len(tail) == 1 else mixed % HASHED_ROWS


def prior_weights() -> Any:
    """Return the initial weights of a drafter, by order and bucket."""
    weight = np.zeros((ORDERS, 3 * SIZES))
    for first, (orders, remainder, decay, few, many) in PRIORS.items():
        for size in range(SIZES):
            weight[first : first + orders, 3 * size : 3 * size + 3] = 1 - remainder * decay**size, few, many
    return weight


def kind_of(millionths: int) -> int:
    return min(NEIGHBOR_KINDS - 1, int(-np.log2(max(1, millionths) / MILLION)))


def size_of(total: int) -> int:
    return min(int(np.log2(total)), SIZES - 1)


def bucket(total: int, distinct: int) -> int:
    spread = 0 if distinct <= 1 else 1 if 4 * distinct <= total else 2
    return 3 * size_of(total) + spread
