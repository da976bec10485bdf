"""A history that lasts inside vLLM: answers are kept once they are finished, and drafted from after a restart."""

from __future__ import annotations

import os
import shutil
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.errors import HdtoolError, OptionError, StoreError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_folder import read_manifest
from hdtool.data.stores.stores_at_home import model_store_at_home
from hdtool.runtime.budget.min_probability import NO_DRAFT_ABOVE
from hdtool.runtime.integrations.vllm import answer_collector
from hdtool.runtime.integrations.vllm.answer_collector import appends_history
from hdtool.runtime.integrations.vllm.start_vllm import Launch
from hdtool.runtime.integrations.vllm.worker_settings import VllmSettings
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.serving import VllmConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.history_ring import create_if_new
from hdtool.runtime.stores.history_store import History, HistoryStore
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import load_tokenizer
from tests.support.vllm_batch import MODEL, Engine, engine, worker

MARK, NAME = TokenizerFingerprint("test", 60_000), "0123456789abcdef"
PROMPT, ANSWER = [1, 2, 3], [30, 31, 32, 33, 34, 35]
NOWHERE = {"hdtool": {"model_db": "none", "corpus_db": "none"}}


@pytest.fixture(autouse=True)
def in_its_own_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def lasting(folder: Path | str) -> Engine:
    """An engine with a history store."""
    store = HistoryStore.open(Path(folder), MARK, NAME)
    return engine(store_set=StoreSet(history=History(store=store)), history=str(folder))


def answered(asked: Engine, *dialogues: tuple[list[int], list[int]]) -> None:
    """Answer prompts in one batch, token by token."""
    for end in range(max(len(answer) for _, answer in dialogues)):
        asked.requests = [prompt + answer[: end + 1] for prompt, answer in dialogues if end < len(answer)]
        asked.drafts()


def finish(asked: Engine) -> None:
    """As at the end of the process."""
    finished = asked.drafter._finished
    assert finished
    finished.finish_all()


def held(folder: Path | str) -> list[list[int]]:
    store = HistoryStore(Path(folder), read_only=True)
    return [tokens.tolist() for _, tokens in store.answers(store.conversations())]


def test_after_a_restart_earlier_answers_are_drafted_from(tmp_path: Path) -> None:
    first = lasting(tmp_path / "past")
    answered(first, (PROMPT, ANSWER))
    finish(first)
    assert held(tmp_path / "past") == [ANSWER]
    second = lasting(tmp_path / "past")
    second.requests = [[4, 5, 3, *ANSWER[:2]]]
    assert second.drafts()[0][:2] == ANSWER[2:4]
    assert engine([4, 5, 3, *ANSWER[:2]]).drafts() == [[]]


def test_an_answer_is_kept_whole_and_of_its_prompt_the_last_tokens_alone(tmp_path: Path) -> None:
    asked, prompts = lasting(tmp_path / "past"), [list(range(100, 140)), list(range(200, 230))]
    turn = [*prompts[0], *ANSWER, *range(300, 320)]
    answered(asked, (prompts[0], ANSWER), (prompts[1], ANSWER[::-1]))
    answered(asked, (turn, [40, 41, 42]))
    finish(asked)
    assert sorted(held(tmp_path / "past")) == sorted([ANSWER, ANSWER[::-1], [40, 41, 42]])
    store = HistoryStore(tmp_path / "past", read_only=True)
    assert sum(1 + each.before + each.tokens for each in store.conversations()) == store.num_positions == 3 * 9 + 15


def test_answers_are_kept_without_a_further_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_collector, "MAX_IDLE_SECONDS", 0.05)
    monkeypatch.setattr(answer_collector, "CHECK_SECONDS", 0.02)
    asked = lasting(tmp_path / "past")
    answered(asked, (PROMPT, ANSWER))
    stop = time.monotonic() + 10
    while not held(tmp_path / "past") and time.monotonic() < stop:
        time.sleep(0.02)
    assert held(tmp_path / "past") == [ANSWER]
    while asked.drafter._finished and asked.drafter._finished._timer and time.monotonic() < stop:
        time.sleep(0.02)
    assert asked.drafter._finished and not asked.drafter._finished._timer, "nothing runs while nothing is asked"


