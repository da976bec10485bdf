"""Uses compiled layers in a model once they have given the numbers of its own layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module, ModuleList

from hdtool.runtime.kernels.fused.layers import compile_layers
from hdtool.runtime.kernels.fused.passes import compile_passes
from hdtool.runtime.model.attention_masks import FULL, Mask
from hdtool.runtime.model.cache.kv_cache import KVTensors, SlotKVCache, StaticKVCache
from hdtool.runtime.model.checks.trees import some_context
from hdtool.runtime.model.fused.layer_parts import LayerParts, parts_of
from hdtool.runtime.model.fused.layer_stack import LayerStack, StackedLayers
from hdtool.runtime.model.fused.tree_kernel import compile_tree_passes
from hdtool.runtime.model.fused.whole_pass import whole_pass_of
from hdtool.runtime.model.library import cache_argument
from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import DraftTree

TOLERANCE = 1e-4
"""The largest distance of a row from that of the library's layer, relative to what the layer adds to the row. Rounding
in float32 gives about a millionth."""
TREE = DraftTree.of(7, [11, 23, 5, 41, 2, 17, 29], [-1, 0, 1, -1, 3, 0, -1])
LENGTHS = (0, 37, 150)
"""Of contexts, for the layers at both ends; a tree follows the second one."""
SHORT = 5
"""Tokens of a context or a piece for the whole model: a large one takes a second for 40 on one core."""
BATCH_LENGTHS, BATCH_NODES = (5, 20), (2, 4)
Case = tuple[KVTensors, StaticKVCache | SlotKVCache, torch.Tensor, Mask]
"""A cache, the positions of a pass, and its mask."""


@torch.inference_mode()
def fuse_layers(target: Target, *, proved: bool = False) -> bool:
    """Compute passes of few rows in compiled code from now on, if the layers of the model are of that kind.

    ``proved`` layers are not compared with those of the library: an earlier process did so.
    """
    if (
        target.device.type != "cpu"
        or target.dtype != torch.float32
        or [one.kind for one in target.stock.windows] != [FULL]
    ):
        return False
    lists = [module for module in target.model.modules() if type(module) is ModuleList and len(module)]
    found = [(layers, parts) for layers in lists if (parts := _parts_of_all(layers))]
    if len(found) != 1:
        return False
    (layers, parts), *_ = found
    rotary = _rotary_of(target.model, layers)
    if rotary is None or not _fit_cache(parts, target.allocate(1, 1).storage):
        return False
    if proved:
        stack = LayerStack(parts, target.config)
        with target.changing():
            _put(layers, stack)
            target.use_whole_passes(whole_pass_of(target.model, stack))
        return True
    compile_layers()
    compile_passes()
    compile_tree_passes()
    stack = LayerStack(parts, target.config)
    with target.changing(), target.log.unchanged():
        if not _Proof(target, stack, parts, rotary).holds():
            return False
        with stack.first_layer_alone():
            if not _is_called(target, layers, stack):
                return False
            _use_whole_passes(target, stack)
    return True


def _parts_of_all(layers: ModuleList) -> list[LayerParts] | None:
    parts = [parts_of(layer, place) for place, layer in enumerate(layers)]
    known = [part for part in parts if part is not None]
    return known if len(known) == len(parts) and len({part.shape for part in known}) == 1 else None


def _rotary_of(model: Module, layers: ModuleList) -> Module | None:
    """What computes the rotary positions in the module that has this list of layers."""
    owners = [module for module in model.modules() if any(one is layers for one in module._modules.values())]
    return owners[0]._modules.get("rotary_emb") if len(owners) == 1 else None


def _fit_cache(parts: list[LayerParts], storage: KVTensors) -> bool:
    """Whether all layers have keys and values of the shape of their heads, in one tensor."""
    shapes = {(view.shape[1], view.shape[3]) for views in storage.layers for view in views if view.dim() == 4}
    is_whole = len(storage.tensors) == 1 and len(storage.layers) == len(parts)
    return is_whole and shapes == {(parts[0].heads, parts[0].width)}


class _Proof:
    """Compares layers in compiled code with those of the library, on hidden states of the model."""

    def __init__(self, target: Target, stack: LayerStack, parts: list[LayerParts], rotary: Module) -> None:
        self._target, self._stack, self._parts, self._rotary = target, stack, parts, rotary
        self._random = torch.Generator().manual_seed(0)
        tokens = torch.tensor([some_context(len(TREE) + 1, target.vocabulary)])
        embedded: torch.Tensor = target.model.get_input_embeddings()(tokens)
        self._states = [embedded]
        """The input of each layer, which is the output of the layer before it."""

    def holds(self) -> bool:
        """Compare all layers on a tree, and those at both ends on other contexts and on a batch."""
        ends = sorted({0, len(self._parts) - 1})
        return self._is_same(range(len(self._parts)), self._case(7, TREE)) and all(
            self._is_same(ends, case) for case in self._cases()
        )

    def _cases(self) -> Iterator[Case]:
        for length in LENGTHS:
            yield self._case(length, TREE if length == LENGTHS[1] else DraftTree.bare(0))
        yield self._batch()

    def _case(self, length: int, tree: DraftTree) -> Case:
        target = self._target
        cache = target.allocate(1, length + len(tree) + 1).slots[0].kv
        cache.length = length
        positions = length + torch.tensor([[0, *tree.depths[1:].tolist()]])
        return cache.storage, cache, positions, target.stock.masks.of_tree(tree, length)

    def _batch(self) -> Case:
        target, lengths = self._target, BATCH_LENGTHS
        trees = [DraftTree.of(0, [0] * nodes, list(range(-1, nodes - 1))) for nodes in BATCH_NODES]
        rows = max(BATCH_NODES) + 1
        storage = target.allocate(len(trees), max(lengths) + rows).storage
        positions = torch.tensor(lengths)[:, None] + torch.arange(rows)
        return storage, SlotKVCache(storage, lengths, rows), positions, target.stock.masks.of_batch(trees, lengths)

    def _is_same(self, numbers: Iterable[int], case: Case) -> bool:
        storage, cache, positions, mask = case
        for tensor in storage.tensors:
            tensor.normal_(generator=self._random)
        for number in numbers:
            rows = self._states[number].flatten(0, 1)
            chosen = torch.arange(positions.numel()) % len(rows)
            hidden = rows[chosen].view(*positions.shape, -1)
            given = {
                "attention_mask": mask,
                "position_embeddings": self._rotary(hidden, positions),
                "position_ids": positions,
                **cache_argument(self._parts[0].layer, cache),
                "use_cache": True,
            }
            expected = self._checked(number, storage, hidden, given)
            if expected is None:
                return False
            if number + 1 == len(self._states):
                self._states.append(expected)
        return True

    def _checked(
        self, number: int, storage: KVTensors, hidden: torch.Tensor, given: dict[str, Any]
    ) -> torch.Tensor | None:
        """The output of the library's layer; None if the compiled one is not taken, or has other numbers."""
        keys_values = storage.layers[number]
        before = [tensor.clone() for tensor in keys_values]
        expected = self._parts[number].layer(hidden, **given)
        if not isinstance(expected, torch.Tensor) or not self._stack.takes(hidden, given):
            return None
        written = [tensor.clone() for tensor in keys_values]
        for tensor, old in zip(keys_values, before, strict=True):
            tensor.copy_(old)
        found = self._stack.compute(hidden, given, number, number + 1)
        distances = [distance(found, expected, expected - hidden)]
        distances += [distance(tensor, new, new) for tensor, new in zip(keys_values, written, strict=True)]
        return expected if all(one <= TOLERANCE for one in distances) else None


