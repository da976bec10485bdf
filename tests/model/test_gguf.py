"""Models in GGUF files: the weights, tokenizer and answers of the usual layout, from memory and without copies."""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaForCausalLM

import hdtool
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import load, load_stock, load_stops, load_tokenizer
from hdtool.runtime.weights import gguf_folder
from hdtool.runtime.weights.weight_store import WeightStore
from tests.support.commands import complaint
from tests.support.decoding import SAMPLINGS, output_tokens, run as decoded
from tests.support.gguf_files import END_OF_TEXT, TEMPLATE, tiny_llama, vocabulary, write_gguf

pytestmark = pytest.mark.usefixtures("home")

PROMPT = [token * 29 % 500 + 2 for token in range(20)]


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, original: LlamaForCausalLM) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", original)


@pytest.fixture(scope="module")
def of_all_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the whole tokenizer of the demo model."""
    model = tiny_llama(vocab_size=len(vocabulary()["model"]["vocab"]))
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", model)


@pytest.fixture
def file(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copy(written, tmp_path / "tiny.gguf"))


def answered(capfd: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    asked = ["generate", "--prompt", "What does `len` do? Say it twice.", "--max-new-tokens", "24", "--json", *options]
    assert run(asked) == 0
    answer: dict[str, Any] = json.loads(capfd.readouterr().out)
    return answer


def head_of(file: Path) -> torch.Tensor:
    weight: torch.Tensor = hdtool.load(str(file)).target.model.get_output_embeddings().weight
    return weight.detach() + 0


def test_weights_and_logits_are_those_of_the_model(file: Path, original: LlamaForCausalLM, home: Path) -> None:
    loaded = hdtool.load(str(file))
    found = loaded.target.model.state_dict()
    expected = original.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    ids = torch.tensor([loaded.tokenizer("def spam(eggs): return eggs")["input_ids"]])
    with torch.no_grad():
        assert torch.equal(load_stock(ModelConfig(str(file))).eval()(ids).logits, original(ids).logits)
    assert loaded.name == str(file)
    assert sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) < file.stat().st_size // 2


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_numbers_in_any_dtype_are_exactly_those_that_transformers_reads(
    kind: str, tmp_path: Path, original: LlamaForCausalLM
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", original, kind)
    given = {"gguf_file": file.name, "quantization_config": GgufConfig(dequantize=True)}
    for dtype in ("auto", "float32", "bfloat16"):
        config = ModelConfig(str(file), dtype=dtype, device="cpu")
        expected = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype="float32" if dtype == "auto" else dtype, **given
        ).state_dict()
        for model in (load(config).target.model, load_stock(config)):
            found = model.state_dict()
            assert found.keys() == expected.keys()
            for name, weight in expected.items():
                assert found[name].dtype == weight.dtype and torch.equal(found[name] + 0, weight), name


@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.8", "--seed", "5")], ids=["greedy", "sampled"])
def test_drafted_answers_equal_plain_ones(
    sampled: tuple[str, ...], written: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = answered(capfd, "--model", str(written), "--method", "ar", *sampled)
    drafted = answered(capfd, "--model", str(written), "--method", "hd", "--draft-tokens", "12", *sampled)
    assert drafted["output_ids"] == plain["output_ids"]
    assert plain["steps"] == plain["tokens"]
    assert sum(source["drafted"] for source in drafted["sources"].values())


def test_a_file_is_named_by_itself_or_by_its_folder(
    file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answered(capfd, "--model", str(file), "--method", "ar")["output_ids"]
    here = ("--method", "ar", "--model", str(file.parent))
    assert answered(capfd, *here)["output_ids"] == expected
    shutil.copytree(demo.MODEL, file.parent, dirs_exist_ok=True)
    assert answered(capfd, *here)["output_ids"] != expected, "the folder holds a model in the usual layout as well"
    assert answered(capfd, *here, "--gguf-file", file.name)["output_ids"] == expected
    monkeypatch.setenv("HOME", str(file.parent))
    assert answered(capfd, "--method", "ar", "--model", "~/tiny.gguf")["output_ids"] == expected


def test_a_file_on_the_hub(of_all_tokens: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def download(repository: str, name: str, **options: object) -> str:
        if (repository, name) != ("someone/tiny-GGUF", "tiny.gguf"):
            raise FileNotFoundError(name)
        return str(of_all_tokens)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    config = ModelConfig("someone/tiny-GGUF", gguf_file="tiny.gguf")
    assert TokenizerFingerprint.of(load_tokenizer(config)) == TokenizerFingerprint.of(load_tokenizer(ModelConfig()))
    assert config.name == "someone/tiny-GGUF/tiny.gguf"
    with pytest.raises(ModelError, match=r"someone/tiny-GGUF: .* the hub has no such model or cannot be reached"):
        load_tokenizer(ModelConfig("someone/tiny-GGUF", gguf_file="other.gguf"))


def test_tokenizer_template_and_stops_come_from_the_file(of_all_tokens: Path, tmp_path: Path) -> None:
    """Another tokenizer in the same folder is not read."""
    file = Path(shutil.copy(of_all_tokens, tmp_path))
    (file.parent / "tokenizer_config.json").write_text('{"chat_template": "wrong", "tokenizer_class": "BertTokenizer"}')
    config = ModelConfig(str(file))
    tokenizer, stock = load_tokenizer(config), AutoTokenizer.from_pretrained(demo.MODEL)
    assert TokenizerFingerprint.of(tokenizer) == TokenizerFingerprint.of(stock)
    assert tokenizer.chat_template == TEMPLATE
    assert load_stops(config, tokenizer) == {END_OF_TEXT} == load(config).stops


def test_commands_that_need_the_tokenizer_alone_read_no_weights(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WeightStore, "read", lambda *_: pytest.fail("weights were read"))
    texts = tmp_path / "texts.jsonl"
    turns = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "One, two, three. " * 8}]
    texts.write_text(json.dumps({"messages": turns}) + "\n")
    named = ("--model", str(file.parent), "--gguf-file", file.name)
    assert run(["build-corpus-db", str(texts), *named, "--quiet"]) == 0
    assert run(["build-model-db", "--from", str(texts), *named, "--quiet"]) == 0
    capfd.readouterr()
    assert run(["replay", "--traces", str(texts), *named, "--methods", "hd", "--json", "--quiet"]) == 0
    printed = capfd.readouterr()
    assert "stores" in printed.err, "the stores are found by the fingerprint of the tokenizer"
    assert json.loads(printed.out)["methods"]["hd"]["tokens_per_step"] > 1


@pytest.fixture
def refused(file: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    def refuse(*options: str, model: Path = file, code: int = 1) -> str:
        capfd.readouterr()
        return complaint(capfd, "generate", "--prompt", "hi", "--model", str(model), *options, code=code)

    yield refuse


def test_files_that_cannot_be_read(refused: Callable[..., str], file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = file.read_bytes()
    for content, said in (
        (b"", "is empty: get the file again"),
        (b"PK\3\4 is no model", "is a file and not in GGUF format"),
        (b"GGUF", "ends within its header"),
        (whole[:5000], "ends within its header"),
        (whole[:-1], f"is cut short, {len(whole) - 1:,} bytes of {len(whole):,}: get the file again"),
        (whole[:4] + b"\0\0\0\3" + whole[8:], "is big-endian GGUF, version 3"),
        (whole[:4] + b"\1\0\0\0" + whole[8:], "is GGUF version 1"),
        (whole.replace(b"llama", b"lamma"), "which has architecture lamma (GGUF model with architecture lamma is not"),
        (whole.replace(b"llama.embedding_length", b"llama.embedding_lengtX"), "where its configuration has ("),
        (whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight"), "lacks 1 of its weights"),
    ):
        file.write_bytes(content)
        assert said in refused()
    file.write_bytes(whole)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "gguf", None)
        assert refused().endswith('import of gguf halted; None in sys.modules: pip install "gguf>=0.19"')


def test_damaged_weights_are_named(refused: Callable[..., str], file: Path, original: LlamaForCausalLM) -> None:
    for number, said in ((math.nan, "NaN"), (-math.inf, "infinite values")):
        model = copy.deepcopy(original)
        model.get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 5] = number
        write_gguf(file, model)
        damaged = f"{file} is damaged: model.layers.1.mlp.down_proj.weight holds {said}: get it again"
        assert refused() == f"error: {damaged}"


def test_weights_that_may_be_damaged_are_named(
    file: Path, original: LlamaForCausalLM, capfd: pytest.CaptureFixture[str]
) -> None:
    model = copy.deepcopy(original)
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data.zero_()
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = 70_000
    load(str(write_gguf(file, model)))
    said = capfd.readouterr().err
    assert f"note: {file} may be damaged: model.layers.0.mlp.up_proj.weight holds only zeros, and 1 more are" in said


def test_names_that_are_not_clear(refused: Callable[..., str], file: Path, tmp_path: Path) -> None:
    shutil.copy(file, tmp_path / "second.gguf")
    assert "several GGUF files: choose one with --gguf-file, of second.gguf, tiny.gguf" in refused(model=tmp_path)
    said = refused("--gguf-file", "third.gguf", model=tmp_path)
    assert "holds no file third.gguf: it holds second.gguf, tiny.gguf" in said
    assert "third.gguf does not exist" in refused(model=tmp_path / "third.gguf")
    assert "does not exist" in refused("--gguf-file", "a.gguf", model=tmp_path / "none")
    said = refused("--gguf-file", "tiny.gguf", code=2)
    assert "--gguf-file names a file of a folder, and" in said
    with pytest.raises(OptionError, match="--gguf-file must be left out without --model"):
        ModelConfig(gguf_file="tiny.gguf")


def test_a_home_that_cannot_be_written(refused: Callable[..., str], home: Path) -> None:
    home.write_text("a file")
    assert f"reading {home.parent}/tiny.gguf into {home}/" in refused()


def test_a_full_disk(refused: Callable[..., str], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(gguf_folder, "write_configuration", fail)
    assert "failed (No space left on device): make room, or let HDTOOL_HOME name another" in refused()
    assert not list((home / "gguf").glob("*/*"))


def test_split_files_give_the_same_answers(written: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Rows of joined weights may lie in several files."""
    parts = tmp_path / "parts"
    parts.mkdir()
    write_gguf(parts / "tiny.gguf", tiny_llama(), max_tensors=3)
    files = sorted(parts.iterdir())
    assert len(files) == 7
    expected = answered(capfd, "--model", str(written))
    assert expected["output_ids"]
    for place in (parts, files[0], files[3]):
        assert answered(capfd, "--model", str(place))["output_ids"] == expected["output_ids"]
    files[3].unlink()
    assert run(["generate", "--prompt", "hi", "--model", str(files[0])]) == 1
    assert f"and {files[3].name} is missing" in capfd.readouterr().err


