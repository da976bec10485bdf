"""bitsandbytes and torchao, where they are installed. Run by ``make test-quantized``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, TorchAoConfig

from hdtool.builders.evaluation.environment import describe_environment
from hdtool.builders.evaluation.verify import Verifier
from hdtool.data import demo
from hdtool.data.errors import FamilyError
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.integrations.hf_generate import Generator
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.model.quantization import RowByRow
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from tests.support.compressed_checkpoints import SCHEMES as COMPRESSED, save_compressed
from tests.support.decoding import answer_of, run

pytestmark = pytest.mark.filterwarnings("default")  # theirs are not ours to mend
QUESTIONS = ("Tom has 3 boxes with 12 pencils each. How many pencils does he have?", "class Stack:")
MAX_NEW_TOKENS = 24


@pytest.fixture
def bitsandbytes() -> Any:
    return pytest.importorskip("bitsandbytes")


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao.quantization")


def saved(folder: Path, how: Any) -> ModelConfig:
    """A checkpoint as its users save it."""
    AutoModelForCausalLM.from_pretrained(demo.MODEL, quantization_config=how, dtype=torch.float32).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(folder)
    return ModelConfig(str(folder))


def asked(loaded: Loaded) -> list[list[int]]:
    return [loaded.tokenizer(question)["input_ids"] for question in QUESTIONS]


def check(loaded: Loaded, *, exact: bool, is_coarse: bool = False) -> None:
    """Drafts change the output only at near ties; plain decoding equals ``generate``.

    If weights are rounded coarsely, the answers are none of which drafts must be accepted.
    """
    verifier = Verifier(loaded, SamplingConfig(), Hierarchy(), MAX_NEW_TOKENS)
    found = [verifier.check("a question", ids) for ids in asked(loaded)]
    differences = [difference for one in found for difference in one.differences]
    assert is_coarse or sum(one.steps for one in found) < sum(one.tokens for one in found)
    if exact:
        assert not differences
    assert all(explained.near_tie for explained in verifier.explain(differences))
    assert fingerprint(loaded.target.model) != fingerprint(AutoModelForCausalLM.from_pretrained(demo.MODEL))


def test_torchao_with_weights_alone(torchao: Any, tmp_path: Path) -> None:
    loaded = load(saved(tmp_path, TorchAoConfig(torchao.Int8WeightOnlyConfig())))
    check(loaded, exact=True)
    stores = StoreSet.for_tokenizer(loaded.tokenizer, StoresConfig("none", "none"))
    assert describe_environment(loaded, stores)["quantized"] == "torchao"


def test_torchao_with_activations(torchao: Any, tmp_path: Path) -> None:
    check(load(saved(tmp_path, TorchAoConfig(torchao.Int8DynamicActivationInt8WeightConfig()))), exact=False)
    whole = torchao.Int8DynamicActivationInt8WeightConfig(granularity=torchao.PerTensor())
    with pytest.raises(FamilyError, match=r"granularity=PerRow\(\)"):
        load(saved(tmp_path / "whole", TorchAoConfig(whole)))


@pytest.mark.parametrize("scheme", COMPRESSED)
def test_compressed_tensors(scheme: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    save_compressed(AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32), scheme, tmp_path)
    AutoTokenizer.from_pretrained(demo.MODEL).save_pretrained(tmp_path)
    check(load(ModelConfig(str(tmp_path))), exact=scheme == "W4A16", is_coarse=scheme == "W4A16")


@pytest.mark.parametrize("kind", ["8bit", "4bit"])
def test_bitsandbytes(bitsandbytes: Any, kind: str, tmp_path: Path) -> None:
    check(load(saved(tmp_path, BitsAndBytesConfig(**{f"load_in_{kind}": True}))), exact=False)


def test_bitsandbytes_row_by_row(bitsandbytes: Any) -> None:
    """A row beside loud ones gets what it gets alone, though their outliers are elsewhere."""
    torch.manual_seed(0)
    layer = bitsandbytes.nn.Linear8bitLt(64, 48, bias=False, has_fp16_weights=False, threshold=2.0)
    layer.weight = bitsandbytes.nn.Int8Params(torch.randn(48, 64), requires_grad=False, has_fp16_weights=False)
    layer.to("cpu").eval()
    rows = torch.randn(1, 9, 64)
    with torch.inference_mode():
        alone = torch.cat([layer(row[None, None]) for row in rows[0]], dim=1)
        shared = layer(rows)
        apart = RowByRow(torch.nn.ModuleList([layer]))
        with apart.on():
            found = layer(rows)
    assert (shared - alone).abs().max() > 0.01
    torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("quantize", "exact"), [("int8", True), ("nf4", False)])
def test_quantized_on_loading(quantize: str, exact: bool) -> None:
    pytest.importorskip("torchao" if quantize == "int8" else "bitsandbytes")
    check(load(ModelConfig(quantization=quantize)), exact=exact)
    load(ModelConfig(quantization=quantize, device_map="auto"))


def test_a_quantized_checkpoint(torchao: Any) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    inputs = AutoTokenizer.from_pretrained(demo.MODEL)(QUESTIONS[1], return_tensors="pt")
    options: dict[str, Any] = {**inputs, "do_sample": False, "max_new_tokens": MAX_NEW_TOKENS}
    found = model.generate(**options, custom_generate=Generator(Hierarchy()))
    assert found.tolist() == model.generate(**options).tolist()


def test_conversations_side_by_side(bitsandbytes: Any, tmp_path: Path) -> None:
    """Earlier answers leave no state in the layers of a model."""
    loaded = load(saved(tmp_path, BitsAndBytesConfig(load_in_8bit=True)))
    (ids, _) = asked(loaded)
    first = answer_of(loaded.target, ids, SamplingConfig(), MAX_NEW_TOKENS, drafter=NoDraft())
    run(loaded.target, ids, SamplingConfig(), MAX_NEW_TOKENS, drafter=Hierarchy())
    assert answer_of(loaded.target, ids, SamplingConfig(), MAX_NEW_TOKENS, drafter=NoDraft()) == first
