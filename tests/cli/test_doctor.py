"""``hdtool doctor``: what it finds well, what it wants mended, and how it looks."""

from __future__ import annotations

import json
import shutil
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from hdtool.builders import doctor
from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.runtime.kernels.compile_process import DRAFTER

decode_probe = doctor.decode_probe
probed = cache(decode_probe)
"""The embedded model answers once for all tests but those of this answer."""


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(doctor, "decode_probe", probed)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "home"


def checked(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> dict[str, dict[str, Any]]:
    """The findings by name of all groups."""
    assert run(["doctor", "--json", *words]) == code
    found = json.loads(capfd.readouterr().out)
    assert found["ok"] is (code == 0)
    return {each["name"]: each for group in found["checks"].values() for each in group}


def test_a_sound_installation(capfd: pytest.CaptureFixture[str]) -> None:
    found = checked(capfd)
    assert found["torch"]["found"] == metadata.version("torch")
    assert found["home"]["state"] == "ok" and "home" in found["home"]["found"]
    assert found["stores"]["advice"].startswith("hdtool build-model-db MODEL")
    assert not [each for each in found.values() if each["state"] == "mend"]
    assert found["decoding"]["found"].startswith("the embedded model gives 10 tokens in")


def test_a_library_that_no_model_works_with_is_noticed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "decode_probe", decode_probe)
    monkeypatch.setattr("hdtool.runtime.model.transformers_internals.CACHE_NAMES", ("renamed",))
    found = checked(capfd, code=1)
    assert "takes no key-value cache" in found["decoding"]["found"] and found["decoding"]["state"] == "mend"


def test_another_answer_with_drafts_is_noticed(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "decode_probe", lambda method: ([1, 2] if method == "hd" else [1, 3], 2))
    assert "another answer" in checked(capfd, code=1)["decoding"]["found"]


