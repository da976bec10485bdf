"""Chains of draft tokens for vLLM, the greedy path down the hierarchy's tree, and the answers that requests finished.

A draft token adds seconds to a pass, and its probability is the expected number of tokens that it adds. It pays if
its tokens per second exceed those of the pass. In a large batch a pass is compute-bound, and no draft pays. vLLM
verifies one sequence per request, so branches are of no use.

vLLM does not report the end of a request to a drafter. An answer is finished when another one follows it in its context
table, or when no step has drafted for it for a while, which a timer observes: after the last answer there is no step.
A request that continues later, such as a preempted one, begins another answer with the last tokens before.
"""

from __future__ import annotations

import time
import weakref
from multiprocessing.util import Finalize
from threading import Lock, Timer
from typing import Any, NamedTuple

import numpy as np

from hdtool.runtime.drafters.hierarchy.candidates import DRAFTING, work_at
from hdtool.runtime.drafters.hierarchy.evidence import ranges_at
from hdtool.runtime.drafters.hierarchy.matches import ANSWERS_LOG, append_to_log, matches_at, table_of
from hdtool.runtime.drafters.hierarchy.tree import expand, extend, feed, restart
from hdtool.runtime.kernels.compiled import Ints, array_at, compiled
from hdtool.runtime.source_names import SourceName
from hdtool.runtime.stores.corpus_index import LONGEST_RANGE, places_of
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.live_tables import add
from hdtool.runtime.stores.token_log import LANE, LOG, MAX_MATCH_TOKENS, OVERLAP_TOKENS, finish, start

MIN_FLOOR = 0.02
"""Lower bound: less probable drafts cost more to find than they save."""
NO_DRAFT_ABOVE = 0.9
"""If the minimum is higher than this, nothing is drafted."""
PRIOR_TOKENS = 256.0
"""Prior: the number of tokens at which a pass takes twice as long as with one token."""
SLOPE_PRIOR_WEIGHT = 1.0
"""Weight of the prior slope, as a variance of the tokens per pass."""
PASS_WINDOW = 64.0
"""Window of the moving averages, in passes."""
STALL_FACTOR = 4.0
"""Seconds of a pass are clipped to this multiple of the mean, because stalls have other causes."""

NO_TOKENS = np.empty(0, np.int64)


class MinProbability:
    """Estimates the minimum draft probability from the passes so far; ``fixed`` replaces the estimate."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._passes = 0
        # Moving averages over passes, the variance of their tokens, and its covariance with seconds.
        self._rows = self._tokens = self._emitted = self._seconds = 0.0
        self._variance = self._covariance = 0.0
        self._last: tuple[float, Ints, Ints, Ints] = 0.0, NO_TOKENS, NO_TOKENS, NO_TOKENS

    def floor(self, rows: int) -> float:
        """The minimum probability in a batch of ``rows`` requests."""
        if self._fixed is not None:
            return self._fixed
        if not self._passes:
            return max(MIN_FLOOR, rows / (PRIOR_TOKENS + rows))
        slope = self.seconds_per_token
        seconds = max(self._seconds + slope * (rows - self._rows), slope * rows)
        return max(MIN_FLOOR, slope * rows * self._emitted / self._rows / seconds)

    @property
    def seconds_per_token(self) -> float:
        """Seconds per additional token of a pass: a regression slope, shrunk to the prior."""
        assumed = self._seconds / (PRIOR_TOKENS + self._tokens)
        return max(0.0, (self._covariance + SLOPE_PRIOR_WEIGHT * assumed) / (self._variance + SLOPE_PRIOR_WEIGHT))

    def begin_step(self, at: float, rows: Ints, lengths: Ints) -> None:
        """Update with the pass since the last call, if it computed the same requests only."""
        before, old_rows, old_lengths, sent = self._last
        if len(rows) and np.array_equal(rows, old_rows):
            grown = lengths - old_lengths
            if ((grown > 0) & (grown <= sent + 1)).all():
                self.observe(len(rows), len(rows) + int(sent.sum()), int(grown.sum()), at - before)

    def sent(self, at: float, rows: Ints, lengths: Ints, drafts: Ints) -> None:
        """Store the number of drafts of each row for the next call of ``begin_step``."""
        self._last = at, rows, lengths, drafts

    def observe(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """Update with a pass: its requests, its tokens with drafts, the emitted tokens and its seconds."""
        if self._passes:
            seconds = min(seconds, STALL_FACTOR * self._seconds)
        self._passes += 1
        step = max(1 / self._passes, 1 / PASS_WINDOW)
        off_tokens, off_seconds = tokens - self._tokens, seconds - self._seconds
        self._rows += step * (rows - self._rows)
        self._tokens += step * off_tokens
        self._emitted += step * (emitted - self._emitted)
        self._seconds += step * off_seconds
        self._variance += step * ((1 - step) * off_tokens * off_tokens - self._variance)
        self._covariance += step * ((1 - step) * off_tokens * off_seconds - self._covariance)


SKIPPED_ORDER_SHARE, SKIPPED_CONTRIBUTION_SHARE = 0.1, 0.03
"""Shorter orders and single contributions are skipped below these shares of the minimum probability of a token. With 1
and 0.3, tokens that 39 % of answers went on with were estimated at 18 % beside a minimum of 17 %, and a fifth of the
drafts that pay were not sent."""

FIRST_ANSWER_NUMBER = 1 << 10
"""Lower numbers are left to the drafter that the requests share."""
NEXT_ANSWER, NUM_ENDED = range(2)
"""The number of the next answer, and how many answers ended lately."""
CONTEXT_NUMBER, HISTORY_NUMBER = SourceName.CONTEXT.value, SourceName.HISTORY.value


class RequestStates(NamedTuple):
    """The state of each request; all other data of a draft is shared and stays in the processor's cache."""

    tables: Ints
    """Addresses of the context tables."""
    tails: Ints
    """The last tokens of each request."""
    places: Ints
    """The ranges of these tokens in the corpus index."""
    lanes: Ints
    """Where their answers are appended to the history."""
    lanes_at: Ints
    """The addresses of these records."""
    ended: Ints
    """Copies of the lanes of answers that others followed: at most one for each request, and none if nobody asks."""
    answers: Ints
    """The number of the next answer, which is 0 without a history, and the number of ``ended`` lanes."""


