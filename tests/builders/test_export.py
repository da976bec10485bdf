"""Exported model folders: they link, draft in any program that calls ``generate``, and replace nothing."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextIteratorStreamer, pipeline

from hdtool.builders.export import CODE_FILE, CODE_FOLDER, REQUIREMENTS_FILE
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.runtime.integrations.exported import ATTRIBUTE
from hdtool.runtime.integrations.generate_request import UnsupportedCallError

OPTIONS = ("--draft-tokens", "6", "--history", "none", "--model-db", "none", "--corpus-db", "none")
ASKED = "Tom has 3 boxes with 12 pencils each. How many pencils"


def exported(out: Path, *options: str, model: Path = demo.MODEL) -> int:
    return run(["export", str(model), "--out", str(out), *OPTIONS, *options])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("exported") / "model"
    assert exported(out) == 0
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


@pytest.fixture(scope="module")
def inputs(folder: Path) -> dict[str, Any]:
    return dict(AutoTokenizer.from_pretrained(folder)(ASKED, return_tensors="pt"))


def plain(model: Any, **options: Any) -> Any:
    """The answer of the library's own ``generate``."""
    return type(model).generate(model, **options)


def test_weights_are_linked(folder: Path) -> None:
    for file in demo.MODEL.iterdir():
        assert (folder / file.name).samefile(file)


def test_generate_drafts_the_same_answer(model: Any, inputs: dict[str, Any]) -> None:
    options = {**inputs, "min_new_tokens": 48, "max_new_tokens": 48, "do_sample": False}
    output = model.generate(**options)
    assert torch.equal(output, plain(model, **options))
    stats = model.__dict__[ATTRIBUTE].generator.stats
    assert stats.tokens == output.shape[1] - inputs["input_ids"].shape[1]
    assert stats.steps < stats.tokens
    assert torch.equal(
        model.generate(inputs["input_ids"], min_new_tokens=48, max_new_tokens=48, do_sample=False), output
    )


