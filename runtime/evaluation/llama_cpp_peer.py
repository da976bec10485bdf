"""llama.cpp as a contender of a benchmark, on the GGUF file of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from hdtool.data.errors import ModelError, reason_of
from hdtool.data.spec_bench import AnsweredTurn
from hdtool.runtime.config import LLAMA_CPP, OTHER_FILE, ModelConfig, SamplingConfig
from hdtool.runtime.decode import room_for
from hdtool.runtime.evaluation.contenders import Passes, timed
from hdtool.runtime.grammar.guide import Guide
from hdtool.runtime.model.gguf.which_file import gguf_file
from hdtool.runtime.model.load import Loaded

PACKAGE = "llama-cpp-python"
ON_OWN_FILE = tuple(name for name in LLAMA_CPP if name != OTHER_FILE)
DRAFTED_ON_CPU, DRAFTED_ON_GPU = 2, 10
"""Tokens that its prompt lookup drafts: the numbers in the documentation of llama-cpp-python."""
LEAST_CONTEXT = 2048
"""Tokens of the KV cache to begin with; a longer question loads the model again, outside of the measured time."""


def files_of(model: ModelConfig, other: str | None = None) -> dict[str, Path]:
    """The GGUF file of each row of llama.cpp that has one: that of the model, or the one named beside it."""
    own = gguf_file(model)
    found = dict.fromkeys(ON_OWN_FILE, own) if own else {}
    return found | ({OTHER_FILE: Path(other).expanduser()} if other else {})


def why_not(name: str, files: Mapping[str, Path], model: ModelConfig, sampling: SamplingConfig) -> str:
    """Why a row of llama.cpp cannot take part, as the end of a sentence; empty if it can."""
    if name not in files:
        return f"runs on GGUF files, and {model.name} is none: name one with --model"
    if not find_spec("llama_cpp"):
        return f"needs {PACKAGE}, not installed here: pip install {PACKAGE}"
    if not sampling.is_greedy or sampling.repetition_penalty not in (None, 1.0):
        return "is measured with greedy answers alone: leave it out, or --temperature and --repetition-penalty"
    return ""


class LlamaCppContender:
    """llama.cpp, plain or with its prompt lookup: greedy answers to the same ids, with the same end tokens and length.

    Its products round activations to few bits, so that answers may differ from those in float32.
    """

    def __init__(self, loaded: Loaded, file: Path, max_new_tokens: int, *, lookup: bool) -> None:
        self._loaded = loaded
        self._file = file
        self._most = max_new_tokens
        self._looks_up = lookup
        self._context = 0
        self._llama: Any = None
        self._passes = Passes(0)

    def fresh(self) -> LlamaCppContender:
        return self  # each answer begins with an empty KV cache, and nothing else is kept

    def answer(self, prompt: list[int], guide: Guide | None = None, prediction: Sequence[int] = ()) -> AnsweredTurn:
        assert guide is None, "its grammars are its own, so the answers could not be compared"
        room, at_the_end = room_for(self._loaded.target, prompt, self._most)
        self._provide(len(prompt) + room)
        # Without this, it would keep the part of the KV cache that the prompt shares with the one before.
        self._llama.reset()
        self._passes = passes = Passes(len(prompt))
        output_ids, seconds = timed(torch.device("cpu"), partial(self._generated, prompt, room))
        return passes.answer(self._loaded, output_ids, seconds, at_the_end, drafts=self._looks_up)

    def _generated(self, prompt: list[int], room: int) -> list[int]:
        found: list[int] = []
        for token in self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
            found.append(int(token))
            if len(found) == room or token in self._loaded.stops:
                break
        return found

    def _provide(self, tokens: int) -> None:
        """Load the model, unless it is loaded with a KV cache of so many tokens."""
        if self._context >= tokens:
            return
        from llama_cpp import Llama

        self._context = max(LEAST_CONTEXT, 1 << (tokens - 1).bit_length())
        threads, on_gpu = torch.get_num_threads(), self._loaded.target.device.type == "cuda"
        self._llama = None  # its memory is needed
        try:
            self._llama = Llama(
                str(self._file),
                n_ctx=self._context,
                n_threads=threads,
                n_threads_batch=threads,
                n_gpu_layers=-1 if on_gpu else 0,
                # Its drafts are verified by all logits; unless they are asked for, it has no room for long prompts.
                logits_all=self._looks_up,
                draft_model=self._lookup(DRAFTED_ON_GPU if on_gpu else DRAFTED_ON_CPU) if self._looks_up else None,
                verbose=False,
            )
        except (ValueError, OSError, RuntimeError) as error:
            raise ModelError(
                f"llama.cpp cannot load {self._file} ({reason_of(error)}): leave llama.cpp out of --methods, or "
                f"install another {PACKAGE}"
            ) from error

    def _lookup(self, most: int) -> Any:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        draft: Any = LlamaPromptLookupDecoding(num_pred_tokens=most)

        def counted(context: Any, **options: Any) -> Any:
            found = draft(context, **options)
            self._passes.note(len(context), len(found))
            return found

        return counted
