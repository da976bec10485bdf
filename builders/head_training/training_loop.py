"""Training loop of drafting heads on a frozen target, with checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hdtool.builders.head_training.hidden_states_file import HiddenStatesFile
from hdtool.builders.head_training.loss import Batch, FrozenTarget, HeadsLoss, TargetProbs, autocast, label_positions
from hdtool.builders.head_training.processes import Processes
from hdtool.builders.head_training.training_examples import BatchSampler, Example
from hdtool.data.errors import HeadsError, OptionError, error_reason
from hdtool.data.output_files import OutputFile
from hdtool.runtime.drafters.heads.modules import Heads
from hdtool.runtime.settings.building import TrainConfig

CHECKPOINT_FILE = "checkpoint.pt"
CHECKPOINT_KEYS = {"heads", "optimizer", "done", "losses", "hits", "settings"}
MAX_GRADIENT_NORM = 1.0
ADAMW_BETAS = (0.9, 0.999)


@dataclass
class TrainingHistory:
    """Loss per token, and top-1 accuracy of each head, at every step."""

    losses: list[float] = field(default_factory=list)
    hits: list[list[float]] = field(default_factory=list)


class Training:
    """One training run, started from scratch or resumed from a checkpoint."""

    def __init__(
        self,
        heads: Heads,
        target: FrozenTarget,
        batches: BatchSampler,
        config: TrainConfig,
        out: Path,
        processes: Processes,
        stored: HiddenStatesFile | None = None,
    ) -> None:
        """``stored`` caches hidden states; if None, the target computes them.

        Raise an OptionError if a batch has fewer texts than there are processes.
        """
        self.heads = heads
        self.history = TrainingHistory()
        self.steps = batches.steps
        self._target, self._batches, self._config, self._processes = target, batches, config, processes
        self._stored = stored
        self._checkpoint = checkpoint_file(out)
        torch.nn.Module.to(heads, target.device, torch.float32)
        if processes.size > min(config.batch, len(batches.train)):
            raise OptionError(f"batch is {config.batch}: {processes.size} processes need at least one text each")
        self._optimizer = torch.optim.AdamW(heads.parameters(), lr=config.learning_rate, betas=ADAMW_BETAS)
        self._loss = processes.prepare(HeadsLoss(heads, config.lm_weight))

    def run(self, settings: dict[str, Any]) -> Iterator[int]:
        """Train to the end, yielding the number of steps done.

        Raise a ``HeadsError`` if a checkpoint has other settings than ``settings``, or if the loss is not finite.
        """
        done = self._restore(settings)
        yield done
        for step in range(done, self.steps):
            self._step(step)
            if (step + 1) % self._config.save_every == 0 or step + 1 == self.steps:
                self._save(step + 1, settings)
            yield step + 1

    def finish(self) -> None:
        """Delete the checkpoint; call this method once the heads are saved."""
        self._checkpoint.remove()

    def summary(self) -> str:
        """Return the mean loss and accuracy of the last 20 steps as one line; empty before the first step."""
        losses, hits = self.history.losses[-20:], self.history.hits[-20:]
        if not losses:
            return ""
        shares = (f"{100 * sum(column) / len(column):.0f}" for column in zip(*hits, strict=True))
        return f"loss {sum(losses) / len(losses):.3f}, heads right {'/'.join(shares)}%"

    def _step(self, step: int) -> None:
        examples = self._batches.step(step)
        known = [
            sum(int(example.drafted[2 + head :].sum()) for example in examples)
            for head in range(self.heads.config.heads)
        ]
        mine = examples[self._processes.rank :: self._processes.size]
        size = self._config.micro_batch_size or len(mine)
        parts = [mine[start : start + size] for start in range(0, len(mine), size)]
        sums = torch.zeros(1 + len(known), device=self._target.device)
        for number, part in enumerate(parts, start=1):
            with self._processes.without_sync(self._loss) if number < len(parts) else nullcontext():
                sums += self._learn(part, sum(known))
        length = torch.nn.utils.clip_grad_norm_(self.heads.parameters(), MAX_GRADIENT_NORM)
        if not math.isfinite(float(length)):
            raise HeadsError(
                f"the loss is not finite in step {step + 1}: take a lower --learning-rate, or --dtype float32; "
                "another --out starts again"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * learning_rate_factor(step, self.steps, self._config.warm_up)
        self._optimizer.step()
        self._optimizer.zero_grad()
        total, *hits = self._processes.reduce_sum(sums).tolist()
        self.history.losses.append(total / sum(known))
        self.history.hits.append([hit / max(1, count) for hit, count in zip(hits, known, strict=True)])

    def _learn(self, examples: Sequence[Example], known: int) -> torch.Tensor:
        batch = Batch.of(examples, self._target.device)
        with autocast(self._target.device):
            output = self._stored.read(examples, batch) if self._stored else self._target.read(batch.ids)
            positions = label_positions(batch, self.heads.config.heads)
            probs = TargetProbs.of(self._target, output, batch, self.heads)
            loss, hits = self._loss(batch, positions, output.hidden, output.embedded, probs)
        # Gradients are averaged over processes; scale so that the result is the mean over all labels.
        (loss * (self.heads.config.heads * self._processes.size / known)).backward()
        return torch.cat([loss.detach()[None], hits.to(loss)])

    def _save(self, done: int, settings: dict[str, Any]) -> None:
        if self._processes.rank == 0:
            checkpoint = {
                "heads": self.heads.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "done": done,
                "losses": self.history.losses,
                "hits": self.history.hits,
                "settings": settings,
            }
            try:
                with self._checkpoint.replaced() as stream:
                    torch.save(checkpoint, stream)
            except RuntimeError as error:
                raise HeadsError(
                    f"{self._checkpoint.path} cannot be written ({error_reason(error)}): {self._checkpoint.advice}"
                ) from error
        self._processes.wait()

    def _restore(self, settings: dict[str, Any]) -> int:
        if not self._checkpoint.exists():
            return 0
        try:
            checkpoint = torch.load(self._checkpoint.path, map_location=self._target.device, weights_only=True)
            saved_settings = checkpoint["settings"]
        except Exception as error:  # torch raises many kinds of errors for a damaged file
            raise HeadsError(
                f"{self._checkpoint.path} cannot be read ({error_reason(error)}): move it away to start again"
            ) from error
        if names := ", ".join(
            name for name in {**saved_settings, **settings} if saved_settings.get(name) != settings.get(name)
        ):
            raise HeadsError(
                f"{self._checkpoint.path} is of a training with other settings ({names}): give the same ones to "
                "resume, choose another --out, or move it away"
            )
        self.heads.load_state_dict(checkpoint["heads"])
        self._optimizer.load_state_dict(checkpoint["optimizer"])
        self.history = TrainingHistory(checkpoint["losses"], checkpoint["hits"])
        return int(checkpoint["done"])


def checkpoint_file(folder: Path) -> OutputFile:
    advice = "make room, choose another --out, or move it away, and run the command again"
    return OutputFile(
        folder / CHECKPOINT_FILE, "a checkpoint of hdtool train-heads", _is_checkpoint, HeadsError, advice
    )


def _is_checkpoint(path: Path) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):
            checkpoint = torch.load(path, map_location="meta", weights_only=True)  # without reading the tensors
    except OSError:
        raise
    except Exception:  # torch raises many kinds of errors for other files
        return False
    return isinstance(checkpoint, dict) and checkpoint.keys() == CHECKPOINT_KEYS


def learning_rate_factor(step: int, steps: int, warm_up: float) -> float:
    """Return the factor that scales the learning rate at a step: linear warm-up, then cosine decay to zero."""
    rising = max(1, round(warm_up * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
