"""The history of earlier answers: in memory and, with ``--history``, in a store on disk that processes share.

Any number of processes may read the store and append to it; appends are serialized. A reader maps the ring and sees
what was committed at its last ``refresh``. Once the store is full, the oldest conversations are removed before their
positions are overwritten.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any

import numpy as np

from hdtool.data.errors import StoreError
from hdtool.data.stores.history_manifest import (
    DEFAULT_SOURCE,
    manifest_stamp,
    read_history_manifest,
    require_history,
)
from hdtool.data.stores.manifest import TokenizerFingerprint
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.runtime.kernels.compiled import Ints, Uncopyable
from hdtool.runtime.stores.history_metadata import (
    MAX_SOURCE_NAME,
    MIN_POSITIONS_PER_CONVERSATION,
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
from hdtool.runtime.stores.history_ring import (
    OpenFiles,
    compile_ring,
    create_if_new,
    delete_rebuild_leftovers,
    open_files,
    positions_within,
    rebuild,
    require_room,
    store_errors,
)
from hdtool.runtime.stores.token_log import LOG, MAX_LOG_POSITIONS, OVERLAP_TOKENS, TokenLog

EVICTION_DIVISOR = 64
"""An eviction frees 1 / EVICTION_DIVISOR of the ring, so that most appends need no eviction."""
MAX_POSITION = 1 << 31
ROOM_CHECK_SECONDS = 1.0
"""Seconds between checks of the free disk space."""
APPEND_ATTEMPTS = 100
"""Maximum number of attempts per append; retries follow an eviction, extension or replacement of the store."""


class HistoryStore(Uncopyable):
    """A history store, open for lookups and, unless it is read-only, for appends."""

    def __init__(self, folder: Path, *, read_only: bool = False) -> None:
        """Open a folder's store without checking its model; raise StoreError if it can't be opened.

        With ``read_only``, nothing is appended or repaired.
        """
        self.folder = Path(folder).expanduser()
        self._manifest_path = str(self.folder / MANIFEST)
        self.fault = ""
        """Error message of the last append or refresh; empty if it succeeded."""
        self._lock = threading.RLock()
        self._log, self._end = np.zeros(1, LOG), np.zeros(1, np.int64)
        self._room_until = 0.0
        self._previous_files: OpenFiles | None = None
        self._read_only = read_only
        if not read_only:
            compile_ring()
            delete_rebuild_leftovers(self.folder)
        self._use(open_files(self.folder, writable=not read_only))
        self._end[0] = self._current_end()
        if not read_only:
            self._repair()

    @classmethod
    def open(
        cls, folder: Path, tokenizer: TokenizerFingerprint, model: str, *, read_only: bool = False
    ) -> HistoryStore:
        """Open a model's store in a folder; create the store if it is missing, unless ``read_only``.

        Raise StoreError if the store can't be opened, or belongs to another model or tokenizer.
        """
        folder = Path(folder).expanduser()
        if not read_only:
            create_if_new(folder, tokenizer, model)
        require_history(read_history_manifest(folder), folder, tokenizer, model)
        return cls(folder, read_only=read_only)

    @property
    def num_positions(self) -> int:
        """Number of positions in use, as of the last refresh or append."""
        return int(min(self._end[0], self._open.ring.size))

    @property
    def manifest(self) -> Any:
        return self._open.manifest

    @property
    def log(self) -> Ints:
        """Record of the ring for compiled code, at a fixed address; ``refresh`` and ``append`` update the record."""
        return self._log

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return self._open.ring.nbytes + self._open.records.nbytes

    def refresh(self) -> None:
        """Load the changes of other processes (appends, removals, rebuilds); call this between answers.

        On an error, the store appears empty, and the first of consecutive errors issues a warning; see ``fault``.
        """
        with self._lock:
            end = 0
            with self._faults_noted():
                end = self._current_end()
                self.fault = ""
            self._end[0] = end  # on an error, e.g. a deleted store, nothing is found

    def append(
        self, tokens: Sequence[int] | Ints, prompt_tail: Sequence[int] | Ints, source: str = DEFAULT_SOURCE
    ) -> bool:
        """Append an answer together with the last tokens of its prompt; return False on failure or if read-only.

        A failure, such as a full disk, issues a warning, once for consecutive failures; see ``fault``. If an answer
        takes more than half of the ring at its full size, only its last tokens are kept.
        """
        if self._read_only:
            return False
        if not len(tokens):
            return True
        with self._lock:
            with self._faults_noted():
                ids = np.concatenate([np.asarray(part, np.int32) for part in (prompt_tail, tokens)])
                self._append(ids, len(tokens), source[:MAX_SOURCE_NAME])
                self.fault = ""
            return not self.fault

    def keep(self, wanted: Callable[[StoredConversation], bool]) -> list[StoredConversation]:
        """Remove and return the conversations that ``wanted`` rejects; raise StoreError if the store cannot be rebuilt.

        The files are rebuilt, so that they no longer contain dropped tokens. No other process appends between the calls
        of ``wanted`` and the rebuild.
        """
        with self._lock:
            while True:
                with store_errors(self.folder), self._open.records.writing() as transaction:
                    if self._is_current():
                        everything = list(conversations(transaction, self._open.records.path))
                        chosen = [wanted(each) for each in everything]
                        if not all(chosen):
                            rebuild(self.folder, self._open, list(compress(everything, chosen)))
                        break
                self._reopen()
            self._end[0] = self._current_end()
            return [each for each, is_wanted in zip(everything, chosen, strict=True) if not is_wanted]

    def conversations(self) -> list[StoredConversation]:
        """Return all conversations, oldest first; raise StoreError if they cannot be read."""
        with self._lock, store_errors(self.folder), self._reading() as transaction:
            return list(conversations(transaction, self._open.records.path))

    def tokens(self, first: int, count: int) -> Ints:
        """Return ``count`` tokens from position ``first``, with -1 between conversations and past the committed end."""
        ring_tokens = self._open.ring.tokens(first, count)
        ring_tokens[max(0, int(self._end[0]) - first) :] = -1
        return ring_tokens

    def answers(self, chosen: Sequence[StoredConversation]) -> Iterator[tuple[StoredConversation, Ints]]:
        """Yield each ``chosen`` conversation and its answer's tokens, skipping damaged or overwritten conversations."""
        ring = self._open.ring
        for each in chosen:
            tokens = ring.tokens(each.first, each.tokens)
            if token_hash(tokens) == each.hash:
                yield each, tokens

    def _append(self, ids: Ints, count: int, source: str) -> None:
        """Append the last ``count`` of ``ids`` as an answer; raise StoreError if the store keeps being replaced."""
        for _ in range(APPEND_ATTEMPTS):
            with self._open.records.writing() as transaction:
                if is_current := self._is_current():
                    end = self._append_once(transaction, *self._fitting(ids, count), source)
            if not is_current:
                self._reopen()
            elif end:
                self._end[0] = end
                self._open.records.sync()
                return
        raise StoreError(
            f"{self.folder} was replaced {APPEND_ATTEMPTS} times during an append: wait for the other commands"
        )

    def _fitting(self, ids: Ints, count: int) -> tuple[Ints, Ints]:
        """Return the last tokens before an answer and the answer's ``count`` tokens, or the last of these if too many.

        An answer takes at most half of the ring at its full size.
        """
        half = max(self._open.ring.size, positions_within(self.manifest.max_bytes)) // 2
        start = len(ids) - min(count, half - OVERLAP_TOKENS - 1)
        return ids[max(0, start - OVERLAP_TOKENS) : start], ids[start:]

    def _append_once(self, transaction: Any, overlap: Ints, tokens: Ints, source: str) -> int:
        """Append a conversation and return the new end.

        If the store must be rebuilt, or conversations must be removed, do only that and return 0. The
        caller then commits the transaction and retries.
        """
        ring, records = self._open.ring, self._open.records
        state = state_of(transaction, records.path)
        stop = state.end + 1 + len(overlap) + len(tokens)
        self._check_room()
        if self._grows(transaction, stop) or self._remove_oldest(transaction, stop - ring.size):
            return 0
        end = ring.append(state.end, overlap, tokens)
        first = end - len(tokens)
        new = StoredConversation(state.next, first, len(overlap), len(tokens), source, time.time(), token_hash(tokens))
        put(transaction, new)
        put_state(transaction, StoreState(end, state.next + 1))
        return end

    def _grows(self, transaction: Any, stop: int) -> bool:
        """Rebuild the store if it has too few positions, or if position numbers would overflow; return True if so."""
        ring, max_size = self._open.ring, positions_within(self.manifest.max_bytes)
        size = ring.size
        while size < min(max_size, stop):
            size *= 2
        if size == ring.size and stop < MAX_POSITION:
            return False
        self._check_room(2 * size // ring.size * ring.nbytes)
        rebuild(self.folder, self._open, list(conversations(transaction, self._open.records.path)), size)
        return True

    def _remove_oldest(self, transaction: Any, below: int) -> bool:
        """Remove conversations that start before position ``below``, and the oldest ones if the store has too many.

        More are removed than needed, to do so less often. Return True if any were removed.
        """
        size, path = self._open.ring.size, self._open.records.path
        # The limit is that of the full-size ring, even while the ring is smaller.
        max_conversations = positions_within(self.manifest.max_bytes) // MIN_POSITIONS_PER_CONVERSATION
        surplus = count_of(transaction) + 1 - max_conversations
        if surplus <= 0 >= below:
            return False
        surplus += max_conversations // EVICTION_DIVISOR if surplus > 0 else 0
        removed: list[StoredConversation] = []
        for each in conversations(transaction, path):
            start = each.first - each.before - 1
            if start >= below and len(removed) >= surplus:
                break
            if not removed:
                below += size // EVICTION_DIVISOR if start < below else 0
            removed.append(each)
        for each in removed:
            delete(transaction, each)
        return bool(removed)

    def _check_room(self, needed: int = 0) -> None:
        """Raise OSError unless the disk has space for ``needed`` bytes.

        If ``needed`` is 0, the disk is checked at most once a second.
        """
        if not needed and time.monotonic() < self._room_until:
            return
        self._room_until = 0.0
        require_room(self.folder, needed)
        self._room_until = time.monotonic() + ROOM_CHECK_SECONDS

    def _repair(self) -> None:
        """Remove conversations whose tokens were not synced to disk before a power failure.

        Only the latest conversations can be affected, so nothing else is checked if the latest one is intact.
        """
        with store_errors(self.folder):
            with self._reading() as transaction:
                latest = next(conversations(transaction, self._open.records.path, latest_first=True), None)
            if latest and not self._is_intact(latest):
                self.keep(self._is_intact)

    def _is_intact(self, conversation: StoredConversation) -> bool:
        return bool(list(self.answers([conversation])))

    @contextmanager
    def _reading(self) -> Iterator[Any]:
        """Yield a read transaction on the current files, reopening files that another process has replaced.

        The files are compared after the transaction has begun, so that its conversations lie within the open ring.
        """
        while True:
            with self._open.records.reading() as transaction:
                if self._is_current():
                    yield transaction
                    return
            self._reopen()

    def _is_current(self) -> bool:
        """Return True unless another process has replaced the files."""
        return manifest_stamp(self._manifest_path) == self._open.stamp

    def _current_end(self) -> int:
        """Return the committed end, after reopening files that another process has replaced."""
        with store_errors(self.folder), self._reading() as transaction:
            return state_of(transaction, self._open.records.path).end

    def _reopen(self) -> None:
        """Open the new manifest's files; raise StoreError if its model or tokenizer differs from the old manifest's."""
        opened = open_files(self.folder, writable=not self._read_only)
        require_history(opened.manifest, self.folder, self.manifest.tokenizer, self.manifest.model)
        self._use(opened)
        with store_errors(self.folder), opened.records.reading() as transaction:
            self._end[0] = state_of(transaction, opened.records.path).end

    def _use(self, opened: OpenFiles) -> None:
        if hasattr(self, "_open"):
            self._previous_files = self._open  # stays mapped until the next call, as compiled code may still read it
        self._open: OpenFiles = opened
        self._end[0] = 0
        opened.ring.fill(self._log, self._end)

    @contextmanager
    def _faults_noted(self) -> Iterator[None]:
        """Catch a StoreError, warn if ``fault`` is still empty, and set ``fault`` to the error message."""
        try:
            with store_errors(self.folder):
                yield
        except StoreError as error:
            message = f"the history is not kept on the disk: {error}"
            if not self.fault:
                warnings.warn(message, RuntimeWarning, stacklevel=5)
            self.fault = message


class History:
    """Earlier answers, in memory and, if there is a store, on disk; shared by all drafters of a model."""

    source = DEFAULT_SOURCE
    """Name of the source under which the store records answers."""

    def __init__(
        self, max_tokens: int = MAX_LOG_POSITIONS, *, prompts: bool = False, store: HistoryStore | None = None
    ) -> None:
        """Keep the latest ``max_tokens`` tokens in memory, including tokens of prompts if ``prompts`` is True.

        Finished answers move to the ``store``, where they are matched from then on.
        """
        self.answers = TokenLog(max_tokens)
        self.store = store
        self._prompts = prompts

    @property
    def stored_log(self) -> Ints | None:
        """The store's record for compiled code, at an address that never changes; None if there is no store."""
        return self.store.log if self.store else None

    def start(self, lane: Ints, prompt: Sequence[int], new: int) -> None:
        """Begin an answer in a lane, after finishing the lane's previous answer.

        The last ``new`` tokens of ``prompt`` are those that were not part of an earlier turn.
        """
        self.finish(lane)
        if self.store:
            self.store.refresh()
        if self._prompts and new:
            self.answers.start(lane, prompt[-new:], learned=True)
        else:
            self.answers.start(lane, prompt)

    def finish(self, lane: Ints) -> None:
        """End a lane's answer, and move the answer to the store, if any; it stays in memory if the append fails."""
        owner = int(lane["owner"][0])
        overlap, tokens = self.answers.answer(lane) if self.store and owner else (lane[:0], lane[:0])
        self.answers.finish(lane)
        lane["owner"] = 0
        if self.store and len(tokens) and self.store.append(tokens, overlap, self.source):
            self.answers.discard(owner)

    def lane(self) -> Ints:
        return self.answers.lane()


def address_of(log: Ints | None) -> int:
    """Return the address of a log's record for compiled code, or 0 if ``log`` is None."""
    return int(log.ctypes.data) if log is not None else 0