def test_it_fits_a_terminal_of_80_columns_and_needs_no_colours(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run(["doctor"]) == 0
    shown = capfd.readouterr().out
    # Paths and commands are not cut, so that they can be copied.
    assert all(len(line) <= 80 or len(line.split()[-1]) > 40 for line in shown.splitlines())
    assert "\033" not in shown
    assert shown.splitlines()[-1].startswith("all is well")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run(["doctor"]) == 0
    assert "\033[32m✓\033[0m" in capfd.readouterr().out


def test_packages_that_do_not_fit(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = metadata.version

    def version(name: str) -> str:
        if name == "lmdb":
            raise metadata.PackageNotFoundError(name)
        return {"transformers": "4.57.0", "gguf": "0.1"}.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    found = checked(capfd, code=1)
    assert found["lmdb"]["state"] == "mend" and found["lmdb"]["advice"] == 'pip install "lmdb>=1.6"'
    assert "4.57.0, and <6,>=5.19 is needed" in found["transformers"]["found"]
    assert found["gguf"]["state"] == "mend" and found["gguf"]["advice"] == 'pip install "gguf>=0.19"'


def test_a_package_that_cannot_be_imported(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"Numba needs NumPy 2.3 or less, for {name}\nmore lines")

    monkeypatch.setattr("hdtool.builders.doctor.import_module", fail)
    found = checked(capfd, code=1)["numba"]
    assert found["state"] == "mend" and "Numba needs NumPy 2.3 or less" in found["found"]
    assert "more lines" not in found["found"]


def test_folders_that_cannot_be_written(
    own_home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_home.write_text("a file")
    found = checked(capfd, code=1)["home"]
    assert found["state"] == "mend" and "HDTOOL_HOME" in found["advice"]


def test_the_places_that_are_written_to_are_shown_with_their_sizes(
    own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("stores/a/model", 2_400_000), ("costs/b", 100)):
        (own_home / name).mkdir(parents=True)
        (own_home / name / "file").write_bytes(bytes(size))
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "weights").write_bytes(bytes(5_000))
    (blobs / "again").symlink_to(blobs / "weights")
    code = tmp_path / "compiled" / "hdtool-0"
    (code / "hierarchy").mkdir(parents=True)
    (code / "hierarchy" / "tree.grow_all-1.py311.nbi").write_bytes(bytes(70))
    monkeypatch.setattr(doctor, "code_folder", lambda: code)
    monkeypatch.setattr(doctor, "is_compiled", lambda part: part != DRAFTER)
    found = {each.name: each for each in doctor.folder_findings()}
    assert found["home"].found.endswith("; in it: stores 2.4MB, costs 100B") and found["home"].bytes == 2_400_100
    assert found["hub cache"].found.endswith("; in it: 1 model, 5.0kB") and found["hub cache"].bytes == 5_000
    assert found["compiled"].found.startswith("not yet: the drafter; ") and found["compiled"].state == doctor.NOTE
    monkeypatch.setattr(doctor, "is_compiled", lambda part: True)
    (compiled,) = (each for each in doctor.folder_findings() if each.name == "compiled")
    assert (compiled.found, compiled.state, compiled.bytes) == (f"70B in {code.parent}", doctor.OK, 70)


def test_stores_that_can_and_cannot_be_opened(own_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for place in ("whole", "broken"):
        shutil.copytree(demo.CORPUS_INDEX, own_home / "stores" / place / "corpus")
    next((own_home / "stores" / "broken" / "corpus").glob("suffixes-*")).unlink()
    found = checked(capfd, code=1)
    assert found["corpus-whole"]["state"] == "ok" and "599,984 tokens" in found["corpus-whole"]["found"]
    broken = found["corpus-broken"]
    assert broken["state"] == "mend" and "is missing" in broken["found"]
    assert "hdtool stores remove corpus-broken" in broken["advice"]


@pytest.mark.parametrize(("measured", "text"), [(0, "0 models"), (1, "1 model"), (2, "2 models")])
def test_measured_models_are_counted(measured: int, text: str, own_home: Path) -> None:
    for number in range(measured):
        folder = own_home / "costs" / str(number)
        folder.mkdir(parents=True)
        (folder / "cpu.json").touch()
    (threads,) = (finding for finding in doctor.machine_findings() if finding.name == "threads")
    assert threads.found.endswith(f"measured here: {text}")


def test_a_model_that_would_load_and_draft(capfd: pytest.CaptureFixture[str]) -> None:
    found = checked(capfd, "--model", str(demo.MODEL))
    assert found["family"]["found"].startswith("llama")
    assert str(demo.MODEL_STORE) in found["model store"]["found"]
    assert str(demo.CORPUS_INDEX) in found["corpus index"]["found"]
    assert "4,096 tokens" in found["tokenizer"]["found"] and "GB in 1 file" in found["weights"]["found"]


def test_a_model_that_is_not_whole(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(demo.MODEL, tmp_path / "my model"))
    (model / "model.safetensors").unlink()
    (model / "chat_template.jinja").unlink()
    found = checked(capfd, "--model", str(model), code=1)
    assert found["weights"]["state"] == "mend"
    assert found["model store"]["advice"] == f"hdtool build-model-db '{model}' --from answers.jsonl"
    assert found["chat template"]["state"] == "note"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder"),
        ({"quantization_config": {"quant_method": "torchao"}}, 'pip install "bitsandbytes'),
    ],
)
def test_a_model_that_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(demo.MODEL, tmp_path / "model"))
    row = json.loads((model / "config.json").read_text()) | change
    (model / "config.json").write_text(json.dumps(row))
    assert said in checked(capfd, "--model", str(model), code=1)["model"]["found"]


def test_a_model_that_verifies_chains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = Path(shutil.copytree(demo.MODEL, tmp_path / "model"))
    row = json.loads((model / "config.json").read_text()) | {"model_type": "bloom"}
    (model / "config.json").write_text(json.dumps(row))
    found = checked(capfd, "--model", str(model))["family"]["found"]
    assert found.startswith("bloom, which verifies chains of drafts, as this one uses ALiBi")


def test_a_model_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert "HF_HUB_OFFLINE is set" in checked(capfd, "--model", "nobody/nothing", code=1)["model"]["found"]
    assert "does not exist" in checked(capfd, "--model", "./nothing", code=1)["model"]["found"]


def test_a_check_writes_nothing(
    own_home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "decode_probe", decode_probe)
    checked(capfd, "--model", str(demo.MODEL))
    assert not own_home.exists()
