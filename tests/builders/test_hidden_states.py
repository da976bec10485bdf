"""Stored hidden states: a training that reads them equals one that does not, and files of others are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdtool.builders.head_training import hidden_states_file, loss
from hdtool.builders.head_training.hidden_states_file import HiddenStatesFile
from hdtool.builders.head_training.loss import FrozenTarget
from hdtool.builders.head_training.processes import Processes
from hdtool.builders.head_training.training_examples import BatchSampler, Example
from hdtool.builders.head_training.training_loop import Training
from hdtool.cli.app import run
from hdtool.data.errors import HeadsError
from hdtool.runtime.drafters.heads.checkpoint import new_heads
from hdtool.runtime.settings.building import HeadsConfig, TrainConfig
from hdtool.runtime.target.target import Target
from tests.support.families import FAMILIES, VOCABULARY, model_of

CONFIG = TrainConfig(epochs=3, batch=4, val_fraction=0.1)


def texts(count: int = 9) -> list[Example]:
    random = np.random.default_rng(3)
    lengths = random.integers(5, 30, count)
    return [Example(random.integers(VOCABULARY, size=length), np.arange(length) > 3) for length in lengths]


def stored_in(path: Path, learned: list[Example], key: str = "a") -> HiddenStatesFile:
    return HiddenStatesFile(path, FrozenTarget(Target(copy.deepcopy(model_of("llama")))), learned, key)


def trained(folder: Path, learned: list[Example], stored: HiddenStatesFile | None) -> Training:
    target = FrozenTarget(Target(copy.deepcopy(model_of("llama"))))
    torch.manual_seed(1)
    heads = new_heads(target.model, target.hidden_width, VOCABULARY, HeadsConfig(rank=8, mlp=16))
    found = Training(heads, target, BatchSampler(learned, CONFIG), CONFIG, folder, Processes(), stored)
    for _ in found.run({}):
        pass
    return found


@pytest.mark.parametrize("half", [False, True])
def test_a_training_from_stored_states_equals_one_from_the_target(
    tmp_path: Path, half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states_file, "takes_bfloat16", lambda device: half)
    monkeypatch.setattr(loss, "takes_bfloat16", lambda device: half)
    monkeypatch.setattr(hidden_states_file, "BATCH_TOKENS", 50)
    learned = texts()
    stored = stored_in(tmp_path / "states", learned)
    assert not stored.is_written()
    assert list(stored.write())[-1] == stored.tokens == sum(len(each.ids) for each in learned)
    assert stored.is_written() and (tmp_path / "states").stat().st_size >= stored.bytes
    with_file, without = trained(tmp_path / "a", learned, stored), trained(tmp_path / "b", learned, None)
    tolerance = 2e-2 if half else 1e-5
    np.testing.assert_allclose(with_file.history.losses, without.history.losses, rtol=tolerance)


def test_states_of_other_texts_are_refused(tmp_path: Path) -> None:
    learned = texts()
    list(stored_in(tmp_path / "states", learned).write())
    with pytest.raises(HeadsError, match="of other texts or of another model: name another file"):
        stored_in(tmp_path / "states", learned, key="b").is_written()


def test_a_file_of_another_origin_is_refused_and_kept(tmp_path: Path, capsys: Any) -> None:
    place = tmp_path / "mine"
    place.write_bytes(b"mine")
    stored = stored_in(place, texts())
    for act in (stored.is_written, lambda: list(stored.write())):
        with pytest.raises(HeadsError, match="is there and is not a file of hidden states"):
            act()
    out = str(tmp_path / "heads")
    assert run(["train-heads", "--from", str(place), "--out", out, "--hidden-states", str(place), "--quiet"]) == 1
    assert "is there and is not a file of hidden states" in capsys.readouterr().err
    assert place.read_bytes() == b"mine"


def test_too_little_room_is_found_before_the_first_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = stored_in(tmp_path / "new" / "states", texts())
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(HeadsError, match=r"needs 0\.0 GB, and 0\.0 GB are free"):
        next(stored.write())
    assert not (tmp_path / "new").exists()


def test_models_that_change_their_logits_cannot_store_states(tmp_path: Path) -> None:
    assert FrozenTarget(Target(copy.deepcopy(model_of("llama")))).has_plain_output
    capped = FrozenTarget(Target(copy.deepcopy(model_of("gemma2"))))
    assert not capped.has_plain_output
    with pytest.raises(HeadsError, match="it changes its logits after the output layer"):
        HiddenStatesFile(tmp_path / "states", capped, texts(), "a")


def test_hidden_states_of_several_processes_are_refused(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    states, out = str(tmp_path / "states"), str(tmp_path / "heads")
    assert run(["train-heads", "--from", "nowhere", "--out", out, "--hidden-states", states, "--quiet"]) == 2
    assert "--hidden-states works in one process" in capsys.readouterr().err


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_at_some_positions_are_those_of_the_model(family: str) -> None:
    model = copy.deepcopy(model_of(family))
    target = FrozenTarget(Target(model))
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    rows, columns, some = torch.tensor([0, 1, 1]), torch.tensor([3, 0, 8]), torch.tensor([5, 7, 50])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[rows, columns]
    output = target.read(ids)
    torch.testing.assert_close(target.logits_at(output, rows, columns, None), expected, rtol=1e-4, atol=1e-5)
    found = target.logits_at(output, rows, columns, some)
    torch.testing.assert_close(found, expected[:, some], rtol=1e-4, atol=1e-5)
