"""Processes that compute one model together, each with a part of its weights, as torchrun starts them.

The first one leads: it alone reads what was asked, drafts, decides how much, chooses tokens and prints. The others
repeat what it does to the model, verb by verb. So nothing that hangs on time or rounding can part them.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hdtool.data.errors import HdtoolError, ModelError, OptionError
from hdtool.runtime.config import NEED_HEADS
from hdtool.runtime.model.cuda_graphs import never
from hdtool.runtime.model.target import Target
from hdtool.runtime.tree import DraftTree

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hdtool.runtime.config import DecodeConfig, ModelConfig

LETTER = 1 << 14
"""Bytes that go out at once; what does not fit follows behind. A tree and its call take about a tenth."""
LENGTH = 8
LONGEST_SILENCE = timedelta(days=30)
"""Between two verbs, while somebody thinks about a prompt."""
FAULT_WAIT = 5.0
"""Seconds in which the leader may tell of a fault that all have, before another process tells of its own."""

Load = Callable[["ModelConfig"], Target]


class ProcessGroup:
    """All processes, as one of them sees them."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
        self.size = dist.get_world_size()
        self.is_leader = dist.get_rank() == 0
        # What they tell each other must not wait in a line with what they compute.
        self._line = dist.new_group(backend="gloo", timeout=LONGEST_SILENCE)

    def broadcast(self, verb: str, *arguments: object) -> None:
        """Have all others do something."""
        said = pickle.dumps((verb, arguments))
        letter = bytearray(LETTER)
        letter[:LENGTH] = len(said).to_bytes(LENGTH, "little")
        letter[LENGTH : LENGTH + len(said)] = said[: LETTER - LENGTH]
        self._send(letter[:LETTER])
        if rest := said[LETTER - LENGTH :]:
            self._send(bytearray(rest))

    def receive(self) -> tuple[str, tuple[Any, ...]]:
        """What to do next."""
        letter = self._send(bytearray(LETTER))
        size = int.from_bytes(letter[:LENGTH], "little")
        said = letter[LENGTH : LENGTH + size]
        if size > len(said):
            said += self._send(bytearray(size - len(said)))
        verb, arguments = pickle.loads(said)
        return verb, arguments

    def _send(self, letter: bytearray) -> bytearray:
        """The first process's letter, in all of them."""
        dist.broadcast(torch.frombuffer(letter, dtype=torch.uint8), src=0, group=self._line)
        return letter


_group: ProcessGroup | None = None


def leader() -> ProcessGroup | None:
    """All processes, if there are several and this one leads them."""
    return _group


@contextmanager
def leading() -> Iterator[None]:
    """Lead the others; they end when this does."""
    global _group
    _group = ProcessGroup()
    try:
        yield
    finally:
        with suppress(RuntimeError):  # whoever is gone needs not be told
            _group.broadcast("end")
        _group = None
        dist.destroy_process_group()


def follow(load: Load) -> int:
    """Do what the leader does to its model until it ends; returns the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all of them; the leader says what becomes of it
    group = ProcessGroup()
    target: Target | None = None
    try:
        while True:
            verb, arguments = group.receive()
            if verb == "end":
                break
            if verb == "load":
                target = load(*arguments)
            else:
                getattr(target, verb)(*arguments)
    except HdtoolError as error:
        return _late_complaint(error)
    except RuntimeError as error:
        if "closed" in str(error) or "reset" in str(error):
            return 1  # the leader is gone, and has said why if it could
        raise
    dist.destroy_process_group()
    return 0


def _late_complaint(error: HdtoolError) -> int:
    """Tell of a fault unless the leader has it as well: when it ends, torchrun ends all others."""
    time.sleep(FAULT_WAIT)
    print(f"error: process {os.environ['RANK']}: {error}", file=sys.stderr)
    return error.exit_code


class LeadingTarget(Target):
    """The leader's part of the model; the others' parts do what it does."""

    def __init__(self, model: PreTrainedModel, group: ProcessGroup) -> None:
        self._group: ProcessGroup | None = None  # each proves by itself that its model can verify trees
        super().__init__(model, never)
        self._group, self.processes = group, group.size

    def prefill(self, context: Sequence[int], room: int = 0) -> torch.Tensor:
        self._broadcast("prefill", list(context), room)
        return super().prefill(context, room)

    def verify(self, tree: DraftTree) -> torch.Tensor:
        self._broadcast("verify", tree)
        return super().verify(tree)

    def recompute(self, root: int) -> torch.Tensor:
        if not self._group:
            return super().recompute(root)
        self._group.broadcast("recompute", root)
        # Its verification is part of what the others were told to do.
        group, self._group = self._group, None
        try:
            return super().recompute(root)
        finally:
            self._group = group

    def commit(self, path: Sequence[int]) -> None:
        self._broadcast("commit", list(path))
        super().commit(path)

    def _broadcast(self, verb: str, *arguments: object) -> None:
        if self._group:
            self._group.broadcast(verb, *arguments)


def check_decoding(config: DecodeConfig) -> None:
    """Refuse what would need more of the model than the first process has, before it is loaded."""
    if not leader():
        return
    if config.batch_size > 1:
        raise OptionError(
            f"batch-size is {config.batch_size}, but a model over several processes answers one prompt after another: "
            "leave it out"
        )
    if config.method in NEED_HEADS:
        raise OptionError(
            f"method {config.method} drafts by heads, which need the whole model in one process: choose another one"
        )


def check_device(wanted: str) -> None:
    """The library itself gives each process an accelerator, or the CPU where there is none."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted not in ("auto", found):
        raise OptionError(
            f"device is {wanted}, but processes that torchrun starts compute on {found} here: leave it out"
            + (", or hide the GPUs with CUDA_VISIBLE_DEVICES=" if wanted == "cpu" else "")
        )


def check_plan(config: Any, name: str, size: int) -> None:
    """Refuse a model that cannot be cut into so many parts."""
    text = config.get_text_config(decoder=True)
    heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    if not getattr(text, "base_model_tp_plan", None):
        raise ModelError(
            f"{name} cannot be cut over processes: transformers has no tensor-parallel plan for models of type "
            f"{config.model_type!r}; run it in one process, with --device-map auto over several GPUs"
        )
    if heads % size:
        raise ModelError(
            f"{name} cannot be cut over {size} processes: it has {heads} heads of keys and values; "
            "start torchrun with a number that divides them"
        )
