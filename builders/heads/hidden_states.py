"""The target's hidden states of all texts in a file: computed once, and read in each epoch of each training.

The file has the format of safetensors. It is written text after text, in the order of their lengths, so that no more
than one batch is in memory.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hdtool.builders.heads.examples import Example
from hdtool.builders.heads.frozen_target import FrozenTarget, TargetOutput
from hdtool.builders.heads.loss import Batch
from hdtool.builders.heads.precision import autocast, takes_bfloat16
from hdtool.data.errors import HeadsError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import safetensors_metadata

TENSOR = "hidden"
BATCH_TOKENS = 2048
"""Tokens of a pass, padding included."""
NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


class HiddenStates:
    """The hidden states of a target for some texts, in a file."""

    def __init__(self, path: Path, target: FrozenTarget, examples: Sequence[Example], key: str) -> None:
        """``key`` is a digest of the model and of the texts."""
        if not target.has_plain_output:
            raise HeadsError(
                "--hidden-states does not work with this model: it changes its logits after the output layer; leave "
                "the option out"
            )
        self._target, self._file = target, hidden_states_file(path)
        self._examples = sorted(examples, key=lambda example: len(example.ids))
        self._dtype = torch.bfloat16 if takes_bfloat16(target.device) else target.model.dtype
        self.tokens = sum(len(example.ids) for example in examples)
        self.bytes = self.tokens * target.hidden_width * self._dtype.itemsize
        self._metadata = {"writer": "hdtool", "content": "hidden states", "key": key, "dtype": NAMES[self._dtype]}
        self._starts: dict[bytes, int] = {}
        start = 0
        for example in self._examples:
            self._starts.setdefault(example.ids.tobytes(), start)
            start += len(example.ids)

    def is_written(self) -> bool:
        """Whether the file holds the hidden states; raises if it is of other texts or of another model."""
        if not self._file.exists():
            return False
        if safetensors_metadata(self._file.path) != self._metadata:
            raise HeadsError(
                f"{self._file.path} holds hidden states of other texts or of another model: name another file"
            )
        return True

    def write(self) -> Iterator[int]:
        """Compute all hidden states; yields the number of tokens done."""
        free = shutil.disk_usage(_existing(self._file.path.absolute())).free
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
                kept = hidden.to("cpu", self._dtype)
                for row, example in enumerate(batch):
                    part = kept[row, : len(example.ids)].contiguous()
                    stream.write(part.view(torch.uint8).numpy().tobytes())
                    done += len(example.ids)
                yield done

    def read(self, examples: Sequence[Example], batch: Batch) -> TargetOutput:
        """The same as ``FrozenTarget.read`` for a batch of examples; padding is 0."""
        from safetensors import safe_open

        shape = (*batch.ids.shape, self._target.hidden_width)
        hidden = torch.zeros(shape, dtype=self._dtype)
        with safe_open(self._file.path, framework="pt") as opened:
            stored: Any = opened.get_slice(TENSOR)
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
        entry = {"dtype": NAMES[self._dtype], "shape": shape, "data_offsets": [0, self.bytes]}
        text = json.dumps({"__metadata__": self._metadata, TENSOR: entry}).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text


def hidden_states_file(path: Path) -> OutputFile:
    def is_ours(path: Path) -> bool:
        found = safetensors_metadata(path)
        return found.get("writer") == "hdtool" and found.get("content") == "hidden states"

    return OutputFile(path, "a file of hidden states of hdtool train-heads", is_ours, HeadsError, "name another file")


def _existing(path: Path) -> Path:
    return next(place for place in path.parents if place.is_dir())
