"""GGUF files whose weights stay packed: the bits, the tokens and the errors of the expanded model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import hdtool
from hdtool.cli.app import run as command
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.data.stores.manifest import Checkpoint
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.kernels.compact_weight import is_compact, is_packed
from hdtool.runtime.kernels.matrix_formats import GGUF_FORMATS
from hdtool.runtime.model import compact_layers
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.model.reference_logits import logits_after, more_precise
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load
from hdtool.runtime.target.target import Target
from hdtool.runtime.weights import gguf_formats, stored_model, weight_store
from hdtool.runtime.weights.model_in_memory import checkpoint_in_memory
from hdtool.runtime.weights.weight_store import WeightStore
from tests.support.decoding import SAMPLINGS, answer_of, assert_lossless
from tests.support.fused import compiled
from tests.support.gguf_files import tiny_llama, write_gguf
from tests.support.gpt_oss_gguf import write_gpt_oss
from tests.support.one_sequence import OneSequence
from tests.support.oracle import all_logits, prompt_of
from tests.support.packed_blocks import needs_blocks

pytestmark = [needs_blocks, pytest.mark.usefixtures("home")]
KINDS = [one.name for one in GGUF_FORMATS]
LENGTHS = (1, 2, 3, 5, 16, 64, 65, 100)
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Each matrix has blocks of 256 columns."""


def file_of(folder: Path, kind: str = "Q4_1", seed: int = 0, **changed: Any) -> Path:
    return write_gguf(folder / "tiny.gguf", tiny_llama(seed, **(changed or WIDE)), kind)


def both(file: Path) -> tuple[Target, Target]:
    """The model with packed weights, and expanded."""
    packed, wide = (load(ModelConfig(str(file), device="cpu", dtype=dtype)).target for dtype in ("auto", "float32"))
    return packed, wide


def packed_names(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if is_packed(weight)}


def matrices(model: torch.nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters(remove_duplicate=False) if weight.dim() == 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(3)
def test_all_logits_and_answers_are_those_of_the_expanded_model(kind: str, tmp_path: Path) -> None:
    packed, wide = both(file_of(tmp_path, kind))
    assert packed_names(packed.model) == matrices(wide.model) and not packed_names(wide.model)
    assert packed.dtype == torch.float32
    for length in LENGTHS:
        assert torch.equal(all_logits(packed.model, length), all_logits(wide.model, length)), length
    prompt = prompt_of(20)
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["T 0.7"]):
        assert_lossless(packed, prompt, sampling, expected=answer_of(wide, prompt, sampling))
    assert packed_names(packed.model) == matrices(wide.model), "no weight was expanded"


INT8 = ("--activations", "int8")
LOSSLESS: list[Any] = [
    *(("Q4_1", method, ()) for method in ("hd", "lade", "hd+logitspec")),
    *(("Q4_1", method, INT8) for method in ("hd", "hd+logitspec", "lade")),
    *(
        pytest.param("Q4_1", method, (), marks=pytest.mark.long)
        for method in ("hd-paper", "pld", "suffix", "sam", "tr", "racer", "logitspec")
    ),
    *(pytest.param("gpt-oss", method, (), marks=pytest.mark.long) for method in ("hd", "lade")),
]


def test_compiled_passes_multiply_by_packed_weights(tmp_path: Path) -> None:
    shape = WIDE | {"num_attention_heads": 4, "num_key_value_heads": 2}  # heads as wide as vectors
    packed, wide = both(file_of(tmp_path, "Q4_K", **shape))
    tree = DraftTree.of(3, [5, 8, 13, 21], [-1, 0, 0, 2])
    found = []
    for target in (packed, wide):
        one, before = OneSequence(target), compiled(target).passes
        one.prefill(prompt_of(30))
        found.append(one.verify(tree).clone())
        assert compiled(target).passes == before + 2
    assert torch.equal(*found)


