"""Models in GGUF files: the same weights, tokenizer and answers as in the usual layout, converted once."""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

import hdtool
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.errors import HdtoolError, ModelError, OptionError
from hdtool.data.stores.home import converted_models_at_home
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.config import ModelConfig
from hdtool.runtime.model.gguf import converted, converted_folder
from hdtool.runtime.model.gguf.convert import LLAMA_3, Conversion, narrow_if_exact
from hdtool.runtime.model.gguf.converted import converted as folder_of
from hdtool.runtime.model.gguf.converted_folder import REST, WEIGHTS, Manifest
from hdtool.runtime.model.load import load, load_stops, load_tokenizer
from tests.support.gguf_files import END_OF_TEXT, END_OF_TURN, TEMPLATE, tiny_llama, vocabulary, write_gguf
from tests.support.project import ROOT


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of each test's own. A file that a test has just written counts as settled."""
    monkeypatch.setattr(converted_folder, "MIN_SETTLED_AGE", -60.0)
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, original: LlamaForCausalLM) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", original)


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory, written: Path) -> Path:
    """A home with the converted model of ``written``."""
    place = tmp_path_factory.mktemp("ready")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(converted_folder, "MIN_SETTLED_AGE", -60.0)
        patched.setenv("HDTOOL_HOME", str(place))
        folder_of(written, weights=True)
    return place


@pytest.fixture
def known(written: Path, ready: Path, home: Path) -> Path:
    """A file that was converted before; a test must not change it."""
    shutil.copytree(ready, home)
    return written


