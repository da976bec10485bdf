"""The demo model's trainer on a morsel of text: what it reads, that it learns, that a kill costs nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from hdtool.builders.demo import model as demo_model
from hdtool.builders.demo.corpus import TrainingDocument, documentation, documents, library_code, plain_text
from hdtool.builders.demo.model import build_model, encode, learning_rate_factor, mtp_agreement, pass_fractions
from hdtool.builders.demo.prompts import prompts
from hdtool.builders.demo.stores import Recipe
from hdtool.data.demo import MODEL
from hdtool.data.errors import ModelError

PAGE = """
:mod:`gizmo` --- Turn gizmos
============================

.. module:: gizmo
   :synopsis: Turn them.

.. _label:

This page tells of gizmos, see :func:`other.thing <thing>` and `the site <https://example.org>`_. ``Gizmo`` objects
turn and turn again, and when they have turned enough they rest, which is what a good gizmo does all day::

   >>> gizmo.turn(3)

.. function:: turn(times, *, fast=False)

   Turn the gizmo *times* times and return how far it came, as a number of steps.

   .. versionadded:: 3.2

   .. note:: Never turn a gizmo backwards.

.. class:: Gizmo()

   What turns. A gizmo is made by turning another one, which is where all the gizmos come from.
"""

SOURCE = '''
"""A module."""

class Gizmo:
    def turn(self, times):
        """Turn it.

        As often as told.
        """
        for _ in range(times):
            self.step += 1
        return self.step

def undocumented():
    return None
'''


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sources")
    for part in ("gsm8k", "docs/library", "lib"):
        (root / part).mkdir(parents=True)
    for page in range(60):
        (root / f"docs/library/gizmo{page}.rst").write_text(PAGE.replace("gizmo", f"gizmo{page}"))
        (root / f"lib/gizmo{page}.py").write_text(SOURCE.replace("Gizmo", f"Gizmo{page}"))
    for split, count in (("train", 80), ("test", 8)):
        rows = [
            {"question": f"What is {n} + 1?", "answer": f"{n} + 1 = <<{n}+1={n + 1}>>{n + 1}\n#### {n + 1}"}
            for n in range(count)
        ]
        (root / f"gsm8k/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"gsm8k": root / "gsm8k", "docs": root / "docs", "library": root / "lib"}


def test_documentation_is_read_as_a_person_would(sources: dict[str, Path]) -> None:
    page = [document for document in documentation(sources["docs"]) if document.name.startswith("docs/library/gizmo7#")]
    asked = {document.name.split("#")[1]: document for document in page}
    turn = asked["gizmo7.turn"]
    assert turn.question.endswith(("`gizmo7.turn` do?", "`gizmo7.turn`.", "`gizmo7.turn`?"))
    assert turn.answer.splitlines()[0] == "`turn(times, *, fast=False)`"
    assert turn.answer.endswith("as a number of steps.\n\nNote: Never turn a gizmo7 backwards.")
    prose = next(document.answer for document in page if document.kind == "prose")
    assert "see `other.thing` and the site. `Gizmo` objects" in prose
    assert ".. " not in prose


def test_plain_text_drops_directives_with_their_bodies() -> None:
    assert plain_text("a\n\n.. index::\n   single: x\n\nb ``c``") == "a\n\nb `c`"


def test_code_becomes_two_tasks(sources: dict[str, Path]) -> None:
    tasks = [document for document in library_code(sources["library"]) if document.name.startswith("lib/gizmo3.py#")]
    write, edit = sorted(tasks, key=lambda document: document.kind, reverse=True)
    assert write.question == "Write a Python function `turn`. Turn it."
    assert '"""Turn it.' in write.answer and '"""' not in edit.question
    assert edit.answer == write.answer


def test_held_out_pages_share_nothing_with_the_rest(sources: dict[str, Path]) -> None:
    everything = list(documents(**sources))
    pages = {True: set[str](), False: set[str]()}
    for document in everything:
        pages[document.held_out].add(document.name.split("#")[0])
    assert not pages[True] & pages[False]
    assert len(pages[True]) > 1
    rows = list(prompts(everything, per_kind=2))
    assert {row["from"].split("#")[0] for row in rows} <= pages[True]
    assert [row["category"] for row in rows[:4]] == ["math", "explain", "write", "edit"]


def test_the_recipe_paces_and_shares() -> None:
    assert pass_fractions(2.5) == [1.0, 1.0, 0.5]
    start, middle, end = (learning_rate_factor(step, step / 1000) for step in (0, 300, 999))
    assert start < 0.05 and middle == 1.0 and end < 0.01
    assert (
        TrainingDocument("math", "gsm8k/test#3", "").held_out
        and not TrainingDocument("math", "gsm8k/train#3", "").held_out
    )


TINY = Recipe(
    vocabulary=400, width=32, layers=2, heads=2, kv_heads=1, mlp=48, context=64, window=32, batch=4, steps=12
)  # fmt: skip


def test_a_killed_training_goes_on_at_the_same_step(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "CHECKPOINT_STEPS", 4)
    places: dict[str, Any] = {"gsm8k": sources["gsm8k"], "docs": sources["docs"], "library": sources["library"]}
    report = build_model(**places, out=tmp_path / "whole", recipe=TINY, device="cpu", compiled=False)
    assert report["held_out"]["math"]["loss_per_token"] < 6.0
    assert not (tmp_path / "whole.rescue").exists()

    real, calls = demo_model.next_token_loss, []

    def killed(*arguments: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(demo_model, "next_token_loss", killed)
    with pytest.raises(KeyboardInterrupt):
        build_model(**places, out=tmp_path / "resumed", recipe=TINY, device="cpu", compiled=False)
    assert (tmp_path / "resumed.rescue").exists()
    build_model(**places, out=tmp_path / "resumed", recipe=TINY, device="cpu", compiled=False)
    assert len(calls) == 10 + 4, "steps 9 to 12 run again, the first 8 do not"

    whole, resumed = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("whole", "resumed"))
    for (name, left), right in zip(whole.state_dict().items(), resumed.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, msg=f"{name} differs")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "whole")
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|endoftext|><|user|>x<|end|><|assistant|>"
    assert whole.dtype == torch.float32


@pytest.mark.long
def test_a_hybrid_is_saved_with_its_mtp_layer(sources: dict[str, Path], tmp_path: Path) -> None:
    recipe = replace(TINY, kind="hybrid", layers=4, vocabulary=4096, steps=60)
    places: dict[str, Any] = {**sources}
    report = build_model(**places, out=tmp_path, recipe=recipe, device="cpu", tokenizer_of=MODEL)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(MODEL).get_vocab()

    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    model.mtp = MtpModel.from_pretrained(model).layers[0]
    read = encode(tokenizer, (document for document in documents(**sources) if document.held_out))["math"]
    pairs = [mtp_agreement(model.eval(), torch.from_numpy(ids[:32].astype(np.int64))[None]) for ids in read]
    same, positions = map(sum, zip(*pairs, strict=True))
    assert 0 < same < positions
    assert report["held_out"]["math"]["ahead_agrees"] == same / positions


def test_a_training_ends_by_the_clock(sources: dict[str, Path], tmp_path: Path) -> None:
    places: dict[str, Any] = {**sources}
    report = build_model(**places, out=tmp_path, recipe=TINY, device="cpu", compiled=False, seconds=1e-9)
    assert report["tokens_seen"] == TINY.batch * TINY.window, "one step"


def test_a_folder_of_another_origin_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    places: dict[str, Any] = {"gsm8k": sources["gsm8k"], "docs": sources["docs"], "library": sources["library"]}
    (tmp_path / "config.json").write_text("mine")
    with pytest.raises(ModelError, match="is not empty and holds no model of this script"):
        build_model(**places, out=tmp_path, recipe=TINY, device="cpu", compiled=False)
    assert (tmp_path / "config.json").read_text() == "mine"
