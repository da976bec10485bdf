"""Build executor for a Ray cluster or for a local Ray instance.

Workers read inputs by path and exchange everything else through Ray; only the driver process writes the store. A worker
that dies leaves nothing on disk, and Ray retries its tasks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import chdir, contextmanager
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np

from hdtool.builders.stores.frequent_sequences import (
    TOKENIZER_BATCH,
    CountedDocuments,
    FrequentSequences,
    encode_texts,
    merge_frequent,
    most_frequent_in_part,
    part_count,
)
from hdtool.builders.stores.local_executor import BuildExecutor
from hdtool.builders.stores.ngram_groups import SEQUENCE_LENGTHS, sequence_groups
from hdtool.builders.stores.suffix_array import SORT_MEMORY_FACTOR, ShardFiles, SortedShard, sort_shard
from hdtool.data.documents import Document, Tokens, token_type
from hdtool.data.errors import ClusterError, HdtoolError, error_reason, install_command
from hdtool.data.isolated_processes import isolated_children
from hdtool.data.progress import progress_bar
from hdtool.data.stores.store_folder import file_checksum
from hdtool.data.texts_and_traces import Portion, RecordReader
from hdtool.runtime.stores.model_store_lmdb import NgramGroup
from hdtool.runtime.stores.suffix_search import ShardExtent

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONNECT_SECONDS = 5.0
"""Timeout for reaching the cluster's head, in seconds; Ray itself would keep trying for minutes."""
STDERR_FD = 2
INVALID_TOKEN_ERROR = b"InvalidAuthToken"
"""Part of Ray's error message when the authentication token is missing or wrong."""

T = TypeVar("T")


@contextmanager
def ray_executor(address: str | None, workers: int | None) -> Iterator[RayBuildExecutor]:
    """Yield an executor on a cluster, or on ``workers`` cores here, or raise a ClusterError; shut Ray down on exit."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ClusterError(f"engine ray needs Ray, which is not installed: {install_command('ray')}") from None
    if address:
        _check_reachable(address)
    options = {"address": address} if address else {"address": "local", "num_cpus": workers, "include_dashboard": False}
    with TemporaryFile() as output:
        try:
            # Workers search the folder in which Ray is started before their libraries.
            with _stderr_to(output), isolated_children(), chdir(Path(sys.executable).parent):
                ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except Exception as error:  # ConnectionError, RuntimeError, ValueError and Ray's own errors
            raise _connection_error(address, error, output) from None
    try:
        yield RayBuildExecutor(ray, workers)
    finally:
        ray.shutdown()


@contextmanager
def _stderr_to(file: IO[bytes]) -> Iterator[None]:
    """Redirect file descriptor 2, to which Ray's compiled code writes once a second, to ``file``."""
    saved = os.dup(STDERR_FD)
    os.dup2(file.fileno(), STDERR_FD)
    try:
        yield
    finally:
        os.dup2(saved, STDERR_FD)
        os.close(saved)


def _connection_error(address: str | None, error: Exception, output: IO[bytes]) -> ClusterError:
    """Return the error to raise when Ray cannot be used, based on Ray's own messages."""
    cluster = f"the Ray cluster at {address}" if address else "Ray on this machine"
    output.seek(0)
    if INVALID_TOKEN_ERROR in output.read() + str(error).encode():
        return ClusterError(
            f"{cluster} requires a token that this process does not have: set RAY_AUTH_MODE=token, and have the "
            "cluster's token in RAY_AUTH_TOKEN or ~/.ray/auth_token"
        )
    return ClusterError(f"{cluster} cannot be used ({error_reason(error)}): check it with ray status")


