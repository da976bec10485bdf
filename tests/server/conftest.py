"""One server of the demo model for all tests of this folder, with a chat template that presents tools."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from hdtool.data import demo
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import Loaded, load
from tests.support.server import ALWAYS_DRAFTS, RunningServer

if TYPE_CHECKING:  # imported by the worker that uses it, as that takes seconds
    import openai

TOOL_TEMPLATE = (
    "{% if tools %}{{ '<tool_call> ' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


LIMITS = ("--body-seconds", "2", "--batch-size", "4")


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served") / "demo-with-tools"
    shutil.copytree(demo.MODEL, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TOOL_TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@pytest.fixture(scope="session")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    log = tmp_path_factory.mktemp("server") / "log"
    stores = ("--model-db", str(demo.MODEL_STORE), "--corpus-db", str(demo.CORPUS_INDEX))
    with RunningServer(log, str(model), *stores, "--served-model-name", "demo", *LIMITS, *ALWAYS_DRAFTS) as running:
        yield running
        assert "Traceback" not in running.log, running.log


@pytest.fixture(scope="session")
def loaded(model: Path) -> Loaded:
    return load(ModelConfig(str(model), threads=1))


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    import openai

    with openai.OpenAI(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client
