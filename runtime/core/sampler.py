"""Chooses the next token from logits, by argmax or by an exponential race with random numbers keyed by position."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TypicalLogitsWarper,
)

from hdtool.data.errors import ModelError, PromptError
from hdtool.runtime.core.exponential_race import ExponentialRace
from hdtool.runtime.core.top_k_top_p import (
    NOT_FINITE,
    UNDECIDED,
    WARPER_OPTIONS,
    DrawOptions,
    Truncation,
    allowed_scores,
    keeps_one,
)
from hdtool.runtime.core.tree import LARGEST_TREE
from hdtool.runtime.core.tree_walks import compile_drawn_walks, ranked_for
from hdtool.runtime.kernels.compiled import Array
from hdtool.runtime.kernels.topk import argmax
from hdtool.runtime.settings.model import SamplingConfig

NOTHING_ALLOWED = "the grammar leads to a place where no token of this model's vocabulary may follow"
NO_BITS = np.frombuffer(b"", np.uint8)
"""Empty bitmask; read-only like a grammar's bitmask, because code would be compiled once more for a writable array."""
NO_NUMBERS = "the model's logits are not numbers: its dtype may be too small, try --dtype float32"


def seed_of(seed: int, index: int) -> int:
    """Return the seed of answer ``index`` among several answers for which one ``seed`` was given.

    Answer 0 uses ``seed``, others a hash of both: with ``seed + index``, neighbouring seeds would share answers.
    """
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") if index else seed


@runtime_checkable
class Mask(Protocol):
    """A logits processor that forbids tokens and leaves all other scores unchanged."""

    def allowed(self, context: Sequence[int], tokens: list[int]) -> int:
        """Return how many leading ``tokens`` are known to be allowed if appended to the context one after another."""
        ...

    def bits(self, context: Sequence[int]) -> Array:
        """Return a bitmask of the tokens allowed after the context: eight tokens per byte, the lowest bit first."""
        ...


Criterion = Callable[["Sampler", int], bool]
"""Called once for each emitted token, which is the last one of the context; returns True if it ends the answer."""
KEEP_THE_BEST = (
    *WARPER_OPTIONS,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TypicalLogitsWarper,
)
"""Types of processors that never remove the only token that a mask has left."""


class Shortcuts(NamedTuple):
    """Ways to choose a token without processing all logits of its row; by default, there are none."""

    only_mask: Mask | None = None
    """The mask, if it is the only processor before the choice."""
    chooses_by_argmax: bool = False
    """True if each token is the argmax of its logits, or of the logits that a mask allows."""
    draws: DrawOptions | None = None
    """The options of each draw if nothing or only a mask processes the logits before it."""
    max_ranked: int = 0
    """Number of highest logits per row that a draw needs; 0 if it needs all of them."""
    draws_by_row: bool = False
    """True if each draw reads all logits of its row, unprocessed."""
    races: DrawOptions | None = None
    """The options of each draw if the leaders of a race among all tokens of its row usually determine it."""
    takes_the_only_token: bool = False
    """True if a token is chosen regardless of the logits once a mask forbids all others."""


