"""Every field of ``GenerationConfig`` that changes tokens is honoured as ``generate`` does it, or refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from hdtool.data.chat import encode_conversation
from hdtool.data.errors import ModelError
from hdtool.runtime.answering.answer_plan import NEUTRAL_SETTINGS, generate_options, sampler_for
from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.session import decode
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.generation.generation_settings import REFUSED_SETTINGS, generation_settings
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from tests.support.decoding import answers_of

MAX_NEW_TOKENS = 80
ASKED = [{"role": "user", "content": "Tom has 3 boxes with 12 pencils each. How many pencils does he have?"}]

GREEDY: dict[str, Any] = {
    "min_length": 95,
    "min_new_tokens": 70,
    "max_time": 0.0,
    "stop_strings": ["pencils"],
    "repetition_penalty": 1.7,
    "encoder_repetition_penalty": 3.0,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": "the second token of the plain answer",
    "suppress_tokens": "the second token of the plain answer",
    "begin_suppress_tokens": "the first token of the plain answer",
    "sequence_bias": "the second token of the plain answer",
    "exponential_decay_length_penalty": (2, 3.0),
    "eos_token_id": "the second token of the plain answer",
    "guidance_scale": 1.5,
    "watermarking_config": {"greenlist_ratio": 0.25, "bias": 6.0, "seeding_scheme": "lefthash"},
}
"""Settings that apply to greedy decoding and sampling, each with a value that changes the output."""

SAMPLED: dict[str, Any] = {
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.3,
    "top_h": 0.5,
    "typical_p": 0.4,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.3,
    "renormalize_logits": True,
}
"""Honoured where tokens are drawn; each with a value that changes the scores."""

REFUSED_VALUES: dict[str, Any] = {
    "num_beams": 3,
    "num_beam_groups": 2,
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "constraints": ["anything"],
    "force_words_ids": [[5]],
    "token_healing": True,
    "is_assistant": True,
    "assistant_ensemble_weight": 0.5,
    "cache_implementation": "quantized",
}

HONOURED_ELSEWHERE = {
    "forced_bos_token_id",  # after a prompt of one token: tested by itself
    "forced_eos_token_id",  # at the longest length: tested by itself
    "remove_invalid_values",  # where a model overflows: tested by itself
}
OF_HDTOOL = {"max_length", "max_new_tokens", "do_sample", "temperature"}
"""hdtool's own options: their defaults are its own, and documented."""