def _check_reachable(address: str) -> None:
    """Raise a ``ClusterError`` unless ``address`` accepts a connection within ``CONNECT_SECONDS``."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ClusterError(
            f"address is {address!r}: give HOST:PORT of the cluster's head, as ray start printed it, and run this on a "
            "machine of the cluster"
        )
    try:
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error_reason(error)
        raise ClusterError(
            f"no Ray cluster can be reached at {address} ({reason}): start one with ray start --head, or leave "
            "--address out to build on this machine"
        ) from None


@contextmanager
def ray_errors_reported(ray: Any) -> Iterator[None]:
    """Re-raise hdtool's errors from tasks; raise a ``ClusterError`` for tasks' import errors and failures of Ray."""
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
            f"the Ray cluster could not finish the build ({type(error).__name__}: {error_reason(error)}): the store "
            "there, if any, is unchanged; see ray status, and choose smaller --shard-bytes if memory ran out"
        ) from None


def on_each_node(ray: Any, function: Callable[..., T], *arguments: object) -> Iterator[tuple[str, T]]:
    """Run a function on every live node; yield ``(address, result)`` for each node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node for node in ray.nodes() if node["Alive"]]
    with ray_errors_reported(ray):
        tasks = [
            ray.remote(function).options(
                num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote(*arguments)
            for node in nodes
        ]  # fmt: skip
        for node, task in zip(nodes, tasks, strict=True):
            yield node["NodeManagerAddress"], ray.get(task)


PREFETCHED_PORTIONS = 8
"""Number of portions that each reader task keeps ready."""
READER_OPTIONS: dict[str, Any] = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}
"""Ray options of reader tasks, which mostly wait for I/O and therefore reserve no core."""

Item = TypeVar("Item")


