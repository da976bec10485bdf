"""The script that measures other engines beside hdtool, by stand-ins for them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hdtool.builders.evaluation.contenders import generate_ids
from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import ModelError
from hdtool.data.prompts import Prompt, interleave_tasks, read_prompts
from hdtool.runtime.config import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from tests.benchmarks import rivals
from tests.benchmarks.llama_bench import LlamaBench
from tests.benchmarks.openvino_peer import OpenVinoContender
from tests.benchmarks.rivals import Row
from tests.support import fake_llama_cpp, fake_openvino
from tests.support.gguf_files import tiny_llama, write_gguf

TOKENS = 6
SHORT = ["--max-new-tokens", str(TOKENS), "--rounds", "1", "--no-generate"]
ABSENT = {"llama_cpp_peer": "hdtool.builders.evaluation.llama_cpp_peer", "openvino": "tests.benchmarks.openvino_peer"}


@pytest.fixture(scope="module")
def embedded() -> Loaded:
    return load(ModelConfig())


@pytest.fixture
def answers(embedded: Loaded) -> dict[tuple[int, ...], list[int]]:
    """Plain answers to the questions of the script, with tokens beyond their end."""
    found = {}
    for question in interleave_tasks(read_prompts(demo.PROMPTS), 1):
        ids = encode_conversation(embedded.tokenizer, question.messages)
        found[tuple(ids)] = [*generate_ids(embedded, SamplingConfig(), ids, TOKENS), *[5] * 8]
    return found


def program(path: Path, body: str) -> Path:
    path.write_text(f"#!{sys.executable}\n{body}\n")
    path.chmod(0o755)
    return path


def bench_program(folder: Path) -> Path:
    row = {"avg_ns": 2_000_000_000, "build_commit": "abc", "build_number": 7, "backends": "CPU"}
    log = f"import sys; open({str(folder / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
    return program(folder / "llama-bench", f"{log}\nprint({json.dumps([row])!r})")


def names_in(printed: str) -> list[str]:
    rows = [line for line in printed.splitlines() if line.startswith("| ")]
    return [line.split(" | ")[0].removeprefix("| ") for line in rows[1:]]


def test_what_is_not_installed_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ABSENT.values():
        monkeypatch.setattr(f"{module}.find_spec", lambda name: None)
    rivals.main(["--model", "embedded", *SHORT])
    printed, said = capsys.readouterr()
    assert names_in(printed) == ["hdtool, float32, plain", "hdtool, float32, `hd`"]
    missing = [line for line in said.splitlines() if line.startswith("missing: ")]
    assert [line.split(": ")[1].split()[0] for line in missing] == ["hdtool,", "llama.cpp", "llama-bench", "OpenVINO"]
    assert "embedded has none" in missing[0] and "pip install openvino-genai" in missing[3]
    assert [line.replace("missing", "- Not measured") in printed for line in missing] == [True] * 4


def test_all_engines_stand_in_one_table(
    answers: dict[tuple[int, ...], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake_llama_cpp.install(monkeypatch, answers)
    fake_openvino.install(monkeypatch, answers)
    monkeypatch.setattr(rivals, "check_same_model", lambda file, loaded: None)
    file = write_gguf(tmp_path / "model.gguf", tiny_llama(), "Q4_0")
    named = ["--llama-cpp-file", str(file), "--llama-bench", str(bench_program(tmp_path)), "--openvino", "ir-int8"]
    rivals.main(["--model", "embedded", *SHORT, *named])
    printed = capsys.readouterr().out
    engines = ("llama.cpp, Q4_0", "llama-bench, Q4_0", "OpenVINO, ir-int8")
    expected = [f"{engine}, {method}" for engine in engines for method in ("plain", "prompt lookup")]
    expected.remove("llama-bench, Q4_0, prompt lookup")
    assert names_in(printed) == ["hdtool, float32, plain", "hdtool, float32, `hd`", *expected]
    assert "- llama-cpp-python 0.0.1, built with SSE3, AVX, " in printed
    assert "- llama-bench: commit abc (build 7), backends CPU" in printed and "- OpenVINO GenAI 2.0" in printed
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(f"-m {file} -t 1 -p 0 -n 0 -pg " in call and " -r 1 " in call for call in calls)
    lengths = [call.split(" -pg ")[1].split()[0] for call in calls]
    assert [one for one in lengths if one != "1,1"] == [f"{len(question)},{TOKENS}" for question in answers]
    equal = [line.rsplit(" | ", 1)[1] for line in printed.splitlines() if line.startswith("| ") and " of " in line]
    assert equal == [f"{len(answers)} of {len(answers)} |"] * 6


@pytest.mark.parametrize(
    ("named", "said"),
    [
        (["--llama-cpp-file", "none.gguf"], "names none.gguf, which is no file: name a GGUF file of the same model"),
        (["--model", "none.gguf"], "none.gguf does not exist"),
        (["--questions", "none.jsonl"], "none.jsonl"),
    ],
)
def test_a_wrong_file_ends_it_with_one_line(named: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        rivals.main(["--model", "embedded", *SHORT, *named])
    assert said in str(ended.value) and str(ended.value).startswith("error: ")


def test_a_table_has_a_column_for_each_task() -> None:
    questions = [replace(Prompt.from_text(id, id=id), category=task) for id, task in {"a": "qa", "b": "math"}.items()]
    plain, drafted, bench = Row("E", "plain"), Row("E", "`hd`"), Row("B", "plain")
    for cpu in (1.0, 2.0, 4.0):
        plain.add("a", 8, 1.0, cpu)
        drafted.add("a", 8, 1.0, cpu / 2)
    for row in (plain, drafted):
        row.add("b", 8, 0.5, 1.0)
        row.tokens, row.steps = 16, 8
    plain.answers, drafted.answers = {"a": [[1]], "b": [[2]]}, {"a": [[1]], "b": [[3]]}
    bench.add("a", 8, 1.0, 1.0)
    bench.add("b", 8, 1.0, 2.0)
    head, line, *rows = rivals.table([plain, drafted, bench], questions)
    assert head.startswith("| tokens per CPU second | qa | math | all | by wall clock | against its plain decoding |")
    assert line.count("---") == head.count("|") - 1
    assert rows == [
        "| E, plain | 4.0 | 8.0 | 6.0 | 12.0 | 1.00 | 2.00 | 2 of 2 |",
        "| E, `hd` | 8.0 | 8.0 | 8.0 | 12.0 | 1.33 | 2.00 | 1 of 2 |",
        "| B, plain | 8.0 | 4.0 | 6.0 | 8.0 | 1.00 |  |  |",
    ]


@pytest.mark.parametrize("lookup", [False, True])
def test_openvino_answers_with_its_tokens_and_passes(
    embedded: Loaded, monkeypatch: pytest.MonkeyPatch, lookup: bool
) -> None:
    end = min(embedded.stops)
    made = fake_openvino.install(monkeypatch, {(5, 6): [7, 8, 9, 7, 8, 9, 7, 8], (6, 5): [7, 8, end, 9]})
    contender = OpenVinoContender(embedded, Path("ir"), TOKENS + 1, lookup=lookup)
    found = contender.fresh().answer([5, 6])
    assert (found.output_ids, found.finish) == ([7, 8, 9, 7, 8, 9, 7], "length")
    assert found.step_tokens == ([2, 2, 2, 1] if lookup else [1] * 7)
    ended = contender.answer([6, 5])
    assert (ended.output_ids, ended.finish) == ([7, 8, end], "stop")
    (pipeline,) = made
    assert not pipeline.options["scheduler_config"].enable_prefix_caching
    assert pipeline.options.get("prompt_lookup", False) == lookup == hasattr(pipeline.settings, "num_assistant_tokens")
    with pytest.raises(ModelError, match=r"OpenVINO GenAI cannot load broken \(no model here"):
        OpenVinoContender(embedded, Path("broken"), TOKENS, lookup=lookup)


def test_a_program_that_is_not_llama_bench_is_named(tmp_path: Path) -> None:
    found = LlamaBench(bench_program(tmp_path), Path("model.gguf"), 1)
    wall, cpu = found.seconds(100, 20)
    assert wall == 2.0 and cpu > 0
    for program_, said in {
        tmp_path / "none": "which does not run: No such file or directory",
        program(tmp_path / "talks", "print('hello')"): "prints no JSON of one test: is it llama-bench?",
        program(tmp_path / "fails", "raise SystemExit('cannot load')"): r"fails on model\.gguf \(cannot load\)",
    }.items():
        with pytest.raises(ModelError, match=said):
            LlamaBench(program_, Path("model.gguf"), 1).seconds(100, 20)
