"""Passes over trees of a model with recurrent layers: its mixers start each row from the state after its parent."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import Cache

from hdtool.runtime.model.cache.states import States
from hdtool.runtime.model.recurrent.by_levels import LevelStates, forward_by_levels
from hdtool.runtime.model.recurrent.mixers import Mixer
from hdtool.runtime.model.recurrent.row_tree import RowTree
from hdtool.runtime.tree import DraftTree

Forward = Callable[..., Any]


class StatesOfPass:
    """The states after each row of a pass, of all layers."""

    def __init__(self) -> None:
        self.layers: list[LevelStates] = []

    @torch.inference_mode()
    def commit(self, slot: int, rows: Sequence[int], states: States) -> None:
        for layer in self.layers:
            layer.commit(slot, rows, states)


class RecurrentLayers:
    """The mixers of a model."""

    def __init__(self, mixers: Sequence[Mixer], device: torch.device) -> None:
        self._mixers, self._device = mixers, device

    @contextmanager
    def over(self, trees: Sequence[DraftTree], states: States, cache: Cache) -> Iterator[StatesOfPass]:
        """In this block a pass of the model is one over trees, from the ``states`` before them, which it leaves."""
        tree, found = RowTree(trees, self._device), StatesOfPass()
        held: list[tuple[Mixer, Forward | None]] = []
        try:
            for mixer in self._mixers:
                own = vars(mixer.module).get("forward")
                held.append((mixer, own))
                after = LevelStates(tree, states.of_layer(mixer.layer))
                found.layers.append(after)
                vars(mixer.module)["forward"] = _over_tree(mixer, mixer.module.forward, tree, cache, after)
            yield found
        finally:
            for mixer, own in held:
                if own is None:
                    del vars(mixer.module)["forward"]
                else:
                    vars(mixer.module)["forward"] = own


def _over_tree(mixer: Mixer, forward: Forward, tree: RowTree, cache: Cache, states: LevelStates) -> Forward:
    def over_tree(*args: Any, **kwargs: Any) -> Any:
        return forward_by_levels(mixer, forward, tree, cache, states, args, kwargs)

    return over_tree