@pytest.fixture(scope="module")
def of_all_tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with the whole tokenizer of the demo model."""
    model = tiny_llama(vocab_size=len(vocabulary()["model"]["vocab"]))
    return write_gguf(tmp_path_factory.mktemp("whole") / "tiny.gguf", model)


@pytest.fixture
def file(written: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copy(written, tmp_path / "tiny.gguf"))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / WEIGHTS))


def answered(capfd: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    asked = ["generate", "--prompt", "What does `len` do? Say it twice.", "--max-new-tokens", "24", "--json", *options]
    assert run(asked) == 0
    answer: dict[str, Any] = json.loads(capfd.readouterr().out)
    return answer


def test_weights_and_logits_are_those_of_the_model(known: Path, original: LlamaForCausalLM) -> None:
    loaded = hdtool.load(str(known))
    found = loaded.target.model.state_dict()
    expected = original.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    ids = torch.tensor([loaded.tokenizer("def spam(eggs): return eggs")["input_ids"]])
    stock = AutoModelForCausalLM.from_pretrained(folder_of(known, weights=True))
    with torch.no_grad():
        assert torch.equal(stock(ids).logits, original(ids).logits)
    assert loaded.name == str(known)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("Q8_0", torch.float32), ("Q4_1", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)],
)
def test_numbers_are_exactly_those_that_transformers_reads(
    kind: str, dtype: torch.dtype, tmp_path: Path, original: LlamaForCausalLM
) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", original, kind)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=file.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).state_dict()
    folder = folder_of(file, weights=True)
    stored = weights_of(folder)
    assert stored.keys() == expected.keys()
    assert all(torch.equal(weight.float(), expected[name]) for name, weight in stored.items())
    assert stored["lm_head.weight"].dtype == dtype
    assert json.loads((folder / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert load(ModelConfig(str(file), dtype="bfloat16")).target.dtype == torch.bfloat16


def test_16_bits_hold_only_numbers_that_they_hold_exactly() -> None:
    for numbers, dtype in (
        ([1.0, -0.0, 2.0**100], torch.bfloat16),
        ([1.0009765625], torch.float16),
        ([1.0009765625, 2.0**100], torch.float32),
        ([float("nan")], torch.float32),
    ):
        weight = torch.tensor(numbers)
        assert narrow_if_exact(weight).dtype == dtype
        assert torch.equal(narrow_if_exact(weight).float().nan_to_num(7), weight.nan_to_num(7))


@pytest.mark.parametrize("sampled", [(), ("--temperature", "0.8", "--seed", "5")], ids=["greedy", "sampled"])
def test_drafted_answers_equal_plain_ones(
    sampled: tuple[str, ...], known: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = answered(capfd, "--model", str(known), "--method", "ar", *sampled)
    drafted = answered(capfd, "--model", str(known), "--method", "hd", "--draft-tokens", "12", *sampled)
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


def test_a_token_that_ends_a_turn_ends_the_answer(tmp_path: Path, original: LlamaForCausalLM) -> None:
    settings = {"tokenizer.ggml.eot_token_id": END_OF_TURN, "tokenizer.ggml.eom_token_id": END_OF_TURN}
    config = ModelConfig(str(write_gguf(tmp_path / "tiny.gguf", original, settings=settings)))
    assert load_stops(config, load_tokenizer(config)) == {END_OF_TEXT, END_OF_TURN} == load(config).stops


def test_scaled_rotary_positions_of_llama_3(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The file has the divisors of the frequencies, which transformers skips when it reads the file."""
    rope = {"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 32.0, **LLAMA_3}
    scaled = tiny_llama(rope_parameters=rope)
    plain = LlamaForCausalLM(LlamaConfig(**{**scaled.config.to_dict(), "rope_parameters": {"rope_theta": 500_000.0}}))
    divisors = (plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq).numpy()
    assert divisors.min() == 1 and divisors.max() == 32
    found = load(ModelConfig(str(write_gguf(tmp_path / "scaled.gguf", scaled, divisors=divisors)))).target.model
    assert found.config.rope_parameters == rope
    assert torch.equal(found.model.rotary_emb.inv_freq, scaled.model.rotary_emb.inv_freq)
    assert "scales its rotary positions" not in capfd.readouterr().err

    other = write_gguf(tmp_path / "other.gguf", scaled, divisors=np.sqrt(divisors))
    assert AutoConfig.from_pretrained(folder_of(other, weights=False)).rope_parameters["rope_type"] == "default"
    assert "scales its rotary positions (rope_freqs.weight), which" in capfd.readouterr().err
    yarn = write_gguf(tmp_path / "yarn.gguf", scaled, settings={"llama.rope.scaling.type": "yarn"})
    folder_of(yarn, weights=False)
    assert "scales its rotary positions (of type yarn), which" in capfd.readouterr().err


def test_commands_that_need_the_tokenizer_alone_convert_no_weights(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Conversion, "write_weights", lambda *_: pytest.fail("weights were converted"))
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
    assert not list(converted_models_at_home().rglob(WEIGHTS))


def test_the_second_start_reads_only_what_was_converted(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(known, weights=True)
    for function in ("content_hash", "file_lock"):
        monkeypatch.setattr(converted, function, lambda *_: pytest.fail("the file was read or locked"))
    assert folder_of(known, weights=True) == folder_of(known, weights=False) == folder
    assert folder.name.startswith("tiny-")


def test_a_moved_file_is_not_converted_again(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(file, weights=True)
    monkeypatch.setattr(converted, "_complete", lambda *_: pytest.fail("it was converted again"))
    (tmp_path / "other").mkdir()
    moved = file.rename(tmp_path / "other" / "tiny.gguf")
    assert folder_of(moved, weights=True) == folder
    monkeypatch.setattr(converted, "content_hash", lambda *_: pytest.fail("it was read again"))
    assert folder_of(moved, weights=True) == folder


def test_a_changed_file_never_gives_the_old_model(file: Path) -> None:
    """The new file has the name, the header, the size and the time of the old one."""
    before = file.stat()
    old = folder_of(file, weights=True)
    earlier = weights_of(old)
    write_gguf(file, tiny_llama(seed=1))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    new = folder_of(file, weights=True)
    assert not torch.equal(weights_of(new)["lm_head.weight"], earlier["lm_head.weight"])
    assert torch.equal(weights_of(new)["lm_head.weight"], tiny_llama(seed=1).lm_head.weight)
    assert not old.exists(), "the superseded model takes no room"


def test_a_file_that_changes_all_the_time_is_hashed_all_the_time(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converted_folder, "MIN_SETTLED_AGE", 3600.0)
    folder = folder_of(file, weights=False)
    manifest = Manifest.read(folder)
    assert manifest is not None and not manifest.seen
    assert folder_of(file, weights=False) == folder


def test_another_version_of_transformers_reads_the_file_again(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = folder_of(file, weights=False)
    (old / "note.txt").write_text("not written by hdtool")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "5.99")
    new = folder_of(file, weights=False)
    assert new != old
    assert sorted(path.name for path in old.iterdir()) == ["note.txt"], "only what hdtool wrote is removed"


def test_a_copy_keeps_what_another_file_supersedes(file: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copy(file, tmp_path / "copy.gguf"))
    old = folder_of(file, weights=False)
    assert folder_of(copy, weights=False) == old
    write_gguf(file, tiny_llama(seed=1))
    assert folder_of(file, weights=False) != old
    assert folder_of(copy, weights=False) == old


def test_files_that_can_be_deleted_are_deleted(file: Path) -> None:
    folder = folder_of(file, weights=True)
    manifest = Manifest.read(folder)
    assert manifest
    first, *others = manifest.files
    (folder / first).unlink()
    (folder / first).mkdir()
    with pytest.raises(OSError):
        converted_folder.remove(folder, manifest)
    assert others
    assert [path.name for path in folder.iterdir()] == [first]


def test_missing_parts_are_made_again(known: Path, original: LlamaForCausalLM) -> None:
    folder = folder_of(known, weights=True)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:1000])
    (folder / "tokenizer.json").unlink()
    assert folder_of(known, weights=True) == folder
    assert torch.equal(weights_of(folder)["lm_head.weight"], original.lm_head.weight)
    assert load_tokenizer(ModelConfig(str(known))).chat_template == TEMPLATE


@pytest.mark.parametrize("name", ["{folder}/thesis.txt", "../thesis.txt", "..", ".", "", "a\0b"])
def test_a_manifest_that_lists_other_places_is_damaged(
    name: str, known: Path, home: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(known, weights=False)
    manifest, thesis = Manifest.read(folder), folder.parent / "thesis.txt"
    thesis.write_text("mine")
    place = name.format(folder=folder.parent)
    try:
        size = (folder / place).stat().st_size
    except ValueError:
        size = 0
    assert manifest
    replace(manifest, files={**manifest.files, place: size}).write(folder)
    assert Manifest.read(folder) is None
    assert run(["stores", "remove", f"gguf-{manifest.sha256[:8]}", "--yes"]) == 1
    assert "there is no store" in capfd.readouterr().err
    assert folder_of(known, weights=False) == folder and Manifest.read(folder), "the file is read again"
    assert thesis.read_text() == "mine"


def test_damaged_weights_are_not_reused(known: Path) -> None:
    """The packed weights are made of the converted ones."""
    folder = folder_of(known, weights=True)
    os.truncate(folder / WEIGHTS, 1000)
    assert converted.converted(known, packed=True) == folder
    assert not (folder / WEIGHTS).exists()
    assert load_file(folder / REST)


def test_no_weights_stay_when_the_configuration_is_made_again(known: Path) -> None:
    folder = folder_of(known, weights=True)
    (folder / "generation_config.json").unlink()
    assert folder_of(known, weights=False) == folder
    assert not (folder / WEIGHTS).exists()


def test_weights_of_a_killed_conversion_are_removed(known: Path) -> None:
    """The kill came before the manifest listed them."""
    folder = folder_of(known, weights=True)
    manifest = Manifest.read(folder)
    assert manifest
    files = {name: size for name, size in manifest.files.items() if name != WEIGHTS}
    converted.remove_converted(folder, replace(manifest, files=files))
    assert not folder.exists()


KILLED = """
import os, sys
from pathlib import Path
from hdtool.runtime.model.gguf import convert, converted

def torn(model, folder):
    (folder / "model.safetensors").write_bytes(b"half")
    os._exit(9)

if "killed" in sys.argv:
    convert._save = torn
print(converted.converted(Path(sys.argv[1]), weights=True))
"""


def start(file: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", KILLED, str(file), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.long
def test_a_killed_conversion_leaves_nothing_that_is_taken_for_whole(file: Path, original: LlamaForCausalLM) -> None:
    with start(file, "killed") as process:
        process.communicate()
    assert process.returncode == 9
    assert list(converted_models_at_home().rglob(WEIGHTS)), "the test has left a torn file"
    folder = folder_of(file, weights=True)
    assert torch.equal(weights_of(folder)["lm_head.weight"], original.lm_head.weight)
    assert [path.name for path in converted_models_at_home().rglob(WEIGHTS)] == [WEIGHTS]
    assert not list(converted_models_at_home().glob("*.tmp")) and not list(converted_models_at_home().glob(".*.tmp"))


@pytest.mark.exhaustive
def test_two_processes_at_once_convert_once(file: Path) -> None:
    time.sleep(max(0, file.stat().st_mtime + 2.5 - time.time()))  # in these processes the file must have settled
    processes = [start(file) for _ in range(2)]
    printed = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    (one, said), (other, also_said) = printed
    assert one == other
    assert (said + also_said).count("converting the weights") == 1


@pytest.fixture
def refused(file: Path, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    def complaint(*options: str, model: Path = file, code: int = 1) -> str:
        capfd.readouterr()
        assert run(["generate", "--prompt", "hi", "--model", str(model), *options]) == code
        printed = capfd.readouterr()
        (line,) = [line for line in printed.err.splitlines() if not line.startswith("note: ")]
        assert line.startswith("error: ") and not printed.out
        return line

    yield complaint


def test_files_that_cannot_be_read(
    refused: Callable[..., str], file: Path, original: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        (whole.replace(b"llama.embedding_length", b"llama.embedding_lengtX"), "cannot read the"),
        (whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight"), "lacks 1 weights of its model"),
    ):
        file.write_bytes(content)
        assert said in refused()
    write_gguf(file, original, settings={"split.count": 3})
    assert "is one of 3 parts of a model: join them" in refused()
    file.write_bytes(whole)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "gguf", None)
        assert refused().endswith('import of gguf halted; None in sys.modules: pip install "gguf>=0.19"')
    assert not list(converted_models_at_home().rglob(WEIGHTS))


def test_damaged_weights_are_named_and_leave_no_copy(
    refused: Callable[..., str], file: Path, original: LlamaForCausalLM
) -> None:
    for number, said in ((math.nan, "NaN"), (-math.inf, "infinite values")):
        model = copy.deepcopy(original)
        model.get_parameter("model.layers.1.mlp.down_proj.weight").data[3, 5] = number
        write_gguf(file, model)
        damaged = f"{file} is damaged: model.layers.1.mlp.down_proj.weight holds {said}: get it again"
        assert refused() == f"error: {damaged}"
        assert not [path for path in converted_models_at_home().iterdir() if path.is_dir()]


def test_weights_that_may_be_damaged_are_named(
    file: Path, original: LlamaForCausalLM, capfd: pytest.CaptureFixture[str]
) -> None:
    model = copy.deepcopy(original)
    model.get_parameter("model.layers.0.mlp.up_proj.weight").data.zero_()
    model.get_parameter("model.layers.1.mlp.up_proj.weight").data[0, 0] = 70_000
    folder_of(write_gguf(file, model), weights=True)
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


def test_a_full_disk(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors import SafetensorError

    def fail(*_: object, **__: object) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", fail)
    assert "(I/O error: No space left on device (os error 28)): make room" in refused()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
    assert "whose disk has 5: make room" in refused()
    assert not list(converted_models_at_home().rglob(WEIGHTS))
    assert not list(converted_models_at_home().glob(".*.tmp"))


def test_a_home_that_cannot_be_written(refused: Callable[..., str], home: Path) -> None:
    home.write_text("a file")
    assert "cannot be converted to" in refused()


def test_a_file_that_changes_while_it_is_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Conversion.write_configuration

    def interrupted(self: Conversion, folder: Path) -> None:
        write(self, folder)
        os.utime(file)

    monkeypatch.setattr(Conversion, "write_configuration", interrupted)
    with pytest.raises(HdtoolError, match="was changed while it was read"):
        folder_of(file, weights=False)
    assert not [path for path in converted_models_at_home().iterdir() if path.is_dir()]
