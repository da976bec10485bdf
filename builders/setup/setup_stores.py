"""Stores that a set-up builds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from hdtool.data.errors import StoreError
from hdtool.data.stores.kinds import MODEL_KIND
from hdtool.data.stores.manifest import Manifest
from hdtool.data.stores.store_file_names import holds_manifest
from hdtool.data.stores.store_folder import FolderCheck, check_replaceable, file_checksum, read_manifest


@cache
def _file_digest(path: Path, changed: int) -> str:
    """Return a file's checksum, cached by path and modification time ``changed``, because a corpus may be large."""
    return file_checksum(path)


@dataclass(frozen=True)
class SetupStores:
    """Stores of a set-up by kind. A store is the set-up's if its sources include all of the set-up's inputs for it."""

    folders: Mapping[str, Path]
    inputs: Mapping[str, Callable[[], Sequence[Path]]]
    """Functions that return the text files of each store; the parts of logs are known only after the logs are read."""
    model: str
    replace: bool
    """True if stores that another command built may be replaced."""

    def own_manifest(self, kind: str) -> Manifest | None:
        """Return the manifest of this set-up's store, to which texts may have been added; None for any other store."""
        folder, inputs = self.folders[kind], self.inputs[kind]()
        if not inputs or not holds_manifest(folder) or not all(path.exists() for path in inputs):
            return None
        manifest = read_manifest(folder, check=not self.replace)
        held = {share.sha256 for share in manifest.sources}
        return manifest if all(_file_digest(path, path.stat().st_mtime_ns) in held for path in inputs) else None

    def check(self) -> None:
        """Raise a StoreError if a folder cannot hold a new store, or holds a store that must not be replaced."""
        for kind, folder in self.folders.items():
            check_replaceable(folder, self.replacement_check(kind))

    def build_effect(self, kind: str) -> str:
        """Return a phrase for what a build does to a folder, such as "goes to", to be printed before the path."""
        folder = self.folders[kind]
        if not holds_manifest(folder):
            return "goes to"
        if self.own_manifest(kind):
            return "was built before and stays in"
        rankings = kind == MODEL_KIND and read_manifest(folder, check=False).holds_rankings_alone
        if rankings:
            return "joins the rankings in"
        return "replaces the store in" if self.replace else "cannot replace the store in"

    def replacement_check(self, kind: str) -> FolderCheck | None:
        """Return a check that raises a StoreError if a store must not be replaced; None if ``replace`` is True."""
        return None if self.replace else partial(self._refuse_other, kind)

    def _refuse_other(self, kind: str, folder: Path) -> None:
        if holds_manifest(folder) and not self.own_manifest(kind) and not read_manifest(folder).holds_rankings_alone:
            raise StoreError(
                f"{folder} holds a {kind} store of {self.model}: --replace replaces it, and hdtool add {folder} FILES "
                "extends it without a set-up"
            )

    def require(self) -> None:
        """Raise a ``StoreError`` if another command has replaced a store since it was built."""
        for kind, folder in self.folders.items():
            if not self.own_manifest(kind):
                raise StoreError(f"{folder} was replaced by another command meanwhile: run setup again")
