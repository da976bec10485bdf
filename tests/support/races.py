"""Races of single rows in float64, as a device runs them in float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hdtool.runtime.core.exponential_race import ExponentialRace
from hdtool.runtime.core.race_leaders import LEADERS, RACE
from hdtool.runtime.core.top_k_top_p import DrawOptions
from hdtool.runtime.kernels.compiled import Array

NEAR = 1e-3
"""Distance of the logarithms of two weights that a device may take for each other."""


def keys_of(row: npt.NDArray[np.float32], position: int, draws: DrawOptions) -> npt.NDArray[np.float64]:
    """Return the negative logarithms of all tokens' times."""
    uniforms = ExponentialRace(int(draws.seed)).uniforms(position, len(row))
    keys: npt.NDArray[np.float64] = exponents_of(row, draws) - np.log(-np.log1p(-uniforms))
    return keys


def exponents_of(row: npt.NDArray[np.float32], draws: DrawOptions) -> npt.NDArray[np.float64]:
    exponents: npt.NDArray[np.float64] = (row.astype(np.float64) - row.max()) / np.float64(draws.temperature)
    return exponents


def race_of(row: npt.NDArray[np.float32], position: int, draws: DrawOptions) -> Array:
    """Return the outcome of a row's race in a ``RACE`` record, which fewer tokens than leaders do not fill."""
    race = np.zeros(1, RACE)
    race["keys"] = -np.inf
    keys, exponents = keys_of(row, position, draws), exponents_of(row, draws)
    race["total"], race["highest"] = np.exp(exponents).sum(), row.max()
    tokens = np.arange(len(row))
    for place, leader in enumerate(np.argsort(-keys)[:LEADERS]):
        if keys[leader] == -np.inf:
            break
        distance, is_tied = exponents - exponents[leader], row == row[leader]
        for field, bound in (("certain", NEAR), ("possible", -NEAR)):
            is_before = np.where(is_tied, tokens > leader, distance > bound)
            race[field][0, place] = np.exp(exponents[is_before]).sum()
        race["tokens"][0, place], race["scores"][0, place], race["keys"][0, place] = leader, row[leader], keys[leader]
    record: Array = race[0]
    return record
