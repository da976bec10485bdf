"""Opens LMDB files once in a process, and checks their pages, because a damaged page may crash the process.

The check walks the two trees of a snapshot (data and free pages) from their roots. Every page must lie in the file,
store the right page number and a valid kind, and contain its nodes. The layout is LMDB 0.9's, little-endian.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from hdtool.data.errors import StoreError, os_errors_as
from hdtool.runtime.kernels.compiled import compiled

T = TypeVar("T")
_opened: WeakValueDictionary[str, Any] = WeakValueDictionary()
"""Objects that hold the open LMDB files, by path; a process may open an LMDB file only once."""
_opening = threading.Lock()


def opened_once(path: Path, open_file: Callable[[Path], T]) -> T:
    """Return the object that holds the open LMDB file at a path, calling ``open_file`` to make it if there is none.

    ``open_file`` gets the path without symbolic links. All callers in the process share the object.
    """
    name = os.path.realpath(path)
    with _opening:
        if (file := _opened.get(name)) is None:
            file = _opened[name] = open_file(Path(name))
    return file


LMDB_MAGIC = 0xBEEFC0DE
PAGE_HEADER_BYTES = 16
BRANCH_PAGE, LEAF_PAGE, OVERFLOW_PAGE = 1, 2, 4
NODE_HEADER_BYTES = 8
OVERFLOW_VALUE, INLINE_VALUE = 1, 0
"""Flags of a node: its value is stored in overflow pages, or in the node itself."""
TREE_RECORD = np.dtype(
    [
        ("page_size", "<u4"),
        ("flags", "<u2"),
        ("depth", "<u2"),
        ("branches", "<u8"),
        ("leaves", "<u8"),
        ("overflow", "<u8"),
        ("entries", "<u8"),
        ("root", "<u8"),
    ]
)
SNAPSHOT_RECORD = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u4"),
        ("address", "<u8"),
        ("map_size", "<u8"),
        ("trees", TREE_RECORD, 2),
        ("last_page", "<u8"),
        ("number", "<u8"),
    ]
)
NO_PAGE = 2**64 - 1
MAX_TREE_DEPTH = 16

ByteArray = npt.NDArray[np.uint8]


def damage_of(path: Path, number: int) -> str:
    """Return a description of the damage to an LMDB file's snapshot of transaction ``number``; empty if there is none.

    The caller must hold a read transaction of the snapshot, so that its pages aren't reused. Raise StoreError if the
    file cannot be read, for example because its store was replaced meanwhile.
    """
    with os_errors_as(StoreError, f"{path} cannot be read", "run the command again"), open(path, "rb") as stream:
        content = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(content, np.uint8)
    for page_size in (1 << bits for bits in range(9, 17)):
        start = PAGE_HEADER_BYTES + (number & 1) * page_size
        if start + SNAPSHOT_RECORD.itemsize > len(data):
            break
        snapshot = np.frombuffer(content, SNAPSHOT_RECORD, 1, start)[0].copy()
        trees = snapshot["trees"]
        if snapshot["magic"] == LMDB_MAGIC and int(trees[0]["page_size"]) == page_size:
            if int(snapshot["number"]) > number:
                return ""  # another process has committed a newer snapshot since, so the file is usable
            pages, entries = len(data) // page_size, 0
            for tree in trees:
                if int(tree["root"]) == NO_PAGE:
                    continue
                if not 0 < int(tree["depth"]) <= MAX_TREE_DEPTH:
                    return "a tree has no depth"
                if (entries := _entries_below(data, page_size, pages, int(tree["root"]), int(tree["depth"]))) < 0:
                    return f"page {-1 - entries} is none of a tree"
            return "" if entries == int(trees[1]["entries"]) else "it holds another number of entries than it says"
    return "it has no snapshot"


@compiled
def _number(data: ByteArray, at: Any, width: int) -> Any:
    number = np.int64(0)
    for byte in range(width):
        number |= np.int64(data[at + byte]) << (8 * byte)
    return number


@compiled
def _entries_below(data: ByteArray, page_size: int, pages: int, root: int, depth: int) -> int:
    """Count the entries in a tree's leaves; return ``-1 - page`` if a page is damaged."""
    waiting, levels = [root], [1]
    entries = visited = 0
    while waiting:
        page, level = waiting.pop(), levels.pop()
        visited += 1
        # Without the limit on visits, a cycle of pages would never end.
        if not 0 < page < pages or visited > pages or level > depth:
            return -1 - max(page, 0)
        start = page * page_size
        kind, lower, upper = _number(data, start + 10, 2), _number(data, start + 12, 2), _number(data, start + 14, 2)
        is_branch = kind & (BRANCH_PAGE | LEAF_PAGE | OVERFLOW_PAGE) == BRANCH_PAGE
        count = (lower - PAGE_HEADER_BYTES) >> 1
        if _number(data, start, 8) != page or is_branch != (level < depth) or kind & (LEAF_PAGE | BRANCH_PAGE) == 0:
            return -1 - page
        if not PAGE_HEADER_BYTES < lower <= upper <= page_size or lower & 1:
            return -1 - page
        for slot in range(count):
            node = _number(data, start + PAGE_HEADER_BYTES + 2 * slot, 2)
            if node < upper or node + NODE_HEADER_BYTES > page_size:
                return -1 - page
            low, flags = _number(data, start + node, 4), _number(data, start + node + 4, 2)
            key = _number(data, start + node + 6, 2)
            if is_branch:
                if node + NODE_HEADER_BYTES + key > page_size:
                    return -1 - page
                waiting.append(low | flags << 32)
                levels.append(level + 1)
                continue
            entries += 1
            if flags == OVERFLOW_VALUE:
                first = (
                    _number(data, start + node + NODE_HEADER_BYTES + key, 8)
                    if node + NODE_HEADER_BYTES + key + 8 <= page_size
                    else -1
                )
                size = first + -(-(low + PAGE_HEADER_BYTES) // page_size)
                if not 0 < first < size <= pages or _number(data, first * page_size + 10, 2) & OVERFLOW_PAGE == 0:
                    return -1 - page
            elif flags != INLINE_VALUE or node + NODE_HEADER_BYTES + key + low > page_size:
                return -1 - page
    return entries
