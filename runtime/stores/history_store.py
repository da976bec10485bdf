"""The history: answers of this process in memory, and the store on disk that ``--history`` names.

Any process may append, one conversation at a time, and all may read. A reader maps the ring and looks up what was
committed at its last ``refresh``. Once the store has its full size, the oldest conversations are removed before their
places are overwritten.
"""

from __future__ import annotations

import errno
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from typing import Any

import numpy as np

from hdtool.data.errors import StoreError
from hdtool.data.stores.home import history_at_home, history_of_tenant
from hdtool.data.stores.manifest import (
    DEFAULT_SOURCE,
    TokenizerFingerprint,
    manifest_stamp,
    read_history_manifest,
    require_history,
)
from hdtool.data.stores.store_files import MANIFEST
from hdtool.runtime.config import HOME
from hdtool.runtime.kernels.compiled import Ints, Uncopyable
from hdtool.runtime.stores.history_files import (
    MAX_STORE_BYTES,
    OpenFiles,
    compile_ring,
    create_if_new,
    delete_leftovers,
    lengthen,
    open_files,
    places_within,
    rebuild,
    store_errors,
)
from hdtool.runtime.stores.history_records import (
    MAX_SOURCE_NAME,
    PLACES_PER_CONVERSATION,
    StoredConversation,
    StoreState,
    conversations,
    count_of,
    delete,
    put,
    put_state,
    state_of,
    token_hash,
)
from hdtool.runtime.stores.token_log import LOG, MAX_LOG_PLACES, OVERLAP_TOKENS, TokenLog

EVICTION_PARTS = 64
"""The ring is evicted in this many parts, so that few transactions remove conversations."""
MAX_PLACE_NUMBER = 1 << 31
RESERVED_DISK_BYTES = 16 << 20
"""Bytes of the disk that a store leaves free."""
ROOM_CHECK_SECONDS = 1.0
"""Seconds after which the free room is looked up again."""
APPEND_ATTEMPTS = 100
"""How often an append is retried after room was made or the store was replaced."""


