"""`hdtool serve --engine vllm`, the settings of vLLM's workers, and their stores. vLLM itself is not needed."""

from __future__ import annotations

import json
import logging
import re
import shutil
import socket
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hdtool.builders.stores.build_stores import BUILDS
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.errors import HdtoolError, OptionError, ServeError, StoreError, install_command
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_folder import read_manifest
from hdtool.data.stores.stores_at_home import corpus_index_at_home, model_store_at_home
from hdtool.runtime.integrations.vllm.cpu_repairs import expand_settings, with_rows_only
from hdtool.runtime.integrations.vllm.proposer import COST, HierarchyProposer, open_drafter
from hdtool.runtime.integrations.vllm.start_vllm import HOOK_FILE, Launch, require_hook
from hdtool.runtime.integrations.vllm.worker_settings import PROPOSER, VllmSettings
from hdtool.runtime.settings.decoding import StoresConfig
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.settings.serving import VllmConfig
from hdtool.runtime.target.load import load_tokenizer
from tests.support.vllm_batch import worker, worker_config

MODEL = str(demo.MODEL)
DEMO = read_manifest(demo.MODEL_STORE).model or pytest.fail("the demo's store names no model")
MODEL_STORE, CORPUS_INDEX = str(demo.MODEL_STORE.resolve()), str(demo.CORPUS_INDEX.resolve())


pytestmark = pytest.mark.usefixtures("home")


@pytest.fixture(scope="module")
def mark() -> TokenizerFingerprint:
    return TokenizerFingerprint.of(load_tokenizer(ModelConfig()))


def launch(*options: str, **stores: str) -> Launch:
    return Launch(MODEL, options, VllmConfig(), StoresConfig(**stores))


def told(launched: Launch) -> tuple[dict[str, Any], dict[str, Any]]:
    """The speculative and the additional configuration of a command."""
    command = launched.command
    assert command[-4::2] == ["--speculative-config", "--additional-config"]
    return json.loads(command[-3]), json.loads(command[-1])


def test_the_command_is_vllms_own_with_our_drafter() -> None:
    launched = launch("--port", "9", "-tp", "2", "--dtype=half")
    assert Path(launched.command[0]).name == "vllm"
    assert launched.command[1:7] == ["serve", MODEL, "--port", "9", "-tp", "2"]
    speculation, additional = told(launched)
    assert speculation == {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 8}
    assert additional == {"hdtool": {"model_db": MODEL_STORE, "corpus_db": CORPUS_INDEX}}
    module, _, name = PROPOSER.rpartition(".")
    assert getattr(import_module(module), name) is HierarchyProposer


@pytest.mark.long
def test_a_worker_opens_the_stores_of_the_command() -> None:
    launched = Launch(MODEL, [], VllmConfig(3, 0.5, 1), StoresConfig(corpus_db="none"))
    speculation, additional = told(launched)
    assert additional["hdtool"] == {
        "model_db": MODEL_STORE, "corpus_db": "none", "min_draft_prob": 0.5, "context_mib": 1
    }  # fmt: skip
    settings = VllmSettings.of(additional, speculation["num_speculative_tokens"])
    assert settings.serving == VllmConfig(3, 0.5, 1)
    drafter = worker(additional).drafter
    assert (drafter.store_set.model is None, drafter.store_set.corpus is None) == (False, True)
    assert drafter.min_probability.floor(1) == 0.5
    assert drafter.max_tables == 1


def test_a_worker_on_a_cpu_expects_tokens_to_cost_more() -> None:
    floors = []
    for device in ("cuda", "cpu"):
        config = worker_config()
        config.device_config.device_type = device
        floors.append(open_drafter(config).min_probability.floor(8))
    assert floors == [8 / 264, 8 / 40]


def test_a_worker_drafts_in_vllms_form() -> None:
    proposer = worker()
    proposer.load_model("whatever", vllm="hands over")
    contexts, lengths = np.zeros((4, 256), np.int32), np.zeros(4, np.int32)
    for row, text in enumerate(("one two three one two", "def f(self):\n    return", "unread")):
        ids = load_tokenizer(ModelConfig())(text)["input_ids"]
        contexts[row, : len(ids)], lengths[row] = ids, len(ids)
    drafts = proposer.propose([[1], [1, 2], []], lengths, contexts, slot_mappings={})
    assert [bool(draft) for draft in drafts] == [True, True, False]
    assert all(type(token) is int and len(draft) <= 4 for draft in drafts for token in draft)


