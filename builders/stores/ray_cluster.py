"""A Ray cluster: joined or started, queried, and left; every fault is reported in one line."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any, TypeVar

from hdtool.data.errors import ClusterError, HdtoolError, reason_of
from hdtool.data.extras import install_command

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