class HistoryStore(Uncopyable):
    """A history store, open for look-ups and for new conversations."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Open the store in a folder, whatever model it is of; ``read_only``, nothing is appended or repaired."""
        self.folder = Path(folder).expanduser()
        self._manifest_path = str(self.folder / MANIFEST)
        self.fault = ""
        """Why the last append or refresh failed."""
        self._lock = threading.RLock()
        self._log, self._end = np.zeros(1, LOG), np.zeros(1, np.int64)
        self._room_until = 0.0
        self._was: OpenFiles | None = None
        self._read_only = read_only
        if not read_only:
            compile_ring()
            delete_leftovers(self.folder)
        self._use(open_files(self.folder, writable=not read_only))
        self._end[0] = self._committed().end
        if not read_only:
            self._repair()

    @classmethod
    def open(
        cls,
        folder: Path,
        tokenizer: TokenizerFingerprint,
        model: str,
        *,
        most_bytes: int | None = None,
        read_only: bool = False,
    ) -> HistoryStore:
        """Open the store of a model, or create it unless it is only read; ``most_bytes`` changes the bound."""
        folder = Path(folder).expanduser()
        if not read_only:
            create_if_new(folder, tokenizer, model, most_bytes or MAX_STORE_BYTES)
        require_history(read_history_manifest(folder), folder, tokenizer, model)
        store = cls(folder, read_only=read_only)
        if most_bytes and most_bytes != store.manifest.most_bytes:
            store.keep(lambda _: True, most_bytes=most_bytes)
        return store

    @property
    def places(self) -> int:
        """Places in use, as of the last refresh."""
        return int(min(self._end[0], self._open.ring.size))

    @property
    def manifest(self) -> Any:
        return self._open.manifest

    @property
    def log(self) -> Ints:
        """The record that compiled code reads; it stays at its address. It changes in ``refresh`` and ``append``."""
        return self._log

    @property
    def nbytes(self) -> int:
        """Bytes on the disk."""
        return self._open.ring.nbytes + self._open.records.nbytes

    def refresh(self) -> None:
        """See what other processes appended, dropped or replaced; called between answers."""
        with self._lock:
            end = 0
            with self._faults_noted():
                if not self._is_current():
                    self._reopen()
                end = self._committed().end
                self.fault = ""
            self._end[0] = end  # of a store that was deleted, nothing is looked up

    def append(
        self, tokens: Sequence[int] | Ints, prompt_tail: Sequence[int] | Ints, source: str = DEFAULT_SOURCE
    ) -> bool:
        """Add an answer, after the last tokens of its prompt; whether that succeeded.

        A failure, such as a full disk, is a warning the first time, and nothing is changed by it.
        """
        if self._read_only:
            return False
        if not len(tokens):
            return True
        with self._lock:
            with self._faults_noted():
                half = self._open.ring.size // 2
                ids = np.concatenate([np.asarray(part, np.int32) for part in (prompt_tail, tokens)])
                count = min(len(tokens), max(half, places_within(self.manifest.most_bytes) // 2) - OVERLAP_TOKENS - 1)
                before = ids[max(0, len(ids) - count - OVERLAP_TOKENS) : len(ids) - count]
                self._append(before, ids[len(ids) - count :], source[:MAX_SOURCE_NAME])
                self.fault = ""
            return not self.fault

    def keep(
        self, wanted: Callable[[StoredConversation], bool], *, most_bytes: int | None = None
    ) -> list[StoredConversation]:
        """Rebuild the store with the wanted conversations, and return the others, whose tokens no file holds."""
        with self._lock:
            while True:
                with store_errors(self.folder), self._open.records.writing() as transaction:
                    if self._is_current():
                        everything = list(conversations(transaction, self._open.records.path))
                        kept = [each for each in everything if wanted(each)]
                        size = self.manifest.size
                        if most_bytes:
                            size = min(size, places_within(most_bytes))
                        if most_bytes or len(kept) < len(everything):
                            rebuild(self.folder, self._open, kept, size=size, most_bytes=most_bytes)
                        break
                self._reopen()
            self._reopen()
            return [each for each in everything if not wanted(each)]

    def conversations(self) -> list[StoredConversation]:
        """All conversations, the oldest first."""
        with self._lock, store_errors(self.folder):
            if not self._is_current():
                self._reopen()
            with self._open.records.reading() as transaction:
                return list(conversations(transaction, self._open.records.path))

    def tokens(self, first: int, count: int) -> Ints:
        """The tokens at some places; -1 where a conversation begins, and above the committed end."""
        ring_tokens = self._open.ring.tokens(first, count)
        ring_tokens[max(0, int(self._end[0]) - first) :] = -1
        return ring_tokens

    def answers(self, chosen: Sequence[StoredConversation]) -> Iterator[tuple[StoredConversation, Ints]]:
        """The tokens of conversations; those that were damaged or overwritten are left out."""
        ring = self._open.ring
        for each in chosen:
            tokens = ring.tokens(each.first, each.tokens)
            if token_hash(tokens) == each.hash:
                yield each, tokens

    def _append(self, before: Ints, tokens: Ints, source: str) -> None:
        for _ in range(APPEND_ATTEMPTS):
            with self._open.records.writing() as transaction:
                if is_current := self._is_current():
                    end = self._append_once(transaction, before, tokens, source)
            if not is_current:
                self._reopen()
            elif end:
                self._end[0] = end
                self._open.records.sync()
                return
        raise StoreError(
            f"{self.folder} was replaced {APPEND_ATTEMPTS} times during an append: wait for the other commands"
        )

    def _append_once(self, transaction: Any, before: Ints, tokens: Ints, source: str) -> int:
        """The new end; 0 if the store was made anew, or if what was removed must be committed first."""
        ring, records = self._open.ring, self._open.records
        state = state_of(transaction, records.path)
        stop = state.end + 1 + len(before) + len(tokens)
        self._check_room()
        if self._grows(transaction, state.end, stop) or self._remove_oldest(transaction, stop - ring.size):
            return 0
        end = ring.append(state.end, before, tokens)
        first = end - len(tokens)
        new = StoredConversation(state.next, first, len(before), len(tokens), source, time.time(), token_hash(tokens))
        put(transaction, new)
        put_state(transaction, StoreState(end, state.next + 1))
        return end

    def _grows(self, transaction: Any, end: int, stop: int) -> bool:
        """Lengthen the store if its places are too few, make it anew if their numbers are too large; whether it was."""
        ring, largest = self._open.ring, places_within(self.manifest.most_bytes)
        size = ring.size
        if stop >= MAX_PLACE_NUMBER:
            self._check_room(2 * ring.nbytes)
            rebuild(self.folder, self._open, list(conversations(transaction, self._open.records.path)), size=size)
            return True
        while size < min(largest, stop):
            size *= 2
        if size == ring.size:
            return False
        self._check_room(size // ring.size * ring.heads.nbytes)
        ring.recover(end)
        lengthen(self.folder, self._open, size)
        return True

    def _remove_oldest(self, transaction: Any, below: int) -> bool:
        """Remove the conversations with places below this one, and the oldest of too many; whether there was one."""
        size, path = self._open.ring.size, self._open.records.path
        # Of the largest ring, not of the one that may still grow.
        max_conversations = places_within(self.manifest.most_bytes) // PLACES_PER_CONVERSATION
        surplus = count_of(transaction) + 1 - max_conversations
        if surplus <= 0 >= below:
            return False
        surplus += max_conversations // EVICTION_PARTS if surplus > 0 else 0
        removed: list[StoredConversation] = []
        for each in conversations(transaction, path):
            start = each.first - each.before - 1
            if start >= below and len(removed) >= surplus:
                break
            if not removed:
                below += size // EVICTION_PARTS if start < below else 0
            removed.append(each)
        for each in removed:
            delete(transaction, each)
        return bool(removed)

    def _check_room(self, needed: int = 0) -> None:
        """Raise if the disk is full; asked once a second, and before the store is made anew."""
        if not needed and time.monotonic() < self._room_until:
            return
        self._room_until = 0.0
        if (free := disk_usage(self.folder).free) < needed + RESERVED_DISK_BYTES:
            raise OSError(errno.ENOSPC, f"No space left on device, {free >> 20} MiB free")
        self._room_until = time.monotonic() + ROOM_CHECK_SECONDS

    def _repair(self) -> None:
        """After a power failure, remove the conversations whose tokens did not get to the disk.

        Those were the latest ones, so the others need no check.
        """
        with store_errors(self.folder):
            path = self._open.records.path
            with self._open.records.reading() as transaction:
                latest = next(conversations(transaction, path, latest_first=True), None)
            if latest and not list(self.answers([latest])):
                whole = {each.number for each, _ in self.answers(self.conversations())}
                self.keep(lambda each: each.number in whole)

    def _is_current(self) -> bool:
        """Return True if no other process has made the files anew."""
        return manifest_stamp(self._manifest_path) == self._open.stamp

    def _committed(self) -> StoreState:
        with store_errors(self.folder), self._open.records.reading() as transaction:
            return state_of(transaction, self._open.records.path)

    def _reopen(self) -> None:
        """Open the files of the new manifest; they must be of the same model."""
        opened = open_files(self.folder, writable=not self._read_only)
        require_history(opened.manifest, self.folder, self.manifest.tokenizer, self.manifest.model)
        self._use(opened)
        self._end[0] = self._committed().end

    def _use(self, opened: OpenFiles) -> None:
        if hasattr(self, "_open"):
            self._was = self._open  # stays mapped until the next time, as compiled code may still read it
        self._open: OpenFiles = opened
        self._end[0] = 0
        opened.ring.fill(self._log, self._end)

    @contextmanager
    def _faults_noted(self) -> Iterator[None]:
        """Warn of an error of an append or refresh unless the last one failed, too; answers go on without the store."""
        try:
            with store_errors(self.folder):
                yield
        except StoreError as error:
            message = f"the history is not kept on the disk: {error}"
            if not self.fault:
                warnings.warn(message, RuntimeWarning, stacklevel=5)
            self.fault = message


class History:
    """Answers of this process in memory and, if there is a store, on the disk; shared by all drafters of a model."""

    source = DEFAULT_SOURCE
    """The name under which the store keeps the answers."""

    def __init__(
        self, max_tokens: int = MAX_LOG_PLACES, *, prompts: bool = False, store: HistoryStore | None = None
    ) -> None:
        """At most ``max_tokens`` tokens are kept, the latest ones; with ``prompts``, those of prompts count too.

        An answer that is finished goes to the ``store``, and is matched there from then on.
        """
        self.answers = TokenLog(max_tokens)
        self.store = store
        self._prompts = prompts

    @property
    def stored_log(self) -> Ints | None:
        """The record of the store's log for compiled code; it stays at its address."""
        return self.store.log if self.store else None

    def start(self, lane: Ints, prompt: Sequence[int], new: int) -> None:
        """Begin an answer to a prompt, whose last ``new`` tokens are not of an earlier turn."""
        self.finish(lane)
        if self.store:
            self.store.refresh()
        if self._prompts and new:
            self.answers.start(lane, prompt[-new:], learned=True)
        else:
            self.answers.start(lane, prompt)

    def finish(self, lane: Ints) -> None:
        """End the answer of a lane."""
        owner = int(lane["owner"][0])
        before, tokens = self.answers.answer(lane) if self.store and owner else (lane[:0], lane[:0])
        self.answers.finish(lane)
        lane["owner"] = 0
        if self.store and len(tokens) and self.store.append(tokens, before, self.source):
            self.answers.discard(owner)

    def lane(self) -> Ints:
        return self.answers.lane()


def address_of(log: Ints | None) -> int:
    """The address of the record of a log, for compiled code; 0 is none."""
    return int(log.ctypes.data) if log is not None else 0


def open_history(
    named: str,
    tokenizer: TokenizerFingerprint,
    model: str,
    *,
    tenant: str = "",
    read_only: bool = False,
    created: bool = False,
) -> HistoryStore:
    """The store of a model in a folder or at home; each tenant has a folder of its own there.

    A new store is created by those who append to it, and with ``created`` by those who only read it, too.
    """
    folder = (
        history_at_home(model, tokenizer, tenant or None)
        if named == HOME
        else history_of_tenant(Path(named).expanduser(), tenant)
    )
    if created:
        create_if_new(folder, tokenizer, model, MAX_STORE_BYTES)
    return HistoryStore.open(folder, tokenizer, model, read_only=read_only)