def test_a_worker_logs_what_hdtool_costs_and_that_no_gpu_has_run_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "vllm.hdtool"):
        worker()
    assert COST in caplog.text
    assert "experimental inside vLLM on cuda" in caplog.text


def test_settings_are_spread_over_drafted_tokens() -> None:
    """As vLLM's kernel on GPUs does it: 0 as a temperature means greedy, and is replaced."""
    settings, ends = torch.tensor([0.5, 0.0, 2.0, 7.0]), torch.tensor([2, 3, 3, 5], dtype=torch.int32)
    assert expand_settings(settings, ends, 5, 0, 1).tolist() == [0.5, 0.5, 1.0, 7.0, 7.0]
    assert expand_settings(settings.int(), ends, 5).tolist() == [0, 0, 0, 7, 7]


def test_an_empty_batch_is_not_processed() -> None:
    guarded = with_rows_only(lambda logits, k: logits[k.max()])
    nothing = torch.empty(0, 3)
    assert guarded(nothing, torch.empty(0, dtype=torch.int32)) is nothing
    assert guarded(torch.eye(3), torch.tensor([1])).tolist() == [0, 1, 0]


def test_the_users_additional_configuration_is_passed_on() -> None:
    _, additional = told(launch("--additional_config", '{"other": 1, "hdtool": {}}'))
    assert additional["other"] == 1
    assert additional["hdtool"]["model_db"] == MODEL_STORE


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speculative-config", "{}"], "leave it out"),
        (["--speculative_config={}"], "leave it out"),
        (["--additional-config", "nonsense"], "additional-config"),
        (["--additional-config", "[1]"], "JSON object"),
        (["--tokenizer", "./nowhere"], "does not exist"),
    ],
)
def test_invalid_options(options: list[str], said: str) -> None:
    with pytest.raises(HdtoolError, match=said):
        launch(*options)


@pytest.mark.parametrize(
    "hdtool", [1, {"model": 1}, {"min_draft_prob": "much"}, {"min_draft_prob": 7}, {"context_mib": 0}]
)
def test_invalid_settings(hdtool: object) -> None:
    with pytest.raises(OptionError):
        VllmSettings.of({"hdtool": hdtool}, 8)


