"""What checks have found out about a model; engines decide by these facts alone what they may compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hdtool.data.errors import FamilyError
from hdtool.runtime.caches.kv_cache import LayerShape
from hdtool.runtime.caches.recurrent_states import StateShape

if TYPE_CHECKING:
    from hdtool.runtime.caches.replay_slots import TensorPath
    from hdtool.runtime.engines.stock.recurrent_layers import RecurrentLayers


@dataclass(frozen=True)
class ModelFacts:
    """What checks have established about one model."""

    shapes: tuple[LayerShape, ...] = ()
    """Shapes of the keys and values that each layer caches; empty for a model that cannot verify trees."""
    state_shapes: tuple[StateShape, ...] = ()
    """Shapes of the recurrent layers' states."""
    recurrent: RecurrentLayers | None = None
    """Runs recurrent layers over trees; None if the model has none."""
    continues: bool = True
    """True if passes continue correctly from tokens that earlier passes read, so prompts may be read in parts."""
    rounding: float | None = None
    """Rounding error of the logits, in standard deviations of the logits.

    Measured for quantized models and for models that round more than their dtype suggests; otherwise None.
    """
    no_trees: FamilyError | None = None
    """Why the model cannot verify trees; None if it can."""
    replaced: frozenset[TensorPath] = frozenset()
    """Paths of the cache tensors that every pass replaces, for a model that verifies chains."""
