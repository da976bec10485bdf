"""What trained heads are worth, by texts that they did not learn from; and the tree that this suggests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from hdtool.builders.heads.examples import Example
from hdtool.builders.heads.frozen_target import FrozenTarget
from hdtool.builders.heads.loss import Batch, head_labels, head_logits, places_of
from hdtool.runtime.config import LARGEST_BUDGET
from hdtool.runtime.drafters.heads.calibration import BUCKETS, bucket_of, centre_of
from hdtool.runtime.drafters.heads.checkpoint import EvalResult
from hdtool.runtime.drafters.heads.modules import Heads
from hdtool.runtime.drafters.hierarchy.sources.heads_evidence import BEST

AT_ONCE = 8
"""Lessons in one pass."""
DOUBT = 1.0
"""Tokens of odds that a calibrated value is held back by where little was seen."""

ProcessGroup = npt.NDArray[np.int64]


@torch.inference_mode()
def judge(heads: Heads, teacher: FrozenTarget, held_out: list[Example]) -> EvalResult:
    """Read all held-out lessons and see what the heads would have drafted."""
    number = heads.config.heads
    ranks: list[ProcessGroup] = []
    seen = np.zeros((2, number, BUCKETS))
    ordered = sorted(held_out, key=lambda lesson: len(lesson.ids))
    for start in range(0, len(ordered), AT_ONCE):
        batch = Batch.of(ordered[start : start + AT_ONCE], teacher.device)
        taught, places = teacher.read(batch.ids), places_of(batch, number)
        logits = head_logits(heads, taught.hidden.to(heads.like.dtype), taught.embedded, places).float()
        found = _ranks(logits, head_labels(batch, places), places.known)
        _count(seen, logits, found)
        ranks.append(found)
    every = np.concatenate(ranks, axis=1)
    known = (every >= 0).sum(axis=1)
    top = {
        str(best): [round(float(share), 4) for share in ((every >= 0) & (every < best)).sum(axis=1) / known]
        for best in (1, 5, 10)
    }
    tree, gains = best_tree(every)
    odds = (seen[1] + DOUBT * centre_of(np.arange(BUCKETS))) / (seen[0] + DOUBT)
    return EvalResult(top, int(known[0]), tree, gains, [[round(float(each), 4) for each in row] for row in odds])


def _ranks(logits: torch.Tensor, labels: torch.Tensor, known: torch.Tensor) -> ProcessGroup:
    """Which of a head's best the token was that came, ``[heads, places]``; -1 where none is known."""
    label_logits = logits.gather(-1, labels[..., None])
    ranks = (logits > label_logits).sum(dim=-1)
    return ranks.masked_fill(~known, -1).cpu().numpy().astype(np.int64)


def _count(seen: npt.NDArray[np.float64], logits: torch.Tensor, ranks: ProcessGroup) -> None:
    """Add, for each head and likelihood, how many of its best tokens were offered, and how many came."""
    best = logits.log_softmax(dim=-1).topk(min(BEST, logits.shape[-1])).values.cpu().numpy()
    right = np.ones(ranks.shape[1], np.bool_)
    for head in range(len(ranks)):
        asked = right & (ranks[head] >= 0)
        buckets = bucket_of(np.exp(best[head][asked]))
        np.add.at(seen[0, head], buckets, 1.0)
        came = ranks[head][asked]
        held = np.flatnonzero(came < best.shape[-1])
        np.add.at(seen[1, head], buckets[held, came[held]], 1.0)
        right &= (ranks[head] >= 0) & (ranks[head] < best.shape[-1])


def best_tree(ranks: ProcessGroup, most: int = LARGEST_BUDGET) -> tuple[list[list[int]], list[float]]:
    """The nodes that would have been taken most often: adding the best one, again and again.

    A path is never taken more often than its start, so these are the commonest beginnings of the ranks that
    were seen; how often each was is what it is expected to bring.
    """
    taken: Counter[tuple[int, ...]] = Counter()
    whole = ranks[:, ranks[0] >= 0].T
    for row in whole.tolist():
        for depth, rank in enumerate(row, start=1):
            if not 0 <= rank < BEST:
                break
            taken[tuple(row[:depth])] += 1
    chosen = sorted(taken.items(), key=lambda entry: (-entry[1], len(entry[0]), entry[0]))[:most]
    return [list(path) for path, _ in chosen], [round(count / len(whole), 6) for _, count in chosen]


def told(judged: EvalResult) -> Iterable[str]:
    """Head by head, in words."""
    for head, shares in enumerate(zip(*judged.top.values(), strict=True), start=1):
        yield f"head {head}: " + ", ".join(
            f"top {best} {share:.1%}" for best, share in zip(judged.top, shares, strict=True)
        )
