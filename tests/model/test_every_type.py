"""Every type of model that the library generates text with is what the page of model families says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import LlamaConfig

from hdtool.runtime.engines.cpu.compiled_support import COMPILED
from tests.support.project import ROOT
from tests.sweep.page import PAGE, TYPE, table, verdicts_of, write
from tests.sweep.result import REFUSED, SAME, TREES, VERDICTS, WRONG, Result
from tests.sweep.shrink import small_settings
from tests.sweep.types import every_type

MOST_USED = (
    "deepseek_v32",
    "gemma4",
    "gpt_oss",
    "internvl",
    "nemotron_h",
    "qwen2_5_vl",
    "qwen3_5_moe",
)
"""Much used types, each of a kind of its own or with images; others stand in `tests/support/families.py`."""
AT_ONCE = 35
"""Types of one process: the libraries take seconds to load."""
TIMEOUT_SECONDS = 900
"""Seconds after which a process is taken to hang."""
KNOWN_NOW = sorted(set(every_type()))


def groups(kinds: Sequence[str], size: int) -> list[Any]:
    parts = [kinds[first : first + size] for first in range(0, len(kinds), size)]
    return [pytest.param(part, id=part[0]) for part in parts]


def swept(*arguments: str) -> dict[str, Result]:
    """The results of a process of the sweep."""
    command = [sys.executable, "-m", "tests.sweep", "--json", *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert not process.returncode, process.stderr
    results = [Result(**json.loads(line)) for line in process.stdout.splitlines()]
    return {result.kind: result for result in results}


def assert_as_on_the_page(found: dict[str, Result]) -> None:
    expected = verdicts_of()
    other = [result.line() for kind, result in found.items() if result.verdict != expected[kind]]
    assert not other, "other than on the page; python -m tests.sweep --page writes it:\n" + "\n".join(other)


@pytest.mark.long
def test_the_most_used_types_are_as_the_page_says() -> None:
    found = swept("--no-capture", *MOST_USED)
    assert list(found) == list(MOST_USED)
    assert_as_on_the_page(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kinds", groups(KNOWN_NOW, AT_ONCE))
def test_every_type_is_as_the_page_says(kinds: Sequence[str]) -> None:
    found = swept(*kinds)
    assert list(found) == list(kinds)
    assert_as_on_the_page(found)


def test_the_page_names_every_type() -> None:
    assert list(verdicts_of()) != [] and set(verdicts_of()) == set(every_type())
    assert set(verdicts_of().values()) <= set(VERDICTS)
    assert set(MOST_USED) <= set(verdicts_of())


def test_the_table_is_read_as_it_is_written(tmp_path: Any) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    results = [Result("b", TREES, checks={"hook": SAME}, lookup=SAME), Result("a", REFUSED, "this one has | in it")]
    write(results, page)
    assert verdicts_of(page) == {"b": TREES, "a": REFUSED}
    assert "has \\| in it" in page.read_text(encoding="utf-8") and "this one" not in table(results)
    assert page.read_text(encoding="utf-8").startswith("# Model families")


def test_compiled_families_that_are_too_narrow_here_are_told_from_others() -> None:
    """The page answers whether a user's model is compiled, not whether the tiny model of its type is."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| no |")]
    assert rows and not {kind for row in rows for kind in TYPE.findall(row)} & set(COMPILED.families)
    narrow = table([Result("qwen3_moe", TREES, lookup=SAME), Result("gpt2", TREES, lookup=SAME)])
    assert "| in published sizes | no | same |" in narrow and "| no | no | same |" in narrow


class FutureConfig(LlamaConfig):
    """A type that no rule names."""

    model_type = "from_the_future"


def test_a_type_that_no_rule_knows_becomes_small() -> None:
    odd: dict[str, Any] = {"layer_kinds": ["a"] * 30 + ["b", "a"], "expert_sizes": [4096] * 32}
    made: Any = FutureConfig(**small_settings(FutureConfig(**odd)))
    assert made.num_hidden_layers == len(made.layer_kinds) == 3 and made.layer_kinds == ["a", "a", "b"]
    assert (made.hidden_size, made.num_attention_heads, made.vocab_size) == (64, 4, 97)


def test_a_type_that_becomes_wrong_or_refused_is_noticed() -> None:
    assert_as_on_the_page({"llama": Result("llama", TREES)})
    for verdict in (REFUSED, WRONG):
        with pytest.raises(AssertionError, match="other than on the page"):
            assert_as_on_the_page({"llama": Result("llama", verdict)})
