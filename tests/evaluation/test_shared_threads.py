"""One number of threads for all contenders: the one that suits the peer."""

from __future__ import annotations

import pytest
import torch

from hdtool.builders.evaluation import shared_threads
from hdtool.builders.evaluation.shared_threads import choose_shared_threads
from hdtool.runtime.target.target import Target
from tests.support.families import model_of

pytestmark = pytest.mark.usefixtures("torch_threads")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(model_of("llama"))


@pytest.mark.parametrize(
    ("seconds", "quota", "chosen"),
    [
        ({4: 1.0, 2: 1.5}, None, 4),
        ({4: 9.0, 2: 6.0, 1: 1.0}, None, 1),
        ({3: 1.0, 1: 2.0}, 3, 3),
    ],
)
def test_the_number_is_the_one_with_which_the_peer_is_fastest(
    seconds: dict[int, float], quota: int | None, chosen: int, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine, threads of torch that wait for each other make it slower than a single one."""
    monkeypatch.setattr(shared_threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(shared_threads, "_pass_seconds", lambda model, count: seconds[count])
    torch.set_num_threads(4)
    assert choose_shared_threads(target, target.model) == torch.get_num_threads() == chosen


def test_the_user_and_hdtool_come_first_where_there_is_no_peer(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_threads, "_pass_seconds", lambda *_: pytest.fail("a peer was timed"))
    assert choose_shared_threads(target, target.model, 2) == torch.get_num_threads() == 2
    monkeypatch.setattr(shared_threads, "choose_threads", lambda target, wanted: 3)
    assert choose_shared_threads(target, None) == 3


def test_a_pass_of_the_peer_takes_time(target: Target) -> None:
    assert shared_threads._pass_seconds(target.model, 1) > 0
