"""Training heads: they learn, a killed training ends as one that was not, and mistakes are one-line errors."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib import rc_context
from safetensors.torch import load_file, save_file

from hdtool.builders.evaluation.recording import TurnReader
from hdtool.builders.head_training import training_loop
from hdtool.builders.head_training.loss import (
    Batch,
    FrozenTarget,
    HeadsLoss,
    TargetProbs,
    cross_entropy,
    head_labels,
    label_positions,
)
from hdtool.builders.head_training.processes import Processes
from hdtool.builders.head_training.train_heads import evaluate
from hdtool.builders.head_training.training_curve import draw_training
from hdtool.builders.head_training.training_examples import BatchSampler, Example, draft_vocabulary, read_examples
from hdtool.builders.head_training.training_loop import Training, learning_rate_factor
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.conversation_files import ConversationReader
from hdtool.data.errors import HeadsError, ModelError, RecordError
from hdtool.data.progress import progress_bar
from hdtool.runtime.drafters.heads.checkpoint import EvalResult, SavedHeads, load_heads, new_heads
from hdtool.runtime.drafters.heads.modules import ParallelHeads
from hdtool.runtime.drafters.trained.proposal import PROB_BUCKETS
from hdtool.runtime.settings.building import HeadsConfig, TrainConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load, load_tokenizer
from hdtool.runtime.target.target import Target
from tests.support.families import VOCABULARY, model_of
from tests.support.heads import reference_logits_after
from tests.support.oracle import generated, prompt_of

SMALL = HeadsConfig(rank=8, mlp=16)
KINDS = {kind: replace(SMALL, kind=kind).resolved for kind in ("amphista", "hydra", "hydra++", "mtp")}
each_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def said_to(length: int) -> list[int]:
    return generated(model_of("llama"), prompt_of(length), 20)


def texts(count: int, seed: int = 0) -> list[Example]:
    """What a model says to prompts; the prompts are not worth drafting."""
    found = []
    for number in range(count):
        prompt = prompt_of(4 + (number + seed) % 5)
        answer = said_to(len(prompt))
        drafted = np.array([False] * len(prompt) + [True] * len(answer))
        found.append(Example(np.array(prompt + answer), drafted))
    return found


def trained(
    folder: Path,
    learned: Sequence[Example],
    config: TrainConfig,
    max_steps: int | None = None,
    heads: HeadsConfig = SMALL,
) -> Training:
    target = FrozenTarget(Target(copy.deepcopy(model_of("llama"))))
    torch.manual_seed(config.seed)
    made = new_heads(target.model, target.hidden_width, target.vocabulary, heads)
    found = Training(made, target, BatchSampler(learned, config), config, folder, Processes())
    for done in found.run({"a": 1}):
        if done == max_steps:
            break
    return found


@each_kind
@pytest.mark.one_in(4)
def test_heads_learn_what_the_model_says(kind: str, tmp_path: Path) -> None:
    """The model has 97 tokens, of which chance finds one in a hundred."""
    learned, config = texts(10), TrainConfig(epochs=60, batch=5, learning_rate=0.01, val_fraction=0.1)
    found = trained(tmp_path, learned, config, heads=KINDS[kind])
    losses, hits = np.array(found.history.losses), np.array(found.history.hits)
    assert losses[-5:].mean() < 0.6 * losses[:5].mean()
    assert (hits[-5:].mean(axis=0) > 2 * hits[:5].mean(axis=0) + 0.1).all()
    assert "loss " in found.summary() and "heads right " in found.summary()
    result = evaluate(found.heads.eval(), FrozenTarget(Target(copy.deepcopy(model_of("llama")))), learned)
    assert min(result.top["1"]) > 0.3
    assert all(one <= five <= ten for one, five, ten in zip(*result.top.values(), strict=True))
    assert np.array(result.odds).shape == (4, PROB_BUCKETS)
    if kind != "amphista":
        assert not result.tree, "a static tree is of heads that draft in parallel"
        return
    assert result.tree[0] == [0] and result.gains == sorted(result.gains, reverse=True)
    assert result.gains[0] == pytest.approx(result.top["1"][0], abs=0.05)


@each_kind
@pytest.mark.one_in(4)
def test_a_killed_training_ends_as_one_that_was_not(kind: str, tmp_path: Path) -> None:
    learned = texts(9)
    config = TrainConfig(epochs=8, batch=4, save_every=3, val_fraction=0.2)
    heads = KINDS[kind]
    whole = trained(tmp_path / "whole", learned, config, heads=heads)
    for max_steps in (4, 11):  # some steps after the last checkpoint are lost, and done once more
        trained(tmp_path / "killed", learned, config, max_steps, heads)
    resumed = trained(tmp_path / "killed", learned, config, heads=heads)
    assert resumed.history == whole.history
    for name, weight in whole.heads.state_dict().items():
        assert torch.equal(weight, resumed.heads.state_dict()[name]), name


def test_gradients_of_parts_add_up_to_those_of_a_step(tmp_path: Path) -> None:
    learned = texts(9)
    at_once, in_parts = (
        trained(tmp_path / str(size), learned, TrainConfig(epochs=1, batch=8, micro_batch_size=size)).history.losses
        for size in (None, 3)
    )
    np.testing.assert_allclose(at_once, in_parts, rtol=2e-2)  # bfloat16, where the device has it


@pytest.mark.parametrize("size", [None, 20])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_the_loss_is_what_its_words_say(family: str, size: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """For each head, the cross-entropy to the target's probabilities, plus ``lm_weight`` times that to the token.

    With a draft vocabulary, both are of its tokens only, and other labels have none.
    """
    monkeypatch.setattr("hdtool.builders.head_training.loss.CHUNK_BYTES", 4 * 97 * 5)
    target = FrozenTarget(Target(copy.deepcopy(model_of(family))))
    learned = texts(3)
    config, token_ids = draft_vocabulary(replace(SMALL, draft_vocabulary=size), learned, VOCABULARY)
    heads = new_heads(target.model, target.hidden_width, VOCABULARY, config, token_ids)
    assert isinstance(heads, ParallelHeads)
    mine = torch.arange(VOCABULARY) if token_ids is None else torch.from_numpy(token_ids)
    batch = Batch.of(learned, target.device)
    output, positions = target.read(batch.ids), label_positions(batch, 4)
    heads.requires_grad_(False)
    probs = TargetProbs.of(target, output, batch, heads)
    found, hits = HeadsLoss(heads, 0.3)(batch, positions, output.hidden, output.embedded, probs)
    expected, right = 0.0, [0] * 4
    for row, example in enumerate(learned):
        ids = torch.from_numpy(example.ids)
        alone = target.read(ids[None])
        logits = target.model(input_ids=ids[None], use_cache=False).logits
        stages = heads.stages(alone.hidden, alone.embedded)
        for column in range(len(ids)):
            states = heads.states([stage[0, column : column + 1] for stage in stages])
            for head, predicted in enumerate(heads.logits(states)[:, 0]):
                place = column + 2 + head
                if place < len(ids) and example.drafted[place]:
                    label = (mine == ids[place]).nonzero()
                    if len(label):
                        probs = logits[0, place - 1, mine].softmax(-1)
                        logs = predicted.log_softmax(-1)
                        expected -= float((probs * logs).sum() + 0.3 * logs[label[0, 0]])
                        right[head] += int(predicted.argmax() == label[0, 0])
        assert output.hidden.shape[0] > row
    assert float(found) == pytest.approx(expected, rel=1e-3)
    assert hits.tolist() == right


@pytest.mark.parametrize("family", ["llama", "gemma2", "gptj"])
@pytest.mark.parametrize("kind", ["hydra++", "mtp"])
@pytest.mark.each_value
def test_the_loss_of_a_draft_is_that_of_its_path(kind: str, family: str) -> None:
    """A head that drafts token by token is learned after the tokens of the text; an MTP layer after its own states."""
    model = copy.deepcopy(model_of(family))
    if (bias_of_model := model.get_output_embeddings().bias) is not None:
        torch.nn.init.normal_(bias_of_model)
    target = FrozenTarget(Target(model))
    learned = texts(2)
    heads = new_heads(target.model, target.hidden_width, VOCABULARY, KINDS[kind]).requires_grad_(False)
    for weight in heads.parameters():
        weight.copy_(0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(weight.numel())))
    batch = Batch.of(learned, target.device)
    output, positions = target.read(batch.ids), label_positions(batch, 4)
    found, hits = HeadsLoss(heads, 0.3)(
        batch, positions, output.hidden, output.embedded, TargetProbs.of(target, output, batch, heads)
    )
    expected, right = 0.0, [0] * 4
    bias = heads.output(0).up.bias
    for example in learned:
        ids = torch.from_numpy(example.ids)
        alone = target.read(ids[None])
        logits = target.model(input_ids=ids[None], use_cache=False).logits[0]
        hidden, embedded = alone.hidden[0], alone.embedded[0]
        for column in range(len(ids)):
            for head in range(4):
                label = column + 2 + head
                if label < len(ids) and example.drafted[label]:
                    seen, path = slice(column + 1), embedded[column + 1 : column + 1 + head]
                    said = torch.from_numpy(reference_logits_after(heads, hidden[seen], embedded[seen], path))
                    logs = (said if bias is None else said + bias).log_softmax(-1)
                    probs = logits[label - 1].softmax(-1)
                    expected -= float((probs * logs).sum() + 0.3 * logs[ids[label]])
                    right[head] += int(logs.argmax() == ids[label])
    assert float(found) == pytest.approx(expected, rel=2e-3)
    assert hits.tolist() == right


@pytest.mark.parametrize("kind", ["hydra", "mtp"])
@pytest.mark.long
def test_an_easy_text_is_learned_far_above_chance(kind: str, tmp_path: Path) -> None:
    """Tokens that count up: only the token before says which comes next, and chance finds one in 97."""

    def counting(start: int) -> Example:
        return Example((np.arange(24) * 5 + start) % 97, np.ones(24, np.bool_))

    learned = [counting(start) for start in range(0, 97, 3)]
    config = TrainConfig(epochs=40, batch=11, learning_rate=0.01, val_fraction=0.1, lm_weight=5.0)
    found = trained(tmp_path, learned, config, heads=replace(KINDS[kind], rank=0))
    unseen = [counting(start) for start in range(1, 97, 7) if start % 3]
    result = evaluate(found.heads.eval(), FrozenTarget(Target(copy.deepcopy(model_of("llama")))), unseen)
    assert min(result.top["1"]) > 0.3, result.top


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_output_layer_with_a_bias_gets_no_gradient(frozen: bool) -> None:
    torch.manual_seed(1)
    bias, weight = torch.randn(30), torch.randn(30, 8, requires_grad=not frozen)
    rows, labels, probs = torch.randint(5, (10,)), torch.randint(30, (10,)), torch.randn(5, 30).softmax(-1)
    states = torch.randn(10, 8, requires_grad=True)
    loss, _ = cross_entropy(states, weight, probs, rows, labels, 0.2, bias)
    logs = (states @ weight.T + bias).log_softmax(-1)
    expected = -(probs[rows] * logs).sum() - 0.2 * logs.gather(-1, labels[:, None]).sum()
    torch.testing.assert_close(loss, expected)
    wanted = [states] if frozen else [states, weight]
    found, known = (torch.autograd.grad(each, wanted) for each in (loss, expected))
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lm_weight", [0.0, 0.3])
def test_gradients_of_the_cross_entropy_are_those_of_autograd(
    lm_weight: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdtool.builders.head_training.loss.CHUNK_BYTES", 4 * 30 * 3)
    torch.manual_seed(1)
    rows, labels = torch.randint(5, (10,)), torch.randint(30, (10,))
    probs = torch.randn(5, 30).softmax(-1)
    gradients = []
    for ours in (True, False):
        torch.manual_seed(2)
        states, weight = torch.randn(10, 8, requires_grad=True), torch.randn(30, 8, requires_grad=True)
        if ours:
            loss, _ = cross_entropy(states, weight, probs, rows, labels, lm_weight)
        else:
            logs = (states @ weight.T).log_softmax(-1)
            loss = -(probs[rows] * logs).sum() - lm_weight * logs.gather(-1, labels[:, None]).sum()
        (3 * loss).backward()
        gradients.append((loss.detach(), states.grad, weight.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_the_rate_rises_and_falls() -> None:
    rates = [learning_rate_factor(step, 100, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert all(later <= earlier for earlier, later in pairwise(rates[10:]))
    assert rates[10] == 1.0 and rates[-1] < 0.01


def test_a_round_reads_every_text() -> None:
    learned = texts(11)
    batches = BatchSampler(learned, TrainConfig(epochs=2, batch=4, val_fraction=0.1))
    assert len(batches.validation) == 1 and len(batches.train) == 10 and batches.steps == 6
    for start in (0, 3):
        read = [id(example) for step in range(start, start + 3) for example in batches.step(step)]
        assert len(read) == 12 and set(read) == {id(example) for example in batches.train}
    again = BatchSampler(learned, TrainConfig(epochs=2, batch=4, val_fraction=0.1))
    assert [id(example) for example in again.step(4)] == [id(example) for example in batches.step(4)]


def read_lessons(path: Path, window: int = 64) -> list[Example]:
    tokenizer = load_tokenizer(ModelConfig())
    turns = TurnReader(tokenizer, frozenset([0, 1]), tokenizer.eos_token_id)
    with progress_bar(1, "reading", quiet=True) as shown:
        return read_examples(ConversationReader([path]), turns, window, shown)


def written(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_lessons_of_chats_know_what_the_model_said(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    chat = [
        {"role": "user", "content": "What is a tuple?"},
        {"role": "assistant", "content": "A tuple is a sequence."},
        {"role": "user", "content": "And a list?"},
        {"role": "assistant", "content": "A list is one, too."},
    ]
    (example,) = read_lessons(written(tmp_path / "a.jsonl", {"messages": chat}))
    said = str(tokenizer.decode(example.ids[example.drafted]))
    assert "A tuple is a sequence." in said and "A list is one, too." in said
    assert "What" not in said and "And" not in said
    assert "What is a tuple?" in str(tokenizer.decode(example.ids))


def test_lessons_of_collected_answers_keep_their_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(ModelConfig())
    ids = tokenizer("A tuple is a se", add_special_tokens=False)["input_ids"]
    row = {
        "messages": [
            {"role": "user", "content": "What is a tuple?"},
            {"role": "assistant", "content": "A tuple is a se"},
        ],
        "answers": [{"output_ids": ids, "finish": "length"}],
    }
    (example,) = read_lessons(written(tmp_path / "a.jsonl", row))
    assert example.ids[example.drafted].tolist() == ids, "no end where the answer was cut off"
    row["answers"][0]["output_ids"] = [*ids[:-1], 7]
    with pytest.raises(RecordError, match="do not spell its text"):
        read_lessons(written(tmp_path / "b.jsonl", row))


def test_plain_texts_are_cut_into_windows(tmp_path: Path) -> None:
    found = read_lessons(written(tmp_path / "a.jsonl", {"text": "import os\n" * 60}), window=50)
    assert len(found) > 2 and all(len(example.ids) <= 50 and example.drafted.all() for example in found)


def test_three_tokens_are_enough(tmp_path: Path) -> None:
    """The first head predicts the third one."""
    (example,) = read_lessons(written(tmp_path / "a.jsonl", {"text": "import os"}), window=3)
    assert len(example.ids) == 3
    batch = Batch.of([example], torch.device("cpu"))
    assert head_labels(batch, label_positions(batch, 1)).tolist() == [[int(example.ids[2])]]


@pytest.mark.parametrize(
    ("rows", "said"),
    [([{"text": "a"}], "no examples: the longest text has 2 tokens"), ([], "is empty")],
)
def test_inputs_without_examples_are_an_error(rows: list[Any], said: str, tmp_path: Path, capsys: Any) -> None:
    path = written(tmp_path / "a.jsonl", *rows)
    assert run(["train-heads", "--from", str(path), "--out", str(tmp_path / "heads"), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1 and error.startswith("error: ")
    assert not (tmp_path / "heads").exists()


def test_a_loss_that_is_not_finite_ends_the_training(tmp_path: Path) -> None:
    with pytest.raises(HeadsError, match=r"not finite in step \d+: take a lower --learning-rate"):
        trained(tmp_path, texts(9), TrainConfig(epochs=20, batch=8, learning_rate=1e30, warm_up=0))


def test_a_model_with_nan_logits_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    target = FrozenTarget(Target(copy.deepcopy(model_of("llama"))))
    layer = target.model.get_output_embeddings()
    with monkeypatch.context() as patch:
        patch.setattr(layer, "forward", lambda states: states.new_full((*states.shape[:-1], 97), float("nan")))
        batch = Batch.of(texts(1), target.device)
        heads = new_heads(target.model, target.hidden_width, VOCABULARY, SMALL)
        with pytest.raises(ModelError, match="logits are not finite"):
            TargetProbs.of(target, target.read(batch.ids), batch, heads)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    learned, config = texts(6), TrainConfig(epochs=2, batch=3, save_every=1)
    trained(tmp_path, learned, config, max_steps=2)
    found = trained(tmp_path, learned, config, max_steps=3)
    with pytest.raises(HeadsError, match=r"other settings \(a\)"):
        next(found.run({"a": 2}))


@pytest.mark.parametrize("form", ["text", "tensors", "pickle"])
def test_a_checkpoint_of_another_origin_is_neither_used_nor_replaced(tmp_path: Path, form: str) -> None:
    place = tmp_path / training_loop.CHECKPOINT_FILE
    if form == "text":
        place.write_bytes(b"nonsense")
    else:
        torch.save({"model": torch.zeros(3)} if form == "tensors" else Path("an object of a class"), place)
    before = place.read_bytes()
    found = trained(tmp_path / "elsewhere", texts(6), TrainConfig(epochs=1, batch=3))
    found._checkpoint = training_loop.checkpoint_file(tmp_path)
    for act in (lambda: next(found.run({"a": 1})), lambda: found._save(1, {}), found.finish):
        with pytest.raises(HeadsError, match=r"checkpoint\.pt is there and is not a checkpoint of hdtool train-heads"):
            act()
    assert place.read_bytes() == before


@pytest.mark.parametrize(("kind", "method"), [("amphista", "amphista"), ("hydra++", "hydra"), ("mtp", "mtp")])
@pytest.mark.one_in(2)
def test_the_command_trains_heads_that_draft(
    kind: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [json.loads(line) for line in demo.PROMPTS.read_text().splitlines()[:6]]
    path = written(
        tmp_path / "a.jsonl",
        *({"messages": [*row["messages"], {"role": "assistant", "content": row["reference"][:200]}]} for row in rows),
    )
    out = tmp_path / "heads"
    asked = ["train-heads", "--from", str(path), "--out", str(out), "--epochs", "1", "--batch-size", "3", "--mlp", "32"]
    assert run([*asked, "--kind", kind, "--quiet"]) == 0
    assert "head 4: top 1 " in capsys.readouterr().err
    assert sorted(each.name for each in out.iterdir()) == ["config.json", "heads.safetensors", "training.png"]
    assert (out / "training.png").read_bytes().startswith(b"\x89PNG")
    loaded = load(ModelConfig())
    saved = load_heads(out, loaded.target.model)
    assert saved.heads.shape.mlp == 32 and saved.training["texts"] == 5 and saved.heads.config.kind == kind
    weights = sum(weight.numel() for weight in load_file(out / "heads.safetensors").values())
    assert weights == sum(weight.numel() for weight in saved.heads.state_dict().values()) > 10**5
    plain, drafted = (
        _answer(capsys, "--method", method, *extra)
        for method, extra in (("ar", ()), (method, ("--heads", str(out), "--draft-tokens", "20")))
    )
    assert plain["output_ids"] == drafted["output_ids"] and drafted["sources"]["heads"]["drafted"] > 0


def _answer(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert run(["generate", "--prompt", "What is a tuple?", "--max-new-tokens", "24", "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def model_folder(folder: Path) -> Path:
    """A model's own folder, as save_pretrained writes it."""
    model_of("llama").save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["config.json", "heads.safetensors", "checkpoint.pt", "training.png"])