def test_stores_are_checked_before_vllm_starts(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        launch(model_db=str(tmp_path / "nowhere"))
    other = other_tokenizer(tmp_path)
    with pytest.raises(StoreError, match="another tokenizer"):
        launch("--tokenizer", other, corpus_db=str(demo.CORPUS_INDEX))
    assert str(launch("--tokenizer", other).store_set).startswith("no stores")


def test_a_worker_without_a_store_names_its_host(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"holds no store.*on {socket.gethostname()}"):
        worker({"hdtool": {"model_db": str(tmp_path / "nowhere")}})
    with pytest.raises(StoreError, match="another tokenizer"):
        worker({"hdtool": {"model_db": str(demo.MODEL_STORE)}}, tokenizer=other_tokenizer(tmp_path))


def test_tenants_have_their_own_model_stores_and_never_anothers(mark: TokenizerFingerprint) -> None:
    for namespace in ("acme", "models/beta"):
        shutil.copytree(demo.MODEL_STORE, model_store_at_home(DEMO, mark, namespace))
    shutil.copytree(demo.CORPUS_INDEX, corpus_index_at_home(mark, "empty"))

    def of(*options: str, **stores: str) -> list[Path | None]:
        store_set = launch(*options, **stores).store_set
        return [store.folder if store else None for store in (store_set.model, store_set.corpus)]

    own = [model_store_at_home(DEMO, mark, "acme"), demo.CORPUS_INDEX]
    assert of("--served-model-name", "acme") == own
    assert of("--served_model_name=acme") == own
    assert of(namespace="acme") == own
    assert of("--served-model-name", "models/beta")[0] == model_store_at_home(DEMO, mark, "models/beta")
    assert of("--served-model-name", "unknown") == of() == [demo.MODEL_STORE, demo.CORPUS_INDEX]
    assert of("--served-model-name", "empty") == [None, corpus_index_at_home(mark, "empty")]
    assert worker(served="acme").drafter.store_set.model.folder == own[0]  # type: ignore[union-attr]
    shutil.copytree(demo.MODEL_STORE, model_store_at_home(DEMO, mark, MODEL))
    assert of()[0] == model_store_at_home(DEMO, mark, MODEL), "known by its path"
    with pytest.raises(ServeError, match="build-model-db --namespace nobody"):
        launch(namespace="nobody")


LONG = "/".join(["folder"] * 50)
"""A path that cannot be a namespace."""


def test_a_model_with_a_long_path_is_served_without_a_namespace(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a_folder_with_a_long_name"] * 10)
    deep.parent.mkdir(parents=True)
    deep.symlink_to(demo.MODEL)
    store_set = Launch(str(deep), ["--served-model-name", LONG], VllmConfig(), StoresConfig()).store_set
    assert store_set.model and store_set.model.folder == demo.MODEL_STORE
    assert worker(served=LONG).drafter.store_set.model.folder == demo.MODEL_STORE  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["", LONG])
def test_a_namespace_that_cannot_be_a_folder_is_refused_where_it_is_asked_for(name: str) -> None:
    with pytest.raises(OptionError, match="cannot name a folder"):
        launch(namespace=name)


@pytest.mark.parametrize(("command", "kind"), [("build-model-db --from", "model"), ("build-corpus-db", "corpus")])
def test_a_tenants_stores_are_built_where_the_server_finds_them(
    command: str,
    kind: str,
    mark: TokenizerFingerprint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build(folder: Path, *arguments: object, **options: object) -> None:
        raise StoreError(f"would be built at {folder}")

    monkeypatch.setitem(BUILDS, kind, build)
    run([*command.split(), str(demo.PROMPTS), "--namespace", "acme", "--quiet"])
    place = model_store_at_home(DEMO, mark, "acme") if kind == "model" else corpus_index_at_home(mark, "acme")
    assert capsys.readouterr().err.splitlines()[-1] == f"error: would be built at {place}"


def test_the_command_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--port", "9", "--draft-tokens", "5", "--max-num-seqs", "2", "--dry-run"]
    assert run(["serve", "--engine", "vllm", MODEL, *options]) == 0
    shown = capsys.readouterr()
    assert f"serve {MODEL} --port 9 --max-num-seqs 2 --speculative-config" in shown.out
    assert '"num_speculative_tokens": 5' in shown.out
    assert shown.err.startswith("drafting from")


SECRET = "s3cret"


@pytest.mark.parametrize(
    "options",
    [
        ["--api-key", SECRET],
        ["--api_key", SECRET, f"{SECRET} too", f"-{SECRET} with a space", "-123", "--port", "8000"],
        [f"--api-key={SECRET}", f"--api_key={SECRET}=more"],
        ["--api-k", SECRET],
        [f"--api-ke={SECRET}"],
        ["--hf-token", SECRET],
        [f"--hf_to={SECRET}"],
        ["--ssl-keyfile-password", SECRET],
        [f"--ssl_keyfile_pass={SECRET}"],
        ["--model-loader-extra-config.aws_secret", SECRET],
        ["--model-loader-extra-config", json.dumps({"other": 1, "deep": [{"access_key": SECRET}]})],
        ["--additional-config", json.dumps({"other": {"password": SECRET}})],
    ],
    ids=str,
)
@pytest.mark.parametrize("dry_run", [True, False])
def test_secrets_are_never_printed(
    options: list[str], dry_run: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("hdtool.cli.serve.find_spec", lambda name: name)
    monkeypatch.setattr("os.execv", lambda program, command: started.append(command))
    arguments = ["serve", "--engine", "vllm", MODEL, "--max-num-seqs", "2", *options, "--ssl-keyfile", "key.pem"]
    assert run([*arguments, *["--dry-run"] * dry_run]) == 0
    shown = capsys.readouterr()
    assert SECRET not in shown.out + shown.err and "-123" not in shown.out + shown.err
    assert f"serve {MODEL} --max-num-seqs 2" in (shown.out if dry_run else shown.err)
    assert "--ssl-keyfile key.pem" in shown.out + shown.err, "a path is no secret"
    name = options[0].partition("=")[0]
    assert f"leaves out {name}" in shown.err and "VLLM_API_KEY" in shown.err
    assert [command for command in started if SECRET in " ".join(command)] == started, "vLLM gets them"
    assert bool(started) is not dry_run


@pytest.mark.parametrize("options", [["--api-key", SECRET], [f"--api-key={SECRET}", MODEL], [f"--a={SECRET}"]])
def test_secrets_are_not_in_errors_either(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--engine", "vllm", *options]) == 2
    assert run(["serve", "--engine", "vllm", MODEL, f"--a={SECRET}", "--dry-run"]) == 2
    assert SECRET not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "address", "is_open"),
    [
        ([], "all interfaces, port 8000", True),
        (["--port", "9"], "all interfaces, port 9", True),
        (["--host", "0.0.0.0"], "0.0.0.0, port 8000", True),
        (["--host=192.168.0.7", "--por=9"], "192.168.0.7, port 9", True),
        (["--host", "::"], "::, port 8000", True),
        (["--host", ""], "all interfaces, port 8000", True),
        (["--hos", "127.0.0.1"], "127.0.0.1, port 8000", False),
        (["--host", "localhost"], "localhost, port 8000", False),
        (["--host", "::1"], "::1, port 8000", False),
        (["--uds", "/run/hdtool.sock"], "the Unix socket /run/hdtool.sock", False),
        (["--api-key", SECRET], "all interfaces, port 8000", False),
        (["--api-key", ""], "all interfaces, port 8000", True),
        (["--config", "served.yaml"], "all interfaces, port 8000, unless served.yaml sets another address", True),
    ],
    ids=str,
)
def test_the_address_is_named_and_an_open_server_is_warned_of(
    options: list[str],
    address: str,
    is_open: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    assert run(["serve", "--engine", "vllm", MODEL, *options, "--dry-run"]) == 0
    shown = capsys.readouterr().err.splitlines()
    assert f"the server listens on {address}" in shown
    assert any(line.startswith("warning: other machines can use this server") for line in shown) is is_open
    monkeypatch.setenv("VLLM_API_KEY", SECRET)
    assert run(["serve", "--engine", "vllm", MODEL, *options, "--dry-run"]) == 0
    has_key = options != ["--api-key", ""]
    assert ("warning" not in capsys.readouterr().err) is has_key


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([MODEL], 1, install_command("vllm")),
        (["--port", "9"], 2, "hdtool serve MODEL --engine vllm"),
        ([MODEL, "--draft-tokens", "0"], 2, "draft-tokens"),
        ([MODEL, "--min-draft-prob", "2"], 2, "--min-draft-prob"),
        (["./nowhere", "--dry-run"], 1, "does not exist"),
    ],
)
def test_what_goes_wrong_is_one_line(
    arguments: list[str], code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hdtool.cli.serve.find_spec", lambda name: None)
    assert run(["serve", "--engine", "vllm", *arguments]) == code
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 1 and said in shown[0]


@pytest.mark.parametrize(
    ("has_hook", "environment", "said"),
    [
        (True, {}, None),
        (False, {}, "no custom_class drafters .*: " + re.escape(install_command("vllm"))),
        (True, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, None),
        (True, {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "VLLM_USE_V2_MODEL_RUNNER=1 .*: unset it"),
    ],
)
def test_a_vllm_that_would_not_draft_is_refused_before_it_starts(
    has_hook: bool, environment: dict[str, str], said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = tmp_path / "vllm" / HOOK_FILE
    hook.parent.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise AssertionError('imported')")
    if has_hook:
        hook.touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    with pytest.raises(ServeError, match=said) if said else nullcontext():
        require_hook(environment)


def other_tokenizer(folder: Path) -> str:
    """The demo's tokenizer with one word more, beside a model that does not matter."""
    tokenizer = load_tokenizer(ModelConfig())
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(folder / "tokenizer")
    return str(folder / "tokenizer")
