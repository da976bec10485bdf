"""The engine that runs the tasks of a build on a Ray cluster, or on workers that Ray starts on this machine.

Workers read the inputs by their paths and get all else through Ray, which also carries their results; this
process alone writes the store. So a worker that dies leaves nothing on disk, and Ray repeats a lost task.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from hdtool.builders.stores.engine import LENGTHS, MEMORY_A_BYTE, ShardFiles, SortedShard, groups_of, sorted_shard
from hdtool.builders.stores.sequences import BATCH, Answers, Frequent, frequent_of_part, ids_of, parts_of, united
from hdtool.data.errors import ClusterError, HdtoolError, install_command, reason_of
from hdtool.data.progress import Bar, bar
from hdtool.data.records import Portion, Reading
from hdtool.data.stores.store import checksum
from hdtool.data.stores.store_files import Document, Tokens, token_type
from hdtool.runtime.stores.model_store import NgramGroup
from hdtool.runtime.stores.suffix_search import ShardPlace

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONNECT_SECONDS = 5.0
"""Ray itself tries for minutes."""
STDERR = 2
NO_TOKEN = b"InvalidAuthToken"
"""Part of Ray's message about a token that is missing or wrong."""

T = TypeVar("T")


@contextmanager
def joined(address: str | None, workers: int | None = None) -> Iterator[Any]:
    """Ray, connected to the cluster at ``address`` or to one of this machine alone, until the end."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ClusterError(f"engine ray needs Ray, which is not installed: {install_command('ray')}") from None
    if address:
        _reach(address)
    options = {"address": address} if address else {"address": "local", "num_cpus": workers, "include_dashboard": False}
    with TemporaryFile() as output:
        try:
            with _stderr_to(output):
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # ConnectionError, RuntimeError, ValueError and Ray's own
            raise _refusal(address, error, output) from None
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect standard error, to which Ray's compiled part writes once a second, to a file."""
    own = os.dup(STDERR)
    os.dup2(file.fileno(), STDERR)
    try:
        yield
    finally:
        os.dup2(own, STDERR)
        os.close(own)


