"""Drafts a chain per request for vLLM, always taking the most probable next token.

vLLM verifies one sequence per request, so branches are useless.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from hdtool.runtime.budget.min_probability import NO_DRAFT_ABOVE
from hdtool.runtime.drafters.hierarchy.compiled_source import DRAFTING, work_at
from hdtool.runtime.drafters.hierarchy.counting_sources import ranges_at
from hdtool.runtime.drafters.hierarchy.matching_sources import ANSWERS_LOG, append_to_log, matches_at, table_of
from hdtool.runtime.drafters.hierarchy.tree_growth import expand, extend, feed, restart
from hdtool.runtime.kernels.compiled import Ints, array_at, compiled
from hdtool.runtime.settings.draft_sources import SourceId
from hdtool.runtime.stores.context_table import add
from hdtool.runtime.stores.suffix_ranges import MAX_RANGE_ORDER, bounds_of
from hdtool.runtime.stores.token_log import LANE, LOG, MAX_MATCH_TOKENS, OVERLAP_TOKENS, finish, start

SKIPPED_ORDER_SHARE, SKIPPED_CONTRIBUTION_SHARE = 0.1, 0.03
"""Shares of a token's minimum probability below which shorter orders and single contributions are skipped.

With 1 and 0.3, tokens that continued 39 % of answers were estimated to have a probability of 18 %, close to a minimum
of 17 %, and a fifth of the drafts that pay off were not sent.
"""

FIRST_ANSWER_NUMBER = 1 << 10
"""Number of the first answer; lower numbers are reserved for the drafter that the requests share."""
NEXT_ANSWER, NUM_ENDED = range(2)
"""Indices in ``RequestStates.answers``."""
CONTEXT_NUMBER, HISTORY_NUMBER = SourceId.CONTEXT.value, SourceId.HISTORY.value


class RequestStates(NamedTuple):
    """The state of each request; all other drafting data is shared by the requests, so it stays in the CPU cache."""

    tables: Ints
    """Address of each request's context table."""
    tails: Ints
    """Last tokens of each request."""
    range_bounds: Ints
    """Ranges of suffixes in the corpus index that match each request's last tokens."""
    lanes: Ints
    """Records of where each request's answer is appended to the history."""
    lanes_at: Ints
    """Address of each record in ``lanes``."""
    ended: Ints
    """Copies of the lanes of answers followed by another answer, at most one per request; empty if not requested."""
    answers: Ints
    """Two items: the number of the next answer (0 without a history), and the number of lanes in ``ended``."""


def new_request_states(max_requests: int, shards: int, *, history: bool = False, ended: bool = False) -> RequestStates:
    """Return the initial states of requests; allocate ``RequestStates.ended`` only if ``ended`` is True."""
    tails = np.full((max_requests, MAX_MATCH_TOKENS), -1, np.int64)
    range_bounds = np.zeros((max_requests, MAX_RANGE_ORDER + 1, shards, 2), np.int64)
    lanes = np.zeros(max_requests, LANE)
    lanes_at = lanes.ctypes.data + np.arange(max_requests, dtype=np.int64) * LANE.itemsize
    answers = np.array([FIRST_ANSWER_NUMBER if history else 0, 0], np.int64)
    return RequestStates(
        np.zeros(max_requests, np.int64),
        tails,
        range_bounds,
        lanes,
        lanes_at,
        np.zeros(max_requests if ended else 0, LANE),
        answers,
    )


@compiled
def grow_chain(records_at: int, max_tokens: int, floor: float) -> int:
    """Draft up to ``max_tokens`` tokens with a path probability of at least ``floor``; return their number.

    ``records_at`` is the ``address`` of a ``Hierarchy``, to whose workspace the tokens are written.
    """
    work = work_at(records_at)
    work.parents[0], work.depths[0], work.probs[0] = 0, 0, 1.0
    node = 0
    while node < max_tokens:
        min_left = floor / work.probs[node]
        expand(records_at, node, SKIPPED_ORDER_SHARE * min_left, SKIPPED_CONTRIBUTION_SHARE * min_left, DRAFTING)
        best, prob = 0, 0.0
        for candidate in range(work.size):
            if work.chances[candidate] > prob:
                best, prob = candidate, work.chances[candidate]
        # A damaged store may give a probability above 1.
        probs = min(1.0, prob) * work.probs[node]
        if probs < floor:
            break
        node += 1
        token = work.candidates[best]
        work.probs[node], work.tokens[node] = probs, token
        work.parents[node], work.depths[node] = node - 1, node
        extend(work, node - 1, node, token)
    return node


