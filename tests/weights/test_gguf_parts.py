"""GGUF files that consist of several parts: any part names the model, and damaged sets of parts are refused."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from hdtool.data.errors import ModelError
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.weights.gguf_configuration import write_configuration
from hdtool.runtime.weights.gguf_file import GGUFFile, gguf_file
from tests.support.gguf_files import add_settings, add_tokenizer, tiny_llama, written

NAMES = [f"tiny-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
TENSORS = {f"blk.{number}.ffn_up.weight": np.full((4, 32), number, np.float32) for number in range(5)}


def write(path: Path, parts: int = 3) -> None:
    writer = GGUFWriter(path, "llama", split_max_tensors=2 if parts > 1 else 0)
    add_settings(writer, tiny_llama().config)
    add_tokenizer(writer, 300)
    for name, numbers in TENSORS.items():
        writer.add_tensor(name, numbers)
    written(writer, path)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    write(folder / "tiny.gguf")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """Parts that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "parts"))


def test_any_part_names_the_model(made: Path, tmp_path: Path) -> None:
    write(tmp_path / "tiny.gguf", parts=1)
    whole, configurations = GGUFFile.open(tmp_path / "tiny.gguf"), []
    for name in NAMES:
        model = GGUFFile.open(made / name)
        assert [path.name for path in model.paths] == NAMES and model.path == made / NAMES[0]
        assert [*model.tensors] == [*whole.tensors] == [*TENSORS]
        assert [one.file.name for one in model.tensors.values()] == [NAMES[number // 2] for number in range(5)]
        for name, one in (*model.tensors.items(), *whole.tensors.items()):
            stored = np.fromfile(one.file, "<f4", one.bytes // 4, offset=one.offset)
            assert np.array_equal(stored.reshape(one.shape), TENSORS[name])
    for file in (model, whole):
        configurations.append(tmp_path / f"{len(file.paths)}")
        configurations[-1].mkdir()
        write_configuration(file, configurations[-1])
    for path in configurations[0].iterdir():
        assert path.read_bytes() == (configurations[1] / path.name).read_bytes()


def test_a_folder_with_the_parts_of_one_model_names_it(folder: Path) -> None:
    first = folder / NAMES[0]
    for config in (ModelConfig(str(folder)), ModelConfig(str(folder), gguf_file=NAMES[2]), ModelConfig(str(first))):
        assert gguf_file(config) == first
    assert gguf_file(ModelConfig(str(folder / NAMES[1]))) == first
    shutil.copy(first, folder / "other.gguf")
    with pytest.raises(ModelError, match=f"several GGUF files: choose one with --gguf-file, of other.gguf, {NAMES[0]}"):
        gguf_file(ModelConfig(str(folder)))
    (folder / "other.gguf").unlink()
    first.unlink()
    path = gguf_file(ModelConfig(str(folder)))
    assert path == folder / NAMES[1]
    with pytest.raises(ModelError, match=f"is one of 3 parts of a model, and {NAMES[0]} is missing: put all parts"):
        GGUFFile.open(path)


def test_all_parts_are_downloaded_from_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    downloaded = []

    def download(repository: str, name: str, **options: object) -> str:
        downloaded.append(name)
        return str(folder / Path(name).name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert gguf_file(ModelConfig("someone/parts-GGUF", gguf_file=f"Q8_0/{NAMES[1]}")) == folder / NAMES[0]
    assert downloaded == [f"Q8_0/{name}" for name in NAMES]


def replaced(key: str, old: int, new: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        return content.replace(key.encode() + entry(old), key.encode() + entry(new))

    def entry(value: int) -> bytes:
        return struct.pack("<IH", 2, value) if key != "split.tensors.count" else struct.pack("<Ii", 5, value)

    return change


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (1, replaced("split.count", 3, 4), f"{NAMES[1]} is not part 2 of the model of .*{NAMES[0]}: get all"),
        (1, replaced("split.no", 1, 2), f"{NAMES[1]} is not part 2 of the model"),
        (2, replaced("split.tensors.count", 5, 6), f"{NAMES[2]} is not part 3 of the model"),
        (1, lambda content: content.replace(b"blk.2", b"blk.0"), "holds blk.0.ffn_up.weight 2 times"),
        (1, lambda content: content[:-1], f"{NAMES[1]} is cut short"),
        (2, lambda content: content[:50], f"{NAMES[2]} ends within its header"),
        (2, lambda content: b"", f"{NAMES[2]} is empty"),
        (1, lambda content: b"GGML" + content[4:], f"{NAMES[1]} is a file and not in GGUF format"),
        (0, replaced("split.no", 0, 1), f"{NAMES[0]} is part 2 of 3 of a model, and its name does not end in"),
    ],
)
def test_parts_that_do_not_make_a_model(
    part: int, change: Callable[[bytes], bytes], message: str, folder: Path
) -> None:
    path = folder / NAMES[part]
    content = path.read_bytes()
    path.write_bytes(change(content))
    assert path.read_bytes() != content
    with pytest.raises(ModelError, match=message):
        GGUFFile.open(folder / NAMES[0])


def test_parts_of_other_models(folder: Path) -> None:
    for path in folder.iterdir():
        path.write_bytes(replaced("split.tensors.count", 5, 6)(path.read_bytes()))
    with pytest.raises(ModelError, match="states 6 tensors, and its parts hold 5: get all parts again"):
        GGUFFile.open(folder / NAMES[0])


def test_a_renamed_part(folder: Path) -> None:
    shutil.copy(folder / NAMES[1], folder / "other.gguf")
    with pytest.raises(ModelError, match=r"is part 2 of 3 of a model, and its name does not end in -00002-of-00003"):
        GGUFFile.open(folder / "other.gguf")
