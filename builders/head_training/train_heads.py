"""Implements ``train-heads``: reads texts, trains and evaluates heads, and saves them."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.builders.evaluation.recording import TurnReader
from hdtool.builders.head_training.hidden_states_file import HiddenStatesFile, hidden_states_output
from hdtool.builders.head_training.loss import (
    Batch,
    FrozenTarget,
    draft_labels,
    head_labels,
    head_logits,
    label_positions,
)
from hdtool.builders.head_training.processes import Processes, process_group, world_size
from hdtool.builders.head_training.training_curve import curve_file, draw_training
from hdtool.builders.head_training.training_examples import BatchSampler, Example, draft_vocabulary, read_examples
from hdtool.builders.head_training.training_loop import Training, checkpoint_file
from hdtool.data.conversation_files import ConversationReader
from hdtool.data.errors import OptionError
from hdtool.data.input_files import find_inputs
from hdtool.data.progress import progress_bar, show_bars
from hdtool.runtime.drafters.heads.checkpoint import EvalResult, SavedHeads, new_heads, output_files
from hdtool.runtime.drafters.heads.modules import Heads, ParallelHeads
from hdtool.runtime.drafters.trained.proposal import PROB_BUCKETS, TOKENS_PER_RANKING, bucket_center, prob_bucket
from hdtool.runtime.kernels.compiled import Ints
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.model.refusals import context_limit
from hdtool.runtime.settings.building import HeadsConfig, TrainConfig
from hdtool.runtime.settings.draft_token_limits import LARGEST_BUDGET
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_stock
from hdtool.runtime.target.target import Target

EVAL_BATCH = 8
"""Number of examples per forward pass of the evaluation."""
PRIOR_WEIGHT = 1.0
"""Pseudo-count of the prior in the calibration."""


@torch.inference_mode()
def evaluate(heads: Heads, target: FrozenTarget, examples: list[Example]) -> EvalResult:
    """Measure the heads' accuracy, calibration and (for parallel heads) best static tree on validation examples."""
    number = heads.config.heads
    ranks: list[Ints] = []
    counts = np.zeros((2, number, PROB_BUCKETS))
    ordered = sorted(examples, key=lambda example: len(example.ids))
    for start in range(0, len(ordered), EVAL_BATCH):
        batch = Batch.of(ordered[start : start + EVAL_BATCH], target.device)
        output, positions = target.read(batch.ids), label_positions(batch, number)
        logits = head_logits(heads, output.hidden.to(heads.like.dtype), output.embedded, positions).float()
        batch_ranks = _ranks(logits, draft_labels(heads, head_labels(batch, positions)), positions.has_label)
        _count_calibration(counts, logits, batch_ranks)
        ranks.append(batch_ranks)
    all_ranks = np.concatenate(ranks, axis=1)
    label_counts = (all_ranks >= 0).sum(axis=1)
    top = {
        str(best): [
            round(float(share), 4) for share in ((all_ranks >= 0) & (all_ranks < best)).sum(axis=1) / label_counts
        ]
        for best in (1, 5, 10)
    }
    tree, gains = best_tree(all_ranks) if isinstance(heads, ParallelHeads) else ([], [])
    calibrated = (counts[1] + PRIOR_WEIGHT * bucket_center(np.arange(PROB_BUCKETS))) / (counts[0] + PRIOR_WEIGHT)
    return EvalResult(
        top, int(label_counts[0]), tree, gains, [[round(float(value), 4) for value in row] for row in calibrated]
    )


def _ranks(logits: torch.Tensor, labels: torch.Tensor, has_label: torch.Tensor) -> Ints:
    """Return each label's rank in its head's logits, ``[heads, positions]``; -1 where ``has_label`` is False.

    A label of -1 stands for a token outside the draft vocabulary, which ranks last.
    """
    label_logits = logits.gather(-1, labels.clamp_min(0)[..., None])
    ranks = (logits > label_logits).sum(dim=-1).masked_fill(labels < 0, logits.shape[-1])
    return ranks.masked_fill(~has_label, -1).cpu().numpy().astype(np.int64)


def _count_calibration(counts: npt.NDArray[np.float64], logits: torch.Tensor, ranks: Ints) -> None:
    """Count each head's top-k tokens, and how many of them were correct, by probability bucket.

    The counts are added to ``counts[0]`` and ``counts[1]``. A position counts for a head only if every earlier head
    ranked its own true token in its top-k.
    """
    best = logits.log_softmax(dim=-1).topk(min(TOKENS_PER_RANKING, logits.shape[-1])).values.cpu().numpy()
    correct = np.ones(ranks.shape[1], np.bool_)
    for head in range(len(ranks)):
        reached = correct & (ranks[head] >= 0)
        buckets = prob_bucket(np.exp(best[head][reached]))
        np.add.at(counts[0, head], buckets, 1.0)
        true_ranks = ranks[head][reached]
        held = np.flatnonzero(true_ranks < best.shape[-1])
        np.add.at(counts[1, head], buckets[held, true_ranks[held]], 1.0)
        correct &= (ranks[head] >= 0) & (ranks[head] < best.shape[-1])


