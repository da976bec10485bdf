"""A model store belongs to a model: built, found, listed, replaced and removed by its name."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from hdtool.cli import store_output
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.artifact import Artifact
from hdtool.data.durable_files import file_lock
from hdtool.data.errors import StoreError
from hdtool.data.home import home
from hdtool.data.stores.manifest import Manifest
from hdtool.data.stores.store_file_names import LOCK_FILE, MANIFEST
from hdtool.data.stores.store_folder import read_manifest
from hdtool.data.stores.stores_at_home import StoredItem, model_store_at_home, store_at_home, stored_items
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of
from tests.support.commands import complaint, json_of
from tests.support.locks import deleted_lock_files

QUICK = ("--max-new-tokens", "4", "--method", "hd", "--draft-tokens", "2", "--history", "none")


@pytest.fixture(autouse=True)
def own_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "Hi?", "output": f"I am a language model, and I say {word}."} for word in ("yes", "no", "yes")]
    Path("answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def tuned(tmp_path: Path) -> str:
    """A fine-tune of the demo model with the same tokenizer."""
    folder = Path(shutil.copytree(demo.MODEL, tmp_path / "tuned"))
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 0.1
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def noted(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["generate", "--prompt", "Hi", *QUICK, *arguments]) == 0
    return capfd.readouterr().err


def test_a_fine_tune_and_its_base_have_stores_of_their_own(tuned: str, capfd: pytest.CaptureFixture[str]) -> None:
    base = json_of(capfd, "build-model-db", "--from", "answers.jsonl")
    own = json_of(capfd, "build-model-db", "--from", "answers.jsonl", "--model", tuned)
    assert base["tokenizer"] == own["tokenizer"] and base["store"] != own["store"]
    assert (base["model"]["name"], own["model"]["name"]) == ("hdtool-demo", "tuned")
    for store, model in ((base, ()), (own, ("--model", tuned))):
        said = noted(capfd, *model)
        assert f"drafting from {store['store']} (" in said and "note:" not in said


def test_another_models_store_is_never_opened_silently(tuned: str, capfd: pytest.CaptureFixture[str]) -> None:
    base = json_of(capfd, "build-model-db", "--from", "answers.jsonl")
    said = noted(capfd, "--model", tuned, "--corpus-db", "none")
    assert "note: there is no model store of tuned (" in said
    assert f"{base['store']} holds answers of hdtool-demo (" in said
    assert "drafting from no stores" in said
    said = noted(capfd, "--model", tuned, "--model-db", base["store"])
    assert f"note: {base['store']} holds answers of hdtool-demo (" in said and "not of tuned (" in said
    assert f"drafting from {base['store']} (" in said
    assert "note:" not in noted(capfd, "--model", tuned, "--model-db", "none")


@pytest.mark.parametrize("command", ["build-model-db --from", "build-corpus-db"])
@pytest.mark.parametrize("out", [(), ("--out", "store")])
def test_a_build_replaces_a_store_only_if_asked(
    command: str, out: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    words = [*command.split(), "answers.jsonl", *out]
    first = json_of(capfd, *words)
    before = read_manifest(Path(first["store"]))
    said = complaint(capfd, *words)
    assert "holds a store of " in said and "hdtool add" in said and "--replace" in said
    assert read_manifest(Path(first["store"])) == before
    again = json_of(capfd, *words, "--replace")
    assert again["store"] == first["store"] and again["files"] != first["files"]


@pytest.mark.parametrize("options", [(), ("--replace",)])
def test_a_store_that_came_meanwhile_is_replaced_only_if_asked(
    options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another build ends after the check of the folder and before this build begins."""
    prepare = store_output.open_documents

    def read_after_another_build(*arguments: Any, **named: Any) -> Any:
        monkeypatch.setattr(store_output, "open_documents", prepare)
        json_of(capfd, "build-corpus-db", "answers.jsonl", "--out", "store")
        return prepare(*arguments, **named)

    monkeypatch.setattr(store_output, "open_documents", read_after_another_build)
    Path("more.txt").write_text("Some text of another origin.")
    words = ("build-corpus-db", "more.txt", "--out", "store", "--quiet")
    if options:
        assert run([*words, *options]) == 0
    else:
        assert "--replace" in complaint(capfd, *words)
    (source,) = read_manifest(Path("store")).sources
    assert Path(source.name).name == ("more.txt" if options else "answers.jsonl")


