"""Checks that this installation loads the embedded model and decodes ten tokens, with and without drafts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hdtool.builders.diagnosis.finding import MEND, Finding
from hdtool.data import demo
from hdtool.data.errors import reason_of
from hdtool.data.prompts import Prompt
from hdtool.runtime.answerer import Answerer
from hdtool.runtime.config import DecodeConfig, ModelConfig, SamplingConfig, StoresConfig

PROMPT = "def read(path):"
TOKENS = 10
NODES = 8
"""Draft tokens of each step: their number is not left to measured passes, which may say that none pay."""


def decoding_findings() -> Iterator[Finding]:
    try:
        (plain, _), (drafted, steps) = decoded("ar"), decoded("hd")
    except Exception as error:  # libraries that do not fit raise many kinds
        advice = "install the versions of constraints.txt, and report this with the output of hdtool doctor --json"
        yield Finding("decoding", f"the embedded model cannot be used ({reason_of(error)})", MEND, advice)
        return
    if drafted != plain:
        advice = "report this with the output of hdtool doctor --json"
        yield Finding("decoding", "the embedded model gives another answer with drafts than without", MEND, advice)
        return
    yield Finding("decoding", f"the embedded model gives {len(plain)} tokens in {steps} steps, as without drafts")


def decoded(method: str) -> tuple[list[int], int]:
    """An answer of the embedded model and the number of its steps; no proof or cost curve is kept."""
    decoding = DecodeConfig(method, draft_tokens=NODES, max_new_tokens=TOKENS)
    stores = StoresConfig(str(demo.MODEL_STORE), str(demo.CORPUS_INDEX))
    answerer = Answerer(
        ModelConfig(dtype="float32", threads=torch.get_num_threads()),
        decoding,
        SamplingConfig(),
        store_set=stores,
    )
    for answer in answerer.all_answers([Prompt.from_text(PROMPT)]):
        for _ in answer:
            pass
    return answer.output_ids, answer.stats.steps
