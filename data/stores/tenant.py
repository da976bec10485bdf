"""Tenants and namespaces: whose stores and kept answers a model drafts from, and the folders that hold them."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hdtool.data.errors import OptionError
from hdtool.data.home import home
from hdtool.data.stores.kinds import HISTORY_KIND

MAX_FOLDER_NAME = 200
"""Maximum length of a namespace's folder name. File systems allow up to 255 characters, some fewer."""
UNESCAPED_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyz0123456789-_")
"""Bytes that a folder name may contain. All other bytes are percent-encoded."""
WINDOWS_DEVICE = re.compile(r"(con|prn|aux|nul|(com|lpt)[0-9])")
"""Folder names that Windows reserves for devices."""


@dataclass(frozen=True)
class Tenant:
    """User or served name with stores and a history of its own; by default, the shared tenant, who has no name."""

    name: str = ""
    """Name under which answers are kept."""
    namespace: str | None = None
    """Namespace of the stores to draft from; None for the common ones."""

    @classmethod
    def of_key(cls, name: str, namespace: str | None) -> Tenant:
        """Return the tenant of an API key, who drafts from ``namespace`` or else from the stores under its own name."""
        return cls(name or namespace or "", namespace or first_namespace_with_stores([name]))

    @classmethod
    def served(cls, served_as: Sequence[str], model: str, name: str | None = None) -> Tenant:
        """Return the tenant ``name`` or, if None, the one that a server's names for ``model`` stand for.

        That is the first name that has stores; ``model`` is tried last. If no name has stores, it is the first served
        name other than ``model``, or the shared tenant if the model is served only under its own name.
        """
        namespace = first_namespace_with_stores([name] if name else [*served_as, model])
        if name is None:
            name = namespace or next((served for served in served_as if served != model), "")
        return cls(name, namespace)


def first_namespace_with_stores(names: Iterable[str]) -> str | None:
    """Return the first of ``names`` that is a valid namespace and has stores, or None if there is none."""
    return next((name for name in names if _is_possible(name) and has_stores(name)), None)


def has_stores(namespace: str) -> bool:
    """Return True if a store was built for this namespace; raise OptionError if the name cannot be a namespace.

    History stores do not count. Otherwise, a server that has kept a history for a tenant would draft from other stores
    after a restart.
    """
    folder = namespace_folder(namespace)
    try:
        return folder.is_dir() and any(path.name != HISTORY_KIND for path in folder.glob("*/*"))
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return False  # the file system does not allow names of this length


def namespace_folder(name: str) -> Path:
    """Return the folder of a namespace's stores, which always lies inside hdtool's home."""
    return home() / "namespaces" / _folder_of(name)


def history_of_tenant(folder: Path, tenant: str) -> Path:
    """Return a tenant's subfolder of the history folder that the user named, or ``folder`` if ``tenant`` is empty."""
    return folder / _folder_of(tenant) if tenant else folder


def _folder_of(name: str) -> str:
    """Return the folder name of a namespace; raise OptionError if the name is empty or too long.

    Different namespaces have different folder names.
    """
    if not _is_possible(name):
        raise OptionError(
            f"namespace {name!r} cannot name a folder: its encoded name has {len(_encoded(name))} characters and must "
            f"have 1 to {MAX_FOLDER_NAME}, where each byte other than a to z, 0 to 9, - and _ counts as 3: "
            f"take {'a shorter one' if name else 'another one'}"
        )
    return _encoded(name)


def _is_possible(name: str) -> bool:
    return 0 < len(_encoded(name)) <= MAX_FOLDER_NAME


def _encoded(name: str) -> str:
    """Encode a name as a folder name that is valid on every file system.

    Different names have different results, even on file systems that ignore case.
    """
    written = "".join(
        chr(byte) if byte in UNESCAPED_BYTES else f"%{byte:02x}" for byte in name.encode("utf-8", "surrogatepass")
    )
    return f"%{ord(written[0]):02x}{written[1:]}" if WINDOWS_DEVICE.fullmatch(written) else written
