"""Tensor parallelism: the processes started by torchrun share one model, each with a shard of its weights.

Only the leader encodes prompts, drafts, chooses the number of draft tokens, samples and prints. The followers repeat
the leader's operations on the target, so decisions that depend on time or rounding cannot differ between processes.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hdtool.data.errors import HdtoolError, ModelError, OptionError
from hdtool.data.notes import tell
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.engine_interface import PassOptions, Verified
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.captured_functions import never
from hdtool.runtime.target.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.runtime.settings.decoding import DecodeConfig
    from hdtool.runtime.settings.model import ModelConfig

MESSAGE_SIZE = 1 << 14
"""Size in bytes of a message's first broadcast, about ten times that of a tree; any rest follows in a second one."""
LENGTH_BYTES = 8
MESSAGE_TIMEOUT = timedelta(days=30)
"""Maximum time between two messages, during which the leader may wait for a prompt."""
ERROR_DELAY = 5.0
"""Time in seconds that a follower waits before it prints an error, since the leader may print the same error."""

Load = Callable[["ModelConfig"], Target]


class ProcessGroup:
    """The processes that share one model; the leader sends messages to the followers."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        self.size = dist.get_world_size()
        self.is_leader = dist.get_rank() == 0
        # Messages use a separate group, so that they don't queue behind computations.
        self._messages = dist.new_group(backend="gloo", timeout=MESSAGE_TIMEOUT)

    def broadcast(self, operation: str, *arguments: object) -> None:
        """Send an operation and its arguments to the followers."""
        payload = pickle.dumps((operation, arguments))
        message = bytearray(MESSAGE_SIZE)
        message[:LENGTH_BYTES] = len(payload).to_bytes(LENGTH_BYTES, "little")
        message[LENGTH_BYTES : LENGTH_BYTES + len(payload)] = payload[: MESSAGE_SIZE - LENGTH_BYTES]
        self._send(message[:MESSAGE_SIZE])
        if rest := payload[MESSAGE_SIZE - LENGTH_BYTES :]:
            self._send(bytearray(rest))

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """Wait for the leader's next operation; return ``(operation, arguments)``."""
        message = self._send(bytearray(MESSAGE_SIZE))
        size = int.from_bytes(message[:LENGTH_BYTES], "little")
        payload = message[LENGTH_BYTES : LENGTH_BYTES + size]
        if size > len(payload):
            payload += self._send(bytearray(size - len(payload)))
        operation, arguments = pickle.loads(payload)
        return operation, arguments

    def _send(self, message: bytearray) -> bytearray:
        """Broadcast the leader's message, which replaces ``message`` in all followers; return it in every process."""
        dist.broadcast(torch.frombuffer(message, dtype=torch.uint8), src=0, group=self._messages)
        return message


_group: ProcessGroup | None = None


def leader() -> ProcessGroup | None:
    """Return the process group if this process leads several processes, otherwise None."""
    return _group


@contextmanager
def leading() -> Iterator[None]:
    """In this block, make this process the leader; the followers exit when the block ends."""
    global _group
    _group = ProcessGroup()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # a follower may have ended already
            _group.broadcast("end")
        _group = None
        dist.destroy_process_group()