def test_files_of_another_origin_are_refused_before_the_training(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    path = written(tmp_path / "a.jsonl", {"text": "import os\n" * 60})
    folder = tmp_path / "model"
    if name == "config.json":
        model_folder(folder)
    else:
        folder.mkdir()
        (folder / name).write_bytes(b"mine")
    before = {each.name: each.read_bytes() for each in folder.iterdir()}
    monkeypatch.setattr(
        "hdtool.builders.head_training.train_heads.load_stock", lambda model: pytest.fail("the model is loaded")
    )
    assert run(["train-heads", "--from", str(path), "--out", str(folder), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert f"{folder / name} is there and is not " in error and error.count("\n") == 1
    assert {each.name: each.read_bytes() for each in folder.iterdir()} == before


def test_heads_are_trained_again_over_own_ones(tmp_path: Path) -> None:
    """Weights of earlier versions have no metadata: the settings in the same folder show whose they are."""
    learned = texts(6)
    for earlier in (False, True):
        if earlier:
            save_file(load_file(tmp_path / "heads.safetensors"), tmp_path / "heads.safetensors")
        found = trained(tmp_path, learned, TrainConfig(epochs=1, batch=3, save_every=1))
        saved = SavedHeads(found.heads, "target", "model", EvalResult(), {})
        saved.save(tmp_path)
        draw_training(found.history, tmp_path)
        usual = (tmp_path / "training.png").read_bytes()
        with rc_context({"figure.facecolor": "red"}):  # as a matplotlibrc in the current folder sets it
            draw_training(found.history, tmp_path)
        assert (tmp_path / "training.png").read_bytes() == usual
        found.finish()
        names = ["config.json", "heads.safetensors", "training.png"]
        assert sorted(each.name for each in tmp_path.iterdir()) == names


@pytest.mark.parametrize(
    "options",
    [
        ["--num-heads", "9"],
        ["--lm-head-rank", "-1"],
        ["--adaptation", "3"],
        ["--learning-rate", "0"],
        ["--val-fraction", "1"],
    ],
)
def test_bad_usage_is_found_before_anything_is_loaded(options: list[str], capsys: Any) -> None:
    assert run(["train-heads", "--from", "nowhere", "--out", "nowhere", *options]) == 2
    assert "must be" in capsys.readouterr().err
