"""Requests for the tests: the demo's held-out prompts, and what to ask for them."""

from __future__ import annotations

from typing import Any

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer

GREEDY = {"temperature": 0.0, "max_tokens": 120}
ENGINE = {"model": str(demo.MODEL), "max_model_len": 1024, "max_num_seqs": 16, "disable_log_stats": False}


def requests(count: int, **sampling: Any) -> list[dict[str, Any]]:
    """The first prompts, as token ids, each with a length of answer of its own."""
    tokenizer = load_tokenizer(ModelConfig())
    prompts = list(read_prompts(demo.PROMPTS))
    return [
        {
            "prompt": encode_conversation(tokenizer, prompts[number % len(prompts)].messages),
            "sampling": {**GREEDY, "max_tokens": 40 + 20 * (number % 6), **sampling},
        }
        for number in range(count)
    ]
