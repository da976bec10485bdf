"""The demo's texts and the training of its models, on a morsel of text."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from hdtool.data.demo import MODEL
from tests.benchmarks.demo_model import Recipe, build_model, learning_rate_factor, pass_fractions
from tests.benchmarks.demo_texts import TrainingDocument, documentation, documents, library_code, plain_text, prompts

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


@pytest.mark.parametrize("kind", ["llama", pytest.param("hybrid", marks=pytest.mark.long)])
def test_a_model_is_trained_and_saved(sources: dict[str, Path], tmp_path: Path, kind: str) -> None:
    recipe = TINY if kind == "llama" else replace(TINY, kind=kind, layers=4, vocabulary=4096)
    tokenizer_of = MODEL if kind == "hybrid" else None
    everything = list(documents(**sources))
    report = build_model(everything, tmp_path, recipe, "cpu", tokenizer_of=tokenizer_of, compiled=False)
    assert report["held_out"]["math"] < math.log(recipe.vocabulary), "it learns"
    assert report["tokens_seen"] == recipe.steps * recipe.batch * recipe.window
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=False)
    assert chat == "<|endoftext|><|user|>x<|end|><|assistant|>"
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    if kind == "hybrid":
        assert len(MtpModel.from_pretrained(model).layers) == 1


def test_a_training_ends_by_the_clock(sources: dict[str, Path], tmp_path: Path) -> None:
    everything = list(documents(**sources))
    report = build_model(everything, tmp_path, TINY, "cpu", compiled=False, seconds=1e-9)
    assert report["tokens_seen"] <= TINY.batch * TINY.window
