"""Fake llama-cpp-python with predefined answers, limited to what benchmarks call."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import pytest

Answers = Mapping[tuple[int, ...], Sequence[int]]


class Lookup:
    """Drafter that copies the tokens after the first earlier occurrence of the last token."""

    def __init__(self, num_pred_tokens: int) -> None:
        self.num_pred_tokens = num_pred_tokens

    def __call__(self, context: Any) -> Any:
        (places,) = np.nonzero(context[:-1] == context[-1])
        return context[places[0] + 1 :][: self.num_pred_tokens] if len(places) else context[:0]


class Llama:
    """Model that answers the prompts of ``answers``, and keeps the KV cache of the last prompt until ``reset``."""

    answers: Answers
    made: list[Llama]

    def __init__(self, path: str, **options: Any) -> None:
        self.path, self.options = path, options
        self.reused: list[int] = []
        """Number of tokens of each prompt that were still in the KV cache."""
        self.passes: list[int] = []
        """Number of tokens that each pass of the last answer yielded, as far as the caller consumed them."""
        self._cached: list[int] = []
        self.made.append(self)

    def reset(self) -> None:
        self._cached = []

    def generate(self, prompt: list[int], *, temp: float, repeat_penalty: float) -> Iterator[int]:
        assert (temp, repeat_penalty) == (0.0, 1.0)
        assert len(prompt) < self.options["n_ctx"]
        same = (kept == token for kept, token in zip(self._cached, prompt, strict=False))
        self.reused.append(
            next((place for place, equal in enumerate(same) if not equal), min(len(self._cached), len(prompt)))
        )
        answer, context, draft = self.answers[tuple(prompt)], list(prompt), self.options["draft_model"]
        drafted: list[int] = []
        self.passes = []
        while True:
            self.passes.append(0)
            for guess in (*drafted, None):
                context.append(answer[len(context) - len(prompt)])
                self._cached = context.copy()
                self.passes[-1] += 1
                yield context[-1]
                if context[-1] != guess:
                    break
            drafted = draft(np.array(context)).tolist() if draft else []


SYSTEM_INFO = "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | F16C = 1 | FMA = 1 | BMI2 = 1 | NEON = 0 | REPACK = 1 | "


def install(
    monkeypatch: pytest.MonkeyPatch, answers: Answers, system_info: str = SYSTEM_INFO, *, offloads: bool = False
) -> list[Llama]:
    """Make the package importable, with these CPU features. Returns the list to which models are added."""
    found: list[Llama] = []
    made = type("Llama", (Llama,), {"answers": answers, "made": found})
    package, speculative = ModuleType("llama_cpp"), ModuleType("llama_cpp.llama_speculative")
    for module, contents in (
        (
            package,
            {
                "Llama": made,
                "__version__": "0.0.1",
                "llama_print_system_info": system_info.encode,
                "llama_supports_gpu_offload": lambda: offloads,
            },
        ),
        (speculative, {"LlamaPromptLookupDecoding": Lookup}),
    ):
        module.__spec__ = ModuleSpec(module.__name__, None)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found
