"""Training loop of drafting heads on a frozen target, with checkpoints, cached hidden states and a loss plot."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.builders.heads.loss import (
    Batch,
    BatchSampler,
    Example,
    FrozenTarget,
    HeadsLoss,
    TargetOutput,
    TargetProbs,
    autocast,
    label_positions,
    takes_bfloat16,
)
from hdtool.data.errors import HeadsError, OptionError, error_reason
from hdtool.data.output_files import PNG_METADATA, OutputFile, is_own_png, safetensors_metadata
from hdtool.runtime.config import TrainConfig
from hdtool.runtime.drafters.heads.modules import Heads


class Processes:
    """The single training process, or the group of processes that ``accelerate launch`` started."""

    def __init__(self, accelerator: Any = None) -> None:
        self._accelerator = accelerator
        self.rank: int = accelerator.process_index if accelerator else 0
        self.size: int = accelerator.num_processes if accelerator else 1

    def prepare(self, module: torch.nn.Module) -> Any:
        """Wrap a module for data-parallel training, with gradients averaged over the processes."""
        return self._accelerator.prepare_model(module) if self._accelerator else module

    def without_sync(self, module: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager in which the module's gradients accumulate without being synchronized."""
        return self._accelerator.no_sync(module) if self._accelerator else nullcontext()

    def reduce_sum(self, values: torch.Tensor) -> Any:
        return self._accelerator.reduce(values, reduction="sum") if self._accelerator else values

    def wait(self) -> None:
        if self._accelerator:
            self._accelerator.wait_for_everyone()


def world_size() -> int:
    """Return the number of processes that a launcher started, including this process; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def process_group(*, on_cpu: bool) -> Processes:
    """Return the process group that a launcher started or, without a launcher, this process alone."""
    if world_size() == 1:
        return Processes()
    from accelerate import Accelerator

    return Processes(Accelerator(cpu=on_cpu))


HIDDEN_STATES_TENSOR = "hidden"
BATCH_TOKENS = 2048
"""Maximum number of tokens per forward pass, padding included, unless a single text is longer."""
SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


class HiddenStatesFile:
    """Safetensors file that caches a target's hidden states, written with one batch in memory at a time."""

    def __init__(self, path: Path, target: FrozenTarget, examples: Sequence[Example], key: str) -> None:
        """``key`` identifies the model and the texts; a file with another key is refused."""
        if not target.has_plain_output:
            raise HeadsError(
                "--hidden-states does not work with this model: it changes its logits after the output layer; leave "
                "the option out"
            )
        self._target, self._file = target, hidden_states_output(path)
        self._examples = sorted(examples, key=lambda example: len(example.ids))
        self._dtype = torch.bfloat16 if takes_bfloat16(target.device) else target.model.dtype
        self.tokens = sum(len(example.ids) for example in examples)
        self.bytes = self.tokens * target.hidden_width * self._dtype.itemsize
        self._metadata = {
            "writer": "hdtool",
            "content": "hidden states",
            "key": key,
            "dtype": SAFETENSORS_DTYPES[self._dtype],
        }
        self._starts: dict[bytes, int] = {}
        start = 0
        for example in self._examples:
            self._starts.setdefault(example.ids.tobytes(), start)
            start += len(example.ids)

    def is_written(self) -> bool:
        """Return True if the file exists; raise a ``HeadsError`` if it belongs to other texts or another model."""
        if not self._file.exists():
            return False
        if safetensors_metadata(self._file.path) != self._metadata:
            raise HeadsError(
                f"{self._file.path} holds hidden states of other texts or of another model: name another file"
            )
        return True

    def write(self) -> Iterator[int]:
        """Compute and store all hidden states, yielding the number of tokens done so far.

        Raises a ``HeadsError`` if the disk has too little free space.
        """
        free = shutil.disk_usage(_existing_parent(self._file.path.absolute())).free
        if free < self.bytes:
            raise HeadsError(
                f"{self._file.path} needs {self.bytes / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free: name a file on "
                "another disk, or leave --hidden-states out"
            )
        done = 0
        with self._file.replaced() as stream:
            stream.write(self._header())
            for batch in self._batches():
                with autocast(self._target.device):
                    hidden = self._target.read(Batch.of(batch, self._target.device).ids).hidden
                stored = hidden.to("cpu", self._dtype)
                for row, example in enumerate(batch):
                    part = stored[row, : len(example.ids)].contiguous()
                    stream.write(part.view(torch.uint8).numpy().tobytes())
                    done += len(example.ids)
                yield done

    def read(self, examples: Sequence[Example], batch: Batch) -> TargetOutput:
        """Return what ``FrozenTarget.read`` computes for a batch of examples; hidden states of padding are 0."""
        from safetensors import safe_open

        shape = (*batch.ids.shape, self._target.hidden_width)
        hidden = torch.zeros(shape, dtype=self._dtype)
        with safe_open(self._file.path, framework="pt") as opened:
            stored: Any = opened.get_slice(HIDDEN_STATES_TENSOR)
            for row, example in enumerate(examples):
                start = self._starts[example.ids.tobytes()]
                hidden[row, : len(example.ids)] = stored[start : start + len(example.ids)]
        return TargetOutput(hidden.to(self._target.device), self._target.embed_next(batch.ids))

    def _batches(self) -> Iterator[list[Example]]:
        batch: list[Example] = []
        for example in self._examples:
            if batch and (len(batch) + 1) * len(example.ids) > BATCH_TOKENS:
                yield batch
                batch = []
            batch.append(example)
        yield batch

    def _header(self) -> bytes:
        shape = [self.tokens, self._target.hidden_width]
        entry = {"dtype": SAFETENSORS_DTYPES[self._dtype], "shape": shape, "data_offsets": [0, self.bytes]}
        text = json.dumps({"__metadata__": self._metadata, HIDDEN_STATES_TENSOR: entry}).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def hidden_states_output(path: Path) -> OutputFile:
    def is_ours(path: Path) -> bool:
        metadata = safetensors_metadata(path)
        return metadata.get("writer") == "hdtool" and metadata.get("content") == "hidden states"

    return OutputFile(path, "a file of hidden states of hdtool train-heads", is_ours, HeadsError, "name another file")


