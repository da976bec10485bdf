"""A store on disk: a folder of flat files that a manifest vouches for.

The manifest is the store. It names the files, with sizes and checksums, and is replaced in one
atomic step when all of them are written; files that it does not name are leftovers of a build that
was killed, and the next build sweeps them away. So an old store stays whole until the moment that
the new one is, and readers of the old one keep what they have opened.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdtool.data.errors import StoreError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hdtool.data.documents import Source

FORMAT = 1
MANIFEST = "manifest.json"
BUILD_COMMANDS = {"corpus": "hdtool build-corpus-db", "model": "hdtool build-model-db"}


@dataclass(frozen=True)
class TokenizerMark:
    """What tells whether two tokenizers give the same ids."""

    fingerprint: str
    vocab_size: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> TokenizerMark:
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
        # The vocabulary alone would not tell apart tokenizers that cut the same text differently.
        cut = tokenizer("Hello, world! 12345\n\tdéjà vu 世界", add_special_tokens=False)["input_ids"]
        words = json.dumps([vocabulary, cut], ensure_ascii=True).encode()
        return cls(hashlib.sha256(words).hexdigest()[:16], len(tokenizer))


@dataclass(frozen=True)
class SourceShare:
    """What one input contributed."""

    name: str
    sha256: str
    records: int
    tokens: int


def shares_of(sources: Sequence[Source], counted: Iterable[Sequence[int]]) -> tuple[SourceShare, ...]:
    """The shares of sources whose documents and tokens were counted while they were written."""
    return tuple(
        SourceShare(source.name, source.sha256, int(records), int(tokens))
        for source, (records, tokens) in zip(sources, counted, strict=True)
    )


@dataclass(frozen=True)
class StoredFile:
    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of a store without opening its files."""

    kind: str
    tokenizer: TokenizerMark
    counts: dict[str, int]
    options: dict[str, Any]
    sources: tuple[SourceShare, ...]
    files: dict[str, StoredFile] = field(default_factory=dict)
    """By the part that each plays; the name on disk changes with every build."""
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Manifest:
        return cls(
            kind=row["kind"],
            tokenizer=TokenizerMark(**row["tokenizer"]),
            counts=row["counts"],
            options=row["options"],
            sources=tuple(SourceShare(**source) for source in row["sources"]),
            files={part: StoredFile(**file) for part, file in row["files"].items()},
            format=row["format"],
        )


class StoreBuild:
    """A store under construction, beside the old one if there is one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._mark = secrets.token_hex(4)
        self._parts: dict[str, Path] = {}

    def path(self, part: str, ending: str = "bin") -> Path:
        """Where to write a part; no other build, past or present, uses the name."""
        return self._parts.setdefault(part, self.folder / f"{part}-{self._mark}.{ending}")

    def commit(self, manifest: Manifest) -> Manifest:
        """Make what was written the store, in one step."""
        with ThreadPoolExecutor() as pool:  # neither reading nor hashing holds Python up
            files = dict(zip(self._parts, pool.map(_finished, self._parts.values()), strict=True))
        whole = replace(manifest, files=files)
        beside = self.folder / f"{MANIFEST}-{self._mark}"
        beside.write_text(json.dumps(asdict(whole), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        _to_disk(beside)
        beside.replace(self.folder / MANIFEST)
        _to_disk(self.folder)
        return whole


@contextmanager
def building(folder: Path) -> Iterator[StoreBuild]:
    """Build a store at ``folder``, alone; whatever goes wrong, an old store there stays as it was."""
    from filelock import FileLock, Timeout

    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0)
        with lock:
            sweep(folder)
            try:
                yield StoreBuild(folder)
            finally:
                sweep(folder)
    except Timeout:
        raise StoreError(f"another build of {folder} is running: wait for it, or choose another place") from None
    except OSError as error:
        room = f", {shutil.disk_usage(_existing(folder)).free >> 20} MiB free there" if error.errno == 28 else ""
        raise StoreError(
            f"{folder} cannot be written ({error.strerror or error}{room}): the store there, if any, is unchanged; "
            "make room, mend the permissions or choose another place"
        ) from error


def sweep(folder: Path) -> None:
    """Remove what the manifest does not name: leftovers of killed builds, and replaced files."""
    named = {MANIFEST, ".lock"}
    if (folder / MANIFEST).exists():
        try:
            named |= {file.name for file in read_manifest(folder, check=False).files.values()}
        except StoreError:
            return  # of another format, or damaged: its files go once a new manifest is there
    for path in folder.iterdir():
        if path.name not in named and path.is_file():
            path.unlink(missing_ok=True)


def read_manifest(folder: Path, *, check: bool = True) -> Manifest:
    """What a store says of itself; with ``check`` its files must be there in their full size."""
    try:
        row = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(f"{folder} holds no store: build one, or name the folder of one") from None
    except (OSError, ValueError) as error:
        raise StoreError(f"{folder / MANIFEST} cannot be read ({error}): build the store again") from None
    found = row.get("format") if isinstance(row, dict) else None
    if found != FORMAT:
        raise StoreError(
            f"{folder} is a store of format {found}, this hdtool reads format {FORMAT}: "
            f"build it again with {BUILD_COMMANDS.get(str(row.get('kind')) if isinstance(row, dict) else '', 'hdtool')}"
        )
    try:
        manifest = Manifest.from_json(row)
    except (KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{folder / MANIFEST} is damaged ({error!r}): build the store again") from None
    if check:
        for file in manifest.files.values():
            _check_size(folder, file, manifest.kind)
    return manifest


def _check_size(folder: Path, file: StoredFile, kind: str) -> None:
    path = folder / file.name
    found = path.stat().st_size if path.exists() else None
    if found != file.bytes:
        state = "is missing" if found is None else f"has {found:,} bytes instead of {file.bytes:,}"
        raise StoreError(f"{path} {state}: build the store again with {BUILD_COMMANDS[kind]}")


def require(manifest: Manifest, folder: Path, kind: str, tokenizer: TokenizerMark | None = None) -> None:
    """Raise unless a store is of this kind and, if told, of this tokenizer."""
    if manifest.kind != kind:
        raise StoreError(f"{folder} is a {manifest.kind} store, a {kind} store is needed: name another folder")
    if tokenizer and manifest.tokenizer != tokenizer:
        raise StoreError(
            f"{folder} was built with another tokenizer ({manifest.tokenizer.fingerprint}, "
            f"{manifest.tokenizer.vocab_size:,} tokens; the model has {tokenizer.fingerprint}, "
            f"{tokenizer.vocab_size:,}): build it again with {BUILD_COMMANDS[kind]} --model MODEL"
        )


def damaged(folder: Path, manifest: Manifest) -> list[str]:
    """Files whose content is not what was written; reads every byte."""
    return [file.name for file in manifest.files.values() if checksum(folder / file.name) != file.sha256]


def checksum(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _finished(path: Path) -> StoredFile:
    _to_disk(path)
    return StoredFile(path.name, path.stat().st_size, checksum(path))


def _to_disk(path: Path) -> None:
    """Ask the system to have it on disk before we say so; folders cannot be asked everywhere."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():
            raise
    finally:
        os.close(descriptor)


def _existing(folder: Path) -> Path:
    return next(place for place in (folder, *folder.parents) if place.exists())