def distance(found: torch.Tensor, expected: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest distance of a row, relative to the length of that row of ``scale``."""
    lengths = torch.linalg.vector_norm(scale, dim=-1).clamp_min(1e-12)
    return float((torch.linalg.vector_norm(found - expected, dim=-1) / lengths).max())


def _put(layers: ModuleList, stack: LayerStack) -> Any:
    """Put the stack in place of the layers."""
    stacked: Any = layers
    stacked.__class__, stacked.stack = StackedLayers, stack
    return stacked


def _is_called(target: Target, layers: ModuleList, stack: LayerStack) -> bool:
    """Put the stack in place of the layers; undo it if the model does not call it."""
    stacked = _put(layers, stack)
    cache = target.allocate()
    target.prefill(cache, 0, some_context(3, target.vocabulary))
    computed = stack.passes
    target.verify(cache, [DraftTree.bare(0)])
    if stack.passes == computed + 1:
        return True
    del stacked.stack
    stacked.__class__ = ModuleList
    return False


def _use_whole_passes(target: Target, stack: LayerStack) -> None:
    """Compute whole passes in our own code, if they have the logits of the model."""
    expected = _logits_of_passes(target)
    target.use_whole_passes(whole_pass_of(target.model, stack))
    found = _logits_of_passes(target) if target.whole_pass else []
    if any(distance(*pair, pair[1]) > TOLERANCE for pair in zip(found, expected, strict=False)):
        target.use_whole_passes(None)


def _logits_of_passes(target: Target) -> list[torch.Tensor]:
    """After a tree, after one of its nodes, and after the rest of a prompt."""
    cache, context = target.allocate(), some_context(SHORT, target.vocabulary)
    target.prefill(cache, 0, context)
    of_tree = target.verify(cache, [TREE])[0].logits.clone()
    target.commit(cache, 0, [0, 1])
    bare = target.verify(cache, [DraftTree.bare(1)])[0].logits.clone()
    target.commit(cache, 0, [])
    return [of_tree, bare, target.prefill(cache, 0, context, cache.slots[0].length).logits.clone()]
