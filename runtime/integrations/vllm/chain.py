"""Drafts a chain per request for vLLM, always taking the most probable next token, and detects finished answers.

A draft token adds seconds to a pass, and its probability is the expected number of tokens that it adds to the answer.
The draft pays off if this number per added second exceeds the throughput of the pass. In a large batch a pass is
compute-bound, so no draft pays off. vLLM verifies one sequence per request, so branches are useless.

vLLM does not tell a drafter when a request ends. An answer is finished once another answer follows it in its context
table, or if no step has drafted for it for some time. A timer checks this, because no step follows the last answer. A
request that continues later, such as a preempted one, begins another answer after its last tokens.
"""

from __future__ import annotations

import time
import weakref
from multiprocessing.util import Finalize
from threading import Lock, Timer
from typing import Any, NamedTuple

import numpy as np

from hdtool.runtime.config.source_names import SourceId
from hdtool.runtime.drafters.hierarchy.candidates import DRAFTING, work_at
from hdtool.runtime.drafters.hierarchy.evidence import ranges_at
from hdtool.runtime.drafters.hierarchy.matches import ANSWERS_LOG, append_to_log, matches_at, table_of
from hdtool.runtime.drafters.hierarchy.tree import expand, extend, feed, restart
from hdtool.runtime.kernels.compiled import Ints, array_at, compiled
from hdtool.runtime.stores.corpus_index import MAX_RANGE_ORDER, bounds_of
from hdtool.runtime.stores.history_store import History
from hdtool.runtime.stores.live_tables import add
from hdtool.runtime.stores.token_log import LANE, LOG, MAX_MATCH_TOKENS, OVERLAP_TOKENS, finish, start

MIN_FLOOR = 0.02
"""Lower bound on the minimum probability: less probable drafts cost more to find than they save."""
NO_DRAFT_ABOVE = 0.9
"""Minimum probability above which nothing is drafted."""
PRIOR_TOKENS = 256.0
"""Prior number of tokens at which a pass takes twice as long as with one token."""
SLOPE_PRIOR_WEIGHT = 1.0
"""Weight of the prior slope, in units of the variance of the number of tokens per pass."""
PASS_WINDOW = 64.0
"""Number of passes that the moving averages span."""
STALL_FACTOR = 4.0
"""Multiple of the mean to which the duration of a pass is clipped, because stalls are not caused by drafts."""

NO_TOKENS = np.empty(0, np.int64)


class MinProbability:
    """Estimates from past passes the minimum probability at which a draft pays off; ``fixed`` replaces the estimate."""

    def __init__(self, fixed: float | None = None) -> None:
        self._fixed = fixed
        self._passes = 0
        # Moving averages over passes: means, the variance of the number of tokens, and its covariance with the seconds.
        self._rows = self._tokens = self._emitted = self._seconds = 0.0
        self._variance = self._covariance = 0.0
        self._last: tuple[float, Ints, Ints, Ints] = 0.0, NO_TOKENS, NO_TOKENS, NO_TOKENS

    def floor(self, rows: int) -> float:
        """Return the minimum draft probability in a batch of ``rows`` requests."""
        if self._fixed is not None:
            return self._fixed
        if not self._passes:
            return max(MIN_FLOOR, rows / (PRIOR_TOKENS + rows))
        slope = self.seconds_per_token
        seconds = max(self._seconds + slope * (rows - self._rows), slope * rows)
        return max(MIN_FLOOR, slope * rows * self._emitted / self._rows / seconds)

    @property
    def seconds_per_token(self) -> float:
        """Seconds that each additional token adds to a pass: a regression slope, shrunk towards the prior."""
        assumed = self._seconds / (PRIOR_TOKENS + self._tokens)
        return max(0.0, (self._covariance + SLOPE_PRIOR_WEIGHT * assumed) / (self._variance + SLOPE_PRIOR_WEIGHT))

    def begin_step(self, at: float, rows: Ints, lengths: Ints) -> None:
        """Update the averages with the pass since the last ``record_drafts``, if it ran exactly the recorded requests.

        ``at`` is the current time in seconds, and ``lengths`` are the context lengths of the ``rows``.
        """
        before, old_rows, old_lengths, sent = self._last
        if len(rows) and np.array_equal(rows, old_rows):
            grown = lengths - old_lengths
            if ((grown > 0) & (grown <= sent + 1)).all():
                self.observe(len(rows), len(rows) + int(sent.sum()), int(grown.sum()), at - before)

    def record_drafts(self, at: float, rows: Ints, lengths: Ints, drafts: Ints) -> None:
        """Record the number of draft tokens of each row for the next call of ``begin_step``."""
        self._last = at, rows, lengths, drafts

    def observe(self, rows: int, tokens: int, emitted: int, seconds: float) -> None:
        """Update the averages with a pass: its numbers of requests, computed and emitted tokens, and its duration."""
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
"""Shares of a token's minimum probability below which shorter orders and single contributions are skipped.

With 1 and 0.3, tokens that continued 39 % of answers were estimated to have a probability of 18 %, close to a minimum
of 17 %, and a fifth of the drafts that pay off were not sent.
"""