class RayBuildExecutor(BuildExecutor):
    """Runs builds on a Ray cluster."""

    def __init__(self, ray: Any, workers: int | None) -> None:
        super().__init__(workers)
        self._ray = ray
        self._cpus = max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._sorters = min(workers or self._cpus, self._cpus)

    def prepare(self, reading: RecordReader) -> None:
        """Raise a ClusterError unless all nodes have the same packages and see the same inputs; hash the inputs."""
        paths = _absolute(reading)
        own_versions = _versions()
        for node, (versions, sizes) in on_each_node(self._ray, _versions_and_sizes, paths):
            if versions != own_versions:
                raise ClusterError(
                    f"node {node} of the Ray cluster has {versions}, this process has {own_versions}: "
                    "install the same versions on all nodes"
                )
            for path, local_size, node_size in zip(paths, reading.sizes, sizes, strict=True):
                if local_size != node_size:
                    fault = (
                        "does not see it"
                        if node_size is None
                        else f"finds {node_size:,} bytes there instead of {local_size:,}"
                    )
                    raise ClusterError(
                        f"{path} cannot be read by all workers: node {node} of the Ray cluster {fault}; "
                        "put it where every node has it under the same path, as on a shared disk"
                    )
        hashes = self._results(file_checksum, [(Path(path),) for path in paths], **READER_OPTIONS)
        reading.hashes.update(enumerate(hashes))

    def documents(self, reading: RecordReader, tokenizer: PreTrainedTokenizerBase) -> Iterator[Document]:
        with (
            ray_errors_reported(self._ray),
            progress_bar(reading.total_bytes, "reading", unit="B") as progress,
        ):
            shared, encode = self._ray.put(tokenizer), self._task(_encode_portion)
            streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": PREFETCHED_PORTIONS}
            read = self._task(_portions, **streaming, **READER_OPTIONS)
            width = token_type(len(tokenizer)).str
            inputs = enumerate(_absolute(reading))
            readers = ((source, read.remote(path, reading.answers_only)) for source, path in inputs)
            portions = (
                (source, portion) for source, reader in _prefetched(readers, self._readers) for portion in reader
            )
            encoded = ((source, encode.remote(portion, shared, width)) for source, portion in portions)
            reading.restart()
            for source, done in _prefetched(encoded, 2 * self._cpus):
                portion, ids, ends = self._ray.get(done)
                reading.take(portion)
                for document in np.split(ids, ends):
                    yield Document(document, source)
                progress.to(reading.bytes_read)
            reading.finish()

    def sort(self, files: ShardFiles, shards: Sequence[ShardExtent]) -> None:
        memory = SORT_MEMORY_FACTOR * max(shard.tokens for shard in shards) * files.width.itemsize
        node_memory = max(float(node["Resources"].get("memory", 0)) for node in self._ray.nodes() if node["Alive"])
        if memory > node_memory:
            raise ClusterError(
                f"sorting a shard takes {memory / 2**30:.1f} GiB of memory, and no node of the Ray cluster offers more "
                f"than {node_memory / 2**30:.1f}: choose smaller --shard-bytes"
            )
        jobs = ((files.tokens(shard), files.end) for shard in shards)
        done: Iterator[SortedShard] = self._results(sort_shard, jobs, self._sorters, memory=memory)
        with progress_bar(len(shards), "sorting", unit="shards") as progress:
            for (number, shard), result in zip(enumerate(shards), done, strict=True):
                files.write(number, shard, result)
                progress.advance()

    def mine(self, answers: CountedDocuments, top_k: int, per_key: int) -> Iterator[NgramGroup]:
        parts = part_count(answers)
        jobs = [(length, part) for length in SEQUENCE_LENGTHS for part in range(parts)]
        with (
            ray_errors_reported(self._ray),
            progress_bar(len(jobs), "counting", unit="parts") as progress,
        ):
            shared = self._ray.put(answers.tokens)
            count = self._task(_count_part)
            frequent_by_part = _prefetched(
                (count.remote(shared, answers.end, *job, parts, top_k) for job in jobs), 2 * self._cpus
            )

            def of_length() -> Iterator[FrequentSequences]:
                for _ in range(parts):
                    yield self._ray.get(next(frequent_by_part))
                    progress.advance()

            for length in SEQUENCE_LENGTHS:
                yield from sequence_groups(
                    answers, length, merge_frequent(answers, length, of_length(), top_k), per_key
                )

    @property
    def _readers(self) -> int:
        return max(1, self._cpus // 4)

    def _task(self, function: Any, **options: Any) -> Any:
        return self._ray.remote(function).options(**options) if options else self._ray.remote(function)

    def _results(
        self, function: Any, jobs: Iterable[tuple[Any, ...]], at_once: int = 0, **options: Any
    ) -> Iterator[Any]:
        """Run ``function`` on each job, starting ``at_once`` jobs early (0: two per core); yield results in order."""
        with ray_errors_reported(self._ray):
            task = self._task(function, **options)
            tasks = (task.remote(*job) for job in jobs)
            for done in _prefetched(tasks, at_once or 2 * self._cpus):
                yield self._ray.get(done)


def _absolute(reading: RecordReader) -> list[str]:
    """Return absolute paths of the inputs, because workers run in other folders."""
    return [os.path.abspath(path) for path in reading.inputs]


def _prefetched(items: Iterable[Item], count: int) -> Iterator[Item]:
    """Yield the items in order, taking ``count`` items from the iterable in advance."""
    started: deque[Item] = deque()
    for item in items:
        started.append(item)
        if len(started) > count:
            yield started.popleft()
    yield from started


# Tasks of the workers ---------------------------------------------------------------------------------


def _versions() -> str:
    """Return the versions of all packages that affect the bytes of a store."""
    return ", ".join(f"{name} {metadata.version(name)}" for name in ("hdtool", "tokenizers", "transformers"))


def _versions_and_sizes(paths: list[str]) -> tuple[str, list[int | None]]:
    return _versions(), [os.stat(path).st_size if os.path.exists(path) else None for path in paths]


def _portions(path: str, answers_only: bool) -> Iterator[Portion]:
    yield from RecordReader([Path(path)], answers_only=answers_only).portions(TOKENIZER_BATCH)


def _encode_portion(portion: Portion, tokenizer: PreTrainedTokenizerBase, width: str) -> tuple[Portion, Tokens, Tokens]:
    """Return the portion without its texts, their joined token ids, and the offset of each text after the first."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each core already has a worker
    ids = encode_texts(portion.texts, tokenizer)
    ends = np.cumsum([len(text) for text in ids], dtype=np.int64)[:-1]
    flat = np.concatenate([np.array(text, np.dtype(width)) for text in ids]) if ids else np.empty(0, np.dtype(width))
    return portion.without_texts(), flat, ends


def _count_part(tokens: Tokens, end: int, length: int, part: int, parts: int, top_k: int) -> FrequentSequences:
    return most_frequent_in_part(CountedDocuments(tokens, end), length, part, parts, top_k)
