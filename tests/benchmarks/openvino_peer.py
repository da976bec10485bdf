"""OpenVINO GenAI as a contender, plain or with its prompt lookup."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hdtool.builders.evaluation.contenders import PassCounter
from hdtool.builders.evaluation.timing import Stopwatch
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.errors import ModelError, error_reason
from hdtool.runtime.core.request import room_for
from hdtool.runtime.generation.grammar import Guide
from hdtool.runtime.target.load import Loaded

PACKAGE = "openvino-genai"
DRAFTED, MAX_NGRAM_SIZE = 5, 3
"""Draft tokens and longest n-gram of prompt lookup, as in the example of OpenVINO's documentation."""


def is_installed() -> bool:
    return find_spec("openvino_genai") is not None


def version() -> str:
    import openvino_genai

    return str(openvino_genai.__version__)


class OpenVinoContender:
    """OpenVINO GenAI, which answers greedily with hdtool's prompt ids, stop tokens and length limit.

    Runs a converted model or a GGUF file. OpenVINO chooses the precision and the quantization of activations and KV
    cache for the CPU. Prefix caching is off.
    """

    def __init__(self, loaded: Loaded, place: Path, max_new_tokens: int, *, lookup: bool) -> None:
        import openvino_genai

        self._loaded = loaded
        self._max_new_tokens = max_new_tokens
        self._looks_up = lookup
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        options: dict[str, Any] = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        if lookup:
            options["prompt_lookup"] = True
        try:
            self._pipeline: Any = openvino_genai.LLMPipeline(str(place), "CPU", **options)
        except RuntimeError as error:
            raise ModelError(
                f"OpenVINO GenAI cannot load {place} ({error_reason(error)}): name a folder that optimum-cli export "
                "openvino wrote, or a GGUF file of an architecture that it reads"
            ) from error

    def fresh(self) -> OpenVinoContender:
        return self  # it keeps no state between answers

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        import openvino
        import openvino_genai

        room, at_the_end = room_for(self._loaded.target, prompt, self._max_new_tokens)
        settings = openvino_genai.GenerationConfig()
        settings.max_new_tokens = room
        settings.do_sample = False
        settings.stop_token_ids = set(self._loaded.stops)
        if self._looks_up:
            settings.num_assistant_tokens, settings.max_ngram_size = DRAFTED, MAX_NGRAM_SIZE
        ids = np.array([prompt], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        with Stopwatch(torch.device("cpu")) as watch:
            found = self._pipeline.generate(inputs, settings)
        passes = PassCounter(len(prompt))
        known = len(prompt)
        # The metrics have the tokens per pass, but not the number of draft tokens.
        for tokens in found.perf_metrics.raw_metrics.m_batch_sizes[:-1]:
            known += tokens
            passes.note(known, 0)
        return passes.answer(self._loaded, list(found.tokens[0]), watch, at_the_end, drafts=self._looks_up)