def test_a_table_that_another_request_takes_loses_no_answer(tmp_path: Path) -> None:
    asked, said = lasting(tmp_path / "past"), []
    for number in range(40):
        said += [[number + 500, *ANSWER, number], [number + 600, *ANSWER]]
        answered(asked, ([1, number], said[-2]), ([2, number], said[-1]))
    assert len(asked.drafter) == 2
    finish(asked)
    assert sorted(held(tmp_path / "past")) == sorted(said)


def test_a_request_that_pauses_is_kept_in_pieces(tmp_path: Path) -> None:
    asked = lasting(tmp_path / "past")
    answered(asked, (PROMPT, ANSWER))
    finish(asked)
    longer = [*ANSWER, 36, 37, 38]
    for end in range(len(ANSWER) + 1, len(longer) + 1):
        asked.requests = [[*PROMPT, *longer[:end]]]
        asked.drafts()
    finish(asked)
    assert held(tmp_path / "past") == [ANSWER, longer[len(ANSWER) :]]
    again = lasting(tmp_path / "past")
    again.requests = [longer[3:6]]
    assert again.drafts()[0][:2] == longer[6:8], "the second piece begins with the tokens before it"


def test_an_answer_is_whole_although_drafting_pauses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And drafting goes on as if the context were new."""
    store_set = StoreSet(ModelStore(demo.MODEL_STORE), CorpusIndex(demo.CORPUS_INDEX))
    history = History(store=HistoryStore.open(tmp_path / "past", MARK, NAME))
    asked = engine(store_set=replace(store_set, history=history), history="past")
    text = CorpusIndex(demo.CORPUS_INDEX).shards.tokens[:60].tolist()
    with monkeypatch.context() as patched:
        patched.setattr(asked.drafter.min_probability, "floor", lambda rows: NO_DRAFT_ABOVE)
        answered(asked, (text[:20], text[20:49]))
        assert asked.drafts() == [[]]
    asked.requests = [text[:50]]
    assert asked.drafts() == engine(text[:50], store_set=store_set).drafts() != [[]]
    finish(asked)
    assert held(tmp_path / "past") == [text[20:50]]


def test_the_store_keeps_its_bound(tmp_path: Path) -> None:
    bound = 12 * 256
    create_if_new(tmp_path / "past", MARK, NAME, bound)
    asked = lasting(tmp_path / "past")
    for number in range(60):
        answered(asked, ([1, number], [number + 500, *ANSWER, number]))
    finish(asked)
    store = HistoryStore(tmp_path / "past", read_only=True)
    assert store.manifest.max_bytes == bound and store.num_positions <= 256
    assert 0 < len(held(tmp_path / "past")) < 60
    assert held(tmp_path / "past")[-1] == [559, *ANSWER, 59]


def test_a_kill_leaves_whole_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_collector, "CHECK_SECONDS", 0.001)
    whole = {(number + 500, *ANSWER, number) for number in range(1000)}
    before = 0
    for kill in range(4):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks in a process with threads
            child = os.fork()
        if child == 0:
            try:
                asked = lasting(tmp_path / "past")
                for number in range(1000):
                    answered(asked, ([1, number % 7], [number + 500, *ANSWER, number]))
            finally:
                os._exit(1)
        stop = time.monotonic() + 60
        while time.monotonic() < stop and not (
            (tmp_path / "past" / "manifest.json").exists() and len(held(tmp_path / "past")) > before
        ):
            time.sleep(0.003 * (kill + 1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        HistoryStore.open(tmp_path / "past", MARK, NAME)
        kept = held(tmp_path / "past")
        assert {tuple(answer) for answer in kept} <= whole and len(kept) > before
        before = len(kept)


def test_workers_whose_drafts_are_discarded_append_nothing(tmp_path: Path) -> None:
    def of(tensors: int, stages: int, workers: int) -> list[int]:
        sizes = {"tensor_parallel_size": tensors, "pipeline_parallel_size": stages}
        return [rank for rank in range(workers) if appends_history(type("Parallel", (), {"rank": rank, **sizes}))]

    assert (of(1, 1, 1), of(4, 1, 4), of(2, 3, 6)) == ([0], [0], [4])
    settings = {"hdtool": {**NOWHERE["hdtool"], "history": str(tmp_path / "past")}}
    other, first = (worker(settings, rank=rank, tensor_parallel_size=2) for rank in (1, 0))
    for proposer in (other, first):
        asked = Engine(proposer.drafter)
        answered(asked, (PROMPT, ANSWER))
        finish(asked)
        assert held(tmp_path / "past") == [ANSWER] * (proposer is first)
    asked = Engine(other.drafter)
    asked.requests = [[4, 5, 3, *ANSWER[:2]]]
    assert asked.drafts()[0][:2] == ANSWER[2:4], "it reads what the first one appends"


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    for history in ("memory", "none"):
        asked = Engine(worker({"hdtool": {**NOWHERE["hdtool"], "history": history}}).drafter)
        answered(asked, (PROMPT, ANSWER))
        assert asked.drafter._finished is None
    assert run(["serve", "--engine", "vllm", MODEL, "--history", "past", "--dry-run"]) == 0
    assert list(tmp_path.iterdir()) == []


def launched(*options: str, history: str = "past", namespace: str | None = None) -> Launch:
    serving = VllmConfig(history=history)
    return Launch(MODEL, options, serving, StoresConfig(model_db="none", corpus_db="none", namespace=namespace))


def worker_of(launch: Launch, *served: str) -> Engine:
    """A worker as the command starts it."""
    return Engine(worker(launch._additional, served=served[0] if served else MODEL).drafter)


def test_the_command_names_the_folder_for_workers_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    launch = launched("--served-model-name", "acme", "other")
    settings = VllmSettings.of(launch._additional, 8)
    assert (settings.serving.history, settings.tenant) == (str(tmp_path / "past"), "acme")
    assert VllmSettings.of(launched()._additional, 8).tenant == "", "nobody, and not the name that vLLM gives the model"
    assert launched(history="home")._additional["hdtool"]["history"] == "home"
    assert "history" not in launched(history="memory")._additional["hdtool"]
    command = ["serve", "--engine", "vllm", MODEL, "--history", "past", "--served-model-name", "acme"]
    assert run([*command, "--dry-run"]) == 0
    assert f'"history": "{tmp_path / "past"}"' in capsys.readouterr().out


def test_no_tenant_drafts_from_another(tmp_path: Path) -> None:
    """Servers of two tenants and one of nobody in one folder, started again and again."""
    names: list[tuple[str, ...]] = [(), ("acme",), ("Acme",), ("../acme",)]
    words = [900 + number for number in range(len(names))]
    for turn in range(3):
        for name, word in zip(names, words, strict=True):
            launch = launched(*(("--served-model-name", *name) if name else ()))
            assert launch.open_history() in (tmp_path / "past", *(tmp_path / "past").iterdir())
            asked = worker_of(launch, *name)
            asked.requests = [[*PROMPT, *ANSWER[:3]]]
            first = asked.drafts()[0][:1]
            assert first == [word] if turn else first == []
            finish(asked)
            answered(asked, (PROMPT, [*ANSWER[:3], word, *ANSWER[3:]]))
            finish(asked)
    assert launched("--served-model-name", "acme").open_history() == tmp_path / "past" / "acme"


def test_a_history_at_home_changes_no_stores(tmp_path: Path) -> None:
    mark = TokenizerFingerprint.of(load_tokenizer(ModelConfig()))
    for _ in range(2):
        launch = Launch(MODEL, ["--served-model-name", "acme"], VllmConfig(history="home"), StoresConfig())
        assert launch.store_set.model and launch.store_set.model.folder == demo.MODEL_STORE
        folder = launch.open_history()
        assert folder and folder.is_relative_to(tmp_path / "home" / "namespaces" / "acme")
    checkpoint = read_manifest(demo.MODEL_STORE).model
    assert checkpoint
    shutil.copytree(demo.MODEL_STORE, model_store_at_home(checkpoint, mark, "acme"))
    named = Launch(MODEL, [], VllmConfig(history="home"), StoresConfig(namespace="acme"))
    assert named.open_history() == folder, "the same tenant by another option"


def test_it_is_the_history_of_hdtools_other_commands() -> None:
    text = "Write a story about a fox."
    command = ["generate", "--prompt", text, "--max-new-tokens", "24", "--draft-tokens", "4", "--history", "past"]
    assert run([*command, "--json"]) == 0
    (answer,) = held("past")
    asked = worker_of(launched())
    asked.requests = [[1, 2, *answer[:12]]]
    assert asked.drafts()[0][:4] == answer[12:16]
    answered(asked, (PROMPT, ANSWER))
    finish(asked)
    assert run([*command, "--json"]) == 0
    assert ANSWER in held("past") and held("past")[0] == held("past")[-1] == answer


def refused(*options: str) -> None:
    """Try to start a server; its error must be one line."""
    with pytest.raises(HdtoolError) as first:
        launched(*options).open_history()
    assert "\n" not in str(first.value)
    raise first.value


def test_what_cannot_be_used_is_refused_before_vllm_starts(tmp_path: Path) -> None:
    past = tmp_path / "past"
    HistoryStore.open(past, MARK, NAME)
    with pytest.raises(StoreError, match="answers in another tokenizer"):
        refused()
    shutil.rmtree(past)
    HistoryStore.open(past, TokenizerFingerprint.of(load_tokenizer(ModelConfig())), NAME)
    with pytest.raises(StoreError, match="answers of another model"):
        refused()
    shutil.rmtree(past)
    assert launched().open_history() == past
    manifest = (past / "manifest.json").read_text()
    for damaged in (manifest[:40], manifest.replace('"size"', '"sizes"')):
        (past / "manifest.json").write_text(damaged)
        with pytest.raises(StoreError, match=r"manifest\.json"):
            refused()
        with pytest.raises(StoreError, match=r"manifest\.json .*\(on "):
            worker({"hdtool": {"history": str(past)}})
    shutil.rmtree(past)
    past.mkdir()
    (past / "letter.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"letter\.txt"):
        refused()
    shutil.rmtree(past)
    past.write_text("a file")
    with pytest.raises(StoreError, match="is not a folder"):
        refused()
    with pytest.raises(OptionError, match="cannot name a folder"):
        refused("--served-model-name", "x" * 300)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="cannot be written"):
        refused()


def test_one_line_and_no_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("hdtool.cli.serve.find_spec", lambda name: name)
    monkeypatch.setattr("os.execv", lambda *command: started.append(command))
    HistoryStore.open(Path("past"), MARK, NAME)
    command = ["serve", "--engine", "vllm", MODEL, "--history", "past"]
    assert run(command) == 1
    shown = capsys.readouterr().err.splitlines()
    assert shown[-1].startswith("error: ") and "another tokenizer" in shown[-1] and not started
    shutil.rmtree("past")
    assert run(command) == 0
    assert f"keeping answers in {Path.cwd() / 'past'}" in capsys.readouterr().err and started


def test_a_model_whose_weights_are_elsewhere_has_no_history(tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(MODEL, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    with pytest.raises(StoreError, match="download the model first"):
        Launch(str(bare), [], VllmConfig(history="past"), StoresConfig()).open_history()
    with pytest.raises(StoreError, match="download the model first"):
        worker({"hdtool": {"history": "past"}}, model=str(bare))
    assert not (tmp_path / "past").exists()


@pytest.mark.parametrize("history", [False, 3, "", None])
def test_invalid_histories(history: object) -> None:
    with pytest.raises(OptionError, match="history must be a folder"):
        VllmSettings.of({"hdtool": {"history": history}}, 8)
