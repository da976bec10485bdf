"""The commands around stores, as people type them."""

from __future__ import annotations

import gzip
import json
import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import read_manifest
from hdtool.runtime.target import load
from tests.support.commands import complaint, json_of

SHARE_GPT = [
    {
        "id": "1",
        "conversations": [{"from": "human", "value": "Tell me."}, {"from": "gpt", "value": "Once upon a time."}],
    },
    {"id": "2", "conversations": [{"from": "human", "value": "Again!"}, {"from": "gpt", "value": "Once upon a time."}]},
]


@pytest.fixture(autouse=True)
def in_its_own_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sharegpt.json").write_text(json.dumps(SHARE_GPT))
    rows = [{"prompt": "Hi?", "output": f"I am a language model, and I say {word}."} for word in ("yes", "no", "yes")]
    Path("generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_corpus_index_is_built_found_and_inspected(capfd: pytest.CaptureFixture[str]) -> None:
    built = json_of(capfd, "build-corpus-db", "sharegpt.json")
    assert (built["kind"], built["format"], built["vocab_size"]) == ("corpus", 1, 4096)
    assert built["sources"][0]["records"] == 4
    assert Path(built["store"]).is_relative_to(Path("home").resolve())
    seen = json_of(capfd, "inspect", built["store"], "--after", "Once upon", "--latency", "--verify")
    assert seen["after"][0]["text"] == " a time."
    assert seen["after"][0]["count"] == 2
    assert seen["verified"] == 5
    assert 0 < seen["lookup_us_p50"] <= seen["lookup_us_p99"]
    assert run(["inspect", built["store"], "--after", "Once upon"]) == 0
    shown = capfd.readouterr().out
    assert f"source     sharegpt.json (sha256 {seen['sources'][0]['sha256'][:12]}): 4 documents" in shown
    assert "' a time.'" in shown


def test_inspect_lists_a_screen_of_sources(capfd: pytest.CaptureFixture[str]) -> None:
    for number in range(14):
        Path(f"{number:02}.txt").write_text(f"Text {number}.")
    json_of(capfd, "build-corpus-db", "[01]*.txt", "--out", "store")
    sources = json_of(capfd, "inspect", "store")["sources"]
    assert run(["inspect", "store"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(sources) == 14 and sum(line.startswith("source     ") for line in lines) == 12
    left = sum(source["tokens"] for source in sources[12:])
    assert lines[-1] == f"           and 2 more, {left} tokens: --json lists them"


def test_a_model_store_holds_answers_alone(capfd: pytest.CaptureFixture[str]) -> None:
    built = json_of(capfd, "build-model-db", "--from", "generations.jsonl", "--from", "sharegpt.json")
    assert built["counts"]["documents"] == 5
    seen = json_of(capfd, "inspect", built["store"], "--after", "I am a")
    assert seen["after"][0]["count"] == 3
    assert seen["after"][0]["text"].startswith(" language")
    assert json_of(capfd, "inspect", built["store"], "--after", "Tell")["after"] == []


def test_n_grams_of_a_model_store_are_listed(capfd: pytest.CaptureFixture[str]) -> None:
    built = json_of(capfd, "build-model-db", "--from", "generations.jsonl")
    listed = json_of(capfd, "inspect", built["store"], "--ngrams", "I am")["ngrams"]
    assert listed and all(entry["text"].startswith("I am") for entry in listed)
    assert (listed[0]["total"], listed[0]["continuations"][0]["count"]) == (3, 3)
    drafted = json_of(capfd, "inspect", built["store"], "--after", listed[0]["text"])["after"][0]
    assert drafted["matched"] == len(listed[0]["ids"])
    assert drafted["ids"] == listed[0]["continuations"][0]["ids"]
    whole = json_of(capfd, "inspect", built["store"], "--ngrams", "")["ngrams"]
    assert [entry["total"] for entry in whole] == sorted((entry["total"] for entry in whole), reverse=True)
    assert run(["inspect", built["store"], "--ngrams", "I am"]) == 0
    assert f"'{listed[0]['text']}': " in capfd.readouterr().out
    assert json_of(capfd, "inspect", built["store"], "--ngrams", "zebra zebra")["ngrams"] == []
    json_of(capfd, "build-corpus-db", "generations.jsonl", "--out", "corpus")
    assert "a model store is needed" in complaint(capfd, "inspect", "corpus", "--ngrams", "I")


def test_inputs_of_all_kinds_go_together(capfd: pytest.CaptureFixture[str]) -> None:
    Path("more").mkdir()
    Path("more/plain.txt").write_text("Some plain text.")
    Path("more/chat.jsonl.gz").write_bytes(gzip.compress(b'{"messages": [{"role": "user", "content": "Hi there"}]}\n'))
    built = json_of(capfd, "build-corpus-db", "*.json", "more", "--out", "store")
    assert [Path(share["name"]).name for share in built["sources"]] == ["sharegpt.json", "chat.jsonl.gz", "plain.txt"]


def test_add_merge_and_drop(capfd: pytest.CaptureFixture[str]) -> None:
    whole = json_of(capfd, "build-corpus-db", "sharegpt.json", "generations.jsonl", "--out", "whole")
    json_of(capfd, "build-corpus-db", "sharegpt.json", "--out", "grown")
    assert json_of(capfd, "add", "grown", "generations.jsonl")["counts"] == whole["counts"]
    json_of(capfd, "build-corpus-db", "generations.jsonl", "--out", "other")
    assert json_of(capfd, "merge", "grown", "other", "--out", "united")["counts"] == whole["counts"]
    assert run(["drop", "grown", "--source", "sharegpt.json", "--json"]) == 0
    printed = capfd.readouterr()
    left = json.loads(printed.out)
    removed = next(share for share in whole["sources"] if share["name"] == "sharegpt.json")
    assert f"removed sharegpt.json (sha256 {removed['sha256'][:12]}): 4 documents, " in printed.err
    assert [share["name"] for share in left["sources"]] == ["generations.jsonl"]
    assert all(row["matched"] < 2 for row in json_of(capfd, "inspect", "grown", "--after", "Once upon a")["after"])


def test_bad_records_are_named_and_too_many_stop_the_build(capfd: pytest.CaptureFixture[str]) -> None:
    before = json_of(capfd, "build-corpus-db", "sharegpt.json", "--out", "store")
    good = [json.dumps({"text": f"Text {number}."}) for number in range(30)]
    Path("mixed.jsonl").write_text("\n".join([*good[:15], "{broken", *good[15:]]))
    assert run(["build-corpus-db", "mixed.jsonl", "--out", "mixed"]) == 0
    assert "left out: mixed.jsonl:16: not valid JSON" in capfd.readouterr().err
    said = complaint(
        capfd, "build-corpus-db", "mixed.jsonl", "--out", "store", "--replace", "--max-bad-fraction", "0.01"
    )
    assert "1 of 31 records cannot be used, the first at mixed.jsonl:16" in said
    assert read_manifest(Path("store")).counts == before["counts"], "the old store stays"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["build-corpus-db", "nothing.json"], "nothing.json matches no file: check the path"),
        (["build-corpus-db", "sharegp.json"], "sharegp.json matches no file (did you mean sharegpt.json?): check"),
        (["build-corpus-db", "no/nothing.json"], "no/nothing.json matches no file (no is no folder): check the path"),
        (["build-corpus-db", "empty.jsonl"], "empty.jsonl"),
        (["build-corpus-db", "binary.txt"], "binary.txt"),
        (["build-model-db", "--from", "questions.jsonl"], "questions.jsonl"),
        (["inspect", "nowhere"], "nowhere holds no store"),
        (["merge", "nowhere", "--out", "x"], "nowhere holds no store"),
        (["drop", "nowhere", "--source", "x"], "nowhere holds no store"),
        (["add", "nowhere", "sharegpt.json"], "nowhere holds no store"),
    ],
)
def test_a_missing_input_is_reported_in_one_line(
    arguments: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("empty.jsonl").touch()
    Path("binary.txt").write_bytes(b"\x00\x01\x02")
    Path("questions.jsonl").write_text('{"messages": [{"role": "user", "content": "Only asked"}]}\n')
    assert said in complaint(capfd, *arguments)
    assert not Path("x").exists()


def test_damage_and_other_tokenizers_are_reported(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    json_of(capfd, "build-corpus-db", "sharegpt.json", "--out", "store")
    manifest = read_manifest(Path("store"))
    path = Path("store") / manifest.files["documents"].name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert "store is damaged (documents-" in complaint(capfd, "inspect", "store", "--verify")
    path.write_bytes(whole[:-2])
    assert "hdtool build-corpus-db" in complaint(capfd, "inspect", "store")
    path.write_bytes(whole)
    row = json.loads(Path("store", MANIFEST).read_text())
    row["tokenizer"]["fingerprint"] = "feed"
    Path("store", MANIFEST).write_text(json.dumps(row))
    for command in (["inspect", "store", "--after", "Once"], ["add", "store", "generations.jsonl"]):
        assert "was built with a tokenizer that is not found here (feed" in complaint(capfd, *command)
        assert "was built with another tokenizer (feed" in complaint(capfd, *command, "--model", "embedded")


def test_without_a_model_the_tokenizer_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["build-corpus-db", "sharegpt.json", "--out", "store"]) == 0
    said = "note: the tokenizer is that of the embedded toy model: --model MODEL names another\n"
    assert capfd.readouterr().err == said
    assert "folder" not in json.loads(Path("store", MANIFEST).read_text())["tokenizer"]
    assert run(["build-corpus-db", "sharegpt.json", "--out", "other", "--model", "embedded"]) == 0
    assert not capfd.readouterr().err


def test_a_store_is_extended_with_its_own_tokenizer(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "Once": 1, "upon": 2, "a": 3, "time": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained("words")
    json_of(capfd, "build-corpus-db", "sharegpt.json", "--out", "store", "--model", "words")
    Path("elsewhere").mkdir()
    with chdir("elsewhere"):
        assert run(["add", "../store", "../generations.jsonl"]) == 0
        said = f"note: the tokenizer is that of {tmp_path / 'words'}, with which ../store was built"
        assert said in capfd.readouterr().err
        assert json_of(capfd, "inspect", "../store", "--after", "Once")["after"][0]["text"].startswith("upon")
    shutil.rmtree("words")
    said = complaint(capfd, "add", "store", "sharegpt.json")
    assert "that is not found here" in said and "give the model that the store was built for with --model" in said


@pytest.mark.parametrize("kind", ["corpus", "model"])
def test_text_without_a_token_is_one_line(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    inputs = ["generations.jsonl"] if kind == "corpus" else ["--from", "generations.jsonl"]
    json_of(capfd, f"build-{kind}-db", *inputs, "--out", "store")
    assert run(["inspect", "store", "--after", ""]) == 2
    assert capfd.readouterr().err == "error: --after is empty: give the text after which the store shall draft\n"


def test_text_that_the_tokenizer_discards_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokenizers normalise spaces and control characters away."""
    json_of(capfd, "build-corpus-db", "generations.jsonl", "--out", "store")
    monkeypatch.setattr(PreTrainedTokenizerBase, "__call__", lambda *_, **__: {"input_ids": []})
    monkeypatch.setattr(TokenizerFingerprint, "of", lambda _: read_manifest(Path("store")).tokenizer)
    assert run(["inspect", "store", "--after", " "]) == 2
    assert "--after ' ' has no token" in capfd.readouterr().err


def test_a_destination_is_checked_before_anything_is_loaded(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of the inputs is the case that lost files: nothing there is changed, and nothing is created."""
    before = {path.name: path.read_bytes() for path in Path().iterdir() if path.is_file()}
    monkeypatch.setattr(load, "load_tokenizer", lambda *_: pytest.fail("the tokenizer was loaded"))
    for command in (["build-corpus-db", "sharegpt.json"], ["build-model-db", "--from", "generations.jsonl"]):
        said = complaint(capfd, *command, "--out", ".")
        assert "holds no store, but other files, such as generations.jsonl: choose an empty or a new folder" in said
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_bad_options_are_bad_usage(capfd: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--max-bad-fraction", "2"), ("--shard-bytes", "0"), ("--workers", "-1")):
        assert run(["build-corpus-db", "sharegpt.json", option, value]) == 2
        assert " must be " in capfd.readouterr().err
    assert run(["build-model-db", "--from", "generations.jsonl", "--per-key", "0"]) == 2
    assert run(["add", "store", "generations.jsonl", "--max-bad-fraction", "7"]) == 2


def test_collected_answers_feed_a_model_store(capfd: pytest.CaptureFixture[str]) -> None:
    """The whole way: prompts, the model's own answers, a store mined from them, what it would draft."""
    Path("prompts.jsonl").write_text("".join(demo.PROMPTS.read_text().splitlines(keepends=True)[:2]))
    command = ["collect", "--prompts", "prompts.jsonl", "--out", "own.jsonl", "--max-new-tokens", "40", "--quiet"]
    assert run(command) == 0
    built = json_of(capfd, "build-model-db", "--from", "own.jsonl")
    assert built["counts"]["documents"] == 2
    answer = json.loads(Path("own.jsonl").read_text().splitlines()[0])["messages"][-1]["content"]
    assert json_of(capfd, "inspect", built["store"], "--after", answer[: len(answer) // 2])["after"]
