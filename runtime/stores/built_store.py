"""Base class of opened model stores and corpus indexes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint
from hdtool.data.stores.store_folder import read_store, require_store
from hdtool.runtime.kernels.compiled import Uncopyable


class BuiltStore(Uncopyable):
    """A store opened for lookups. Its files are memory-mapped, so only accessed pages are loaded."""

    kind: ClassVar[str]
    manifest: Manifest

    def __init__(
        self, folder: Path, tokenizer: TokenizerFingerprint | None = None, manifest: Manifest | None = None
    ) -> None:
        """Open the store in a folder; ``manifest`` is read from there if None.

        Raise StoreError if the store can't be used, or if it belongs to another tokenizer than ``tokenizer``, if given.
        """
        self.folder = folder
        if manifest:
            self._open(manifest, tokenizer)
        else:
            read_store(folder, lambda found: self._open(found, tokenizer))

    def _open(self, manifest: Manifest, tokenizer: TokenizerFingerprint | None) -> None:
        require_store(manifest, self.folder, self.kind, tokenizer)
        self.manifest = manifest
        self._map_files()

    def _map_files(self) -> None:
        """Map the manifest's files; raise StoreError if one can't be mapped or they don't fit together."""
        raise NotImplementedError
