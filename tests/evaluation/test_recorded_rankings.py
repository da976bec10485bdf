"""Rankings of collect, and replays of methods that read logits with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdtool.builders.evaluation.recording import RecordedLogits, RecordedTurn, TurnReader
from hdtool.builders.evaluation.replay import ReplayMethod, replay_method
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.conversation import RecordedRankings
from hdtool.data.row_readers import RowError
from hdtool.data.texts_and_traces import read_traces
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load

BEST, TOKENS = 61, 40


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(ModelConfig())


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rankings")
    prompts, out = folder / "prompts.jsonl", folder / "answers.jsonl"
    rows = demo.PROMPTS.read_text().splitlines()[:2]
    prompts.write_text("\n".join([*rows, json.dumps({"turns": ["What is 3 + 4?", "And 4 + 3?"], "id": "t"})]) + "\n")
    arguments = ["collect", "--prompts", str(prompts), "--out", str(out), "--max-new-tokens", str(TOKENS)]
    assert run([*arguments, "--rankings", str(BEST), "--batch-size", "2", "--quiet"]) == 0
    return out


@pytest.fixture(scope="module")
def turns(recording: Path, loaded: Loaded) -> list[RecordedTurn]:
    reader = TurnReader(loaded.tokenizer, loaded.stops, loaded.tokenizer.eos_token_id)
    return [turn for trace in read_traces([recording]) for turn in reader.turns(trace)]


def test_rankings_are_those_of_the_model(turns: list[RecordedTurn], loaded: Loaded) -> None:
    assert len(turns) == 4
    for turn in turns:
        assert turn.rankings is not None
        assert turn.rankings.tokens.shape == (len(turn.answer), BEST)
        assert turn.rankings.tokens[:, 0].tolist() == turn.answer, "greedy"
        with torch.inference_mode():
            ids = torch.tensor([turn.prompt + turn.answer])
            logits = loaded.target.model(input_ids=ids, use_cache=False).logits[0, len(turn.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(turn.rankings.tokens, dtype=torch.int64))
        assert torch.allclose(torch.tensor(turn.rankings.logprobs), expected, atol=2e-3)
        assert (np.diff(turn.rankings.logprobs, axis=1) <= 0).all()


def test_a_replay_of_logitspec_is_a_real_run(turns: list[RecordedTurn], loaded: Loaded) -> None:
    """It reads the logits of accepted positions only, which a recording has."""
    config = DecodeConfig("logitspec", draft_tokens=32)
    drafter = drafter_for(config, loaded.target, StoreSet())
    played = replay_method(ReplayMethod("logitspec", config), turns, StoreSet())
    for turn, one in zip(turns, played.turns, strict=True):
        sampler = Sampler(SamplingConfig(), turn.prompt)
        assert turn.max_tokens is not None
        steps = list(
            decode(
                loaded.target, turn.prompt, sampler, max_new_tokens=turn.max_tokens, stops=loaded.stops, drafter=drafter
            )
        )
        assert [len(step.tokens) for step in steps] == one.accept_lengths.tolist()
        assert [len(step.tree) for step in steps] == one.nodes.tolist()
    assert played.tokens > played.steps


@pytest.mark.long
def test_methods_with_recycled_rankings_are_replayed(
    recording: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["convert", str(recording), "--out", str(tmp_path / "canonical.jsonl"), "--quiet"]) == 0
    capfd.readouterr()
    found = []
    for traces in (recording, tmp_path / "canonical.jsonl"):
        command = ["replay", "--traces", str(traces), "--model-db", "none", "--corpus-db", "none", "--quiet", "--json"]
        assert run(command) == 0
        told = json.loads(capfd.readouterr().out)["methods"]
        assert {"logitspec", "tr", "racer", "hd+logitspec"} <= set(told)
        found.append({name: one["steps"] for name, one in told.items()})
        assert told["tr"]["tokens_per_step"] > 1
        assert told["hd+logitspec"]["by_source"]["recycled"]["drafted"] > 0
    assert found[0] == found[1]


def test_recordings_without_rankings_are_refused(
    recording: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in recording.read_text().splitlines()]
    del rows[1]["answers"][0]["rankings"]
    traces = tmp_path / "traces.jsonl"
    traces.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(["replay", "--traces", str(traces), "--methods", "hd,tr", "--quiet"]) == 2
    said = capfd.readouterr().err
    assert "method tr drafts from the model's logits, which these recordings lack" in said


def test_a_run_goes_on_with_the_same_rankings_only(recording: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = recording.with_name("prompts.jsonl")
    command = ["collect", "--prompts", str(prompts), "--out", str(recording), "--max-new-tokens", str(TOKENS)]
    assert run([*command, "--rankings", "3"]) == 1
    assert f"was answered with rankings {BEST}, not 3: choose another --out" in capfd.readouterr().err
    assert run([*command, "--rankings", "65"]) == 2
    assert "--rankings must be between 0 and 64, got 65" in capfd.readouterr().err


def test_logits_of_a_step_have_what_was_recorded_and_nothing_else() -> None:
    rankings = RecordedRankings(
        np.array([[1, 2], [3, 1], [2, 0]], np.int32), np.array([[-0.1, -3], [-0.5, -1], [-1, -2]], np.float32)
    )
    recorded = RecordedLogits([RecordedTurn("", "", 0, [1], [1, 3, 2], rankings=rankings)])
    inf = np.inf
    first = recorded.logits_after(rankings, 0, [1], 2).tolist()
    assert first == [
        [-inf, pytest.approx(-0.1), pytest.approx(-3), -inf],
        [-inf] * 4,
        [-inf, pytest.approx(-1), -inf, pytest.approx(-0.5)],
    ]
    assert recorded.logits_after(rankings, 2, [], 1).tolist() == [[-2, -inf, -1, -inf], [-inf] * 4]


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {"tokens": [[1], [2]]},
        {"tokens": [[1], [2, 3]], "logprobs": [[0], [0]]},
        {"tokens": [[1], ["x"]], "logprobs": [[0], [0]]},
        {"tokens": [[1]], "logprobs": [[0]]},
        {"tokens": [[], []], "logprobs": [[], []]},
        {"tokens": [[1], [-2]], "logprobs": [[0], [0]]},
        {"tokens": [[1], [2]], "logprobs": [[0, 1], [0, 1]]},
        {"tokens": [[1], [1 << 40]], "logprobs": [[0], [0]]},
    ],
)
def test_damaged_rankings_are_refused(value: Any) -> None:
    with pytest.raises(RowError, match="rankings"):
        RecordedRankings.of_json(value, 2)
