"""Words that hdtool does not know: each message names what was probably meant."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from hdtool.cli.app import run
from hdtool.cli.unknown_words import COMMANDS_ELSEWHERE
from hdtool.data import demo
from hdtool.data.errors import ModelError, did_you_mean
from hdtool.runtime.weights.hub import hub_errors_worded


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run(list(arguments))
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == ""
    return code, line


@pytest.mark.parametrize(
    ("word", "known", "hint"),
    [
        ("hdd", ("ar", "hd", "pld"), " (did you mean hd?)"),
        ("HD", ("ar", "hd"), " (did you mean hd?)"),
        ("hydra+", ("Hydra", "Hydra++"), " (did you mean Hydra++?)"),
        ("weather", ("ar", "hd"), ""),
        ("", ("ar", "hd"), ""),
        ("hd", (), ""),
    ],
)
def test_the_most_similar_word_is_meant(word: str, known: tuple[str, ...], hint: str) -> None:
    assert did_you_mean(word, known) == hint


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("generat", "generate"),
        ("generate --promt hi", "--prompt"),
        ("generate --max-tokens 3 hi", "--max-new-tokens"),
        ("generate hi --method hdd", "hd"),
        ("generate hi --dtype bf16", "bfloat16"),
        ("generate hi --device cuad", "cuda"),
        ("generate hi --sources context,histroy", "history"),
        ("bench --methods hd,pdl", "pld"),
        ("bench --methods generate,hd --baseline genrate", "generate"),
        ("bench --memory wram", "warm"),
        ("bench-cost --shape lama-7b", "llama-7b"),
        ("replay --traces none --methods suffx", "suffix"),
        ("train-heads embedded --from none --out heads --kind hydr", "hydra"),
        ("serve --engine vlm", "vllm"),
        ("serve --log-format jsn", "json"),
        ("export embedded --to sglan --out drafting", "sglang"),
        ("stores remov", "remove"),
    ],
)
def test_a_misspelt_word_of_the_command_line(line: str, meant: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, said = complaint(capfd, *shlex.split(line))
    assert (code, f"(did you mean {meant}?)" in said) == (2, True), said


@pytest.mark.parametrize("word", COMMANDS_ELSEWHERE)
def test_commands_of_similar_tools_are_translated(word: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert complaint(capfd, word, "llama3.2") == (2, f"error: hdtool has no command {word}: {COMMANDS_ELSEWHERE[word]}")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("smollm2", "it is a model, so hdtool chat smollm2, or hdtool generate smollm2 PROMPT"),
        ("Write a quick sort.", "hdtool generate PROMPT answers a prompt"),
        ("\033[31m", r"hdtool has no command \x1b[31m: hdtool --help lists the commands"),
    ],
)
def test_a_model_or_a_prompt_without_a_command(word: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, line = complaint(capfd, word)
    assert (code, line.endswith(said)) == (2, True), line


def test_a_misspelt_store_or_source(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = home / "stores" / "3ba29e36aabbccdd" / "corpus"
    shutil.copytree(demo.CORPUS_INDEX, folder)
    hint = "(did you mean corpus-3ba29e36?)"
    for line in ("inspect corpus-3ba29e63", "generate hi --corpus-db corpus-3ba29", "stores remove corpus-3ba2"):
        code, said = complaint(capfd, *shlex.split(line))
        assert (code, hint in said) == (1, True), said
    code, said = complaint(capfd, "drop", "corpus-3ba29e36", "--source", "document.jsonl")
    assert (code, "(did you mean documents.jsonl?)" in said) == (1, True), said
    assert complaint(capfd, "inspect", "weather")[1].startswith("error: weather holds no store: build one")


def test_a_misspelt_demo_model_that_the_hub_does_not_know() -> None:
    with pytest.raises(ModelError, match=r"^smolm2 \(did you mean smollm2\?\): "), hub_errors_worded("smolm2"):
        raise OSError("Name or service not known")