FIRST_ANSWER_NUMBER = 1 << 10
"""First number of an answer; lower numbers are reserved for the drafter that the requests share."""
NEXT_ANSWER, NUM_ENDED = range(2)
"""Indexes in ``RequestStates.answers``."""
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
    """Copies of the lanes of answers that another answer followed, at most one per request; empty if not requested."""
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
def grow_chain(at: int, max_tokens: int, floor: float) -> int:
    """Draft up to ``max_tokens`` tokens with a path probability of at least ``floor``; return their number.

    ``at`` is the address of a hierarchy, to whose workspace the tokens are written.
    """
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
    """Append the new tokens of ``context`` to the context table, and learn from the last ``sampled`` of them.

    If more than ``few`` tokens are new, the tokens before the sampled ones are a prompt, and a new answer begins in
    the history. If ``is_drafting`` is False, the tokens are only appended, and the tree's root moves to the end of the
    context once drafting resumes.
    """
    history, tail = matches_at(at, HISTORY_NUMBER), work_at(at).tails[0]
    table = table_of(matches_at(at, CONTEXT_NUMBER))
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
            restart(at, old)
        feed(at, new)
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
    """Draft a chain for each of the ``rows`` of ``contexts``; ``chosen`` holds the index of each row's request.

    ``at`` is the address of a hierarchy, and ``sampled`` the number of new tokens in each row. ``limits`` are the
    maximum context length, the maximum number of draft tokens and the minimum probability. If the probability is above
    ``NO_DRAFT_ABOVE``, the new tokens are only appended to tables and answers. Chains are written to ``drafts`` and
    their lengths to ``sizes``.
    """
    max_length, max_drafts, floor = limits
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
            bounds_of(ranges)[0] = requests.range_bounds[request]
            ranges.read[0] = 0
            length: Any = np.int64(lengths[rows[turn]])
            new = min(sampled[turn], length)
            catch_up(at, contexts[rows[turn], :length], new, max_drafts + 1, requests, is_drafting)
            # Leave room for the bonus token after the last draft.
            size = grow_chain(at, min(max_drafts, max_length - length - 1), floor) if is_drafting else 0
            sizes[turn] = size
            drafts[turn, :size] = work.tokens[1 : size + 1]
            requests.tails[request] = work.tails[0]
            requests.range_bounds[request] = bounds_of(ranges)[0]


def appends_history(parallel: Any) -> bool:
    """Return True for the one worker of each model replica in vLLM that appends to the history.

    All tensor parallel workers of the last pipeline stage draft for the same requests, and vLLM uses the drafts of the
    first one.
    """
    stage = parallel.tensor_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1)
    last = stage * (parallel.pipeline_parallel_size - 1)
    return bool(parallel.rank % (stage * parallel.pipeline_parallel_size) == last)


CHECK_SECONDS = 0.5
"""Seconds between two checks while an answer is in progress."""
MIN_IDLE_SECONDS, MAX_IDLE_SECONDS = 1.0, 10.0
"""Bounds on the idle time, in seconds without a step, after which an answer is finished."""
IDLE_STEPS = 4.0
"""Idle time as a multiple of the duration of a slow step, within the bounds; on some devices, a step takes seconds.

A step lasts from the end of the previous one; pauses longer than the upper bound are ignored.
"""
FIRST_STEP_SECONDS, SLOW_STEP_DECAY = 1.25, 0.95
"""Initial duration of a slow step, and its decay per step, because the first steps of an engine are slow."""


class AnswerCollector:
    """Appends finished answers to a stored history; hold ``lock`` while reading or writing the history's logs."""

    def __init__(self, history: History, requests: RequestStates) -> None:
        self.lock = Lock()
        self._history, self._requests = history, requests
        self._followed_lanes: list[Ints] = []
        """Lanes of answers that another answer has followed since the last check."""
        self._last_drafted = np.zeros(len(requests.lanes) + 1)
        """Time of the last step that drafted for each request; the last item is for rows without a table."""
        self._last, self._slow_step_seconds = -np.inf, FIRST_STEP_SECONDS
        self._timer: Timer | None = None
        # Runs at the end of the process, even if multiprocessing started the process.
        Finalize(None, _finish_all, (weakref.ref(self),), exitpriority=0)

    def observe(self, chosen: Ints, at: float) -> None:
        """Record that a step drafted for the ``chosen`` requests at the time ``at``; the caller must hold ``lock``."""
        self._last_drafted[chosen] = at
        since, self._last = at - self._last, at
        self._slow_step_seconds = max(
            SLOW_STEP_DECAY * self._slow_step_seconds, since if since < MAX_IDLE_SECONDS else 0.0
        )
        if ended := int(self._requests.answers[NUM_ENDED]):
            self._followed_lanes += np.split(self._requests.ended[:ended].copy(), ended)
            self._requests.answers[NUM_ENDED] = 0
        if self._timer is None:
            self._refresh()
            self._start_timer()

    def finish_all(self) -> None:
        """Append all answers to the history, including those in progress."""
        with self.lock:
            if self._timer:
                self._timer.cancel()
                self._timer = None
            self._append(np.inf)

    def _check(self) -> None:
        with self.lock:
            self._timer = None
            self._refresh()
            self._append(
                time.perf_counter() - min(max(MIN_IDLE_SECONDS, IDLE_STEPS * self._slow_step_seconds), MAX_IDLE_SECONDS)
            )
            if self._requests.lanes["owner"].any():
                self._start_timer()

    def _append(self, cutoff: float) -> None:
        """Append to the history the answers that another followed, or whose last step was no later than ``cutoff``."""
        followed, self._followed_lanes = self._followed_lanes, []
        for lane in followed:
            self._history.finish(lane)
        lanes = self._requests.lanes
        for request in np.flatnonzero((lanes["owner"] > 0) & (self._last_drafted[:-1] <= cutoff)):
            self._history.finish(lanes[request : request + 1])

    def _refresh(self) -> None:
        """Load the answers that other processes have added to the history."""
        if self._history.store:
            self._history.store.refresh()

    def _start_timer(self) -> None:
        self._timer = Timer(CHECK_SECONDS, self._check)
        self._timer.daemon = True
        self._timer.start()


def _finish_all(reference: weakref.ref[AnswerCollector]) -> None:
    if collector := reference():
        collector.finish_all()
