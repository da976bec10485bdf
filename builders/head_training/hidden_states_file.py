"""A file in which the hidden states of a target are cached for training."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hdtool.builders.head_training.loss import Batch, FrozenTarget, TargetOutput, autocast, takes_bfloat16
from hdtool.builders.head_training.training_examples import Example
from hdtool.data.errors import HeadsError
from hdtool.data.output_files import OutputFile
from hdtool.data.own_files import safetensors_metadata

HIDDEN_STATES_TENSOR = "hidden"
BATCH_TOKENS = 2048
"""Maximum number of tokens per forward pass, padding included, unless a single text is longer."""
SAFETENSORS_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


class HiddenStatesFile:
    """Safetensors file that caches a target's hidden states, written with one batch in memory at a time."""

    def __init__(self, path: Path, target: FrozenTarget, examples: Sequence[Example], key: str) -> None:
        """``key`` identifies the model and texts; raise a HeadsError unless the output layer alone computes logits."""
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

        Raise a ``HeadsError`` if the disk has too little free space.
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
