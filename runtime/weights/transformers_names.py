"""Maps a model's parameters to a checkpoint's tensors, by transformers' own tables of renamings and conversions.

transformers renames and merges weights while it loads them, such as the experts of a mixture. The tables are public;
applying them to names and numbers instead of weights tells where each parameter's rows are stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from hdtool.runtime.weights.stored_pieces import Piece
from hdtool.runtime.weights.traced_conversions import traced
from hdtool.runtime.weights.weight_store import StoredWeight


@dataclass
class _Conversion:
    """A weight conversion of transformers, and the pieces that it takes, grouped by the source pattern they match."""

    converter: Any
    pieces: dict[str, list[Piece]] = field(default_factory=dict)

    def convert(self, target: str, model: Any, parts: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters, by name, that transformers makes from ``parts``, the pieces' contents."""
        converter, rest = deepcopy(self.converter), list(parts)
        for pattern, pieces in self.pieces.items():
            for _ in pieces:
                converter.add_tensor(target, pattern, pattern, rest.pop(0))
        made = converter.convert(target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def parameter(self, name: str, target: str, model: Any, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.convert(target, model, parts)[name]


def stored_weights(transforms: Sequence[Any], pieces: Mapping[str, Piece], model: Any) -> dict[str, StoredWeight]:
    """Return how ``transforms`` make each parameter of a model from ``pieces``, which are keyed by checkpoint name."""
    transforms = deepcopy(list(transforms))
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parameters, prefix = model.state_dict(), model.base_model_prefix
    weights: dict[str, StoredWeight] = {}
    conversions: dict[str, _Conversion] = {}
    for name in sorted(pieces, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, parameters)
        if target not in parameters and name in parameters:
            target, pattern = rename_source_key(name, [], [], prefix, parameters)
        if target not in parameters:
            continue
        if pattern is None:
            weights[target] = StoredWeight((pieces[name],), pieces[name].shape)
        else:
            conversion = conversions.setdefault(target, _Conversion(by_pattern[pattern]))
            conversion.pieces.setdefault(pattern, []).append(pieces[name])
    for target, conversion in conversions.items():
        weights.update(_converted(target, conversion, model, parameters))
    return weights


def _converted(
    target: str, conversion: _Conversion, model: Any, parameters: Mapping[str, Any]
) -> dict[str, StoredWeight]:
    pieces = [piece for found in conversion.pieces.values() for piece in found]
    depends_on_shapes = any(getattr(operation, "check_dims", False) for operation in conversion.converter.operations)
    names = [target]
    if len(conversion.converter.target_patterns) > 1:
        first, *others = conversion.converter.target_patterns
        names += [target.replace(first, other) for other in others]
    return {
        name: traced(
            pieces,
            tuple(parameters[name].shape),
            partial(conversion.parameter, name, target, model),
            full=depends_on_shapes,
        )
        for name in names
        if name in parameters
    }
