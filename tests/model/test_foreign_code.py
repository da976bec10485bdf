"""Code that comes with a model is never run, and nobody is asked about it, unless --trust-remote-code is given."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from hdtool.cli.app import run
from tests.support.project import FILES

LOADS = re.compile(r"(Auto\w+|auto)\.from_(pretrained|config)$")


def test_every_model_is_loaded_without_its_code_unless_settings_say_otherwise() -> None:
    """By default, transformers asks on the terminal and takes the next line of standard input as an answer."""
    loading = [
        (path, call)
        for path in FILES
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and LOADS.match(ast.unparse(call.func))
    ]
    assert len(loading) > 5
    for path, call in loading:
        words = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        told = words.get("trust_remote_code")
        assert told in ("False", "trust", "config.trust_remote_code"), f"{path.name}: {ast.unparse(call)}"


def test_a_shape_runs_no_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mark, code = tmp_path / "executed", tmp_path / "configuration_own.py"
    code.write_text(f"open({str(mark)!r}, 'w')\nraise RuntimeError\n")
    settings = {"model_type": "own", "auto_map": {"AutoConfig": "configuration_own.Config"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert run(["bench-cost", "--shape", str(tmp_path)]) == 1
    assert "is no configuration of a model" in capsys.readouterr().err
    assert not mark.exists()
