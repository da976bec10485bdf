"""Fake OpenVINO GenAI with predefined answers, limited to what benchmarks call."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Answers = Mapping[tuple[int, ...], Sequence[int]]


class Pipeline:
    """Pipeline that answers the prompts of ``answers``. With prompt lookup, each pass yields two tokens."""

    answers: Answers
    made: list[Pipeline]

    def __init__(self, place: str, device: str, **options: Any) -> None:
        if "broken" in place:
            raise RuntimeError("no model here\nsecond line")
        self.place, self.device, self.options = place, device, options
        self.settings: Any = None
        self.made.append(self)

    def generate(self, inputs: Any, settings: Any) -> Any:
        self.settings = settings
        prompt, mask = inputs
        assert mask.shape == prompt.shape and mask.all()
        tokens: list[int] = []
        for token in self.answers[tuple(prompt[0].tolist())][: settings.max_new_tokens]:
            tokens.append(token)
            if token in settings.stop_token_ids:
                break
        size = 2 if self.options.get("prompt_lookup") else 1
        passes = [len(tokens[start : start + size]) for start in range(0, len(tokens), size)]
        metrics = SimpleNamespace(raw_metrics=SimpleNamespace(m_batch_sizes=passes))
        return SimpleNamespace(tokens=[tokens], perf_metrics=metrics)


def install(monkeypatch: pytest.MonkeyPatch, answers: Answers) -> list[Pipeline]:
    """Make the packages importable. Returns the list to which pipelines are added."""
    found: list[Pipeline] = []
    contents: dict[str, dict[str, Any]] = {
        "openvino": {"Tensor": lambda array: array},
        "openvino_genai": {
            "__version__": "2.0",
            "LLMPipeline": type("LLMPipeline", (Pipeline,), {"answers": answers, "made": found}),
            "SchedulerConfig": lambda: SimpleNamespace(enable_prefix_caching=True),
            "GenerationConfig": SimpleNamespace,
            "TokenizedInputs": lambda ids, mask: (ids, mask),
        },
    }
    for name, members in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return found