@pytest.mark.parametrize(("kind", "method", "activations"), LOSSLESS)
def test_methods_are_lossless(
    kind: str, method: str, activations: tuple[str, ...], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """``generate`` computes with activations in float32."""
    file = tmp_path / "tiny.gguf"
    if kind == "gpt-oss":
        write_gpt_oss(file)
    else:
        file_of(tmp_path, kind)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say it {number} times."}) + "\n" for number in range(2)))
    options = ("--model", str(file), "--prompts", str(prompts), "--max-new-tokens", "24", "--method", method)
    assert command(["verify", *options, *activations, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["lossless"] and found["identical"]["plain"] == 2, found
    assert activations or found["identical"]["generate"] == 2, found


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_is_in_memory_once(tied: bool, tmp_path: Path) -> None:
    model = hdtool.load(str(file_of(tmp_path, "Q8_0", tie_word_embeddings=tied))).target.model
    odd = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
    assert matrices(model) - packed_names(model) == odd, "96 columns are no multiple of what the matmul takes"
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (table is head) == tied and is_packed(table)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("is_scarce", [False, True])
def test_only_blocks_that_exceed_the_memory_are_mapped(
    is_scarce: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = file_of(tmp_path)
    expected = all_logits(hdtool.load(str(file)).target.model, 9)
    assert str(file) not in Path("/proc/self/maps").read_text()
    monkeypatch.setattr(stored_model, "available_memory", lambda: 1000 if is_scarce else 1 << 30)
    model = hdtool.load(str(file)).target.model
    assert (str(file) in Path("/proc/self/maps").read_text()) == is_scarce
    assert ("its blocks stay in the mapped file" in capfd.readouterr().err) == is_scarce
    assert torch.equal(all_logits(model, 9), expected)
    before = file.read_bytes()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").stored.blocks.zero_()
    assert file.read_bytes() == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_that_are_copied_into_panels_are_not_copied_into_memory_too(tmp_path: Path) -> None:
    file = file_of(tmp_path, "Q8_0", num_attention_heads=4, num_key_value_heads=2, **WIDE)
    load(ModelConfig(str(file), device="cpu", activations="int8"))
    kept = load(ModelConfig(str(file), device="cpu", activations="int8"))
    assert kept.target.compiled and str(file) in Path("/proc/self/maps").read_text()


def test_without_the_instructions_the_file_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (weight_store, gguf_formats):
        monkeypatch.setattr(module, "EXPANDS_FLOAT16", False)
    assert not packed_names(hdtool.load(str(file_of(tmp_path))).target.model)


def test_where_the_matmul_differs_weights_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_layers, "_has_same_bits", lambda stored: False)
    file = file_of(tmp_path)
    model = hdtool.load(str(file)).target.model
    assert packed_names(model) == {"model.embed_tokens.weight"}


def test_damaged_scales_are_named(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    header = GGUFHeader.read(file)
    (tensor,) = (tensor for tensor in header.tensors if tensor.name == "blk.1.ffn_down.weight")
    with file.open("r+b") as stream:
        stream.seek(header.data + tensor.offset)
        stream.write(np.float16(np.nan).tobytes())
    with pytest.raises(ModelError, match=r"damaged: model.layers.1.mlp.down_proj.weight holds NaN: get it again"):
        hdtool.load(str(file))


def test_the_model_is_recognised_until_its_weights_change(tmp_path: Path) -> None:
    file = file_of(tmp_path, "Q4_1", hidden_size=64)
    loaded = hdtool.load(str(file))
    model: Any = loaded.target.model
    assert loaded.checkpoint
    before = [weight.expansions.count for weight in model.parameters() if is_compact(weight)]
    assert checkpoint_in_memory(model) == Checkpoint(loaded.checkpoint.fingerprint, model.name_or_path.split("/")[-1])
    assert before == [weight.expansions.count for weight in model.parameters() if is_compact(weight)] != []
    wide = load(ModelConfig(str(file), device="cpu", dtype="float32")).target.model
    assert fingerprint(model) == fingerprint(wide)
    for changed in (model.model.layers[0].mlp.down_proj, model.model.layers[1].mlp.up_proj):
        before = changed.weight.data
        changed.weight.data = before + 1
        assert checkpoint_in_memory(model) is None
        changed.weight.data = before


def test_other_uses_of_the_weights(tmp_path: Path) -> None:
    """A higher precision and back, saving, and another dtype."""
    packed, wide = both(file_of(tmp_path))
    for model in (packed.model, wide.model):
        model.save_pretrained(tmp_path / str(is_packed(model.lm_head.weight)))
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("True", "False"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    found = []
    for target in (packed, wide):
        with more_precise(target.model, torch.device("cpu")):
            found.append(logits_after(target.model, prompt_of(9)))
    assert torch.equal(*found) and found[0].dtype == torch.float64
    assert torch.equal(all_logits(packed.model, 9), all_logits(wide.model, 9))
    packed.model.to(torch.float64)
    assert not any(map(is_compact, packed.model.parameters()))


@pytest.mark.parametrize(("kind", "shape"), [("TQ2_0", WIDE), ("Q8_0", {})])
def test_what_is_computed_in_float32_is_said(
    kind: str, shape: dict[str, int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In one line, at each start, and by doctor."""
    file = file_of(tmp_path, kind, **(shape or {"hidden_size": 64}))
    expected = "16 of 16 weights are computed in float32, slower and larger (16 in TQ2_0)"
    if not shape:
        expected = "2 of 16 weights are computed in float32, slower and larger (2 in Q8_0 with 96 columns)"
    for _ in range(2):
        load(ModelConfig(str(file), device="cpu"))
        notes = [line for line in capfd.readouterr().err.splitlines() if "float32" in line and "note:" in line]
        assert notes == [f"note: {file}: {expected}"]
    command(["doctor", "--model", str(file)])
    assert expected in " ".join(capfd.readouterr().out.split())
    load(ModelConfig(str(file), device="cpu", dtype="bfloat16"))
    assert "slower and larger" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("TQ2_0", {}, r"has none that it takes: 16 of 16 .* \(16 in TQ2_0\); leave it out, or take --q"),
        ("F16", {}, "has none that it takes: they are not quantized; leave it out, or take --quantization q8_0"),
        ("Q8_0", {"fused_layers": False}, "needs a GGUF file with packed weights"),
        ("Q8_0", {"attn_implementation": "eager"}, "needs a GGUF file with packed weights"),
        ("Q8_0", {"dtype": "float32"}, "needs a GGUF file with packed weights"),
    ],
)
def test_int8_activations_are_refused_by_the_header(
    kind: str, options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = file_of(tmp_path, kind)
    monkeypatch.setattr(WeightStore, "read", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(OptionError, match=message):
        load(ModelConfig(str(file), device="cpu", activations="int8", **options))