def test_a_store_is_named_as_it_is_listed(capfd: pytest.CaptureFixture[str]) -> None:
    json_of(capfd, "build-model-db", "--from", "answers.jsonl")
    json_of(capfd, "build-corpus-db", "answers.jsonl")
    names = {item["kind"]: item["name"] for item in json_of(capfd, "stores")["stores"]}
    assert json_of(capfd, "inspect", names["model"])["kind"] == "model"
    Path("more.txt").write_text("Some text of another origin.")
    assert len(json_of(capfd, "add", names["corpus"], "more.txt")["sources"]) == 2
    assert len(json_of(capfd, "drop", names["corpus"], "--source", "more.txt")["sources"]) == 1
    assert noted(capfd, "--corpus-db", names["corpus"], "--model-db", "none").count("corpus") == 1
    assert "holds no store" in complaint(capfd, "inspect", "corpus-00000000")


def test_a_damaged_store_is_replaced_only_if_asked(capfd: pytest.CaptureFixture[str]) -> None:
    json_of(capfd, "build-corpus-db", "answers.jsonl", "--out", "store")
    row = json.loads(Path("store", MANIFEST).read_text())
    Path("store", MANIFEST).write_text(json.dumps({**row, "counts": None}))
    assert "holds a store that cannot be read" in complaint(capfd, "build-corpus-db", "answers.jsonl", "--out", "store")
    json_of(capfd, "build-corpus-db", "answers.jsonl", "--out", "store", "--replace")


