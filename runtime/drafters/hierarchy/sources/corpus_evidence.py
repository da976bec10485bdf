"""Evidence of the corpus index at a node of a growing tree."""

from __future__ import annotations

from hdtool.runtime.stores.corpus_ranges import (
    FEWEST_SAMPLES,
    LONGEST_RANGE,
    RANGES,
    ROWS,
    SAMPLES,
    narrow,
    no_shards,
    places_of,
    range_record,
    read_samples,
    size_of,
    tally,
)

__all__ = [
    "FEWEST_SAMPLES",
    "LONGEST_RANGE",
    "RANGES",
    "ROWS",
    "SAMPLES",
    "narrow",
    "no_shards",
    "places_of",
    "range_record",
    "read_samples",
    "size_of",
    "tally",
]