def new_request_states(max_requests: int, shards: int, *, history: bool = False, ended: bool = False) -> RequestStates:
    """Empty state for ``max_requests`` requests; with ``ended``, the lanes of answers that others follow are copied."""
    tails = np.full((max_requests, MAX_MATCH_TOKENS), -1, np.int64)
    places = np.zeros((max_requests, LONGEST_RANGE + 1, shards, 2), np.int64)
    lanes = np.zeros(max_requests, LANE)
    lanes_at = lanes.ctypes.data + np.arange(max_requests, dtype=np.int64) * LANE.itemsize
    answers = np.array([FIRST_ANSWER_NUMBER if history else 0, 0], np.int64)
    return RequestStates(
        np.zeros(max_requests, np.int64),
        tails,
        places,
        lanes,
        lanes_at,
        np.zeros(max_requests if ended else 0, LANE),
        answers,
    )


@compiled
def grow_chain(at: int, max_tokens: int, floor: float) -> int:
    """Fill the workspace with up to ``max_tokens`` tokens of path probability >= ``floor``; return how many."""
    work = work_at(at)
    work.parents[0], work.depths[0], work.probs[0] = 0, 0, 1.0
    node = 0
    while node < max_tokens:
        min_left = floor / work.probs[node]
        expand(at, node, SKIPPED_ORDER_SHARE * min_left, SKIPPED_CONTRIBUTION_SHARE * min_left, DRAFTING)
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
def catch_up(at: int, context: Ints, sampled: int, few: int, requests: RequestStates, is_drafting: bool) -> None:
    """Append the new tokens of ``context`` to the table, and update the weights with the ``sampled`` ones at its end.

    If more than a ``few`` are new, those before the sampled ones are a prompt, and an answer of the history begins.
    Without drafting, the tokens are appended alone, and the root is moved to the end when drafting goes on.
    """
    history, tail = matches_at(at, HISTORY_NUMBER), work_at(at).tails[0]
    table = table_of(matches_at(at, CONTEXT_NUMBER))
    begins = table.end == 0 or len(context) - table.end > few
    if begins:
        for place in range(table.end, len(context) - sampled):
            add(table, np.int64(context[place]))
    old = last_tokens(context[: table.end], MAX_MATCH_TOKENS)
    if begins or history.owner == 0:
        begin_answer(history, requests, old[max(0, len(old) - OVERLAP_TOKENS) :])
    new = last_tokens(context[table.end :], len(context))
    if is_drafting:
        if begins or tail[MAX_MATCH_TOKENS - 1] < 0:
            restart(at, old)
        feed(at, new)
        return
    for token in new:
        add(table, token)
        append_to_log(history, token)
    tail[MAX_MATCH_TOKENS - 1] = -1


@compiled
def last_tokens(tokens: Ints, max_tokens: int) -> Ints:
    """A copy of the last tokens, in the width that all compiled code takes."""
    first = max(0, len(tokens) - max_tokens)
    copied = np.empty(len(tokens) - first, np.int64)
    copied[:] = tokens[first:]
    return copied


@compiled
def begin_answer(history: Any, requests: RequestStates, before: Ints) -> None:
    """Begin an answer of the history after some tokens."""
    answers = requests.answers
    if answers[NEXT_ANSWER] == 0:
        return
    lane, log = array_at(history.lane, 1, LANE), array_at(history.log[ANSWERS_LOG], 1, LOG)
    if lane[0].owner > 0 and len(requests.ended) > 0:
        requests.ended[answers[NUM_ENDED]] = lane[0]
        answers[NUM_ENDED] += 1
    finish(log, lane)
    start(log, lane, answers[NEXT_ANSWER], before, len(before))
    history.owner = answers[NEXT_ANSWER]
    answers[NEXT_ANSWER] += 1


