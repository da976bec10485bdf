"""Checks that a model respects masks and positions after a long context.

This detects attention windows that the model's own code applies. No long prompt is read: all layers share random keys
and values, so a pass takes little longer than after a short context.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import Module
from transformers.cache_utils import Cache, DynamicCache

from hdtool.runtime.caches.kv_cache import KVTensors, LayerShape
from hdtool.runtime.caches.recurrent_states import has_states
from hdtool.runtime.caches.transformers_views import KVView
from hdtool.runtime.core.tree import LARGEST_TREE, ROOT, DraftTree
from hdtool.runtime.model.pass_inputs import AttentionMask, AttentionMasks, AttentionWindow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DEFAULT_LENGTH, LARGEST_LENGTH = 4096, 32_768
"""Minimum and maximum context length of the check in tokens, within the model's own limit."""
SIZE = re.compile(r"window|chunk|conv|kernel|local|keep|block|span|index_topk")
RECURRENT_SIZE = re.compile(r"conv|chunk|kernel")
"""Matches the names of sizes that belong to recurrent layers rather than to attention windows."""
COUNT = re.compile(r"^_|^(num|n)_|layers|experts|heads|pattern|theta|freq|multiple")
MASKED_BY_KIND = ("sliding_window", "attention_chunk_size")
"""Names of the window sizes that hdtool's masks apply if a configuration has ``layer_types``."""
KNOWN_CODE = ("torch", "transformers", "hdtool", "accelerate")
ROWS = 4
"""Number of rows of the tree: the root and its children."""
Forward = Callable[[list[list[int]], Sequence[Sequence[int]], AttentionMask, Cache], torch.Tensor]


