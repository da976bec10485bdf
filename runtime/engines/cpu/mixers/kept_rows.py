"""What mixers kept of the rows of a pass, copied from where the next pass writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hdtool.runtime.engines.cpu.layer_record import JOURNAL, TEAM, Numbers
from hdtool.runtime.engines.cpu.mixers.mix import OF_SLOT, accept, mixer_numbers
from hdtool.runtime.kernels.compiled import Array

if TYPE_CHECKING:
    from hdtool.runtime.engines.cpu.mixers.mixer_table import MixerTable
    from hdtool.runtime.model.cache.states import States


class KeptRows:
    """The rows of one pass over trees."""

    def __init__(self, mixers: MixerTable, shape: Numbers, layers: Numbers, journal: Array) -> None:
        self._mixers, self._shape, self._layers, self._journal = mixers, shape, layers, journal
        shape[JOURNAL], shape[TEAM] = journal.ctypes.data, 0

    def accept(self, path: Array, states: States) -> None:
        """Turn the states of a slot, wherever they are now, into those after a path of its rows."""
        self._mixers.fill_states(self._layers, states, int(path[OF_SLOT]))
        scratch = torch.empty(mixer_numbers(self._shape), dtype=torch.float32)
        accept(self._shape, self._layers, np.zeros(1, np.int64), path, scratch.data_ptr())
