"""The stores of a set-up: where they go, and whether those in their folders were built by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from hdtool.data.errors import StoreError
from hdtool.data.stores.store import Manifest, checksum, read_manifest
from hdtool.data.stores.store_files import MODEL, check_destination, holds_manifest
from hdtool.data.stores.store_replacement import FolderCheck


@cache
def _digest(path: Path, changed: int) -> str:
    """The checksum of a file that was ``changed`` at a time, computed once: a corpus may be large."""
    return checksum(path)


@dataclass(frozen=True)
class OwnStores:
    """Stores of a set-up by kind. A store is its own if it holds all texts that the set-up builds it from."""

    folders: Mapping[str, Path]
    inputs: Mapping[str, Callable[[], Sequence[Path]]]
    """The texts of each store; those of logs are known once they were read."""
    model: str
    replace: bool
    """Whether stores of other origin may be replaced."""

    def built(self, kind: str) -> Manifest | None:
        """The manifest of the store, if it is this set-up's; more texts may have been added to it since."""
        folder, inputs = self.folders[kind], self.inputs[kind]()
        if not inputs or not holds_manifest(folder) or not all(path.exists() for path in inputs):
            return None
        manifest = read_manifest(folder, check=not self.replace)
        held = {share.sha256 for share in manifest.sources}
        return manifest if all(_digest(path, path.stat().st_mtime_ns) in held for path in inputs) else None

    def check(self) -> None:
        """Refuse folders that no build may write to, and to replace any store that this set-up did not build."""
        for kind, folder in self.folders.items():
            check_destination(folder)
            if check := self.replacement_check(kind):
                check(folder)

    def fate(self, kind: str) -> str:
        """What the set-up does with the place of a store that ``check`` has admitted, to be followed by the place."""
        folder = self.folders[kind]
        if not holds_manifest(folder):
            return "goes to"
        if self.built(kind):
            return "was built before and stays in"
        rankings = kind == MODEL and read_manifest(folder, check=False).holds_rankings_alone
        return "joins the rankings in" if rankings else "replaces the store in"

    def replacement_check(self, kind: str) -> FolderCheck | None:
        """Raises if the store of a kind has another origin and must stay."""
        return None if self.replace else partial(self._refuse_other, kind)

    def _refuse_other(self, kind: str, folder: Path) -> None:
        if holds_manifest(folder) and not self.built(kind) and not read_manifest(folder).holds_rankings_alone:
            raise StoreError(
                f"{folder} holds a {kind} store of {self.model}: --replace replaces it, and hdtool add {folder} FILES "
                "extends it without a set-up"
            )

    def require(self) -> None:
        """Raise if another command has replaced a store since it was built."""
        for kind, folder in self.folders.items():
            if not self.built(kind):
                raise StoreError(f"{folder} was replaced by another command meanwhile: run setup again")