@dataclass(frozen=True)
class LongContext:
    """A context after which the model is checked by verifying a tree."""

    length: int
    hidden: int
    """Number of cache positions that the mask hides, in the middle and at the end, like other branches of a tree."""
    largest: tuple[str, int] | None
    """Name and value of the largest window or state size that hdtool's masks don't apply; None without such a size."""

    @property
    def found_in(self) -> str:
        """Description of this context for error messages."""
        return f"after a context of {self.length:,} tokens"

    @property
    def cause(self) -> str:
        named = f" (its {self.largest[0]} is {self.largest[1]:,})" if self.largest else ""
        return f"it has its own window or state, indexed by cache position{named}"

    def logits(
        self,
        forward: Forward,
        masks: AttentionMasks,
        tokens: Sequence[int],
        shapes: Sequence[LayerShape],
        filled: DynamicCache,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits after a root and after one of its children, computed in two ways: ``(of_tree, plain)``.

        ``of_tree`` is from a pass over a tree, ``plain`` from plain decoding, where the model makes its own masks.
        ``tokens`` are the root and the nodes. ``filled`` is a cache with sample keys and values of any tokens.
        """
        first, middle, inner = self.length, self.length // 2, self.hidden // 2
        cache = _drawn_cache(shapes, filled, first + self.hidden + ROWS)
        root, *nodes = tokens[:ROWS]
        cache.begin_after(first)
        plain = []
        for token in (root, nodes[-1]):
            plain.append(forward([[token]], [[cache.length]], None, cache)[0, -1])
            cache.length += 1
        for tensor in cache.storage.tensors:
            later = tensor.narrow(3, middle, first - middle)
            tensor.narrow(3, middle + inner, first - middle).copy_(later.clone())
        mask = masks.of_trees([DraftTree.of(root, nodes, [ROOT] * len(nodes))], [first])
        mask = _with_hidden(_with_hidden(mask, first, self.hidden - inner), middle, inner)
        cache.begin_after(first + self.hidden)
        positions = [first, *([first + 1] * len(nodes))]
        of_tree = forward([[root, *nodes]], [positions], mask, cache)[0]
        return of_tree[[0, -1]], torch.stack(plain)


def long_contexts(model: PreTrainedModel, windows: Sequence[AttentionWindow], limit: int | None) -> list[LongContext]:
    """Return the contexts after which to check a model: none if hdtool's masks cover all of its attention windows.

    The masks cover all windows if they apply all sizes in the configuration and if all of the model's code is known,
    such as that of ``transformers``, which takes its sizes from the configuration.
    """
    config = model.config.get_text_config(decoder=True)
    sizes = dict(sizes_of(vars(config)))
    if getattr(config, "layer_types", None):
        sizes = {name: size for name, size in sizes.items() if name not in MASKED_BY_KIND}
    foreign = [module for module in model.modules() if _is_foreign(module)]
    for module in foreign:
        sizes.update(sizes_of(vars(module)))
    if has_states(DynamicCache(config=config)):
        sizes = {name: size for name, size in sizes.items() if not RECURRENT_SIZE.search(name)}
    masked = {size for window in windows for size in (window.window, window.chunk)}
    sizes = {name: size for name, size in sizes.items() if size not in masked}
    if not sizes and not foreign:
        return []
    largest = max(sizes.items(), key=lambda entry: entry[1], default=None)
    length = min(max(DEFAULT_LENGTH, largest[1] * 5 // 4 if largest else 0), LARGEST_LENGTH)
    if limit is None or length + length // 2 + ROWS <= limit:
        return [LongContext(length, length // 2, largest)]
    # Near the model's context limit fewer positions can be hidden, so a second context checks that end.
    inner = max(1, (limit - ROWS) * 2 // 3)
    return [
        LongContext(inner, inner // 2, largest),
        LongContext(max(1, min(length, limit - 2)), LARGEST_TREE + 1 - ROWS, largest),
    ]


def sizes_of(attributes: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the name and value of each attribute that is the size of a window or a state, judging by its name."""
    for name, value in attributes.items():
        if type(value) is int and value > 1 and SIZE.search(name) and not COUNT.search(name):
            yield name, value


def _is_foreign(module: Module) -> bool:
    """Return True if a module's class is from a package outside ``KNOWN_CODE``, or if its ``forward`` was replaced.

    Linear layers are exempt, as are forwards that accelerate replaced.
    """
    is_replaced = "forward" in vars(module) and not hasattr(module, "_hf_hook")
    is_known = type(module).__module__.split(".")[0] in KNOWN_CODE
    return (is_replaced or not is_known) and not hasattr(module, "in_features")


class _SharedContext(KVView):
    """A cache whose layers may share one context, but each keep their own keys and values of later tokens.

    Compiled layers don't accept this class, since they would write to the shared tensors.
    """

    def __init__(self, storage: KVTensors) -> None:
        super().__init__(storage, 1, 0, has_begun=True)

    def begin_after(self, context: int) -> None:
        """Discard all but the first ``context`` tokens."""
        self.length = self._context = context
        self._later: dict[tuple[int, int], torch.Tensor] = {}
        """Rows after the context, by layer and ``id`` of the cached tensor."""

    def write(self, tensor: torch.Tensor, new: torch.Tensor, layer: int) -> torch.Tensor:
        before = self._later.get((layer, id(tensor)), new[:, :, :0])
        later = self._later[layer, id(tensor)] = torch.cat([before, new], 2)
        end = self._context + later.shape[2]
        tensor[:, :, self._context : end] = later
        return tensor[:, :, :end]


def _drawn_cache(shapes: Sequence[LayerShape], filled: DynamicCache, capacity: int) -> _SharedContext:
    """Return a cache with random keys and values.

    Layers of equal shape share them, unless some layers read the keys and values of another layer.
    """
    if any(shape.keys is None for shape in shapes):
        storage = KVTensors.for_layers(shapes, capacity)
    else:
        different = list(dict.fromkeys(shapes))
        tensors = KVTensors.for_layers(different, capacity)
        views = [tensors.layers[different.index(shape)] for shape in shapes]
        indexers = {
            number: tensors.indexers[different.index(shape)] for number, shape in enumerate(shapes) if shape.indexer
        }
        storage = KVTensors(tensors.tensors, views, tensors.capacity, indexers=indexers)
    random = torch.Generator().manual_seed(1)
    for keys, values in dict.fromkeys(storage.layers):
        if not keys.numel():
            continue
        like: list[Any] = [
            layer for layer, views in zip(filled.layers, storage.layers, strict=True) if views[0] is keys
        ]
        layer = max(like, key=lambda entry: float(entry.values.float().norm()))
        # Early keys are large, so that much attention goes to positions a window would hide. Values repeat, like those
        # of a repeated token in the first layer, so that choices between equal ones depend on the order of keys.
        count = keys.shape[2]
        drawn = torch.randn(keys.shape, generator=random) * torch.linspace(2, 0.5, count)[:, None]
        keys.copy_(drawn * layer.keys.float().std().cpu())
        chosen = torch.randint(layer.values.shape[2], (count,), generator=random)
        values.copy_(layer.values[:1, :, chosen.to(layer.values.device)])
    for keys, number in {keys: number for number, keys in storage.indexers.items()}.items():
        seen: Any = filled.layers[number]
        keys.copy_(torch.randn(keys.shape, generator=random) * seen.indexer_keys.float().std().cpu())
    return _SharedContext(storage)


def _with_hidden(mask: AttentionMask, start: int, hidden: int) -> AttentionMask:
    """Return the mask with ``hidden`` fully masked columns inserted at ``start``."""
    if isinstance(mask, dict):
        return {kind: None if part is None else _inserted(part, start, hidden) for kind, part in mask.items()}
    assert mask is not None
    return _inserted(mask, start, hidden)


def _inserted(mask: torch.Tensor, start: int, hidden: int) -> torch.Tensor:
    columns = mask.new_full((*mask.shape[:-1], hidden), torch.finfo(mask.dtype).min)
    return torch.cat([mask[..., :start], columns, mask[..., start:]], dim=-1)
