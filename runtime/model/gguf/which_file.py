"""Which GGUF file ``--model`` and ``--gguf-file`` name, if they name one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hdtool.data.errors import ModelError, OptionError
from hdtool.runtime.model.checkpoint.hub import file_of

if TYPE_CHECKING:
    from hdtool.runtime.config import ModelConfig

ENDING = ".gguf"
MOST_LISTED = 12


def gguf_file(config: ModelConfig) -> Path | None:
    """The GGUF file that a configuration names; None for a model in another form.

    A file is taken for one whatever its name, so that the reader can word what it is instead. In a folder without
    ``config.json`` the only GGUF file is meant.
    """
    if (name := config.place) is None:
        return None
    path = Path(name).expanduser()
    if path.exists() and config.revision:
        raise OptionError(f"--revision names a version on the hub, and {path} is here: leave it out")
    if path.is_dir():
        return _in_folder(path, config.gguf_file)
    if path.exists():
        if config.gguf_file:
            raise OptionError(f"--gguf-file names a file of a folder, and {path} is a file itself: leave it out")
        return path
    if config.gguf_file and not _is_path(name):
        return file_of(name, config.gguf_file, config.revision)
    if config.gguf_file or path.suffix.lower() == ENDING:
        raise ModelError(f"{name} does not exist: give the path of a GGUF file, or a folder and --gguf-file")
    return None


def _is_path(name: str) -> bool:
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def _in_folder(folder: Path, name: str | None) -> Path | None:
    if name is None and (folder / "config.json").is_file():
        return None
    there = sorted(path for path in folder.iterdir() if path.suffix.lower() == ENDING and path.is_file())
    if name is not None:
        if (folder / name).is_file():
            return folder / name
        raise ModelError(f"{folder} holds no file {name}: it holds {_listed(there)}")
    if len(there) > 1:
        raise ModelError(f"{folder} holds several GGUF files: choose one with --gguf-file, of {_listed(there)}")
    return there[0] if there else None


def _listed(files: list[Path]) -> str:
    names = [path.name for path in files[:MOST_LISTED]] + ["…"] * (len(files) > MOST_LISTED)
    return ", ".join(names) or "no GGUF file"