def best_tree(ranks: Ints, max_nodes: int = LARGEST_BUDGET) -> tuple[list[list[int]], list[float]]:
    """Return the static tree of at most ``max_nodes`` nodes with the most accepted tokens, as ``(paths, rates)``.

    A path's rate is the share of positions at which it is accepted. A path is never accepted more often than its
    prefix, so the most frequent paths form a tree.
    """
    path_counts: Counter[tuple[int, ...]] = Counter()
    whole = ranks[:, ranks[0] >= 0].T
    for row in whole.tolist():
        for depth, rank in enumerate(row, start=1):
            if not 0 <= rank < TOKENS_PER_RANKING:
                break
            path_counts[tuple(row[:depth])] += 1
    chosen = sorted(path_counts.items(), key=lambda entry: (-entry[1], len(entry[0]), entry[0]))[:max_nodes]
    return [list(path) for path, _ in chosen], [round(count / len(whole), 6) for _, count in chosen]


def summary(result: EvalResult) -> Iterable[str]:
    """Yield one line per head with its top-1, top-5 and top-10 accuracy."""
    for head, shares in enumerate(zip(*result.top.values(), strict=True), start=1):
        yield f"head {head}: " + ", ".join(
            f"top {best} {share:.1%}" for best, share in zip(result.top, shares, strict=True)
        )


def train(
    inputs: Sequence[str],
    out: Path,
    model: ModelConfig,
    heads: HeadsConfig,
    config: TrainConfig,
    *,
    chat: bool | None = None,
    hidden_states: Path | None = None,
) -> Iterator[str]:
    """Train heads and save them to ``out``, yielding messages to print.

    ``hidden_states`` is a file in which the target's hidden states are cached; it requires a single process.
    """
    stored_in = [hidden_states_output(hidden_states)] if hidden_states else []
    for file in (*output_files(out), checkpoint_file(out), curve_file(out), *stored_in):
        file.check()
    if hidden_states and world_size() > 1:
        raise OptionError("--hidden-states works in one process: leave it out, or start one process")
    processes, model = _processes(model)
    target = Target(load_stock(model))
    texts, left_out = _texts(inputs, model, target, config, chat)
    yield from left_out if processes.rank == 0 else ()
    frozen = FrozenTarget(target)
    torch.manual_seed(config.seed)
    batches = BatchSampler(texts, config)
    heads, token_ids = draft_vocabulary(heads, batches.train, frozen.vocabulary)
    made = new_heads(target.model, frozen.hidden_width, frozen.vocabulary, heads, token_ids)
    data = {"target": fingerprint(target.model), "texts": _digest(texts)}
    stored = HiddenStatesFile(hidden_states, frozen, texts, " ".join(data.values())) if hidden_states else None
    if stored and not stored.is_written():
        yield f"{hidden_states}: hidden states of {stored.tokens:,} tokens, {stored.bytes / 1e9:.2f} GB"
        _write(stored)
    training = Training(made, frozen, batches, config, out, processes, stored)
    if processes.rank == 0:
        yield (
            f"{sum(weight.numel() for weight in made.parameters()):,} weights are trained on {len(batches.train):,} "
            f"texts ({batches.tokens:,} tokens) in {training.steps:,} steps"
        )
    started = time.monotonic()
    _run(training, {**asdict(config), **asdict(heads), **data, "processes": processes.size})
    if processes.rank:
        return
    result = evaluate(made.eval(), frozen, batches.validation)
    report = asdict(config) | _report(training, batches, target, time.monotonic() - started)
    SavedHeads(made, data["target"], model.name, result, report).save(out)
    draw_training(training.history, out)
    training.finish()
    yield from summary(result)
    yield f"{out}: heads for {model.name}, evaluated on {len(batches.validation):,} texts held out"


def _processes(model: ModelConfig) -> tuple[Processes, ModelConfig]:
    """Join the group of processes; return it, and the settings of the model for this process's device."""
    processes = process_group(on_cpu=model.device == "cpu" or not torch.cuda.is_available())
    if world_size() > 1 and model.device == "auto" and torch.cuda.is_available():
        model = replace(model, device=f"cuda:{torch.cuda.current_device()}")
    if processes.rank:
        show_bars(False)
    return processes, model


def _write(stored: HiddenStatesFile) -> None:
    with progress_bar(stored.tokens, "hidden states", unit="tokens") as progress:
        for done in stored.write():
            progress.to(done)


def _run(training: Training, settings: dict[str, Any]) -> None:
    with progress_bar(training.steps, "training", unit="steps") as progress:
        for done in training.run(settings):
            progress.show(training.summary())
            progress.to(done)


def _report(training: Training, batches: BatchSampler, target: Target, seconds: float) -> dict[str, Any]:
    """Return the figures of the training that the heads' file records besides the settings."""
    return {
        "texts": len(batches.train),
        "tokens": batches.tokens,
        "steps": training.steps,
        "seconds": round(seconds),
        "processor_seconds": round(time.process_time()),
        "machine": machine(target.device),
        "loss": round(training.history.losses[-1], 4),
    }


def _digest(texts: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for example in texts:
        digest.update(example.ids.tobytes() + example.drafted.tobytes())
    return digest.hexdigest()[:16]


def _texts(
    inputs: Sequence[str], model: ModelConfig, target: Target, config: TrainConfig, chat: bool | None
) -> tuple[list[Example], list[str]]:
    """Return the examples, and lines that tell the user about records that were left out."""
    reading = ConversationReader(find_inputs(inputs), tolerance=config.max_bad_fraction)
    turns = TurnReader.of_model(model, chat)
    window = min(config.window, context_limit(target.config, config.window) or config.window)
    with progress_bar(reading.total_bytes, "reading", unit="B") as progress:
        examples = read_examples(reading, turns, window, progress)
    return examples, reading.tally.left_out()