def test_merge_replaces_one_of_its_inputs_but_no_other_store(capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        json_of(capfd, "build-corpus-db", "answers.jsonl", "--out", name)
    assert "--replace" in complaint(capfd, "merge", "one", "--out", "two")
    json_of(capfd, "merge", "one", "two", "--out", "two")
    json_of(capfd, "merge", "one", "--out", "two", "--replace")


def test_stores_made_from_stores_keep_their_model(tuned: str, capfd: pytest.CaptureFixture[str]) -> None:
    json_of(capfd, "build-model-db", "--from", "answers.jsonl", "--out", "base")
    json_of(capfd, "build-model-db", "--from", "answers.jsonl", "--out", "own", "--model", tuned)
    Path("more.jsonl").write_text(json.dumps({"prompt": "?", "output": "One more answer of some length."}) + "\n")
    assert json_of(capfd, "merge", "base", "--out", "copy")["model"]["name"] == "hdtool-demo"
    assert json_of(capfd, "merge", "base", "own", "--out", "both")["model"] is None
    assert run(["add", "own", "more.jsonl", "--model", "embedded"]) == 0
    assert "answers of tuned (" in capfd.readouterr().err
    assert run(["add", "base", "more.jsonl", "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["model"]["name"] == "hdtool-demo" and "answers of" not in printed.err
    assert run(["inspect", "base"]) == 0
    assert "model      hdtool-demo (" in capfd.readouterr().out


def test_a_model_without_weights_needs_a_folder(capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(demo.MODEL, "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    said = complaint(capfd, "build-model-db", "--from", "answers.jsonl", "--model", "bare")
    assert "bare has no weights on this machine" in said and "--out" in said and "--model-db" in said
    assert not home().exists()
    built = json_of(capfd, "build-model-db", "--from", "answers.jsonl", "--model", "bare", "--out", "store")
    assert built["model"] is None
    assert "note:" not in noted(capfd, "--model-db", "store")
    json_of(capfd, "build-corpus-db", "answers.jsonl", "--model", "bare")


@pytest.fixture
def unnamed(capfd: pytest.CaptureFixture[str]) -> Path:
    """A store of an earlier version: filed by its tokenizer alone, without a model in its manifest."""
    json_of(capfd, "build-model-db", "--from", "answers.jsonl", "--out", "old")
    row = json.loads(Path("old", MANIFEST).read_text())
    del row["model"]
    Path("old", MANIFEST).write_text(json.dumps(row))
    folder = store_at_home("model", Manifest.from_json(row).tokenizer)
    folder.parent.mkdir(parents=True)
    Path("old").rename(folder)
    return folder


def test_a_store_that_names_no_model_is_mentioned_opened_and_taken_over(
    unnamed: Path, tuned: str, capfd: pytest.CaptureFixture[str]
) -> None:
    said = noted(capfd, "--model", tuned)
    assert f"{unnamed} holds answers of a model that it does not name" in said
    assert f"drafting from {unnamed} (" in noted(capfd, "--model", tuned, "--model-db", str(unnamed))
    assert run(["stores"]) == 0
    assert f"hdtool build-model-db MODEL --from {unnamed}" in capfd.readouterr().out
    adopted = json_of(capfd, "build-model-db", "--model", tuned, "--from", str(unnamed))
    assert adopted["model"]["name"] == "tuned"
    assert adopted["counts"] == read_manifest(unnamed).counts and adopted["sources"][0]["name"] == "answers.jsonl"
    assert f"drafting from {adopted['store']} (" in noted(capfd, "--model", tuned)
    assert run(["stores", "remove", next(item.name for item in stored_items() if item.folder == unnamed), "--yes"]) == 0
    assert read_manifest(Path(adopted["store"])), "in a folder of the removed one"


def test_stores_are_listed_and_removed(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["stores"]) == 0
    assert "holds no stores: hdtool build-model-db" in capfd.readouterr().out
    model = json_of(capfd, "build-model-db", "--from", "answers.jsonl")
    tenant = json_of(capfd, "build-model-db", "--from", "answers.jsonl", "--namespace", "acme/é")
    corpus = json_of(capfd, "build-corpus-db", "answers.jsonl")
    noted(capfd, "--history", "home")
    listed = json_of(capfd, "stores")
    rows = {row["name"]: row for row in listed["stores"]}
    assert listed["home"] == str(home())
    names = [f"model-{model['model']['fingerprint'][:8]}", f"acme/é/model-{model['model']['fingerprint'][:8]}"]
    names.append(f"corpus-{corpus['tokenizer'][:8]}")
    assert [rows[name]["folder"] for name in names] == [model["store"], tenant["store"], corpus["store"]]
    assert rows[names[0]]["sources"][0]["name"] == "answers.jsonl" and rows[names[0]]["bytes"] == model["bytes"]
    (history,) = {*rows} - {*names}
    assert history.startswith("history-")
    assert run(["stores", "list"]) == 0
    shown = capfd.readouterr().out
    assert all(name in shown for name in rows) and "hdtool-demo" in shown and "4 in " in shown
    with deleted_lock_files() as deleted:
        assert run(["stores", "remove", *rows, "--yes"]) == 0
    assert {str(path.parent) for path in deleted} == {row["folder"] for row in rows.values()}
    assert capfd.readouterr().err.count("removed ") == 4
    assert json_of(capfd, "stores")["stores"] == []
    assert not [path for path in home().rglob("*") if path.is_file() and not {"costs", "proofs"} & {*path.parts}]
    assert not (home() / "stores").exists()


def only_item(kind: str, capfd: pytest.CaptureFixture[str]) -> StoredItem:
    """The only store of an empty home, of this kind."""
    if kind == "history":
        noted(capfd, "--history", "home")
    else:
        json_of(capfd, *(["build-model-db", "--from"] if kind == "model" else ["build-corpus-db"]), "answers.jsonl")
    (item,) = stored_items()
    return item


@pytest.mark.parametrize("kind", ["model", "corpus", "history"])
def test_a_removal_that_the_system_refuses_leaves_the_store_listed(
    kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    item = only_item(kind, capfd)
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.parent == item.folder and path.name not in (MANIFEST, LOCK_FILE) and path.exists():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        said = complaint(capfd, "stores", "remove", item.name, "--yes")
    assert "cannot be removed (Permission denied): correct the permissions" in said
    assert [left.name for left in stored_items()] == [item.name]


@pytest.mark.parametrize("kind", ["model", "corpus", "history"])
def test_a_removal_that_is_interrupted_is_repeated(
    kind: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    item = only_item(kind, capfd)
    unlink = Path.unlink

    def interrupted(path: Path, missing_ok: bool = False) -> None:
        is_there = path.exists()
        unlink(path, missing_ok)
        if is_there and path.parent == item.folder:
            raise KeyboardInterrupt

    removals = 0
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", interrupted)
        while stored_items():
            assert run(["stores", "remove", item.name, "--yes"]) == 130
            removals += 1
            capfd.readouterr()
            if stored_items():
                assert " is missing" in complaint(capfd, "inspect", str(item.folder))
    assert removals > 2
    assert {path.name for path in item.folder.iterdir()} == {LOCK_FILE}


def configuration(version: str) -> Artifact:
    """An artifact of a GGUF file, as a version of transformers makes it."""
    folder = home() / "gguf" / f"tiny-{version.replace('.', '')}"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    details, files = {"fingerprint": "89abcdef" * 2}, {"config.json": [2, 0]}
    artifact = Artifact(folder, "gguf", {"transformers": version}, "", (), details, files)
    artifact.write()
    return artifact


def test_a_name_that_several_share_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    """Two configurations of one GGUF file, as two versions of transformers read it, and a store that was moved."""
    for version in ("5.19", "5.23"):
        configuration(version)
    said = complaint(capfd, "stores", "remove", "gguf-89abcdef", "--yes")
    assert said == (
        "error: gguf-89abcdef could be any of 2: gguf/tiny-519, gguf/tiny-523: give one of these names instead"
    )
    names = [row["name"] for row in json_of(capfd, "stores")["stores"]]
    assert names == ["gguf/tiny-519", "gguf/tiny-523"]
    with deleted_lock_files() as deleted:
        assert run(["stores", "remove", names[0], names[0], "--yes"]) == 0
    assert [path.name for path in deleted] == [".tiny-519.lock"]
    assert capfd.readouterr().err.count("removed ") == 1
    assert [row["name"] for row in json_of(capfd, "stores")["stores"]] == ["gguf-89abcdef"]

    built = json_of(capfd, "build-model-db", "--from", "answers.jsonl")
    moved = home() / "stores" / "0123456789abcdef" / "model" / Path(built["store"]).name
    shutil.copytree(built["store"], moved)
    short = f"model-{built['model']['fingerprint'][:8]}"
    for command in (["stores", "remove", short, "--yes"], ["inspect", short]):
        assert f"{short} could be any of 2: stores/" in complaint(capfd, *command)
    assert json_of(capfd, "inspect", moved.relative_to(home()).as_posix())["store"] == str(moved)


def test_one_of_a_thing_is_singular(capfd: pytest.CaptureFixture[str]) -> None:
    Path("one.txt").write_text("Once upon a time there was a store.")
    assert run(["build-corpus-db", "one.txt", "--out", "store"]) == 0
    assert run(["inspect", "store"]) == 0
    assert run(["convert", "one.txt", "--out", "converted.jsonl"]) == 0
    shown = capfd.readouterr().out
    assert "1 document, 1 shard" in shown and "): 1 document, " in shown and ", 1 plain text" in shown
    assert not re.search(r"\b1 (documents|shards|records|plain texts)\b", shown)


COMMANDS_FOR = {
    "smollm2": "hdtool build-model-db smollm2 --from named.jsonl builds one for that model",
    "vicuna-7b-v1.3": "hdtool build-model-db MODEL --from named.jsonl, where MODEL is its folder or hub name",
    "~nobody-here/x": "build-model-db '~nobody-here/x' --from",
    "org/name; echo": "build-model-db 'org/name; echo' --from",
    "n" * 300: "build-model-db MODEL --from",
}


@pytest.mark.parametrize("name", COMMANDS_FOR)
def test_answers_of_another_model_are_mentioned(
    name: str, tuned: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "smollm2_file", lambda: None)
    rows = [json.loads(line) | {"model": name} for line in Path("answers.jsonl").read_text().splitlines()]
    Path("named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["build-model-db", "--from", "named.jsonl"]) == 0
    (note,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("note: "))
    assert note.startswith(f"note: all 3 records name {name} as the model that answered, and the store is for ")
    assert "hdtool-demo, because no --model is given: " in note and COMMANDS_FOR[name] in note
    assert run(["build-model-db", "--model", tuned, "--from", "named.jsonl"]) == 0
    assert "the store is for tuned: a model's own answers make the best drafts" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["hdtool-demo", "embedded", str(demo.MODEL), "someone/hdtool-demo", ""])
def test_its_own_answers_are_not_mentioned(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) | {"model": name} for line in Path("answers.jsonl").read_text().splitlines()]
    Path("named.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["build-model-db", "--from", "named.jsonl"]) == 0
    assert "note: " not in capfd.readouterr().err


def test_requests_and_converted_files_name_their_model(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    logged = [
        {
            "request": {"model": "their/model", "messages": [{"role": "user", "content": row["prompt"]}]},
            "response": {"choices": [{"message": {"role": "assistant", "content": row["output"]}}]},
        }
        for row in rows
    ]
    Path("logged.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    assert run(["convert", "logged.jsonl", "--out", "converted.jsonl"]) == 0
    for file in ("logged.jsonl", "converted.jsonl"):
        assert run(["build-model-db", "--from", file, "--replace"]) == 0
        assert "note: all 3 records name their/model as the model that answered" in capfd.readouterr().err
    assert run(["add", str(stored_items()[0].folder), "answers.jsonl"]) == 0
    assert "model that answered" not in capfd.readouterr().err
    assert run(["build-corpus-db", "logged.jsonl"]) == 0
    assert "model that answered" not in capfd.readouterr().err


def test_other_files_stay_and_a_running_build_is_not_disturbed(capfd: pytest.CaptureFixture[str]) -> None:
    folder = Path(json_of(capfd, "build-corpus-db", "answers.jsonl")["store"])
    (name,) = (item.name for item in stored_items())
    for other in ("notes.txt", "documents-old.bin"):
        (folder / other).write_text("mine")
    with file_lock(folder / ".lock", StoreError("busy")):
        assert "a build of " in complaint(capfd, "stores", "remove", name, "--yes")
    assert read_manifest(folder)
    assert run(["stores", "remove", str(folder), "--yes"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["documents-old.bin", "notes.txt"]


def test_folders_that_only_look_like_stores_are_neither_listed_nor_removed(capfd: pytest.CaptureFixture[str]) -> None:
    folder = home() / "stores" / "0123456789abcdef" / "corpus"
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text('{"name": "a web application"}')
    assert json_of(capfd, "stores")["stores"] == []
    assert "there is no store" in complaint(capfd, "stores", "remove", str(folder), "--yes")
    assert (folder / MANIFEST).exists()


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["remove"], "nothing to remove", 2),
        (["remove", "nothing", "--yes"], "there is no store nothing", 1),
        (["burn"], "can list and remove, got burn", 2),
        (["list", "model"], "takes no names", 2),
        (["--yes"], "--yes has no effect", 2),
    ],
)
def test_stores_is_used_wrongly(words: list[str], said: str, code: int, capfd: pytest.CaptureFixture[str]) -> None:
    assert said in complaint(capfd, "stores", *words, code=code)


@pytest.mark.parametrize(("answer", "stays"), [("n\n", True), ("y\n", False)])
def test_it_asks_before_it_removes(
    answer: str, stays: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(json_of(capfd, "build-corpus-db", "answers.jsonl")["store"])
    words = ["stores", "remove", str(folder)]
    monkeypatch.setattr("sys.stdin", StringIO())
    assert "give --yes" in complaint(capfd, *words, code=2)
    terminal = StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    assert run(words) == (130 if stays else 0)
    assert "corpus, " in capfd.readouterr().err
    assert folder.exists() is stays


def test_the_home_is_the_key_of_a_store_and_may_move(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = json_of(capfd, "build-model-db", "--from", "answers.jsonl")
    model = checkpoint_of(ModelConfig())
    assert model and Path(built["store"]) == model_store_at_home(model, read_manifest(Path(built["store"])).tokenizer)
    home().rename("elsewhere")
    monkeypatch.setenv("HDTOOL_HOME", str(Path("elsewhere").resolve()))
    assert f"drafting from {Path('elsewhere').resolve()}" in noted(capfd)
