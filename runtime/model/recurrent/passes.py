"""Passes over trees of a model with recurrent layers: its mixers start each row from the state after its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from transformers.cache_utils import Cache

from hdtool.runtime.model.cache.states import States
from hdtool.runtime.model.recurrent.by_levels import LevelStates, forward_by_levels
from hdtool.runtime.model.recurrent.closed_forms import TreeIndices
from hdtool.runtime.model.recurrent.in_closed_form import ClosedForm, ClosedStates
from hdtool.runtime.model.recurrent.mixers import Mixer
from hdtool.runtime.model.recurrent.row_tree import RowTree
from hdtool.runtime.tree import DraftTree

Forward = Callable[..., Any]


class _LayerStates(Protocol):
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None: ...


class StatesOfPass:
    """The states after each row of a pass, of all layers."""

    def __init__(self) -> None:
        self.layers: list[_LayerStates] = []

    @torch.inference_mode()
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for layer in self.layers:
            layer.commit(slot, rows, states)


class RecurrentLayers:
    """The mixers of a model."""

    def __init__(self, mixers: Sequence[Mixer], device: torch.device) -> None:
        self._mixers, self._device = mixers, device
        self._closed: dict[Mixer, ClosedForm] = {}

    def use_closed_forms(self) -> bool:
        """Compute several rows in closed form from now on; whether any mixer has one."""
        forms = {mixer: form for mixer in self._mixers if (form := ClosedForm.of(mixer))}
        self._closed = forms
        return bool(forms)

    def use_levels(self) -> None:
        """Compute all mixers by levels from now on."""
        self._closed = {}

    @property
    def in_closed_form(self) -> int:
        """The number of mixers that compute several rows in closed form."""
        return len(self._closed)

    @contextmanager
    def over(self, trees: Sequence[DraftTree], states: States, cache: Cache) -> Iterator[StatesOfPass]:
        """In this block a pass of the model is one over trees, from the ``states`` before them, which it leaves."""
        tree, found = RowTree(trees, self._device), StatesOfPass()
        states = states.part(0, len(trees))
        indices = TreeIndices(tree, self._device)
        held: list[tuple[Mixer, Forward | None]] = []
        try:
            for mixer in self._mixers:
                own = vars(mixer.module).get("forward")
                forward = mixer.module.forward
                held.append((mixer, own))
                before, closed = states.of_layer(mixer.layer), self._closed.get(mixer) if tree.rows > 1 else None
                over_tree: Forward
                if closed:
                    written = ClosedStates(before, indices)
                    found.layers.append(written)
                    over_tree = _in_closed_form(closed, cache, written)
                else:
                    after = LevelStates(tree, before)
                    found.layers.append(after)
                    over_tree = _by_levels(mixer, forward, tree, cache, after)
                vars(mixer.module)["forward"] = over_tree
            yield found
        finally:
            for mixer, own in held:
                if own is None:
                    del vars(mixer.module)["forward"]
                else:
                    vars(mixer.module)["forward"] = own


def _by_levels(mixer: Mixer, forward: Forward, tree: RowTree, cache: Cache, states: LevelStates) -> Forward:
    return lambda *args, **kwargs: forward_by_levels(mixer, forward, tree, cache, states, args, kwargs)


def _in_closed_form(form: ClosedForm, cache: Cache, states: ClosedStates) -> Forward:
    return lambda *args, **kwargs: form(cache, states, args, kwargs)
