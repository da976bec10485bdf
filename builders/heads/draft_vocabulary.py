"""The draft vocabulary: the most frequent tokens of the model's answers, which are those that heads can draft.

EAGLE-3 (arXiv:2503.01840) and FR-Spec (arXiv:2502.14856) restrict output layers in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from hdtool.builders.heads.examples import Example
from hdtool.runtime.config import HeadsConfig


def draft_vocabulary(
    config: HeadsConfig, examples: Sequence[Example], vocabulary: int
) -> tuple[HeadsConfig, npt.NDArray[np.int64] | None]:
    """The token ids of the draft vocabulary; none, and no such setting, if it would hold all tokens."""
    if config.draft_vocabulary is None or config.draft_vocabulary >= vocabulary:
        return replace(config, draft_vocabulary=None), None
    return config, frequent_tokens(examples, config.draft_vocabulary, vocabulary)


def frequent_tokens(examples: Sequence[Example], number: int, vocabulary: int) -> npt.NDArray[np.int64]:
    """The most frequent tokens that the model wrote, in the order of their ids; lower ids first among equals."""
    counts = np.zeros(vocabulary, np.int64)
    for example in examples:
        np.add.at(counts, example.ids[example.drafted], 1)
    return np.sort(np.argsort(-counts, kind="stable")[:number])
