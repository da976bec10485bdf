"""Models of the hub: downloaded once, whole, with a bar; every failure is one line that says what to do."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from hdtool.data import demo
from hdtool.data.errors import ModelError
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.load import load, load_settings, load_tokenizer
from hdtool.runtime.weights import hub
from hdtool.runtime.weights.checkpoint_identity import checkpoint_of, place_of
from hdtool.runtime.weights.hub import hub_errors_worded
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub

TINY = ModelConfig("someone/tiny")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    shutil.copytree(demo.MODEL, tmp_path / "hub" / "someone" / "tiny")
    hub.snapshot.cache_clear()
    hub.file_of.cache_clear()
    with fake_hub(tmp_path / "hub") as served:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", served.address)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace("https://huggingface.co", served.address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield served


def test_a_model_is_downloaded_once_and_its_tokenizer_without_its_weights(
    server: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    load_tokenizer(TINY)
    assert "model.safetensors" not in server.sent and "tokenizer.json" in server.sent
    assert checkpoint_of(TINY) is None
    folder = place_of(TINY, weights=True)
    assert server.sent.count("model.safetensors") == 1
    assert "note: downloading someone/tiny, once: 13,906,320 bytes in " in capsys.readouterr().err
    found = checkpoint_of(TINY)
    assert found == checkpoint_of(ModelConfig()) and found and found.name == "someone/tiny"
    assert checkpoint_of(ModelConfig(str(folder))) == found
    server.sent.clear()
    hub.snapshot.cache_clear()
    assert place_of(TINY, weights=True) == folder
    assert not server.sent and not capsys.readouterr().err


def test_what_is_in_the_cache_needs_no_hub(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = place_of(TINY, weights=True)
    hub.snapshot.cache_clear()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert place_of(TINY, weights=True) == folder


def test_the_bytes_of_all_files_are_in_one_bar(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[int] = []
    monkeypatch.setattr("hdtool.data.progress.ProgressBar.to", lambda _, place: places.append(place))
    place_of(TINY, weights=True)
    assert places == sorted(places) and places[-1] == (demo.MODEL / "model.safetensors").stat().st_size


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gated/x", "it is gated: accept its licence at https://huggingface.co/gated/x, then run hf auth login"),
        ("private/x", "or it is private: check the name, and for a private model run hf auth login"),
        ("nobody/x", "the hub has no such model"),
        ("revision/x", "it has no revision main"),
        ("disabled/x", "the hub has disabled it"),
        ("busy/x", "too many requests"),
        ("down/x", "status 503: try again later"),
        ("two words/x", "nor a name of the hub"),
    ],
)
def test_a_model_that_the_hub_does_not_give(server: FakeHub, name: str, said: str) -> None:
    with pytest.raises(ModelError) as raised:
        place_of(ModelConfig(name))
    assert said in str(raised.value) and str(raised.value).startswith(f"{name}: ")
    assert "\n" not in str(raised.value)


def test_a_revision_that_is_none(server: FakeHub) -> None:
    with pytest.raises(ModelError, match="it has no revision v9: choose one of"):
        place_of(TINY, revision="v9")
    assert place_of(TINY, revision=COMMIT).name == COMMIT


def test_every_file_is_of_the_revision_that_a_configuration_names(server: FakeHub) -> None:
    named = replace(TINY, revision="v9")
    for read in (load, load_tokenizer, load_settings):
        with pytest.raises(ModelError, match="it has no revision v9: choose one of"):
            read(named)
    assert load(replace(TINY, revision=COMMIT)).checkpoint == checkpoint_of(TINY)


def test_a_file_that_is_none(server: FakeHub) -> None:
    with pytest.raises(ModelError, match=r"it has no file q4\.gguf: see"):
        place_of(ModelConfig("someone/tiny", gguf_file="q4.gguf"))


def test_a_repository_without_weights(server: FakeHub) -> None:
    (server.folder / "someone" / "tiny" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors and no pytorch_model\.bin.*--gguf-file"):
        place_of(TINY, weights=True)


def test_a_full_disk_is_noticed_before_the_download(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    load_tokenizer(TINY)
    server.sent.clear()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 10**6))
    with pytest.raises(ModelError, match=r"needs 13,906,320 bytes in .*HF_HOME"):
        place_of(TINY, weights=True)
    assert not server.sent


def test_offline_and_not_in_the_cache(server: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"HF_HUB_OFFLINE is set.*: unset HF_HUB_OFFLINE, or name a folder"):
        place_of(ModelConfig("someone/other"))


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (httpx2.ConnectError("no route"), "cannot be reached (no route): check the name and the connection"),
        (httpx2.ReadTimeout("timed out"), "cannot be reached (timed out)"),
        (OSError(errno.ENOSPC, "No space left"), "there is no room for it"),
        (PermissionError(13, "Permission denied"), "the hub's cache cannot be written"),
    ],
)
def test_failures_around_the_hub(raised: Exception, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError) as found, hub_errors_worded("someone/tiny"):
        raise errors.LocalEntryNotFoundError("not in the cache") from raised
    assert said in str(found.value)


def test_a_refused_token(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx2.Response(401, request=httpx2.Request("GET", "https://huggingface.co"))
    hub.snapshot.cache_clear()

    def refuse(*_: object, **__: object) -> None:
        raise errors.HfHubHTTPError("401 Unauthorized", response=answer)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError, match="the hub refuses your token: run hf auth login, or set HF_TOKEN"):
        place_of(TINY)