@compiled
def catch_up(
    records_at: int, context: Ints, sampled: int, few: int, requests: RequestStates, is_drafting: bool
) -> None:
    """Append the new tokens of ``context`` to the context table, and learn from the last ``sampled`` of them.

    If more than ``few`` tokens are new, the tokens before the sampled ones are a prompt, and a new answer begins in
    the history. If ``is_drafting`` is False, the tokens are only appended, and the tree's root moves to the end of the
    context once drafting resumes.
    """
    history, tail = matches_at(records_at, HISTORY_NUMBER), work_at(records_at).tails[0]
    table = table_of(matches_at(records_at, CONTEXT_NUMBER))
    begins = table.end == 0 or len(context) - table.end > few
    if begins:
        for position in range(table.end, len(context) - sampled):
            add(table, np.int64(context[position]))
    old = last_tokens(context[: table.end], MAX_MATCH_TOKENS)
    if begins or history.owner == 0:
        begin_answer(history, requests, old[max(0, len(old) - OVERLAP_TOKENS) :])
    new = last_tokens(context[table.end :], len(context))
    if is_drafting:
        if begins or tail[MAX_MATCH_TOKENS - 1] < 0:
            restart(records_at, old)
        feed(records_at, new)
        return
    for token in new:
        add(table, token)
        append_to_log(history, token)
    tail[MAX_MATCH_TOKENS - 1] = -1


@compiled
def last_tokens(tokens: Ints, max_tokens: int) -> Ints:
    """Return a copy of the last ``max_tokens`` tokens as int64, which compiled code requires."""
    first = max(0, len(tokens) - max_tokens)
    copied = np.empty(len(tokens) - first, np.int64)
    copied[:] = tokens[first:]
    return copied


@compiled
def begin_answer(history: Any, requests: RequestStates, overlap: Ints) -> None:
    """If there is a history, end the request's answer in it and begin the next one, after the tokens ``overlap``."""
    answers = requests.answers
    if answers[NEXT_ANSWER] == 0:
        return
    lane, log = array_at(history.lane, 1, LANE), array_at(history.log[ANSWERS_LOG], 1, LOG)
    if lane[0].owner > 0 and len(requests.ended) > 0:
        requests.ended[answers[NUM_ENDED]] = lane[0]
        answers[NUM_ENDED] += 1
    finish(log, lane)
    start(log, lane, answers[NEXT_ANSWER], overlap, len(overlap))
    history.owner = answers[NEXT_ANSWER]
    answers[NEXT_ANSWER] += 1


@compiled
def draft_rows(
    records_at: int,
    requests: RequestStates,
    chosen: Ints,
    contexts: Ints,
    lengths: Ints,
    rows: Ints,
    sampled: Ints,
    limits: tuple[int, int, float],
    drafts: Ints,
    sizes: Ints,
) -> None:
    """Draft a chain for each of the ``rows`` of ``contexts``; ``chosen`` holds the index of each row's request.

    ``records_at`` is the ``address`` of a ``Hierarchy``, and ``sampled`` the number of new tokens in each row.
    ``limits`` are the maximum context length, the maximum number of draft tokens and the minimum probability. If this
    probability is not below ``NO_DRAFT_ABOVE``, the new tokens are only appended to tables and answers. Chains are
    written to ``drafts``, and their lengths to ``sizes``.
    """
    max_length, max_drafts, floor = limits
    is_drafting = floor < NO_DRAFT_ABOVE
    context, history, work, ranges = (
        matches_at(records_at, CONTEXT_NUMBER),
        matches_at(records_at, HISTORY_NUMBER),
        work_at(records_at),
        ranges_at(records_at),
    )
    for turn in range(len(rows)):
        sizes[turn] = 0
        request = chosen[turn]
        if request >= 0:
            context.log[ANSWERS_LOG] = requests.tables[request]
            if history.log[ANSWERS_LOG]:
                history.lane = requests.lanes_at[request]
                history.owner = array_at(history.lane, 1, LANE)[0].owner
            work.tails[0] = requests.tails[request]
            bounds_of(ranges)[0] = requests.range_bounds[request]
            ranges.read[0] = 0
            length: Any = np.int64(lengths[rows[turn]])
            new = min(sampled[turn], length)
            catch_up(records_at, contexts[rows[turn], :length], new, max_drafts + 1, requests, is_drafting)
            # Leave room for the bonus token after the last draft.
            size = grow_chain(records_at, min(max_drafts, max_length - length - 1), floor) if is_drafting else 0
            sizes[turn] = size
            drafts[turn, :size] = work.tokens[1 : size + 1]
            requests.tails[request] = work.tails[0]
            requests.range_bounds[request] = bounds_of(ranges)[0]