def _existing_parent(path: Path) -> Path:
    return next(parent for parent in path.parents if parent.is_dir())


CHECKPOINT_FILE = "checkpoint.pt"
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
        """``stored`` caches the target's hidden states; if it is None, the target computes them for each batch."""
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

        Raises a ``HeadsError`` if there is a checkpoint whose settings differ from ``settings``.
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
    is_ours = is_checkpoint_with({"heads", "optimizer", "done", "losses", "hits", "settings"})
    return OutputFile(folder / CHECKPOINT_FILE, "a checkpoint of hdtool train-heads", is_ours, HeadsError, advice)


def is_checkpoint_with(keys: Set[str]) -> Callable[[Path], bool]:
    """Return a function that tells whether a file is a torch checkpoint with exactly these keys."""

    def is_ours(path: Path) -> bool:
        try:
            with warnings.catch_warnings(action="ignore"):
                checkpoint = torch.load(path, map_location="meta", weights_only=True)  # without reading the tensors
        except OSError:
            raise
        except Exception:  # torch raises many kinds of errors for other files
            return False
        return isinstance(checkpoint, dict) and checkpoint.keys() == keys

    return is_ours


def learning_rate_factor(step: int, steps: int, warm_up: float) -> float:
    """Return the factor that scales the learning rate at a step: linear warm-up, then cosine decay to zero."""
    rising = max(1, round(warm_up * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


CURVE_FILE = "training.png"
CURVE_INCHES, CURVE_DPI = (8.0, 4.0), 130
MIN_CURVE_POINTS = 50
"""Minimum number of points per curve; each point is a mean over consecutive steps."""


def draw_training(history: TrainingHistory, folder: Path) -> None:
    """Plot the loss and the accuracy of each head over the steps, as a PNG in ``folder``."""
    from matplotlib import style
    from matplotlib.figure import Figure  # not pyplot, which keeps global state

    with style.context("default"):  # the current folder may hold a matplotlibrc, which can even run LaTeX
        figure: Any = Figure(figsize=CURVE_INCHES, layout="constrained")
        left, right = figure.subplots(1, 2)
        steps, losses = _smooth(np.array(history.losses))
        left.plot(steps, losses)
        left.set_ylabel("loss a token, nats")
        _, hits = _smooth(np.array(history.hits))
        for head, shares in enumerate(hits.T, start=1):
            right.plot(steps, 100 * shares, label=f"head {head}")
        right.set_ylabel("tokens that a head had first, %")
        right.set_ylim(bottom=0)
        right.legend(fontsize="small")
        for axes in (left, right):
            axes.set_xlabel("steps")
            axes.grid(alpha=0.3)
            axes.spines[["top", "right"]].set_visible(False)
        with curve_file(folder).replaced() as stream:
            figure.savefig(stream, format="png", dpi=CURVE_DPI, metadata=PNG_METADATA)


def curve_file(folder: Path) -> OutputFile:
    return OutputFile(folder / CURVE_FILE, "a picture of hdtool train-heads", is_own_png, HeadsError)


def _smooth(values: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    size = max(1, len(values) // MIN_CURVE_POINTS)
    starts = np.arange(0, len(values), size)
    means = np.stack([values[start : start + size].mean(axis=0) for start in starts])
    return starts + size / 2, means
