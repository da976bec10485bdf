"""Evaluation of trained heads on validation texts, and the static draft tree that fits them best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from hdtool.builders.heads.examples import Example
from hdtool.builders.heads.frozen_target import FrozenTarget
from hdtool.builders.heads.loss import Batch, draft_labels, head_labels, head_logits, places_of
from hdtool.runtime.config import LARGEST_BUDGET
from hdtool.runtime.drafters.heads.checkpoint import EvalResult
from hdtool.runtime.drafters.heads.modules import Heads, ParallelHeads
from hdtool.runtime.drafters.trained.calibration import BUCKETS, bucket_of, centre_of
from hdtool.runtime.drafters.trained.proposal import BEST

BATCH = 8
"""Examples in one pass."""
PRIOR_WEIGHT = 1.0
"""Pseudo-count of the calibration prior."""

Ints = npt.NDArray[np.int64]


@torch.inference_mode()
def evaluate(heads: Heads, target: FrozenTarget, examples: list[Example]) -> EvalResult:
    """Accuracy, calibration and best static tree of the heads on validation examples."""
    number = heads.config.heads
    ranks: list[Ints] = []
    seen = np.zeros((2, number, BUCKETS))
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), BATCH):
        batch = Batch.of(ordered[start : start + BATCH], target.device)
        output, places = target.read(batch.ids), places_of(batch, number)
        logits = head_logits(heads, output.hidden.to(heads.like.dtype), output.embedded, places).float()
        found = _ranks(logits, draft_labels(heads, head_labels(batch, places)), places.known)
        _count(seen, logits, found)
        ranks.append(found)
    every = np.concatenate(ranks, axis=1)
    known = (every >= 0).sum(axis=1)
    top = {
        str(best): [round(float(share), 4) for share in ((every >= 0) & (every < best)).sum(axis=1) / known]
        for best in (1, 5, 10)
    }
    tree, gains = best_tree(every) if isinstance(heads, ParallelHeads) else ([], [])
    calibrated = (seen[1] + PRIOR_WEIGHT * centre_of(np.arange(BUCKETS))) / (seen[0] + PRIOR_WEIGHT)
    return EvalResult(top, int(known[0]), tree, gains, [[round(float(each), 4) for each in row] for row in calibrated])


def _ranks(logits: torch.Tensor, labels: torch.Tensor, known: torch.Tensor) -> Ints:
    """The rank of each true token in a head's logits, ``[heads, places]``; -1 where there is none.

    A token that is not in the draft vocabulary (label -1) is last.
    """
    label_logits = logits.gather(-1, labels.clamp_min(0)[..., None])
    ranks = (logits > label_logits).sum(dim=-1).masked_fill(labels < 0, logits.shape[-1])
    return ranks.masked_fill(~known, -1).cpu().numpy().astype(np.int64)


def _count(seen: npt.NDArray[np.float64], logits: torch.Tensor, ranks: Ints) -> None:
    """Count, per head and probability bucket, its best tokens and how many of them were the true token."""
    best = logits.log_softmax(dim=-1).topk(min(BEST, logits.shape[-1])).values.cpu().numpy()
    right = np.ones(ranks.shape[1], np.bool_)
    for head in range(len(ranks)):
        reached = right & (ranks[head] >= 0)
        buckets = bucket_of(np.exp(best[head][reached]))
        np.add.at(seen[0, head], buckets, 1.0)
        true_ranks = ranks[head][reached]
        held = np.flatnonzero(true_ranks < best.shape[-1])
        np.add.at(seen[1, head], buckets[held, true_ranks[held]], 1.0)
        right &= (ranks[head] >= 0) & (ranks[head] < best.shape[-1])


def best_tree(ranks: Ints, most: int = LARGEST_BUDGET) -> tuple[list[list[int]], list[float]]:
    """The static tree of the nodes that are accepted most often, and the frequency of each.

    A path is never accepted more often than its start, so the most frequent paths form a tree.
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


def summary(result: EvalResult) -> Iterable[str]:
    """One line per head."""
    for head, shares in enumerate(zip(*result.top.values(), strict=True), start=1):
        yield f"head {head}: " + ", ".join(
            f"top {best} {share:.1%}" for best, share in zip(result.top, shares, strict=True)
        )