def truncated(file: Path) -> None:
    os.truncate(file, 0)


def replaced(file: Path) -> None:
    write_gguf(file, tiny_llama(seed=1), "Q8_0")


@pytest.mark.parametrize("change", [truncated, replaced, Path.unlink])
def test_a_file_that_changes_during_an_answer_changes_nothing(change: Callable[[Path], None], tmp_path: Path) -> None:
    target = load(str(write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0"))).target
    expected = output_tokens(decoded(target, PROMPT, SAMPLINGS["greedy"]))
    steps, found = decode(target, PROMPT, Sampler(SamplingConfig(), PROMPT), max_new_tokens=32), []
    for number, step in enumerate(steps):
        found += step.tokens
        if number == 2:
            change(tmp_path / "tiny.gguf")
    assert found == expected and len(found) == 32


def test_a_changed_file_never_gives_the_old_model(file: Path, home: Path) -> None:
    """The new file has the name, the header, the size and the time of the old one."""
    before = file.stat()
    assert torch.equal(head_of(file), tiny_llama().lm_head.weight)
    write_gguf(file, tiny_llama(seed=1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    assert torch.equal(head_of(file), tiny_llama(seed=1).lm_head.weight)
    assert len(list((home / "gguf").glob("[!.]*"))) == 1, "the superseded configuration takes no room"


@pytest.mark.parametrize(("part", "name"), [(gguf_folder, "write_configuration"), (WeightStore, "read")])
def test_a_file_that_changes_while_it_is_read(
    part: Any, name: str, refused: Callable[..., str], file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(part, name)

    def interrupted(*given: Any) -> Any:
        os.utime(file)
        return original(*given)

    monkeypatch.setattr(part, name, interrupted)
    assert f"{file} was changed while it was read: run the command again" in refused()
