"""Windows beside those of hdtool's masks: found at loading, after a context that is longer, and refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from hdtool.data.errors import FamilyError
from hdtool.runtime.engines.proofs import long_contexts as long_context
from hdtool.runtime.engines.proofs.long_contexts import LongContext, long_contexts
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.model.refusals import context_limit
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.target.target import Target
from tests.support.decoding import SAMPLINGS, assert_lossless
from tests.support.families import FAMILIES, SHAPE, VOCABULARY, model_of, random_model
from tests.support.oracle import generated, prompt_of
from tests.support.trees import WrongDrafter

WINDOW = 24


def gpt_neo(window: int = WINDOW, **changes: Any) -> PreTrainedModel:
    layers: dict[str, Any] = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    torch.manual_seed(0)
    return random_model("GPTNeo", window_size=window, **layers, **changes)


def doge(window: int = WINDOW, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model = random_model("Doge", keep_window_size=window, **changes)
    for module in model.modules():
        if hasattr(module, "A"):  # all keys are worth the same in a new model
            torch.nn.init.normal_(module.A)  # type: ignore[arg-type]
    return model


def why_no_trees(model: PreTrainedModel) -> str:
    target = Target(model)
    assert not target.takes_trees
    return str(target.facts.no_trees)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("positions", [512, 2048])
@pytest.mark.parametrize("window", [WINDOW, 256])
def test_gpt_neo_verifies_chains_because_of_its_window(window: int, positions: int, dtype: torch.dtype) -> None:
    reason = why_no_trees(gpt_neo(window, max_position_embeddings=positions).to(dtype))  # type: ignore[arg-type]
    assert "tree wrongly after a context of" in reason and f"(its window_size is {window})" in reason


@pytest.mark.parametrize("positions", [512, 8192])
def test_doge_is_refused_because_of_its_window(positions: int) -> None:
    with pytest.raises(FamilyError, match=rf"its {WINDOW} best keys, and its keep_window_size is less"):
        Target(doge(max_position_embeddings=positions))


def test_generate_answers_by_chains_past_such_a_window() -> None:
    model: Any = gpt_neo()
    prompt = prompt_of(3 * WINDOW)
    drafting = Generator(lambda target: WrongDrafter(len(prompt), generated(model, prompt, 24), VOCABULARY, 1))
    assert generated(model, prompt, 24, custom_generate=drafting) == generated(model, prompt, 24)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_doge_within_its_window_gives_the_answers_of_plain_decoding(sampling: SamplingConfig) -> None:
    model, prompt = doge(SHAPE["max_position_embeddings"]), prompt_of(60)
    target = Target(model)
    plain = assert_lossless(target, prompt, sampling, seeds=range(3))
    if sampling == SamplingConfig():
        assert plain == generated(model, prompt, 32)


class OwnWindow(LlamaAttention):
    """Attention to the last keys of the cache, whose number no configuration names."""

    beside_masks = False

    def forward(self, hidden_states: Any, attention_mask: Any = None, **options: Any) -> Any:  # type: ignore[override]
        cache = options["past_key_values"]
        rows, columns = hidden_states.shape[1], cache.get_seq_length(self.layer_idx) + hidden_states.shape[1]
        if attention_mask is None or self.beside_masks:
            query = torch.arange(columns - rows, columns)[:, None]
            key = torch.arange(columns)
            hidden = (key > query) | (key <= query - WINDOW)
            own = torch.zeros(1, 1, rows, columns).masked_fill_(hidden, torch.finfo(torch.float32).min)
            attention_mask = own if attention_mask is None else torch.minimum(attention_mask, own)
        return super().forward(hidden_states=hidden_states, attention_mask=attention_mask, **options)


class BesideMasks(OwnWindow):
    beside_masks = True


class WithoutWindow(LlamaAttention):
    pass


def with_attention(kind: type[LlamaAttention]) -> Any:
    model: Any = copy.deepcopy(model_of("llama"))
    for layer in model.model.layers:
        layer.self_attn.__class__ = kind
    return model


def test_a_window_that_no_configuration_names_is_found() -> None:
    reason = why_no_trees(with_attention(BesideMasks))
    assert "tree wrongly after a context of 338 tokens" in reason and reason.endswith("indexed by cache position")
    with pytest.raises(FamilyError, match="; a chain of drafts is off"):
        Target(with_attention(OwnWindow))  # in passes over one token alone


@pytest.mark.parametrize("kind", [OwnWindow, BesideMasks])
def test_only_a_long_context_shows_such_a_window(kind: type[LlamaAttention], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_context, "DEFAULT_LENGTH", WINDOW // 2)
    Target(with_attention(kind))


def test_code_of_others_without_a_window_is_taken_and_exact() -> None:
    model, prompt = with_attention(WithoutWindow), prompt_of(60)
    assert [one.length for one in long_contexts(model, [], 512)] == [338, 510]
    target = Target(model)
    expected = generated(model, prompt, 40)
    assert_lossless(target, prompt, max_new_tokens=40, expected=expected, seeds=range(2))


@pytest.mark.parametrize("family", FAMILIES)
def test_windows_of_the_masks_alone_need_no_long_context(family: str) -> None:
    target = Target(model_of(family))
    assert not long_contexts(target.model, target.stock.windows, context_limit(target.config, 1))


@pytest.mark.parametrize("family", ["mistral", "gemma3", "llama4", "gpt_oss", "deepseek_v3"])
def test_every_kind_of_mask_passes_after_a_long_context(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [LongContext(338, 169, None), LongContext(510, 61, None)]
    monkeypatch.setattr("hdtool.runtime.engines.proofs.tree_proof.long_contexts", lambda *_: both)
    Target(model_of(family))


def test_the_length_is_beyond_the_largest_size_and_bounded() -> None:
    def of(size: int, limit: int | None) -> list[tuple[int, int]]:
        model = gpt_neo(window=16)
        model.config.window_size = size
        return [(one.length, one.hidden) for one in long_contexts(model, [], limit)]

    assert of(256, None) == of(256, 10_000) == [(4096, 2048)]
    assert of(8000, 100_000) == [(10_000, 5000)]
    assert of(100_000, None) == [(32_768, 16_384)]
    assert of(256, 2048) == [(1362, 681), (2046, 61)]
    assert of(256, 3) == [(1, 0), (1, 61)]
