"""The configuration of a GGUF file is kept, and its identity is that of the header and of samples of all tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("gguf")

from gguf import GGUFWriter
from transformers import AutoConfig, AutoTokenizer

from hdtool.data.artifact import MANIFEST
from hdtool.data.errors import ModelError
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.runtime.weights.file_fingerprint import fingerprint_of
from hdtool.runtime.weights.gguf_folder import configuration_folder
from tests.support.gguf_files import tiny_llama, write_gguf

pytestmark = pytest.mark.usefixtures("home")


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


def test_configuration_and_tokenizer_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_llama(), "Q8_0")
    kept = configuration_folder(file)
    assert kept.folder.parent.name == "gguf" and kept.folder.name.startswith("tiny-")
    assert AutoConfig.from_pretrained(kept.folder).hidden_size == 64
    assert AutoTokenizer.from_pretrained(kept.folder)("Hi")["input_ids"]
    assert not [name for name in kept.files if name.endswith((".safetensors", ".bin"))]
    assert kept.fingerprint == fingerprint_of([file])
    monkeypatch.setattr(
        "hdtool.runtime.weights.file_fingerprint._lines", lambda _: pytest.fail("the file was read again")
    )
    assert configuration_folder(file) == kept


def test_the_fingerprint_of_the_tokenizer_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = configuration_folder(write_gguf(tmp_path / "tiny.gguf", tiny_llama())).folder
    copy = AutoTokenizer.from_pretrained(shutil.copytree(folder, tmp_path / "copy", ignore=lambda *_: [MANIFEST]))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (mark := TokenizerFingerprint.of(tokenizer)) == TokenizerFingerprint.of(copy)
    with monkeypatch.context() as patches:
        patches.setattr(type(tokenizer), "get_vocab", lambda _: pytest.fail("the vocabulary was hashed again"))
        assert TokenizerFingerprint.of(AutoTokenizer.from_pretrained(folder)) == mark
    for one in (tokenizer, copy):
        one.add_tokens(["<new>"])
    assert mark != TokenizerFingerprint.of(tokenizer) == TokenizerFingerprint.of(copy)
    for place in (folder, Path(copy.name_or_path)):
        content = json.loads((place / "tokenizer.json").read_text())
        vocabulary = content["model"]["vocab"]
        first, second = list(vocabulary)[-2:]
        vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
        (place / "tokenizer.json").write_text(json.dumps(content))
    changed, expected = (
        TokenizerFingerprint.of(AutoTokenizer.from_pretrained(place)) for place in (folder, copy.name_or_path)
    )
    assert mark != changed == expected


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


@pytest.mark.parametrize("content", [b"", b"GGUF", b"a poem"])
def test_a_damaged_file_leaves_nothing(content: bytes, tmp_path: Path, home: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"^[^\n]*a\.gguf[^\n]*$"):
        configuration_folder(tmp_path / "a.gguf")
    assert not home.exists()