NO_TOKEN_CHANGES = {
    *NEUTRAL_SETTINGS,
    # How keys and values are kept, how much is computed at once, what is reported.
    *("use_cache", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config", "disable_compile"),
    *("continuous_batching_config", "low_memory"),
    # Of beams, which are refused.
    *("early_stopping", "length_penalty", "diversity_penalty"),
    # Of draft models, which hdtool replaces.
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
    # Of padding, of empty prompts and of encoder-decoders.
    *("pad_token_id", "bos_token_id", "decoder_start_token_id"),
    "transformers_version",
}


@pytest.fixture(scope="module")
def demo() -> Loaded:
    return load(ModelConfig())


@pytest.fixture
def loaded(demo: Loaded) -> Iterator[Loaded]:
    """The demo model, its generation settings given back afterwards."""
    own = demo.target.model.generation_config
    demo.target.model.generation_config = copy.deepcopy(own)
    yield demo
    demo.target.model.generation_config = own


@pytest.fixture(scope="module")
def plain(demo: Loaded) -> list[int]:
    """What the model says with its own settings."""
    return generated(demo, encode_conversation(demo.tokenizer, ASKED), do_sample=False)


def test_every_field_is_classified() -> None:
    """A new field of the library fails here until it is classified."""
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    classes = [
        set(GREEDY),
        set(SAMPLED),
        set(REFUSED_SETTINGS),
        HONOURED_ELSEWHERE,
        OF_HDTOOL,
        NO_TOKEN_CHANGES - set(REFUSED_SETTINGS),
    ]
    assert fields - set().union(*classes) == set()
    assert sum(map(len, classes)) == len(set().union(*classes)), "each belongs to one class"
    assert set(REFUSED_VALUES) == set(REFUSED_SETTINGS)


def generated(loaded: Loaded, ids: list[int], max_new_tokens: int = MAX_NEW_TOKENS, **options: Any) -> list[int]:
    model: Any = loaded.target.model
    asked = torch.tensor([ids])
    said = model.generate(
        asked,
        attention_mask=torch.ones_like(asked),
        max_new_tokens=max_new_tokens,
        tokenizer=loaded.tokenizer,
        **options,
    )
    found: list[int] = said[0, len(ids) :].tolist()
    return found


def answered(loaded: Loaded, ids: list[int], max_new_tokens: int = MAX_NEW_TOKENS) -> list[int]:
    """By hd, which drafts and has something accepted."""
    sampler, stops = sampler_for(loaded, SamplingConfig(), ids, max_new_tokens=max_new_tokens)
    drafter = Hierarchy(budget=FixedBudget(12), recycled=True, last=True)
    steps = decode(loaded.target, ids, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter)
    return [token for step in steps for token in step.tokens]


def value_of(name: str, value: Any, plain: list[int]) -> Any:
    if not isinstance(value, str):
        return value
    token = plain[0] if "first" in value else plain[1]
    return {"bad_words_ids": [[token]], "sequence_bias": [[[token], -9.0]], "eos_token_id": token}.get(name, [token])


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.one_in(4)
def test_a_setting_of_the_model_is_applied_as_in_generate(name: str, loaded: Loaded, plain: list[int]) -> None:
    ids = encode_conversation(loaded.tokenizer, ASKED)
    setattr(loaded.target.model.generation_config, name, value_of(name, GREEDY[name], plain))
    if name == "watermarking_config":
        loaded.target.model.generation_config = GenerationConfig.from_dict(
            loaded.target.model.generation_config.to_dict() | {name: GREEDY[name]}
        )
    expected = generated(loaded, ids, do_sample=False)
    assert expected != plain, "a value that changes nothing tests nothing"
    assert answered(loaded, ids) == expected
    config = SamplingConfig()
    sampler, stops = sampler_for(loaded, config, ids, max_new_tokens=MAX_NEW_TOKENS)
    requests = [Request(0, ids, sampler, Hierarchy(budget=FixedBudget(12)), stops)]
    assert answers_of(loaded.target, requests, 2, MAX_NEW_TOKENS) == {0: expected}


@pytest.mark.parametrize("name", [*SAMPLED, *(name for name in GREEDY if "suppress" in name or "penalty" in name)])
@pytest.mark.one_in(2)
def test_sampled_scores_are_those_of_generate(name: str, loaded: Loaded, plain: list[int]) -> None:
    """From the raw logits that generate had, the prepared processors compute its scores, in every step."""
    ids = encode_conversation(loaded.tokenizer, ASKED)
    model: Any = loaded.target.model
    without, _ = sampler_for(loaded, SamplingConfig(1.0), ids, max_new_tokens=MAX_NEW_TOKENS)
    setattr(model.generation_config, name, value_of(name, (GREEDY | SAMPLED)[name], plain))
    torch.manual_seed(0)
    asked = torch.tensor([ids])
    theirs = model.generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=True, max_new_tokens=20, output_logits=True,
        output_scores=True, return_dict_in_generate=True, eos_token_id=sorted(loaded.stops),
    )  # fmt: skip
    ours, _ = sampler_for(loaded, SamplingConfig(1.0), ids, max_new_tokens=20)
    changed = False
    for raw, scores, token in zip(theirs.logits, theirs.scores, theirs.sequences[0, len(ids) :].tolist(), strict=True):
        torch.testing.assert_close(ours.scores(raw[0]), scores[0])
        changed |= not torch.equal(without.scores(raw[0]), scores[0])
        ours.context.append(token)
        without.context.append(token)
    assert changed, "a value that changes nothing tests nothing"


