"""GGUF files whose weights stay packed: the bits, the tokens and the errors of the expanded model."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from safetensors.torch import load_file

import hdtool
from hdtool.cli.app import run as command
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.gguf_header import GGUFHeader
from hdtool.data.stores.manifest import Checkpoint
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.environment import fingerprint
from hdtool.runtime.kernels import vector_code
from hdtool.runtime.kernels.compact_weight import is_compact, is_packed
from hdtool.runtime.kernels.matrix_formats import FORMATS_BY_GGUF_TYPE
from hdtool.runtime.kernels.packed_matrix import PackedMatrix
from hdtool.runtime.model import compact_layers
from hdtool.runtime.model.checkpoint_identity import checkpoint_in_memory
from hdtool.runtime.model.gguf import convert, converted_folder, packing
from hdtool.runtime.model.gguf.convert import Conversion
from hdtool.runtime.model.gguf.converted import NAMES, converted
from hdtool.runtime.model.gguf.converted_folder import MANIFEST, PLAN, REST, WEIGHTS, Manifest
from hdtool.runtime.model.load import load
from hdtool.runtime.model.placement import logits_after, more_precise
from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import DraftTree
from tests.support.decoding import SAMPLINGS, output_tokens, run
from tests.support.fused import compiled
from tests.support.gguf_files import VOCABULARY, tiny_llama, write_gguf
from tests.support.one_sequence import OneSequence
from tests.support.packed_blocks import NAMES as NAMES_OF_FORMATS, some_matrix
from tests.support.trees import WrongDrafter

pytestmark = pytest.mark.skipif(not vector_code.EXPANDS_FLOAT16, reason="blocks are expanded by transformers here")
KINDS = [one.name for one in FORMATS_BY_GGUF_TYPE.values()]
LENGTHS = (1, 2, 3, 5, 16, 64, 65, 100)
WIDE = {"hidden_size": 256, "intermediate_size": 512}
"""Each matrix has blocks of 256 columns."""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(converted_folder, "MIN_SETTLED_AGE", -60.0)
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


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


@cache
def prompt_of(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


def all_logits(model: Any, length: int) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([prompt_of(length)]), use_cache=False).logits
    return logits


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
        plain = output_tokens(run(wide, prompt, sampling))
        assert output_tokens(run(packed, prompt, sampling)) == plain
        wrong_drafter = WrongDrafter(len(prompt), plain, VOCABULARY, seed=1)
        assert output_tokens(run(packed, prompt, sampling, drafter=wrong_drafter)) == plain
        assert wrong_drafter.accepted > 0
    assert packed_names(packed.model) == matrices(wide.model), "no weight was expanded"


SLOW = pytest.mark.long
METHODS = ["hd", "lade", "hd+logitspec"]
OTHERS = ["hd-paper", "pld", "suffix", "sam", "tr", "racer", "logitspec"]


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


@pytest.mark.parametrize("method", [*METHODS, *(pytest.param(name, marks=SLOW) for name in OTHERS)])
def test_methods_are_lossless(method: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = file_of(tmp_path, "Q4_1")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"Say it {number} times."}) + "\n" for number in range(2)))
    options = ("--model", str(file), "--prompts", str(prompts), "--max-new-tokens", "24", "--method", method)
    assert command(["verify", *options, "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["lossless"] and found["identical"] == {"plain": 2, "generate": 2}, found


@pytest.mark.parametrize("tied", [False, True])
def test_the_disk_holds_only_what_is_not_packed(tied: bool, tmp_path: Path) -> None:
    file = file_of(tmp_path, "Q8_0", tie_word_embeddings=tied)
    model = hdtool.load(str(file)).target.model
    folder = converted(file, packed=True)
    assert not (folder / WEIGHTS).exists()
    rest = load_file(folder / REST)
    odd = {f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)}
    assert matrices(model) - packed_names(model) == odd, "96 columns are no multiple of what the matmul takes"
    orders = {name for name in rest if name.endswith(packing.ORDER)}
    assert {name.split(".")[4] for name in orders} == {"q_proj", "k_proj"}
    assert {name for name in rest if "norm" not in name} == odd | orders
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert (table is head) == tied and is_packed(table)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("unpacked_before", [True, False])
def test_weights_are_unpacked_one_by_one(
    unpacked_before: bool, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers reads most architectures, and as it reads those that it converts while it fills the model."""
    file = file_of(tmp_path, "Q8_0", tie_word_embeddings=tied)
    folder = converted(file, packed=True)
    expected = load_file(converted(file, weights=True) / WEIGHTS)
    if not unpacked_before:
        monkeypatch.setattr(convert, "LOAD_CHECKPOINT", ("modeling_gguf_pytorch_utils", "none_of_this_name"))
    stay = json.loads((folder / PLAN).read_text())["tensors"].keys()
    handed: dict[str, torch.Tensor] = {}

    def take(name: str, weight: torch.Tensor) -> bool:
        if name not in handed:
            handed[name] = weight.clone()
        return name in stay

    with convert.weights_in_turn(take):
        model = Conversion.of(file)._model(folder, tmp_path)
    assert stay <= handed.keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in handed.items())
    held = {name: weight.untyped_storage().nbytes() for name, weight in model.named_parameters()}
    assert {name for name, size in held.items() if size == 4} == stay


