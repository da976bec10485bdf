"""``hdtool chat`` driven by a script: messages and commands, one per line."""

from __future__ import annotations

import json
import re
import shutil
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from hdtool.cli.app import run
from hdtool.cli.chat_session import ChatSession
from hdtool.data import demo
from hdtool.data.prompts import Prompt
from hdtool.runtime.answering.answer_prompts import Answerer
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig

pytestmark = pytest.mark.usefixtures("known_cost")

SHORT = ["--max-new-tokens", "12", "--model-db", "none", "--corpus-db", "none"]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on these lines; its exit code, standard output, and what standard error has once it began."""

    def chat(*lines: str, options: tuple[str, ...] = ()) -> tuple[int, str, list[str]]:
        sent = "".join(f"{line}\n" for line in lines).encode()
        monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(sent)))
        code = run(["chat", *SHORT, *options])
        printed = capfd.readouterr()
        _, began, later = printed.err.partition("/help lists the commands, Ctrl-D leaves\n")
        return code, printed.out, (later if began else printed.err).splitlines()

    return chat


def answers_to(*conversation: dict[str, str], seed: int = 0, temperature: float = 0.0) -> str:
    """The answer to a conversation, by plain decoding from an empty cache."""
    decoding = DecodeConfig(method="ar", max_new_tokens=12, prefix_caching=False)
    answerer = Answerer(ModelConfig(), decoding, SamplingConfig(temperature=temperature, seed=seed))
    (answer,) = answerer.all_answers([Prompt(conversation)])
    return answer.text


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_each_answer_follows_the_whole_conversation(typed: Any) -> None:
    code, out, err = typed("What is a list?", "", "And a dict?", options=("--system", "Be brief."))
    system = {"role": "system", "content": "Be brief."}
    first = answers_to(system, user("What is a list?"))
    second = answers_to(system, user("What is a list?"), said(first), user("And a dict?"))
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert err == ["note: the answer stopped at --max-new-tokens"] * 2


def test_undo_clear_and_system_change_what_the_model_reads(typed: Any) -> None:
    question = "def read(path):"
    _, out, _ = typed("Name a colour.", "/undo", question, "/clear", question, "/system You are a poet.", question)
    plain = answers_to(user(question))
    poet = answers_to({"role": "system", "content": "You are a poet."}, user(question), said(plain), user(question))
    assert out == f"{answers_to(user('Name a colour.'))}\n{plain}\n{plain}\n{poet}\n"


def test_after_clear_earlier_answers_are_still_in_the_history(typed: Any) -> None:
    asked = ("Write a story about a fox.", "/clear", "Write a story about a fox.")
    for history, drafts in (("memory", True), ("none", False)):
        _, _, err = typed(*asked, options=("--stats", "--draft-tokens", "16", "--history", history))
        lines = [line for line in err if line.startswith("  history: ")]
        assert any("drafted 0," not in line for line in lines) is drafts


def test_retry_draws_the_answer_with_the_next_seed(typed: Any) -> None:
    _, out, _ = typed("import os", "/retry", options=("--temperature", "1.0", "--seed", "4"))
    expected = [answers_to(user("import os"), seed=seed, temperature=1.0) for seed in (4, 5)]
    assert out == "".join(f"{text}\n" for text in expected)
    assert expected[0] != expected[1]


def test_retry_at_temperature_0_says_that_the_answer_comes_again(typed: Any) -> None:
    note = "note: at temperature 0 the answer is the same again: /temperature 0.7 lets the next /retry draw another"
    _, out, err = typed("import os", "/retry", "/temperature 1", "/retry", "/temperature 0", "/retry", "/retry")
    greedy, drawn = answers_to(user("import os")), answers_to(user("import os"), seed=2, temperature=1.0)
    assert out == "".join(f"{text}\n" for text in (greedy, greedy, drawn, greedy, greedy))
    assert [line for line in err if "--max-new-tokens" not in line] == [note, note]
    _, _, err = typed("import os", "/system Be brief.", "/retry")
    assert note not in err


def test_stats_show_the_last_answer_and_all_and_what_was_kept(typed: Any) -> None:
    _, out, _ = typed("What is a list?", "And a dict?", "/stats")
    kept = [line for line in out.splitlines() if "kept" in line]
    assert len(kept) == 1 and int(kept[0].rpartition(" ")[2]) > 10
    assert "2 answers: 24 tokens in" in out


def test_stats_show_what_drafts_gained_by_source(typed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    asked = ("What is a list?", "/retry", "/stats")
    _, out, _ = typed(*asked, options=("--show-drafts", "--draft-tokens", "16"))
    (whole,) = re.findall(r"^2 answers: (\d+) tokens in .* (\d+) steps", out, re.MULTILINE)
    gained = re.search(
        r"^gained: (.*) tokens per step instead of 1 \((.*)\): (\d+) steps instead of (\d+)$", out, re.MULTILINE
    )
    assert gained and gained.groups()[2:] == whole[::-1]
    by_source = [float(share) for share in re.findall(r"([\d.]+) by \033\[", gained[2])]
    assert sum(by_source) == pytest.approx(float(gained[1]) - 1, abs=0.03) and sum(by_source) > 0
    _, out, _ = typed("What is a list?", "/stats", options=("--method", "ar"))
    assert out.endswith("gained: nothing, as no drafted token was accepted\n")


def test_a_saved_conversation_is_read_by_the_builder_and_goes_on_where_it_was(typed: Any, tmp_path: Path) -> None:
    file = tmp_path / "chats" / "one.jsonl"
    _, out, err = typed("What is a list?", f"/save {file}", "And a dict?", f"/save {file}")
    assert err.count(f"saved 2 messages in {file}") == err.count(f"saved 4 messages in {file}") == 1
    first, second = out.splitlines()
    row = json.loads(file.read_text())
    assert row["messages"] == [user("What is a list?"), said(first), user("And a dict?"), said(second)]
    assert not [path for path in file.parent.iterdir() if path != file]
    _, out, err = typed(f"/load {file}", "Why?")
    assert err[0] == f"loaded 4 messages of {file}"
    assert out == f"{answers_to(*row['messages'], user('Why?'))}\n"
    assert run(["build-model-db", "--from", str(file), "--out", str(tmp_path / "store"), "--quiet"]) == 0


def test_files_of_others_are_not_replaced(typed: Any, tmp_path: Path) -> None:
    saved, foreign = tmp_path / "saved.jsonl", tmp_path / "foreign.jsonl"
    typed("What is a list?", f"/save {saved}")
    foreign.write_text(json.dumps({"messages": [user("mine")]}) + "\n")
    before = saved.read_bytes(), foreign.read_bytes()
    _, _, err = typed(f"/load {foreign}", "Hello", f"/save {foreign}", f"/save {saved}", f"/save {tmp_path}")
    assert err[0] == f"loaded 1 message of {foreign}; the last one has no answer: /retry answers it"
    problems = [line for line in err if line.startswith("error")]
    assert [" is there and is not a conversation that" in line for line in problems] == [True, True, False]
    assert "it is a folder" in problems[2]
    assert (saved.read_bytes(), foreign.read_bytes()) == before


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("/wat", "there is no command /wat: /help lists them"),
        ("/", "there is no command /: /help lists them"),
        ("/retyr", "there is no command /retyr (did you mean retry?): /help lists them"),
        ("/temperature", "/temperature needs a number: /temperature NUMBER"),
        ("/temperature hot", "/temperature needs a number, got hot: as in /temperature 0.7"),
        ("/temperature -1", "--temperature must be 0 (greedy) or more, got -1.0"),
        ("/exit now", "/exit takes nothing after it, got now"),
        ("/save", "/save needs the name of a file: /save FILE"),
        ("/save x.jsonl", "there is nothing to save yet: ask something first"),
        ("/undo", "the conversation has no message yet: ask something first"),
        ("/retry", "the conversation has no message yet: ask something first"),
        ("/stats", "there are no figures yet: ask something first"),
        ("/load no/such.jsonl", "no/such.jsonl does not exist"),
        (f"/load {demo.PROMPTS}", "is not one conversation with messages: name a file that /save wrote"),
        ("word " * 2000, "the conversation is full (the prompt is"),
    ],
)
def test_a_mistake_is_one_line_and_the_conversation_goes_on(line: str, problem: str, typed: Any) -> None:
    code, out, err = typed(line, "/help")
    assert code == 0
    assert len(err) == 1 and err[0].startswith("error: ") and problem in err[0]
    assert out.startswith("/help ")


def test_exit_leaves_and_reads_no_further(typed: Any) -> None:
    assert typed("/exit", "What is a list?") == (0, "", [])


def test_text_that_is_no_utf8_is_one_line(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"\xff\xfe\n")))
    assert run(["chat", *SHORT]) == 1
    assert capfd.readouterr().err.splitlines()[-1].startswith("error: standard input is not UTF-8 text")


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path, typed: Any) -> None:
    model = tmp_path / "model"
    shutil.copytree(demo.MODEL, model)
    (model / "chat_template.jinja").unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    code, out, err = typed("Hello", options=(str(model),))
    assert (code, out, len(err)) == (1, "", 1)
    assert err[0].startswith(f"error: {model} has no chat template, so it cannot hold a conversation: name an instruct")


def test_an_interrupted_answer_is_kept_and_an_empty_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    decoding = DecodeConfig(method="ar", max_new_tokens=12)
    answerer = Answerer(ModelConfig(), decoding, SamplingConfig(), stores=StoresConfig("none", "none"))
    session = ChatSession(answerer)
    passes = [0]
    hook = answerer.loaded.target.model.register_forward_hook(lambda *_: interrupted_at(5))

    def interrupted_at(last: int) -> None:
        passes[0] += 1
        if passes[0] == last:
            raise KeyboardInterrupt

    session.take("What is a list?")
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    assert answers_to(user("What is a list?")).startswith(session.messages[1]["content"])
    kept = list(session.messages)
    passes[0] = 4
    session.take("And a dict?")
    assert session.messages == kept
    hook.remove()
    assert capfd.readouterr().err.splitlines() == [
        "note: interrupted: the answer so far is part of the conversation",
        "note: interrupted: the message is not part of the conversation",
    ]


def test_ctrl_c_ends_a_script_as_a_whole(monkeypatch: pytest.MonkeyPatch, typed: Any) -> None:
    def interrupted(answer: Any, **_: Any) -> None:
        answer.interrupt()

    monkeypatch.setattr("hdtool.cli.chat_session.stream_answer", interrupted)
    code, out, err = typed("What is a list?", "/help")
    assert (code, out) == (130, "")
    assert err == ["note: interrupted: the message is not part of the conversation", "error: interrupted"]
