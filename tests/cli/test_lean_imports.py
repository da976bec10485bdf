"""Imports without garbage collection, torch's compiler, distributed tensors and the scan of transformers' sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

LEAN = "from hdtool.runtime.model.lean_imports import import_leanly\nimport_leanly()\n"
NAMES = "import json, transformers, transformers.models\nprint(json.dumps(sorted(dir(transformers))))\n"


def output_of(program: str, home: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HDTOOL_HOME": str(home)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_models_are_imported_without_the_compiler(tmp_path: Path) -> None:
    program = (
        LEAN + "import sys, transformers.models.llama.modeling_llama, types\n"
        "assert not {'sympy', 'torch._inductor', 'torch.distributed.tensor'} & set(sys.modules), sorted(sys.modules)\n"
        "assert type(sys.modules['torch._dynamo']) is not types.ModuleType\n"
    )
    output_of(program, tmp_path)


@pytest.mark.long
def test_the_compiler_is_whole_once_it_is_used(tmp_path: Path) -> None:
    program = (
        LEAN + "import torch, types, transformers.models.llama.modeling_llama\n"
        "from transformers.integrations import deepgemm\n"
        "calls = []\n"
        "@torch.compiler.disable\n"
        "def disabled(x): calls.append(torch.compiler.is_compiling()); return x + 1\n"
        "assert disabled(torch.zeros(1)) == 1\n"
        "compiled = torch.compile(lambda x: disabled(x * 2) * 3, backend='eager')\n"
        "assert compiled(torch.ones(1)) == 9 and calls == [False, False]\n"
        "assert type(torch._dynamo) is types.ModuleType and torch._dynamo.disable\n"
    )
    output_of(program, tmp_path)


@pytest.mark.long
def test_an_interrupted_load_of_the_compiler_is_tried_again(tmp_path: Path) -> None:
    program = (
        LEAN + "import builtins, sys, torch, types, transformers.models.llama.modeling_llama\n"
        "from torch._dynamo import allow_in_graph\n"
        "usual = builtins.__import__\n"
        "def interrupted(name, *rest):\n"
        "    if name.endswith('eval_frame') or 'eval_frame' in (rest[2] or () if len(rest) > 2 else ()):\n"
        "        builtins.__import__ = usual\n"
        "        raise KeyboardInterrupt\n"
        "    return usual(name, *rest)\n"
        "builtins.__import__ = interrupted\n"
        "try:\n"
        "    torch._dynamo.disable\n"
        "    raise SystemExit('no interrupt')\n"
        "except KeyboardInterrupt:\n"
        "    pass\n"
        "assert torch._dynamo.disable and type(torch._dynamo) is types.ModuleType\n"
        "assert allow_in_graph(len) is len, 'taken before the compiler was loaded'\n"
        "assert torch.compile(lambda x: x * 3, backend='eager')(torch.ones(1)) == 3\n"
    )
    output_of(program, tmp_path)


def test_distributions_are_listed_once(tmp_path: Path) -> None:
    program = LEAN + "import importlib.metadata\nprint(len(list(importlib.metadata.distributions())))\n"
    assert output_of(program, tmp_path) == output_of(program.removeprefix(LEAN), tmp_path)


@pytest.mark.long
def test_garbage_collection_waits_until_a_tokenizer_is_loaded(tmp_path: Path) -> None:
    program = (
        "import gc\nusual, phases = gc.get_threshold(), []\n"
        + LEAN
        + "gc.callbacks.append(lambda *_: phases.append(1))\n"
        "from hdtool.runtime.target.load import load_tokenizer\n"
        "from hdtool.runtime.settings.model import ModelConfig\n"
        "assert not phases and gc.get_threshold() != usual\n"
        "load_tokenizer(ModelConfig())\n"
        "assert gc.get_threshold() == usual and (frozen := gc.get_freeze_count()) > 100_000\n"
        "load_tokenizer(ModelConfig())\n"
        "assert gc.get_freeze_count() == frozen, 'a model loaded before could never be freed'\n"
    )
    output_of(program, tmp_path)


@pytest.mark.long
def test_names_of_transformers_are_those_of_an_ordinary_import(tmp_path: Path) -> None:
    usual = output_of(NAMES, tmp_path)
    assert output_of(LEAN + NAMES, tmp_path) == usual
    records = list((tmp_path / "imports").glob("[!.]*.json"))
    assert records
    assert output_of(LEAN + NAMES, tmp_path) == usual
    for record in records:
        record.write_text("{}")
    assert output_of(LEAN + NAMES, tmp_path) == usual
    assert all(len(record.read_text()) > 2 for record in records), "they are made again"


def test_a_process_that_has_torch_is_left_alone(tmp_path: Path) -> None:
    output_of(
        "import gc, sys, torch\nbefore = list(sys.meta_path), gc.get_threshold()\n"
        + LEAN
        + "assert (sys.meta_path, gc.get_threshold()) == before\n",
        tmp_path,
    )