class Sampler:
    """Chooses the tokens of one answer. The caller gives each emitted token to ``take``.

    The choice at a position depends on the context before it, its logits and the draws for that position. It does not
    depend on whether the logits came from plain decoding or from a node of a tree, so drafting does not change the
    output.
    """

    def __init__(
        self,
        config: SamplingConfig,
        context: Sequence[int],
        *,
        processors: Sequence[LogitsProcessor] = (),
        padding: Sequence[int] = (),
        criteria: Sequence[Criterion] = (),
    ) -> None:
        """Only ``seed`` and ``is_greedy`` of ``config`` are used; ``processors`` apply the other options.

        Processors see the ``padding`` tokens in front of the context; the model does not. The answer ends at the first
        token that meets one of the ``criteria``.
        """
        self._greedy, self._race, self._criteria = config.is_greedy, ExponentialRace(config.seed), criteria
        self.seed = None if self._greedy else config.seed
        """The seed of the draws; None if decoding is greedy."""
        self._processors: list[Any] = list(processors)
        truncated = Truncation.at_end_of(self._processors)
        self.pre_processors: list[LogitsProcessor]
        self.pre_processors, self._truncation = (self._processors, Truncation()) if self._greedy else truncated
        """The processors before the truncation, which is a part of the draw."""
        self.truncating_processors = self._processors[len(self.pre_processors) :]
        self._allowed = np.empty(0, np.int64), np.empty(0, np.float32)
        """Buffers for the tokens that a mask allows and for their scores."""
        self._ids, self._on_host = _GrowingIds(padding), _RowOnHost()
        self.context = list(context)
        self.walk_buffer = np.empty((2, LARGEST_TREE + 1), np.int64)
        """Buffer for the tokens of a compiled walk and for the nodes that drafted them, ``[2, tokens]``."""
        self.overflowed = False
        """True if the highest logit of any row used so far was NaN or infinite."""
        self.shortcuts = self._find_shortcuts(padding)
        self._compile()

    def _find_shortcuts(self, padding: Sequence[int]) -> Shortcuts:
        only = self.pre_processors[0] if len(self.pre_processors) == 1 and not padding else None
        only_mask = only if isinstance(only, Mask) else None
        is_unprocessed = not self.pre_processors and self._truncation.is_compiled
        draws = self._truncation.draws(self._race) if not self._greedy and (only_mask or is_unprocessed) else None
        first, *others = self._processors or (None,)
        keeps_the_best = all(type(other) in KEEP_THE_BEST and keeps_one(other) for other in others)
        max_ranked = ranked_for(draws) if draws and not only_mask else 0
        races = draws if draws and not (only_mask or max_ranked or draws.top_k) else None
        return Shortcuts(
            only_mask=only_mask,
            chooses_by_argmax=self._greedy and (only_mask is not None or not self._processors),
            draws=draws,
            max_ranked=max_ranked,
            draws_by_row=not (self._greedy or self.pre_processors or max_ranked),
            races=races,
            takes_the_only_token=isinstance(first, Mask) and keeps_the_best,
        )

    def _compile(self) -> None:
        """Compile what the choices need, or load it from the cache, before the first step."""
        if not self._greedy:
            self._truncation.compile(self._race)
        if self.shortcuts.only_mask:
            allowed_scores(0, 0, NO_BITS, *self._allowed)
        if self.shortcuts.draws:
            compile_drawn_walks(self.shortcuts.draws, self.walk_buffer)

    def take(self, token: int, stops: Container[int] = ()) -> bool:
        """Append an emitted token to the context; return True if it meets a criterion or is one of the ``stops``."""
        self.context.append(token)
        met = [is_met(self, token) for is_met in self._criteria]
        return any(met) or token in stops

    def chooser(
        self,
        logits: torch.Tensor,
        *,
        finite_only: bool = False,
        finite: Array | None = None,
        first: Array | None = None,
    ) -> Callable[[int], int]:
        """Return a function that maps the index of a row in ``logits`` to the token chosen there, given the context.

        ``finite``, if known, says for each row whether its highest logit is finite; ``first`` is a copy of the first
        row on the host, or None. With ``finite_only``, the function returns ``NOT_FINITE`` for a row whose highest
        logit is NaN or infinite, without calling any processor; otherwise such a row raises ModelError in a draw and in
        ``_choose_allowed``. A mask that allows no token raises PromptError.
        """

        def process(row: int) -> int:
            if self.shortcuts.only_mask and logits.is_cpu and logits.dtype == torch.float32:
                return self._noted(self._choose_allowed(logits[row], self.shortcuts.only_mask), finite_only=finite_only)
            # A draw checks by itself whether the row is finite, and much faster.
            if (self.pre_processors or self._greedy) and not (
                logits[row].max().isfinite() if finite is None else finite[row]
            ):
                self.overflowed = True
                if finite_only:
                    return NOT_FINITE
            if row == 0 and first is not None and self.shortcuts.draws_by_row:
                token = self._truncation.draw(self._race, len(self.context), first)
            else:
                token = self.choose_processed(logits, row)
            return self._noted(token, finite_only=finite_only)

        return process

    def _noted(self, token: int, *, finite_only: bool) -> int:
        if token == NOT_FINITE:
            self.overflowed = True
            if not finite_only:
                raise ModelError(NO_NUMBERS)
        return token

    def note_overflow(self) -> None:
        """Record that logits of a pass without drafts are not finite; raise ModelError if tokens are sampled."""
        self.overflowed = True
        if not self._greedy:
            raise ModelError(NO_NUMBERS)

    def _choose_allowed(self, row: torch.Tensor, mask: Mask) -> int:
        """Return the token chosen among those that the mask allows. Only their scores are copied.

        Return ``NOT_FINITE`` if the highest logit of the row, forbidden tokens included, is not finite. Raise
        PromptError if the mask allows no token.
        """
        vocabulary, row = len(row), row.contiguous()
        if not self._greedy:
            winner = self._truncation.winner(self._race, len(self.context), row.numpy())
            if winner == NOT_FINITE or (winner != UNDECIDED and mask.allowed(self.context, [winner])):
                return winner
        if len(self._allowed[0]) < vocabulary:
            self._allowed = np.empty(vocabulary, np.int64), np.empty(vocabulary, np.float32)
        count = allowed_scores(row.data_ptr(), vocabulary, mask.bits(self.context), *self._allowed)
        if count < 0:
            return NOT_FINITE
        if not count:
            raise PromptError(NOTHING_ALLOWED)
        tokens, scores = self._allowed
        if self._greedy:
            return int(tokens[scores[:count].argmax()])
        return self._truncation.draw(self._race, len(self.context), scores[:count], tokens[:count])

    def choose_processed(self, logits: torch.Tensor, row: int) -> int:
        """Apply ``pre_processors`` to a row; return the token chosen from it, or ``NOT_FINITE`` (see ``choose``)."""
        return self.choose(self.processed(logits[row], self.pre_processors))

    def ids(self, device: torch.device) -> torch.LongTensor:
        """Return the padded context so far as a tensor ``[1, length]`` for processors and stopping criteria."""
        return self._ids.of(self.context, device)

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return one row of logits with all processors applied, given the context so far; the row is left unchanged."""
        return self.processed(logits, self._processors)

    def processed(self, logits: torch.Tensor, processors: Sequence[LogitsProcessor]) -> torch.Tensor:
        """Return one row of logits with ``processors`` applied in float32, or the row itself if there are none."""
        if not processors:
            return logits
        ids, scores = self.ids(logits.device), logits[None].to(torch.float32, copy=True)
        # LogitsProcessorList would inspect each processor's signature, which takes longer than most processors run.
        with torch.no_grad():  # not inference mode: a processor may keep tensors and use them outside
            for processor in processors:
                scores = processor(ids, cast(torch.FloatTensor, scores))
        return scores[0]

    def choose(self, scores: torch.Tensor) -> int:
        """Return the token chosen from the scores that the ``pre_processors`` returned.

        Return ``NOT_FINITE`` if a draw finds that the highest score is not finite.
        """
        if self._greedy:
            return int(argmax(scores))
        return self._truncation.draw(self._race, len(self.context), self._on_host.of(scores.detach()))

    def perturbed_scores(self, scores: torch.Tensor) -> torch.Tensor:
        """Return ``scores``, plus Gumbel noise if tokens are sampled, so that their argmax is the chosen token.

        Up to a constant, these scores are the negative logarithms of the tokens' times in the exponential race.
        """
        scores = scores.double().cpu()
        if self._greedy:
            return scores
        uniforms = torch.from_numpy(self._race.uniforms(len(self.context), len(scores)))
        return scores - (-(-uniforms).log1p()).log()


class _RowOnHost:
    """Copies a row of scores to the host; copies from a GPU go through pinned memory, which is faster."""

    def __init__(self) -> None:
        self._pinned = torch.empty(0)

    def of(self, row: torch.Tensor) -> npt.NDArray[np.float32]:
        """Return the row as a float32 array, which is valid only until the next call if the row is on a GPU."""
        if row.device.type != "cuda":
            return np.ascontiguousarray(row.float().cpu().numpy())
        if self._pinned.shape != row.shape:
            self._pinned, self._arrived = torch.empty(row.shape, pin_memory=True), torch.cuda.Event()
        self._pinned.copy_(row, non_blocking=True)
        self._arrived.record(torch.cuda.current_stream(row.device))
        self._arrived.synchronize()
        scores: npt.NDArray[np.float32] = self._pinned.numpy()
        return scores


def compile_sampling() -> None:
    """Compile draws and masks, or load them from the cache, before any answer needs them."""
    Sampler(SamplingConfig(temperature=1.0), [0])
    allowed_scores(0, 0, NO_BITS, np.empty(0, np.int64), np.empty(0, np.float32))


class _GrowingIds:
    """A context as a tensor that grows in place, so that appending a token does not copy the whole context."""

    def __init__(self, padding: Sequence[int]) -> None:
        self._padding = list(padding)
        self._host = self._ids = torch.empty((1, 0), dtype=torch.long)
        """Each id on the host is written only once, so the copy to the device need not be awaited."""
        self._filled = 0

    @torch.no_grad()
    def of(self, context: list[int], device: torch.device) -> torch.LongTensor:
        length = len(self._padding) + len(context)
        if self._ids.shape[1] < length or self._ids.device != device:
            is_pinned = device.type == "cuda"
            self._host = torch.empty((1, 2 * length), dtype=torch.long, pin_memory=is_pinned)
            self._ids = torch.empty_like(self._host, device=device) if device.type != "cpu" else self._host
            self._filled = 0
        if self._filled < length:
            new = context[self._filled - len(self._padding) :] if self._filled else [*self._padding, *context]
            on_host, there = (ids[0, self._filled : length] for ids in (self._host, self._ids))
            on_host[:] = torch.tensor(new)
            if there.device.type != "cpu":
                there.copy_(on_host, non_blocking=True)
            self._filled = length
        return cast(torch.LongTensor, self._ids[:, :length])