def _refusal(address: str | None, error: Exception, output: IO[bytes]) -> ClusterError:
    """The error for a Ray that could not be used, from its own messages."""
    place = f"the Ray cluster at {address}" if address else "Ray on this machine"
    output.seek(0)
    if NO_TOKEN in output.read() + str(error).encode():
        return ClusterError(
            f"{place} requires a token that this process does not have: set RAY_AUTH_MODE=token, and have the "
            "cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    return ClusterError(f"{place} cannot be used ({reason_of(error)}): check it with ray status")


def _reach(address: str) -> None:
    """Raise at once if no process listens at the address."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"address is {address!r}: give HOST:PORT of the cluster's head, as ray start printed it, and run this on a "
            "machine of the cluster"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or reason_of(error)
        raise ClusterError(
            f"no Ray cluster can be reached at {address} ({reason}): start one with ray start --head, or leave "
            "--address out to build on this machine"
        ) from None


@contextmanager
def faults_reported(ray: Any) -> Iterator[None]:
    """Raise the error of a task as the task raised it, and faults of Ray as a ``ClusterError``."""
    try:
        yield
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HdtoolError):
            raise cause from None
        if isinstance(cause, ImportError):
            raise ClusterError(
                f"the workers of the Ray cluster lack {cause.name or 'a library'}: install the same hdtool on all nodes"
            ) from None
        raise
    except ray.exceptions.RayError as error:
        raise ClusterError(
            f"the Ray cluster could not finish the build ({type(error).__name__}: {reason_of(error)}): the store "
            "there, if any, is unchanged; see ray status, and choose smaller --shard-bytes if memory ran out"
        ) from None


def on_each_node(ray: Any, function: Callable[..., T], *arguments: object) -> Iterator[tuple[str, T]]:
    """The result of a function on every node, with the node's address."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    with faults_reported(ray):
        tasks = [
            ray.remote(function).options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(*arguments)
            for node in nodes
        ]  # fmt: skip
        for node, task in zip(nodes, tasks, strict=True):
            yield node["NodeManagerAddress"], ray.get(task)


def largest_memory(ray: Any) -> float:
    """Bytes that the largest node offers to tasks."""
    return max(float(node["Resources"].get("memory", 0)) for node in ray.nodes() if node["Alive"])


READ_AHEAD = 8
"""Portions of an input that its reader keeps ready."""
LIGHT: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
"""Options of readers: they mostly wait, and must not take a core from the tasks that use their output."""

Item = TypeVar("Item")


@contextmanager
def ray_engine(address: str | None, workers: int | None, *, quiet: bool) -> Iterator[RayEngine]:
    """An engine on the cluster at ``address``, or on so many workers of this machine, until the end of the block."""
    with joined(address, workers) as ray:
        yield RayEngine(ray, workers, quiet=quiet)


class RayEngine:
    """Runs the tasks of a build on a cluster."""

    def __init__(self, ray: Any, workers: int | None, *, quiet: bool) -> None:
        self._ray, self._quiet = ray, quiet
        self._cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._sorters = min(workers or self._cpus, self._cpus)

    def prepare(self, reading: Reading) -> None:
        """Check that all nodes see the same inputs and have the same programs."""
        paths = _absolute(reading)
        own = _versions()
        for node, (versions, sizes) in on_each_node(self._ray, _versions_and_sizes, paths):
            if versions != own:
                raise ClusterError(
                    f"node {node} of the Ray cluster has {versions}, this process has {own}: "
                    "install the same versions on all nodes"
                )
            for path, here, there in zip(paths, reading.sizes, sizes, strict=True):
                if here != there:
                    found = "does not see it" if there is None else f"finds {there:,} bytes there instead of {here:,}"
                    raise ClusterError(
                        f"{path} cannot be read by all workers: node {node} of the Ray cluster {found}; "
                        "put it where every node has it under the same path, as on a shared disk"
                    )
        hashes = self._results(checksum, [(Path(path),) for path in paths], **LIGHT)
        reading.hashes.update(enumerate(hashes))

    def documents(self, reading: Reading, tokenizer: PreTrainedTokenizerBase, shown: Bar) -> Iterator[Document]:
        with faults_reported(self._ray):
            shared, encode = self._ray.put(tokenizer), self._task(_encoded)
            streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": READ_AHEAD}
            read = self._task(_portions, **streaming, **LIGHT)
            width = token_type(len(tokenizer)).str
            inputs = enumerate(_absolute(reading))
            readers = ((source, read.remote(path, reading.answers_only)) for source, path in inputs)
            portions = ((source, portion) for source, reader in _ahead(readers, self._readers) for portion in reader)
            encoded = ((source, encode.remote(portion, shared, width)) for source, portion in portions)
            reading.restart()
            for source, done in _ahead(encoded, 2 * self._cpus):
                portion, ids, ends = self._ray.get(done)
                reading.take(portion)
                for document in np.split(ids, ends):
                    yield Document(document, source)
                shown.to(reading.bytes_read)
            reading.finish()

    def sort(self, files: ShardFiles, shards: Sequence[ShardPlace]) -> None:
        memory = MEMORY_A_BYTE * max(shard.tokens for shard in shards) * files.width.itemsize
        if memory > (most := largest_memory(self._ray)):
            raise ClusterError(
                f"sorting a shard takes {memory / 2**30:.1f} GiB of memory, and no node of the Ray cluster offers more "
                f"than {most / 2**30:.1f}: choose smaller --shard-bytes"
            )
        jobs = ((files.tokens(shard), files.end) for shard in shards)
        done: Iterator[SortedShard] = self._results(sorted_shard, jobs, self._sorters, memory=memory)
        with bar(len(shards), "sorting", unit="shards", quiet=self._quiet) as shown:
            for (number, shard), result in zip(enumerate(shards), done, strict=True):
                files.write(number, shard, result)
                shown.advance()

    def mine(self, answers: Answers, top_k: int, per_key: int) -> Iterator[NgramGroup]:
        parts = parts_of(answers)
        jobs = [(length, part) for length in LENGTHS for part in range(parts)]
        with faults_reported(self._ray), bar(len(jobs), "counting", unit="parts", quiet=self._quiet) as shown:
            shared = self._ray.put(answers.tokens)
            count = self._task(_counted)
            how = (shared, answers.end, answers.once)
            found = _ahead((count.remote(*how, *job, parts, top_k) for job in jobs), 2 * self._cpus)

            def of_length() -> Iterator[Frequent]:
                for _ in range(parts):
                    yield self._ray.get(next(found))
                    shown.advance()

            for length in LENGTHS:
                yield from groups_of(answers, length, united(answers, length, of_length(), top_k), per_key)

    @property
    def _readers(self) -> int:
        return max(1, self._cpus // 4)

    def _task(self, function: Any, **options: Any) -> Any:
        return self._ray.remote(function).options(**options) if options else self._ray.remote(function)

    def _results(
        self, function: Any, jobs: Iterable[tuple[Any, ...]], at_once: int = 0, **options: Any
    ) -> Iterator[Any]:
        """The results of a function for each job, in their order."""
        with faults_reported(self._ray):
            task = self._task(function, **options)
            tasks = (task.remote(*job) for job in jobs)
            for done in _ahead(tasks, at_once or 2 * self._cpus):
                yield self._ray.get(done)


def _absolute(reading: Reading) -> list[str]:
    """Absolute paths of the inputs: workers run in other folders."""
    return [os.path.abspath(path) for path in reading.inputs]


def _ahead(items: Iterable[Item], count: int) -> Iterator[Item]:
    """The items, of which ``count`` are started before they are needed."""
    started: deque[Item] = deque()
    for item in items:
        started.append(item)
        if len(started) > count:
            yield started.popleft()
    yield from started


# Tasks of the workers ---------------------------------------------------------------------------------


def _versions() -> str:
    """The versions of all programs that the bytes of a store may depend on."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("hdtool", "tokenizers", "transformers"))


def _versions_and_sizes(paths: list[str]) -> tuple[str, list[int | None]]:
    return _versions(), [os.stat(path).st_size if os.path.exists(path) else None for path in paths]


def _portions(path: str, answers_only: bool) -> Iterator[Portion]:
    yield from Reading([Path(path)], answers_only=answers_only).portions(BATCH)


def _encoded(portion: Portion, tokenizer: PreTrainedTokenizerBase, width: str) -> tuple[Portion, Tokens, Tokens]:
    """The ids of all texts one after another, and where each but the last ends."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a worker for each core
    ids = ids_of(portion.texts, tokenizer)
    ends = np.cumsum([len(text) for text in ids], dtype=np.int64)[:-1]
    flat = np.concatenate([np.array(text, np.dtype(width)) for text in ids]) if ids else np.empty(0, np.dtype(width))
    return portion.without_texts(), flat, ends


def _counted(tokens: Tokens, end: int, once: bool, length: int, part: int, parts: int, top_k: int) -> Frequent:
    return frequent_of_part(Answers(tokens, end, once), length, part, parts, top_k)
