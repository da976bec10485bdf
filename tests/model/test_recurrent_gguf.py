"""GGUF files of models with short convolutions and recurrences, as far as transformers reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from gguf.tensor_mapping import get_tensor_name_map
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hdtool.runtime.config.model import ModelConfig
from hdtool.runtime.engines.cpu.compiled_model import CompiledModel
from hdtool.runtime.target.load import load
from tests.support.decoding import assert_lossless
from tests.support.gguf_files import VOCABULARY, add_tokenizer
from tests.support.oracle import generated, prompt_of
from tests.support.packed_blocks import needs_blocks

PROMPT, MAX_NEW_TOKENS = prompt_of(30), 24
LAYERS = ["conv", "full_attention", "conv"]


def tiny(kind: str, **settings: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=3,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
        **settings,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return model


def lfm2() -> PreTrainedModel:
    return tiny(
        "lfm2",
        intermediate_size=64,
        block_auto_adjust_ff_dim=False,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        layer_types=LAYERS,
        tie_word_embeddings=True,
    )


def mamba() -> PreTrainedModel:
    return tiny("mamba", state_size=8, expand=2, tie_word_embeddings=True)


def write_lfm2(path: Path, model: Any, kind: str) -> None:
    writer, config = GGUFWriter(path, "lfm2"), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    heads = [config.num_key_value_heads if kind == "full_attention" else 0 for kind in config.layer_types]
    writer.add_head_count_kv(heads)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_shortconv_l_cache(config.conv_L_cache)
    write_tensors(writer, MODEL_ARCH.LFM2, model, kind)


def write_mamba(path: Path, model: Any, kind: str) -> None:
    writer, config = GGUFWriter(path, "mamba"), model.config
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_ssm_conv_kernel(config.conv_kernel)
    writer.add_ssm_inner_size(config.intermediate_size)
    writer.add_ssm_state_size(config.state_size)
    writer.add_ssm_time_step_rank(config.time_step_rank)
    write_tensors(writer, MODEL_ARCH.MAMBA, model, kind)


def write_tensors(writer: GGUFWriter, architecture: MODEL_ARCH, model: PreTrainedModel, kind: str) -> None:
    names = get_tensor_name_map(architecture, 3)
    add_tokenizer(writer, VOCABULARY)
    for name, parameter in model.named_parameters():
        weight = parameter.detach().numpy()
        found = names.get_name(name, try_suffixes=(".weight", ".bias")) or f"{names.get_name(f'{name}.weight')}"
        assert found, name
        if name.endswith("A_log"):
            weight = -np.exp(weight)
        if "conv" in name and weight.ndim == 3:
            weight = weight[:, 0]
        is_matrix = weight.ndim == 2 and not weight.shape[1] % 32
        stored = GGMLQuantizationType[kind if is_matrix else "F32"]
        writer.add_tensor(found, quantize(np.ascontiguousarray(weight), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize(("make", "write"), [(lfm2, write_lfm2), (mamba, write_mamba)], ids=["lfm2", "mamba"])
def test_a_file_is_drafted_for_as_it_is_decoded(make: Any, write: Any, kind: str, tmp_path: Path) -> None:
    model = make()
    path = tmp_path / "model.gguf"
    write(path, model, kind)
    expected = generated(model, PROMPT, MAX_NEW_TOKENS, eos_token_id=None) if kind == "F32" else None
    assert_lossless(load(ModelConfig(str(path))).target, PROMPT, max_new_tokens=MAX_NEW_TOKENS, expected=expected)


@needs_blocks
@pytest.mark.parametrize("activations", ["float32", "int8"])
def test_packed_weights_are_computed_in_compiled_passes(activations: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_lfm2(path, lfm2(), "Q8_0")
    loaded = load(ModelConfig(str(path), device="cpu", activations=activations))
    compiled = loaded.target.compiled
    assert isinstance(compiled, CompiledModel) and compiled.activations_are_int8 == (activations == "int8")
    assert_lossless(loaded.target, PROMPT, max_new_tokens=MAX_NEW_TOKENS, seeds=range(3))
    assert compiled.passes > MAX_NEW_TOKENS