@compiled
def draft_rows(
    at: int,
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
    """A chain for each of these ``rows`` of ``contexts``, with the state of the request ``chosen`` for it.

    ``at`` is the address of a hierarchy. So many tokens of each row were ``sampled`` lately.
    ``limits`` are the longest context, the most draft tokens and the minimum probability; if that is too high, nothing
    is drafted, and the tokens are appended to tables and answers.
    """
    longest, max_drafts, floor = limits
    is_drafting = floor < NO_DRAFT_ABOVE
    context, history, work, ranges = (
        matches_at(at, CONTEXT_NUMBER),
        matches_at(at, HISTORY_NUMBER),
        work_at(at),
        ranges_at(at),
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
            places_of(ranges)[0] = requests.places[request]
            ranges.read[0] = 0
            length: Any = np.int64(lengths[rows[turn]])
            new = min(sampled[turn], length)
            catch_up(at, contexts[rows[turn], :length], new, max_drafts + 1, requests, is_drafting)
            # The target adds a bonus token after the last draft.
            size = grow_chain(at, min(max_drafts, longest - length - 1), floor) if is_drafting else 0
            sizes[turn] = size
            drafts[turn, :size] = work.tokens[1 : size + 1]
            requests.tails[request] = work.tails[0]
            requests.places[request] = places_of(ranges)[0]


def appends_history(parallel: Any) -> bool:
    """Return True if a worker of vLLM appends to the history: the one whose drafts count, of those that run one model.

    All tensor parallel workers of the last pipeline stage draft for the same requests, and vLLM takes the drafts of the
    first one.
    """
    stage = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    last = stage * (parallel.pipeline_parallel_size - 1)
    return bool(parallel.rank % (stage * parallel.pipeline_parallel_size) == last)


CHECK_SECONDS = 0.5
"""Seconds between two checks, as long as an answer is in progress."""
MIN_IDLE_SECONDS, MAX_IDLE_SECONDS = 1.0, 10.0
"""Bounds of the seconds without a step after which an answer is finished."""
IDLE_STEPS = 4.0
"""Between these bounds, they are the time of so many steps, slow ones of late: on some devices a step takes seconds.

The time between two steps is that of a step unless it is longer than the upper bound.
"""
FIRST_STEP_SECONDS, SLOW_STEP_DECAY = 1.25, 0.95
"""Seconds of a slow step to begin with, and how they decrease with each step: the first ones of an engine are slow."""


class FinishedAnswers:
    """The answers in progress of a history that lasts; ``lock`` is held while its logs are read or written."""

    def __init__(self, history: History, requests: RequestStates) -> None:
        self.lock = Lock()
        self._history, self._requests = history, requests
        self._followed: list[Ints] = []
        """The lanes of answers that others followed since the last check."""
        self._seen = np.zeros(len(requests.lanes) + 1)
        """When a step drafted for each request lately; the last number is for rows without a table."""
        self._last, self._slowest = -np.inf, FIRST_STEP_SECONDS
        self._timer: Timer | None = None
        # Called at the end of this process, also where multiprocessing started it.
        Finalize(None, _finish_all, (weakref.ref(self),), exitpriority=0)

    def observe(self, chosen: Ints, at: float) -> None:
        """Note the requests that a step has drafted for; the caller holds the lock."""
        self._seen[chosen] = at
        since, self._last = at - self._last, at
        self._slowest = max(SLOW_STEP_DECAY * self._slowest, since if since < MAX_IDLE_SECONDS else 0.0)
        if ended := int(self._requests.answers[NUM_ENDED]):
            self._followed += np.split(self._requests.ended[:ended].copy(), ended)
            self._requests.answers[NUM_ENDED] = 0
        if self._timer is None:
            self._refresh()
            self._start_timer()

    def finish_all(self) -> None:
        """Append all answers, those in progress as far as they went."""
        with self.lock:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            self._append(np.inf)

    def _check(self) -> None:
        with self.lock:
            self._timer = None
            self._refresh()
            self._append(time.perf_counter() - min(max(MIN_IDLE_SECONDS, IDLE_STEPS * self._slowest), MAX_IDLE_SECONDS))
            if self._requests.lanes["owner"].any():
                self._start_timer()

    def _append(self, before: float) -> None:
        """Append the answers that others followed, and those whose last step was ``before``."""
        followed, self._followed = self._followed, []
        for lane in followed:
            self._history.finish(lane)
        lanes = self._requests.lanes
        for request in np.flatnonzero((lanes["owner"] > 0) & (self._seen[:-1] <= before)):
            self._history.finish(lanes[request : request + 1])

    def _refresh(self) -> None:
        """See the answers of other processes."""
        if self._history.store:
            self._history.store.refresh()

    def _start_timer(self) -> None:
        self._timer = Timer(CHECK_SECONDS, self._check)
        self._timer.daemon = True
        self._timer.start()


def _finish_all(answers: weakref.ref[FinishedAnswers]) -> None:
    if finished := answers():
        finished.finish_all()
