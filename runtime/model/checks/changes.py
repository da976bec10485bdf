"""Notices adapters, weights and hooks of a model that changed since its last prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.nn import Module

from hdtool.runtime.model.checks.recorded_model import RecordedModel


class ModelChanges:
    """What a model was at its last prompt, and how often it was found changed since."""

    def __init__(self, model: Module) -> None:
        self._model = model
        self.count = 0
        self._recorded: RecordedModel | None = None
        self._memory: list[torch.UntypedStorage] = []
        """Memory of the weights that captured steps read: a replaced weight is not freed within an answer."""
        self._notices = True

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Notice no changes of the model in this block: they are hdtool's own, and change no answer."""
        noticed, self._notices, self._recorded = self._notices, False, None
        try:
            yield
        finally:
            self._notices = noticed

    def record(self, *, holds_memory: bool) -> None:
        self._recorded = RecordedModel(self._model)
        self._memory = self._recorded.memory() if holds_memory else []

    def found(self, discard: Callable[[bool], None]) -> bool:
        """Whether the model changed since it was recorded; it must be recorded again then, or if it never was.

        ``discard`` is called with whether the model has other code, but not if its weights were merely written in
        place; if it fails, the model is still another one at the next prompt.
        """
        if not self._notices:
            return False
        if recorded := self._recorded:
            if recorded.is_same():
                was_written = recorded.was_written()
                self.count += was_written
                return was_written
            self._memory.clear()
            has_same_code = recorded.has_code_of(self._model)
            try:
                discard(not has_same_code)
            except BaseException:
                self._recorded = recorded
                raise
            self.count += 1
        return True
