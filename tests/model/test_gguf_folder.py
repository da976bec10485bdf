"""The configuration of a GGUF file is kept, and its identity is that of the header and of samples of all tensors."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf import GGUFWriter
from transformers import AutoConfig, AutoTokenizer

from hdtool.data import file_state
from hdtool.data.artifact import Artifact, artifacts
from hdtool.data.errors import ModelError
from hdtool.runtime.weights import gguf_folder
from hdtool.runtime.weights.fingerprint import fingerprint_of
from hdtool.runtime.weights.gguf_folder import configuration_folder
from hdtool.runtime.weights.quantized import quantized_folder, read_quantized
from tests.support.gguf_files import tiny_llama, write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(file_state, "MIN_SETTLED_AGE", -60.0)
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gguf_folder, "write_configuration", lambda file, folder: (folder / "config.json").write_text("{}")
    )


def small(path: Path, value: float = 1.0, name: str = "small", size: int = 40) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_name(name)
    for tensor in ("first", "second"):
        writer.add_tensor(tensor, np.full(size, value if tensor == "second" else 0.5, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_configuration_and_tokenizer_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0")
    kept = configuration_folder(file)
    assert kept.folder.parent.name == "gguf" and kept.folder.name.startswith("tiny-")
    assert AutoConfig.from_pretrained(kept.folder).hidden_size == 64
    assert AutoTokenizer.from_pretrained(kept.folder)("Hi")["input_ids"]
    assert not [name for name in kept.files if name.endswith((".safetensors", ".bin"))]
    assert kept.fingerprint == fingerprint_of([file])
    monkeypatch.setattr(gguf_folder, "fingerprint_of", lambda _: pytest.fail("the file was read again"))
    assert configuration_folder(file) == kept


def test_every_tensor_and_all_of_the_header_identify_a_file(tmp_path: Path) -> None:
    plain = small(tmp_path / "a.gguf")
    copy = Path(shutil.copy(plain, tmp_path / "copy.gguf"))
    assert fingerprint_of([copy]) == (first := fingerprint_of([plain]))
    others = [
        small(tmp_path / "value.gguf", value=2.0),
        small(tmp_path / "name.gguf", name="shown"),
        small(tmp_path / "size.gguf", size=48),
    ]
    assert len({first, *(fingerprint_of([other]) for other in others)}) == 4
    assert fingerprint_of([plain, others[0]]) == fingerprint_of([others[0], plain]) != first


@pytest.mark.parametrize("found", ["seen", "moved", "changed time", "by its store", "removed"])
def test_stores_of_earlier_versions_still_match(
    found: str, quick: None, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their fingerprint is the hash of the whole file."""
    file = small(tmp_path / "a.gguf")
    old, seen = home / "gguf" / "a-0123456789abcdef", vars(file_state.FileState.of(file))
    if found != "by its store":
        old.mkdir(parents=True)
        (old / "model.safetensors").write_bytes(b"converted weights")
        row = {"sha256": digest(file), "transformers": "5.20", "files": {}, "seen": [seen], "format": 1}
        (old / "gguf.json").write_text(json.dumps(row))
    else:
        item = type("Item", (), {"model": type("Model", (), {"fingerprint": digest(file)[:16], "name": file.name})})
        monkeypatch.setattr(gguf_folder, "stored_items", lambda: [item])
    if found == "moved":
        file = file.rename(tmp_path / "b.gguf")
    if found == "changed time":
        os.utime(file)
    if found == "seen":
        monkeypatch.setattr(gguf_folder, "content_hash", lambda _: pytest.fail("all of it was read"))
    kept = configuration_folder(file)
    assert kept.fingerprint == digest(file)[:16] and kept.identity == fingerprint_of([file])
    assert old.exists() == (found == "moved")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "5.99")
    assert configuration_folder(file).fingerprint == kept.fingerprint


def test_other_files_keep_their_own_fingerprint(quick: None, tmp_path: Path, home: Path) -> None:
    first, second = small(tmp_path / "a.gguf"), small(tmp_path / "b.gguf", value=2.0)
    (home / "gguf" / "old").mkdir(parents=True)
    row = {"sha256": digest(first), "transformers": "5.20", "files": {}, "seen": [vars(file_state.FileState.of(first))]}
    (home / "gguf" / "old" / "gguf.json").write_text(json.dumps(row))
    assert configuration_folder(second).fingerprint == fingerprint_of([second])
    assert configuration_folder(first).fingerprint == digest(first)[:16]


def test_a_quantized_copy_has_the_fingerprint_of_its_file(
    quick: None, tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = small(tmp_path / "a.gguf")
    (home / "quantized" / "old").mkdir(parents=True)
    gone = vars(file_state.FileState.of(file)) | {"path": str(home / "gguf" / "a" / "model.safetensors")}
    row = {"scheme": "q8_0", "sha256": "0", "fingerprint": "1", "transformers": "5.20", "files": {}, "seen": [[gone]]}
    (home / "quantized" / "old" / "quantized.json").write_text(json.dumps(row))
    monkeypatch.setattr(gguf_folder, "_fingerprint", lambda *_: "89abcdef" * 2)
    folder = quantized_folder("a.gguf", "q8_0", [file], lambda: tiny_llama(intermediate_size=128))
    made = Artifact.read(folder)
    assert made and made.fingerprint == configuration_folder(file).fingerprint == "89abcdef" * 2
    assert made.folder.name.startswith("a-q8_0-") and read_quantized(folder).keys() >= made.details["kinds"].keys()
    assert [*artifacts("quantized")] == [made], "what was made from a converted copy is removed"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"a poem"])
def test_a_damaged_file_leaves_nothing(content: bytes, tmp_path: Path, home: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"^[^\n]*a\.gguf[^\n]*$"):
        configuration_folder(tmp_path / "a.gguf")
    assert not home.exists()