@pytest.mark.parametrize("changed", ["renamed", "computed with", None])
def test_weights_that_change_on_their_way_are_read_again(
    changed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros stand for weights that were taken: nothing that is made from zeros may be in the model."""
    file, name = file_of(tmp_path, "Q8_0"), "model.layers.0.mlp.gate_proj.weight"
    folder, read, reads = converted(file), Conversion._model, []

    def model_of(conversion: Conversion, *places: Path) -> Any:
        model = read(conversion, *places)
        reads.append(model)
        layer = model.model.layers[0].mlp
        if len(reads) == 1 and changed == "computed with":
            layer.gate_proj.weight.data = layer.gate_proj.weight.data + 0
        if len(reads) == 1 and changed == "renamed":
            layer.other = layer.gate_proj
            del layer.gate_proj
        return model

    monkeypatch.setattr(Conversion, "_model", model_of)
    packed = tmp_path / "packed"
    packed.mkdir()
    plan, rest = Conversion.of(file).write_packed(folder, packed)
    assert len(reads) == (2 if changed else 1)
    assert name in json.loads(plan.read_text())["tensors"] and not any("other" in one for one in load_file(rest))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_blocks_are_mapped_and_not_copied(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    model = hdtool.load(str(file)).target.model
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(file) in line
    ]
    assert spans

    def is_mapped(name: str) -> bool:
        stored = model.get_parameter(name).stored
        assert isinstance(stored, PackedMatrix)
        return any(int(first, 16) <= stored.data_ptr() < int(last, 16) for first, last in spans)

    copied = {name for name in packed_names(model) if not is_mapped(name)}
    assert {name.split(".")[-2] for name in copied} == {"q_proj", "k_proj"}, "their rows have another order"
    before = file.read_bytes()
    with torch.no_grad():
        model.get_parameter("lm_head.weight").stored.blocks.zero_()
    assert file.read_bytes() == before


def test_formats_that_no_matmul_takes_are_expanded(tmp_path: Path) -> None:
    file = file_of(tmp_path, "TQ2_0")
    packed, wide = both(file)
    assert not packed_names(packed.model)
    assert torch.equal(all_logits(packed.model, 9), all_logits(wide.model, 9))
    manifest = Manifest.read(converted(file))
    assert manifest is not None and manifest.has_weights and not manifest.has_packed


def test_without_the_instructions_the_file_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "EXPANDS_FLOAT16", False)
    assert not packed_names(hdtool.load(str(file_of(tmp_path))).target.model)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_unpacked_as_the_library_does(kind: str) -> None:
    format, rows = NAMES_OF_FORMATS[kind], 3 * packing.SAMPLED_ROWS + 1
    blocks = some_matrix(format, rows, 256).blocks.numpy().reshape(1, rows, -1)
    number, read = GGMLQuantizationType[kind], []

    def reference(blocks: Any, kind: int) -> Any:
        read.append(blocks.size)
        return dequantize(blocks, GGMLQuantizationType(kind)) * factor

    for factor, calls in ((1, 1), (2, 2)):
        read.clear()
        found = packing.unpacked(reference, blocks, number)
        assert np.array_equal(found, dequantize(blocks, number) * factor), "where the kernel differs, the library reads"
        assert len(read) == calls and read[0] < blocks.size / 2


def test_where_the_matmul_differs_weights_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_layers, "_has_same_bits", lambda stored: False)
    file = file_of(tmp_path)
    model = hdtool.load(str(file)).target.model
    assert packed_names(model) == {"model.embed_tokens.weight"}


def test_a_model_that_was_converted_before_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = file_of(tmp_path)
    folder = converted(file, weights=True)
    kept = (folder / WEIGHTS).stat().st_mtime_ns
    monkeypatch.setattr(Conversion, "_model", lambda *_: pytest.fail("transformers read the weights again"))
    assert packed_names(hdtool.load(str(file)).target.model)
    assert (folder / WEIGHTS).stat().st_mtime_ns == kept
    monkeypatch.setattr(Conversion, "of", lambda _: pytest.fail("the file was read again"))
    assert packed_names(hdtool.load(str(file)).target.model)


def test_weights_are_packed_again_where_formats_were_added(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    hdtool.load(str(file))
    folder = converted(file, packed=True)
    expected = (folder / PLAN).read_text()
    for name, row in ((PLAN, {"version": 1, "tensors": {}}), (MANIFEST, None)):
        row = row or {**json.loads((folder / name).read_text()), "packing": 1}
        (folder / name).write_text(json.dumps(row))
    files = json.loads((folder / MANIFEST).read_text())
    files["files"][PLAN] = (folder / PLAN).stat().st_size
    (folder / MANIFEST).write_text(json.dumps(files))
    assert packed_names(hdtool.load(str(file)).target.model)
    assert (folder / PLAN).read_text() == expected


def test_expanded_weights_are_added_when_they_are_needed(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    folder = converted(file, packed=True)
    assert converted(file, packed=True, weights=True) == folder
    assert {WEIGHTS, PLAN, REST} <= {path.name for path in folder.iterdir()}
    assert load(ModelConfig(str(file), device="cpu", dtype="bfloat16")).target.dtype == torch.bfloat16


def test_a_changed_file_never_gives_the_old_model(tmp_path: Path) -> None:
    """The new file has the name, the header, the size and the time of the old one."""
    file = file_of(tmp_path)
    before = file.stat()
    old = all_logits(hdtool.load(str(file)).target.model, 5)
    file_of(tmp_path, seed=1)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    packed, wide = both(file)
    assert not torch.equal(all_logits(packed.model, 5), old)
    assert torch.equal(all_logits(packed.model, 5), all_logits(wide.model, 5))


def test_damaged_files(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    expected = all_logits(hdtool.load(str(file)).target.model, 5)
    folder = converted(file, packed=True)
    plan = (folder / PLAN).read_text()
    for damaged in (
        plan.replace('"kind": 3', '"kind": 9'),
        plan.replace('"outs": 2', '"outs": 3'),
        "{" + plan[1:-3] + " ",
    ):
        (folder / PLAN).write_text(damaged.ljust(len(plan))[: len(plan)])
        with pytest.raises(
            ModelError, match=r"packed.json is damaged or does not fit .*: remove .*, and the file is read"
        ):
            hdtool.load(str(file))
    (folder / PLAN).write_text(plan)
    (folder / REST).write_bytes((folder / REST).read_bytes()[:-1])
    assert torch.equal(all_logits(hdtool.load(str(file)).target.model, 5), expected), "it was made again"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1000])
    with pytest.raises(ModelError, match="is cut short"):
        hdtool.load(str(file))


def test_damaged_scales_are_named_and_leave_no_copy(tmp_path: Path, home: Path) -> None:
    file = file_of(tmp_path)
    header = GGUFHeader.read(file)
    (tensor,) = (tensor for tensor in header.tensors if tensor.name == "blk.1.ffn_down.weight")
    with file.open("r+b") as stream:
        stream.seek(header.data + tensor.offset)
        stream.write(np.float16(np.nan).tobytes())
    with pytest.raises(ModelError, match=r"damaged: model.layers.1.mlp.down_proj.weight holds NaN: get it again"):
        hdtool.load(str(file))
    assert not [path for path in (home / "gguf").iterdir() if path.is_dir()]


def test_a_copy_of_the_file_is_mapped_itself(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    expected = all_logits(hdtool.load(str(file)).target.model, 5)
    copy = shutil.copy(file, tmp_path / "copy.gguf")
    file.unlink()
    assert torch.equal(all_logits(hdtool.load(str(copy)).target.model, 5), expected)


def test_the_model_is_recognised_until_its_weights_change(tmp_path: Path) -> None:
    file = file_of(tmp_path, "Q4_1", hidden_size=64)
    loaded = hdtool.load(str(file))
    model: Any = loaded.target.model
    assert loaded.checkpoint
    assert checkpoint_in_memory(model) == Checkpoint(loaded.checkpoint.fingerprint, model.name_or_path.split("/")[-1])
    wide = load(ModelConfig(str(file), device="cpu", dtype="float32")).target.model
    assert fingerprint(model) == fingerprint(wide)
    assert checkpoint_in_memory(model), "expanded weights lie in the folder as well"
    (Path(model.name_or_path) / WEIGHTS).unlink()
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
    first, second = (load_file(tmp_path / name / WEIGHTS) for name in ("True", "False"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    found = []
    for target in (packed, wide):
        with more_precise(target.model, torch.device("cpu")):
            found.append(logits_after(target.model, prompt_of(9)))
    assert torch.equal(*found) and found[0].dtype == torch.float64
    assert torch.equal(all_logits(packed.model, 9), all_logits(wide.model, 9))
    packed.model.to(torch.float64)
    assert not any(map(is_compact, packed.model.parameters()))


def test_formats_without_a_number_in_the_header_are_named() -> None:
    from gguf import GGMLQuantizationType

    assert all(GGMLQuantizationType[name] == number for number, name in NAMES.items())


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
        assert [line for line in notes if "converting" not in line] == [f"note: {file}: {expected}"]
    command(["doctor", "--model", str(file)])
    assert expected in " ".join(capfd.readouterr().out.split())
    load(ModelConfig(str(file), device="cpu", dtype="bfloat16"))
    assert "slower and larger" not in capfd.readouterr().err


def test_what_an_earlier_version_left_unpacked_is_looked_for_again(tmp_path: Path) -> None:
    file = file_of(tmp_path)
    folder = converted(file, packed=True)
    manifest = Manifest.read(folder)
    assert manifest and manifest.has_packed
    replace(manifest, packing=1).write(folder)
    plan, rest = folder / PLAN, folder / REST
    row = json.loads(plan.read_text())
    dropped = row["tensors"].pop("lm_head.weight")
    assert dropped
    plan.write_text(json.dumps(row).ljust(plan.stat().st_size))
    assert rest.is_file()
    assert "lm_head.weight" in packed_names(hdtool.load(str(file)).target.model)


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
    monkeypatch.setattr(Conversion, "of", lambda _: pytest.fail("the file was read"))
    with pytest.raises(OptionError, match=message):
        load(ModelConfig(str(file), device="cpu", activations="int8", **options))
