"""The choices of one request, as they are generated."""

from __future__ import annotations

import asyncio
from itertools import islice
from typing import Any

import pytest

from hdtool.data.errors import ModelError, PromptError
from hdtool.runtime.core.step import Finish
from hdtool.runtime.generation.text_stream import REPLACEMENT, token_text
from hdtool.runtime.integrations.server.choice_stream import ChoiceStream, _refusal
from hdtool.runtime.integrations.server.engine_thread import EngineThread, OverloadError, Tenants
from hdtool.runtime.integrations.server.metrics import Metrics
from hdtool.runtime.integrations.server.openai_formats import CompletionFormat, Delta, RequestError, TokenLogprobs
from hdtool.runtime.integrations.server.openai_requests import ChatRequest, CompletionRequest
from hdtool.runtime.integrations.server.request_preparation import Preparer
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.load import Loaded
from tests.server.plain import plain_ids

PROMPT = [*range(40, 60)]


def answered(loaded: Loaded, request: ChatRequest | CompletionRequest) -> tuple[ChoiceStream, str]:
    """Generate all choices of a request; return them with the server's metrics."""
    decoding = DecodeConfig(method="ar", batch_size=2)
    tenants = Tenants(loaded, decoding, StoresConfig(model_db="none", corpus_db="none"), [""])
    engine = EngineThread(loaded.target, tenants, decoding, max_waiting=9, prefix_bytes=0)
    preparer, metrics = Preparer(loaded, decoding, SamplingConfig()), Metrics(engine)

    choices = preparer.chat(request, "") if isinstance(request, ChatRequest) else preparer.completion(request)

    async def generate() -> ChoiceStream:
        stream = ChoiceStream(engine, metrics, choices)
        stream.submit("")
        async for _ in stream.deltas():
            pass
        return stream

    engine.start()
    try:
        return asyncio.run(generate()), metrics.text().decode()
    finally:
        engine.stop()


def test_the_most_probable_of_tokens_with_one_text_is_reported(loaded: Loaded) -> None:
    tokenizer = loaded.tokenizer
    parts_of_characters = (token for token in range(len(tokenizer)) if token_text(tokenizer, token) == REPLACEMENT)
    first, second = islice(parts_of_characters, 2)
    entry = TokenLogprobs(first, -0.5, [(first, -0.5), (second, -2.0)])
    form = CompletionFormat("demo", tokenizer, [""], with_usage=False)
    (choice,) = form.whole([Delta(REPLACEMENT, logprobs=[entry])], {})["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{REPLACEMENT: -0.5}]


@pytest.mark.parametrize("min_p", [0.0, 0.02, 1.0])
def test_min_p_leaves_out_improbable_tokens(loaded: Loaded, min_p: float) -> None:
    settings: dict[str, Any] = {"temperature": 1.8, "seed": 3, "min_p": min_p}
    request = CompletionRequest.of({"prompt": PROMPT, "max_tokens": 24, "logprobs": 0, **settings})
    plain = plain_ids(loaded, PROMPT, 24, temperature=1.8, seed=3)
    greedy = plain_ids(loaded, PROMPT, 24)
    stream, _ = answered(loaded, request)
    tokens = [each.token for each in stream._choices[0].recorded or ()]
    assert tokens == plain_ids(loaded, PROMPT, 24, **settings)
    assert (tokens == plain, tokens == greedy) == (min_p == 0, min_p == 1)


@pytest.mark.parametrize("min_p", [-0.1, 1.5])
def test_min_p_out_of_range_is_refused(min_p: float) -> None:
    with pytest.raises(RequestError, match=r"^min_p: [^\n]+$"):
        CompletionRequest.of({"prompt": PROMPT, "min_p": min_p})


def test_a_step_that_comes_after_the_end_of_the_server_is_dropped(loaded: Loaded) -> None:
    stream, _ = answered(loaded, CompletionRequest.of({"prompt": [7, 8], "max_tokens": 1}))
    stream._deliver(0, OverloadError("late"))


def test_a_prompt_is_counted_once_for_all_of_its_choices(loaded: Loaded) -> None:
    request = CompletionRequest.of({"prompt": [PROMPT, [7, 8]], "n": 3, "max_tokens": 2})
    stream, metrics = answered(loaded, request)
    assert stream.usage["prompt_tokens"] == 22
    assert "hdtool_prompt_tokens_total 22.0" in metrics
    assert "hdtool_cached_prompt_tokens_total 0.0" in metrics
    assert "hdtool_generated_tokens_total 12.0" in metrics


@pytest.mark.parametrize(("has_tools", "tokens"), [(True, 1), (False, 6)])
def test_a_special_token_stops_an_answer_if_the_text_shows_it(loaded: Loaded, has_tools: bool, tokens: int) -> None:
    special = loaded.tokenizer.convert_tokens_to_ids("<|user|>")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool] if has_tools else None}
    body |= {"max_tokens": 6, "temperature": 0, "logit_bias": {str(special): 100}, "stop": "<|user|>"}
    stream, _ = answered(loaded, ChatRequest.of(body))
    stats = stream._texts[0].stats
    assert (stats.tokens, stats.finish) == (tokens, Finish.STOP if has_tools else Finish.LENGTH)


def test_faults_of_the_model_are_not_the_requests() -> None:
    statuses = [_refusal(error).status for error in (ModelError("NaN"), PromptError("long"), ValueError())]
    assert statuses == [500, 400, 500]


def test_too_many_answers_are_refused_before_they_are_planned(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preparer, "_choice", lambda *of: pytest.fail("an answer is planned"))
    preparer = Preparer(loaded, DecodeConfig(method="ar"), SamplingConfig(), max_answers=8)
    with pytest.raises(PromptError, match="asks for 9 answers, and this server takes at most 8 at once"):
        preparer.completion(CompletionRequest.of({"prompt": [PROMPT] * 3, "n": 3}))
