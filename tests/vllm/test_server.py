"""``hdtool serve``: many clients at once, some of which go away; a worker that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest

from hdtool.data import demo
from hdtool.runtime.integrations.vllm.proposer import COST
from tests.vllm.engine import answer
from tests.vllm.requests import ENGINE, requests
from tests.vllm.server import Server, children

AT_ONCE = 50
OPTIONS = [
    str(demo.MODEL), "--served-model-name", "demo", "--dtype", "float32", "--max-model-len", "1024",
    "--max-num-seqs", "32", "--enforce-eager",
]  # fmt: skip


@pytest.fixture(scope="module")
def asked() -> list[dict[str, Any]]:
    return requests(AT_ONCE)


@pytest.fixture(scope="module")
def greedy(asked: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM says without drafting, nor a server."""
    ids: list[list[int]] = answer({"engine": ENGINE, "waves": [asked]}, tmp_path_factory.mktemp("plain"))["ids"]
    return ids


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("server") / "log", *OPTIONS) as started:
        yield started


def all_at_once(server: Server, asked: list[dict[str, Any]], cancelled: set[int]) -> list[list[int]]:
    """The answers to requests that are made at the same time; some are cancelled after a few tokens."""
    with ThreadPoolExecutor(len(asked)) as clients:
        made = [
            clients.submit(server.stream, request["prompt"], request["sampling"], 5 if number in cancelled else None)
            for number, request in enumerate(asked)
        ]
        return [answered.result() for answered in made]


def test_it_says_what_it_runs_and_what_it_drafts_from(server: Server) -> None:
    assert server.log.startswith("drafting from ")
    assert f"{demo.MODEL} --served-model-name demo" in server.log
    assert "--speculative-config" in server.log
    assert "hdtool drafts from " in server.log
    assert COST in server.log


def test_fifty_streams_at_once(server: Server, asked: list[dict[str, Any]], greedy: list[list[int]]) -> None:
    assert all_at_once(server, asked, set()) == greedy
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") > AT_ONCE


def test_clients_that_go_away_leave_the_others_alone(
    server: Server, asked: list[dict[str, Any]], greedy: list[list[int]]
) -> None:
    gone = set(range(0, AT_ONCE, 3))
    for _ in range(2):
        answers = all_at_once(server, asked, gone)
        for number, (found, whole) in enumerate(zip(answers, greedy, strict=True)):
            assert found == (whole[: len(found)] if number in gone else whole)
    assert all_at_once(server, asked[:8], set()) == greedy[:8], "rows that they held are free again"


def test_a_server_whose_worker_died_starts_again_as_before(
    asked: list[dict[str, Any]], greedy: list[list[int]], tmp_path: Path
) -> None:
    """vLLM ends when a worker dies, and whoever runs it starts it again; the stores are as they were."""
    stores = [path for folder in (demo.MODEL_STORE, demo.CORPUS_INDEX) for path in folder.iterdir()]
    before = [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(stores)]
    with Server(tmp_path / "log", *OPTIONS) as first, ThreadPoolExecutor(8) as clients:
        assert first.stream(asked[0]["prompt"], asked[0]["sampling"]) == greedy[0]
        waiting = [clients.submit(first.stream, request["prompt"], {"max_tokens": 900}) for request in asked[:8]]
        (worker,) = (pid for pid, words in children(first.pid) if "VLLM::Worker" in words)
        os.kill(worker, signal.SIGKILL)
        first.wait()
        for request in waiting:
            try:
                request.result()
            except (OSError, HTTPException, ValueError, KeyError, AssertionError):
                continue  # cut off, or told so
    with Server(tmp_path / "again", *OPTIONS) as second:
        assert all_at_once(second, asked[:8], set()) == greedy[:8]
    assert before == [(path, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(stores)]
