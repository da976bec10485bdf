"""A history that lasts: kept by one engine, drafted from by the next one, and whole after a kill."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from hdtool.data import demo
from hdtool.runtime.stores.history_store import HistoryStore
from tests.vllm.engine import answer, drafting
from tests.vllm.requests import ENGINE, requests
from tests.vllm.server import Server, children

ASKED, DRAFTED = 8, 8
KEPT_WITHIN_SECONDS = 120
"""More than ``MAX_IDLE_SECONDS``: workers that wait for each other on a busy machine take long for a step."""
SERVED = [
    str(demo.MODEL), "--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "1024",
    "--max-num-seqs", "32", "--enforce-eager", "--model-db", "none", "--corpus-db", "none",
    "--tensor-parallel-size", "2",
]  # fmt: skip


def held(folder: Path) -> list[list[int]]:
    if not (folder / "manifest.json").exists():
        return []
    store = HistoryStore(folder, read_only=True)
    return [tokens.tolist() for _, tokens in store.answers(store.conversations())]


def are_kept(answers: list[list[int]], folder: Path) -> bool:
    """Whether each answer is in the store; the last step may have drawn tokens after its end."""
    kept = held(folder)
    return all(any(found[: len(ids)] == ids and len(found) <= len(ids) + DRAFTED for found in kept) for ids in answers)


def test_a_second_engine_drafts_from_the_answers_of_the_first(tmp_path: Path) -> None:
    past, waves = tmp_path / "past", [requests(ASKED)]
    plain = answer({"engine": ENGINE, "waves": waves}, tmp_path)["ids"]
    options = ENGINE | drafting(DRAFTED, model_db="none", corpus_db="none", history=str(past), min_draft_prob=0.05)
    counted = []
    for run in (1, 2):
        answered = answer({"engine": options, "waves": waves}, tmp_path)
        assert answered["ids"] == plain
        assert are_kept(plain, past) and len(held(past)) == run * ASKED
        counted.append(answered["counted"][-1])
    cold, warm = (counts["vllm:spec_decode_num_accepted_tokens"] for counts in counted)
    assert warm > 1.3 * cold


def test_a_server_that_is_killed_keeps_its_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has two workers, which draft alike; one of them appends."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # else each worker needs a NUMA node
    past, waves = tmp_path / "past", requests(ASKED)
    answers: list[list[int]] = []
    accepted = []
    for run in (1, 2):
        with Server(tmp_path / f"log{run}", *SERVED, "--history", str(past)) as server:
            assert f"keeping answers in {past / 'demo'}" in server.log
            assert server.log.count("hdtool keeps answers in") == server.log.count("hdtool reads answers in") == 1
            found = [server.stream(request["prompt"], request["sampling"]) for request in waves]
            assert run == 1 or found == answers
            answers = found
            accepted.append(server.metric("vllm:spec_decode_num_accepted_tokens_total"))
            stop = time.monotonic() + KEPT_WITHIN_SECONDS
            while not (are_kept(answers, past / "demo") and len(held(past / "demo")) == run * ASKED):
                assert time.monotonic() < stop, "the answers are not kept while the server waits"
                time.sleep(0.2)
            for pid, _ in (*children(server.pid), (server.pid, "")):
                os.kill(pid, signal.SIGKILL)
            server.wait()
    assert accepted[1] > 1.3 * accepted[0]
    assert [path.name for path in past.iterdir()] == ["demo"]


def test_two_replicas_draft_from_the_answers_of_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers of one machine that share a folder: what the first one answered, the second one drafts from."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    past, waves = tmp_path / "past", requests(ASKED)
    options = [*SERVED[: SERVED.index("--tensor-parallel-size")], "--min-draft-prob", "0.05", "--history", str(past)]
    with Server(tmp_path / "log1", *options) as first, Server(tmp_path / "log2", *options) as second:
        found = []
        for run, server in enumerate((first, second), 1):
            found.append([server.stream(request["prompt"], request["sampling"]) for request in waves])
            stop = time.monotonic() + KEPT_WITHIN_SECONDS
            while not (are_kept(found[-1], past / "demo") and len(held(past / "demo")) == run * ASKED):
                assert time.monotonic() < stop, "the answers are not kept while the servers wait"
                time.sleep(0.2)
        cold, warm = (server.metric("vllm:spec_decode_num_accepted_tokens_total") for server in (first, second))
    assert found[0] == found[1]
    assert warm > 1.3 * cold