def follow(load: Load) -> int:
    """Repeat the leader's operations on this process's target until the leader ends; return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all processes get Ctrl-C; the leader handles it
    group = ProcessGroup()
    target: Target | None = None
    caches: dict[int, Cache] = {}
    try:
        while True:
            operation, arguments = group.receive()
            if operation == "end":
                break
            if operation == "load":
                target = load(*arguments)
            elif target:
                repeat(target, caches, operation, *arguments)
    except HdtoolError as error:
        return _report_late(error)
    except RuntimeError as error:
        if "closed" in str(error) or "reset" in str(error):
            return 1  # the leader has ended and printed its error
        raise
    dist.destroy_process_group()
    return 0


def _report_late(error: HdtoolError) -> int:
    """Wait, in case torchrun ends this process because the leader failed, then print an error; return the exit code."""
    time.sleep(ERROR_DELAY)
    tell(f"error: process {os.environ['RANK']}: {error}")
    return error.exit_code


class LeadingTarget(Target):
    """The leader's target, which broadcasts its operations to the followers.

    Messages refer to caches by their number.
    """

    def __init__(self, model: PreTrainedModel, group: ProcessGroup) -> None:
        self._group: ProcessGroup | None = None  # each process checks the model by itself, without messages
        super().__init__(model, never)
        self._group, self.processes = group, group.size
        self._caches = 0

    def reads_in_pieces(self, length: int) -> bool:
        """Return False: rounding differs between processes, so their checks of cached tokens could disagree."""
        return False

    def allocate(self, slots: int = 1, capacity: int = 0) -> Cache:
        cache = super().allocate(slots, capacity)
        if self._group:
            self._caches += 1
            cache.number = self._caches
            self._group.broadcast("allocate", cache.number, slots, capacity)
        return cache

    def prefill(self, cache: Cache, slot: int, tokens: Sequence[int], start: int = 0, *, room: int = 0) -> Verified:
        self._broadcast("prefill", cache, slot, list(tokens), start, room)
        return super().prefill(cache, slot, tokens, start, room=room)

    def _verify(self, cache: Cache, trees: Sequence[DraftTree], options: Sequence[PassOptions]) -> list[Verified]:
        self._broadcast("verify", cache, list(trees))
        return super()._verify(cache, trees, ())

    def recompute(self, cache: Cache, slot: int, root: int) -> Verified:
        self._broadcast("recompute", cache, slot, root)
        # Followers verify as part of their own recompute.
        group, self._group = self._group, None
        try:
            return super().recompute(cache, slot, root)
        finally:
            self._group = group

    def commit(self, cache: Cache, slot: int, path: Sequence[int]) -> None:
        self._broadcast("commit", cache, slot, list(path))
        super().commit(cache, slot, path)

    def _broadcast(self, operation: str, cache: Cache, *arguments: object) -> None:
        if self._group:
            self._group.broadcast(operation, cache.number, *arguments)


def repeat(target: Target, caches: dict[int, Cache], operation: str, number: int, *arguments: Any) -> None:
    """Perform on this process's target an operation that the leader broadcast, on the cache with this number."""
    if operation == "allocate":
        caches[number] = target.allocate(*arguments)
    elif operation == "prefill":
        *positional, room = arguments
        target.prefill(caches[number], *positional, room=room)
    else:
        getattr(target, operation)(caches[number], *arguments)


def check_decoding(config: DecodeConfig) -> None:
    """Raise an ``OptionError`` if several processes run the model and the method or other options need a single one."""
    if not leader():
        return
    if config.batch_size > 1:
        raise OptionError(
            f"batch-size is {config.batch_size}, but a model over several processes answers one prompt after another: "
            "leave it out"
        )
    if config.keeps_history:
        raise OptionError(
            f"history is {config.history}, but the processes of one model must all draft the same, and a store changes "
            "between them: use --history memory"
        )
    if config.trained:
        raise OptionError(
            f"method {config.method} drafts by a trained drafter, which needs the whole model in one process: choose "
            "another method"
        )


def check_device(wanted: str) -> None:
    """Raise an ``OptionError`` if ``wanted`` is neither "auto" nor the type of device that torchrun's processes use."""
    available = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted not in ("auto", available):
        raise OptionError(
            f"device is {wanted}, but processes that torchrun starts compute on {available} here: leave it out"
            + (", or hide the GPUs with CUDA_VISIBLE_DEVICES=" if wanted == "cpu" else "")
        )


def check_sharding(config: Any, name: str, size: int) -> None:
    """Raise a ``ModelError`` if a model cannot be split over ``size`` processes."""
    text = config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelError(
            f"{name} cannot be split over processes: transformers has no tensor-parallel plan for models of type "
            f"{config.model_type!r}; run it in one process, with --device-map auto over several GPUs"
        )
    if heads % size:
        raise ModelError(
            f"{name} cannot be split over {size} processes: it has {heads} heads of keys and values; "
            "start torchrun with a number that divides them"
        )