@pytest.mark.parametrize("settings", [{}, {"top_k": 7}, {"top_k": 0, "top_p": 0.5}, {"repetition_penalty": 1.2}])
def test_options_not_given_are_the_defaults_of_generate(settings: dict[str, Any], loaded: Loaded) -> None:
    """Without a top-k of its own, generate draws from 50 tokens."""
    ids = encode_conversation(loaded.tokenizer, ASKED)
    model: Any = loaded.target.model
    torch.manual_seed(0)
    asked = torch.tensor([ids])
    theirs = model.generate(
        asked, attention_mask=torch.ones_like(asked), do_sample=True, temperature=1.3, max_new_tokens=10,
        output_logits=True, output_scores=True, return_dict_in_generate=True, **settings,
    )  # fmt: skip
    ours, _ = sampler_for(loaded, SamplingConfig(1.3, **settings), ids, max_new_tokens=10)
    for raw, scores, token in zip(theirs.logits, theirs.scores, theirs.sequences[0, len(ids) :].tolist(), strict=True):
        torch.testing.assert_close(ours.scores(raw[0]), scores[0])
        ours.context.append(token)


@pytest.mark.parametrize("name", REFUSED_SETTINGS)
def test_unsupported_settings_are_refused_by_name(name: str, loaded: Loaded) -> None:
    setattr(loaded.target.model.generation_config, name, REFUSED_VALUES[name])
    with pytest.raises(
        ModelError, match=rf"^{name} is .* in the model's generation settings, but .*--generation-config"
    ):
        sampler_for(loaded, SamplingConfig(), [1, 2, 3], max_new_tokens=4)


def test_a_forced_first_token(loaded: Loaded) -> None:
    loaded.target.model.generation_config.forced_bos_token_id = 77
    assert answered(loaded, [5])[0] == generated(loaded, [5], do_sample=False)[0] == 77


def test_a_forced_last_token(loaded: Loaded) -> None:
    loaded.target.model.generation_config.forced_eos_token_id = 77
    assert answered(loaded, [5, 9], 12) == generated(loaded, [5, 9], 12, do_sample=False)
    assert answered(loaded, [5, 9], 12)[-1] == 77


def test_values_that_are_not_numbers_are_removed_where_the_model_says_so(loaded: Loaded) -> None:
    overflowed = torch.tensor([1.0, float("nan"), float("inf")])
    usual, _ = sampler_for(loaded, SamplingConfig(), [5, 6], max_new_tokens=4)
    assert not usual.scores(overflowed).isfinite().all()
    loaded.target.model.generation_config.remove_invalid_values = True
    removing, _ = sampler_for(loaded, SamplingConfig(), [5, 6], max_new_tokens=4)
    assert removing.scores(overflowed).isfinite().all()


def test_without_settings_greedy_decoding_has_no_processors(loaded: Loaded) -> None:
    sampler, stops = sampler_for(loaded, SamplingConfig(), [5, 6], max_new_tokens=4)
    assert sampler.shortcuts.chooses_by_argmax and not sampler.pre_processors and stops == loaded.stops


def test_invalid_settings_give_one_line(loaded: Loaded) -> None:
    loaded.target.model.generation_config.bad_words_ids = "nonsense"
    with pytest.raises(ModelError, match="the generation settings of the model cannot be used") as found:
        sampler_for(loaded, SamplingConfig(), [5, 6], max_new_tokens=4)
    assert "\n" not in str(found.value)


def test_other_settings_in_place_of_the_model_s(tmp_path: Path, demo: Loaded) -> None:
    own = demo.target.model.generation_config
    (tmp_path / "generation_config.json").write_text(json.dumps({"min_p": 0.2}))
    for place in (tmp_path, tmp_path / "generation_config.json"):
        found = generation_settings(str(place), own)
        assert found.min_p == 0.2 and found.eos_token_id == own.eos_token_id
    assert generation_settings("none", own).min_p is None
    (tmp_path / "broken.json").write_text("{")
    for wrong in (tmp_path / "broken.json", tmp_path / "none.json"):
        with pytest.raises(ModelError, match=wrong.name):
            generation_settings(str(wrong), own)
    loaded = load(ModelConfig(generation_config=str(tmp_path)))
    assert loaded.target.model.generation_config.min_p == 0.2
    assert loaded.stops == demo.stops


def test_generate_gets_the_same_settings(loaded: Loaded) -> None:
    """What verify and bench compare with."""
    options = generate_options(SamplingConfig(0.7, top_p=0.9), loaded.target.model.generation_config, frozenset({1}), 5)
    assert options == {
        "max_new_tokens": 5,
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "eos_token_id": [1],
        "pad_token_id": 0,
    }