def test_pipelines_and_streamers(model: Any, folder: Path, inputs: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answer = pipeline("text-generation", model=model, tokenizer=tokenizer)
    (found,) = answer(ASKED, max_new_tokens=16, do_sample=False, return_full_text=False)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    model.generate(**inputs, max_new_tokens=16, do_sample=False, streamer=streamer)
    assert "".join(streamer) == found["generated_text"]


def test_other_calls_are_left_to_the_library(model: Any, inputs: dict[str, Any], folder: Path) -> None:
    beams = {**inputs, "max_new_tokens": 8, "num_beams": 2, "do_sample": False}
    with pytest.warns(UserWarning, match="num_beams is 2.*answered without drafts"):
        found = model.generate(**beams)
    assert torch.equal(found, plain(model, **beams))
    streamer = TextIteratorStreamer(AutoTokenizer.from_pretrained(folder))
    with pytest.raises(UnsupportedCallError):
        model.generate(
            **inputs, return_dict_in_generate=True, output_attentions=True, max_new_tokens=4, streamer=streamer
        )
    own = model.generate(**inputs, max_new_tokens=4, custom_generate=lambda model, input_ids, *_, **__: input_ids)
    assert torch.equal(own, inputs["input_ids"])


def test_a_copy_has_a_generator_of_its_own(model: Any, inputs: dict[str, Any]) -> None:
    model.generate(**inputs, max_new_tokens=2)
    assert copy.deepcopy(model).__dict__[ATTRIBUTE].generator is None


def test_settings_are_written_as_code(tmp_path: Path) -> None:
    store = tmp_path / "store"
    assert run(["build-corpus-db", str(demo.PROMPTS), "--out", str(store), "--quiet"]) == 0
    out = tmp_path / "out"
    command = ["export", str(demo.MODEL), "--out", str(out), "--method", "rest", "--corpus-db", str(store)]
    assert run(command) == 0
    names: dict[str, Any] = {}
    exec((out / CODE_FILE).read_text(), names)
    assert names["DECODING"] == {"method": "rest"}
    assert names["STORES"] == {"corpus_db": str(store.resolve())}
    assert run([*command[:4], *OPTIONS]) == 0, "an exported folder is written again"
    exec((out / CODE_FILE).read_text(), names)
    assert names["DECODING"]["draft_tokens"] == 6


def test_another_export_removes_former_links_and_no_file_of_the_user(tmp_path: Path) -> None:
    whole, sharded = (shutil.copytree(demo.MODEL, tmp_path / name) for name in ("whole", "sharded"))
    (whole / "original").mkdir()
    for name in ("vocab.json", "merges.txt", "original/params.json"):
        (whole / name).write_text("{}")
    (sharded / "model.safetensors").rename(sharded / "model-00001-of-00001.safetensors")
    (tmp_path / "other").write_text("mine")
    out = tmp_path / "out"
    assert exported(out, model=whole) == 0
    (out / "notes.txt").write_text("mine")
    (out / "linked.txt").symlink_to(tmp_path / "other")
    (out / "merges.txt").unlink()
    (out / "merges.txt").write_text("mine")
    (whole / "vocab.json").unlink()  # its link now leads nowhere
    assert exported(out, model=sharded) == 0
    own = {"notes.txt", "linked.txt", "merges.txt"}
    assert {path.name for path in out.iterdir() if not path.is_dir()} == own | {path.name for path in sharded.iterdir()}
    assert {(out / name).read_text() for name in own} == {"mine"}
    assert not list((out / "original").iterdir())
    assert all((out / path.name).samefile(path) for path in sharded.iterdir())
    assert (whole / "model.safetensors").is_file()


def test_code_copied_into_its_model_deletes_nothing_there(tmp_path: Path) -> None:
    model = shutil.copytree(demo.MODEL, tmp_path / "model")
    (model / "model-2.safetensors").touch()
    assert exported(tmp_path / "out", model=model) == 0
    shutil.copytree(tmp_path / "out" / CODE_FOLDER, model / CODE_FOLDER)
    before = {path.name for path in model.iterdir()}
    assert exported(model) == 1, "its files are those of another model"
    assert {path.name for path in model.iterdir()} == before


@pytest.mark.parametrize("line", ["MODEL = (", "MODEL = 1", "MODEL = None", ""])
def test_an_export_that_records_no_model_is_replaced(line: str, tmp_path: Path) -> None:
    assert exported(tmp_path) == 0
    code = tmp_path / CODE_FILE
    code.write_text(code.read_text().replace(f"MODEL = {str(demo.MODEL.resolve())!r}", line))
    assert exported(tmp_path) == 0
    assert str(demo.MODEL.resolve()) in code.read_text()


def test_a_store_that_is_gone_leaves_a_model_that_answers(
    tmp_path: Path, inputs: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    shutil.copytree(demo.CORPUS_INDEX, tmp_path / "gone")
    assert run(["export", str(demo.MODEL), "--out", str(out), "--corpus-db", str(tmp_path / "gone")]) == 0
    shutil.rmtree(tmp_path / "gone")
    model: Any = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)
    with pytest.warns(UserWarning, match="gone holds no store.*answers without drafts"):
        found = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    assert torch.equal(found, plain(model, **inputs, max_new_tokens=4, do_sample=False))


class TestNothingIsReplaced:
    def fault(self, capfd: pytest.CaptureFixture[str], out: Path, **options: Any) -> str:
        assert exported(out, **options) == 1
        (line,) = capfd.readouterr().err.splitlines()
        return line

    def test_other_files(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full" / "notes.txt").write_text("mine")
        assert "holds other files" in self.fault(capfd, tmp_path / "full")
        (tmp_path / "file").write_text("mine")
        assert "is not a folder" in self.fault(capfd, tmp_path / "file")
        foreign = tmp_path / "foreign"
        (foreign / CODE_FOLDER).mkdir(parents=True)
        (foreign / CODE_FILE).write_text("def generate(): ...\n")
        assert "is not a file of hdtool export" in self.fault(capfd, foreign)
        assert (foreign / CODE_FILE).read_text() == "def generate(): ...\n"
        assert (tmp_path / "full" / "notes.txt").read_text() == "mine"

    def test_a_file_in_an_exported_folder(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        out = tmp_path / "out"
        assert exported(out) == 0
        capfd.readouterr()
        (out / "config.json").unlink()
        (out / "config.json").write_text("{}")
        assert "config.json is another file" in self.fault(capfd, out)
        assert (out / "config.json").read_text() == "{}"

    def test_requirements(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        model = shutil.copytree(demo.MODEL, tmp_path / "model")
        (model / CODE_FOLDER).mkdir()
        (model / REQUIREMENTS_FILE).write_text("numpy\n")
        assert "of its own" in self.fault(capfd, tmp_path / "out", model=model)
        assert (model / REQUIREMENTS_FILE).read_text() == "numpy\n"
        (model / REQUIREMENTS_FILE).unlink()
        assert exported(tmp_path / "out", model=model) == 0
        edited = tmp_path / "out" / REQUIREMENTS_FILE
        assert edited.read_text() == "hdtool\n"
        edited.write_text("hdtool\npeft\n")
        capfd.readouterr()
        assert "is not a file of hdtool export" in self.fault(capfd, tmp_path / "out", model=model)
        assert edited.read_text() == "hdtool\npeft\n"

    def test_an_export_that_was_stopped_is_completed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def stop(file: Path, to: Path) -> None:
            raise KeyboardInterrupt

        out = tmp_path / "out"
        with monkeypatch.context() as patched:
            patched.setattr("hdtool.builders.export._link", stop)
            assert exported(out) == 130
        assert exported(out) == 0
        assert (out / "config.json").samefile(demo.MODEL / "config.json")

    def test_the_model_itself(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        model = shutil.copytree(demo.MODEL, tmp_path / "model")
        assert "holds other files" in self.fault(capfd, model, model=model)
        assert "lies in the folder of the model" in self.fault(capfd, model / "exported", model=model)
        (model / CODE_FOLDER).mkdir()
        (model / CODE_FILE).write_text("def generate(): ...\n")
        assert "of its own" in self.fault(capfd, tmp_path / "out", model=model)

    def test_json(self, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        assert exported(tmp_path / "out", "--json") == 0
        found = json.loads(capfd.readouterr().out)
        assert found == {"folder": str(tmp_path / "out"), "files": found["files"], "code": CODE_FILE}


def test_a_model_that_could_not_draft_is_not_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(demo.MODEL, bare, ignore=shutil.ignore_patterns("tokenizer*", "special*", "vocab*", "merges*"))
    assert exported(tmp_path / "a", model=bare) == 1
    assert "tokenizer" in capsys.readouterr().err
    other = tmp_path / "other"
    shutil.copytree(demo.MODEL, other)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(other)
    assert exported(tmp_path / "b", "--model-db", str(demo.MODEL_STORE), model=other) == 1
    assert "tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()
