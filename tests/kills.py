"""Kill hdtool at random moments and look for losses: ``python -m tests.kills --times 1000``.

Builds, merges, adds, drops, collects and trainings run as forked children of one process that has everything
imported. Each child is killed with SIGKILL at a moment drawn evenly from the duration of an undisturbed run. After
each kill, every store must be the old or the new one, whole; collected answers must be whole but for a torn last
line; foreign files in the same folder must be unchanged. The next run must succeed and leave the same files as an
undisturbed one. Prints a table and exits with 1 if anything was lost.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

import argparse
import json
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any

import torch
from tqdm import tqdm
from transformers.utils import logging

from hdtool.builders.head_training.training_loop import CHECKPOINT_FILE
from hdtool.cli.app import run
from hdtool.data.errors import HdtoolError
from hdtool.data.stores.store_file_names import MANIFEST
from hdtool.data.stores.store_folder import damaged_files, read_manifest
from hdtool.runtime.drafters.heads.checkpoint import SETTINGS_FILE, WEIGHTS_FILE
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.model_store import ModelStore
from tests.support.scratch import BOTH, INPUTS, Scratch, new_scratch

FOREIGN = {
    "thesis.tex": b"\\begin{document}",
    "documents.txt": b"one line",
    ".notes": b"",
    "photo-0123abcd.jpg": b"\xff",
}
"""Files of a user, in the folder that is written to."""
ERRORS = "stderr.txt"
"""What the last child printed, in the scratch folder."""
AGAIN = 0.3
"""The chance that a killed run is followed by another one that is killed, before one is let finish."""
ADAPTED = 0.3
"""How far the duration of a job follows that of a run which ended before its kill."""
HANGS = 120.0
"""Seconds after which a run that nobody kills is taken to hang."""
REPORTED = 100
"""Kills between two lines on standard error."""
TIMED = 3
"""Undisturbed runs, by which the duration of a job is measured."""


class LossError(Exception):
    """What a kill must not do."""


@dataclass
class Counted:
    """What happened to the runs of one job."""

    seconds: float
    runs: int = 0
    killed: int = 0
    losses: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Job:
    """A command, what is there before it, and what may be there after a kill."""

    name: str
    command: str
    check: Callable[[Path, Path, Path | None], None]
    """Raise ``LossError`` unless what is at a place may be left by a kill, given the finished place and the old one."""
    kind: str = "corpus"
    """The kind of the stores."""
    before: str = ""
    """What is at the place before: a store, by its name, or heads; nothing as a rule."""
    into_file: bool = False
    once: bool = False
    """Whether the command refuses to do again what it has done."""

    def arguments(self, scratch: Scratch, folder: Path) -> list[str]:
        return scratch.command(self.command, self.place(folder), self.kind, BOTH)

    def old(self, scratch: Scratch) -> Path | None:
        if not self.before:
            return None
        return scratch.root / "heads" if self.before == "heads" else scratch.store(self.kind, self.before)

    def place(self, folder: Path) -> Path:
        return folder / "out.jsonl" if self.into_file else folder


# What may be there -------------------------------------------------------------------------------


def check_store(found: Path, new: Path, old: Path | None) -> None:
    """The old store or the new one, whole."""
    if not (found / MANIFEST).exists():
        if old:
            raise LossError(f"there is no {MANIFEST}")
        return
    if _identity(found) not in [_identity(store) for store in (new, old) if store]:
        raise LossError("the store is neither the old nor the new one")
    if broken := damaged_files(found, read_manifest(found)):
        raise LossError(f"{', '.join(broken)} is damaged")
    (ModelStore if read_manifest(found).kind == "model" else CorpusIndex)(found)


def _identity(store: Path) -> Any:
    """What a store holds, whatever its files are called; the files of LMDB differ from build to build."""
    manifest = read_manifest(store)
    parts = {part: file.sha256 for part, file in manifest.files.items() if part != "record"}
    return manifest.kind, manifest.counts, manifest.sources, parts


def check_answers(found: Path, new: Path, old: Path | None) -> None:
    """The first lines, and at most the beginning of the next one."""
    text = found.read_bytes() if found.exists() else b""
    if not new.read_bytes().startswith(text):
        raise LossError("the answers are not the beginning of those of an undisturbed run")


def check_heads(found: Path, new: Path, old: Path | None) -> None:
    """A checkpoint that can be loaded, and heads that are whole as soon as they have settings."""
    if (found / CHECKPOINT_FILE).exists():
        torch.load(found / CHECKPOINT_FILE, weights_only=True)
    if old and not (found / SETTINGS_FILE).exists():
        raise LossError(f"there is no {SETTINGS_FILE}")
    if (found / SETTINGS_FILE).exists():
        json.loads((found / SETTINGS_FILE).read_text())
        if (found / WEIGHTS_FILE).read_bytes() not in [
            (heads / WEIGHTS_FILE).read_bytes() for heads in (new, old) if heads
        ]:
            raise LossError(f"{WEIGHTS_FILE} is neither the old nor the new one")


JOBS = (
    *(Job(f"build-{kind}-db", f"build-{kind}-db", check_store, kind) for kind in INPUTS),
    *(Job(f"build-{kind}-db again", f"build-{kind}-db", check_store, kind, "one") for kind in INPUTS),
    *(Job(f"merge ({kind})", "merge", check_store, kind) for kind in INPUTS),
    *(Job(f"add ({kind})", "add", check_store, kind, "one", once=True) for kind in INPUTS),
    *(Job(f"drop ({kind})", "drop", check_store, kind, "both", once=True) for kind in INPUTS),
    Job("collect", "collect", check_answers, into_file=True),
    Job("train-heads", "train-heads", check_heads),
    Job("train-heads again", "train-heads", check_heads, before="heads"),
)


# Running and killing -----------------------------------------------------------------------------


class Trial:
    """One job in one scratch folder."""

    def __init__(self, job: Job, scratch: Scratch, chance: Random) -> None:
        self.name = job.name
        self._job, self._scratch, self._chance = job, scratch, chance
        self._old = job.old(scratch)
        self._folder = scratch.root / "out"
        finished = scratch.root / "finished" / job.name.replace(" ", "-")
        self._new = job.place(finished)
        self.counted = Counted(median(self._timed() for _ in range(TIMED)))
        shutil.copytree(self._folder, finished)
        self._names = self._shapes(finished)

    def _timed(self) -> float:
        self._begin()
        start = time.perf_counter()
        self._finish()
        return time.perf_counter() - start

    def kill(self) -> None:
        """Kill runs one after another, then let one finish; look for losses after each."""
        self._begin()
        while True:
            self._kill_once()
            whole = self._attempt(self._check, "after a kill")
            if not whole or self._is_done() or self._chance.random() > AGAIN:
                break
        self._attempt(self._finish, "the next run")
        self._attempt(self._check_finished, "after the next run")

    def _attempt(self, act: Callable[[], None], when: str) -> bool:
        try:
            act()
        except (LossError, HdtoolError, OSError, ValueError, RuntimeError, KeyError) as error:
            self.counted.losses.append(f"{self._job.name}, {when}: {type(error).__name__}: {error}")
            return False
        return True

    def _begin(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        place = self._job.place(self._folder)
        if self._old:
            shutil.copytree(self._old, place, dirs_exist_ok=True)
        if self._has_company():
            for name, content in FOREIGN.items():
                (self._folder / name).write_bytes(content)

    def _has_company(self) -> bool:
        """Whether foreign files may be there before the command begins: no build starts a store among them."""
        return self._old is not None or self._job.check is not check_store

    def _kill_once(self) -> None:
        self.counted.runs += 1
        after = self._chance.uniform(0, self.counted.seconds)
        start = time.perf_counter()
        code = run_once(self._job.arguments(self._scratch, self._folder), kill_after=after)
        if code == -signal.SIGKILL:
            self.counted.killed += 1
        else:  # the machine is faster by now than when it was measured
            self.counted.seconds += ADAPTED * (time.perf_counter() - start - self.counted.seconds)
        if code not in (0, -signal.SIGKILL):
            self.counted.losses.append(f"{self._job.name}: ended with {code} before it was killed")

    def _check(self) -> None:
        self._job.check(self._job.place(self._folder), self._new, self._old)
        if self._has_company() and any((self._folder / name).read_bytes() != FOREIGN[name] for name in FOREIGN):
            raise LossError("a foreign file was changed")

    def _is_done(self) -> bool:
        """Whether a command that does its work once was killed after its work was done."""
        return self._job.once and self._new.exists() and _identity(self._folder) == _identity(self._new)

    def _finish(self) -> None:
        again = ["merge", str(self._folder), "--out", str(self._folder)]  # builds the store that is there once more
        code = run_once(again if self._is_done() else self._job.arguments(self._scratch, self._folder))
        if code == -signal.SIGKILL:
            raise LossError(f"the command did not end within {HANGS:.0f} seconds")
        if code:
            raise LossError(f"the command ended with {code}: {Path(ERRORS).read_text().strip()}")

    def _check_finished(self) -> None:
        self._job.check(self._job.place(self._folder), self._new, None)
        if self._job.into_file and self._job.place(self._folder).read_bytes() != self._new.read_bytes():
            raise LossError("the answers are not all there")
        if (names := self._shapes(self._folder)) != self._names:
            raise LossError(f"the folder holds {', '.join(names)}, not {', '.join(self._names)}")
        self._check()

    @staticmethod
    def _shapes(folder: Path) -> list[str]:
        """The names in a folder; of the parts of a store, whose names are drawn for each build, those of the parts."""
        named: dict[str, str] = {}
        if (folder / MANIFEST).exists():
            named = {file.name: part for part, file in read_manifest(folder).files.items()}
        return sorted(named.get(path.name, path.name) for path in folder.iterdir())


def run_once(arguments: Sequence[str], kill_after: float | None = None) -> int:
    """The exit code of a command in a forked child, negative if it was killed by a signal."""
    child = os.fork()
    if not child:
        code = 70
        try:
            silent = os.open(os.devnull, os.O_RDWR)
            errors = os.open(ERRORS, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for stream, target in ((0, silent), (1, silent), (2, errors)):
                os.dup2(target, stream)
            code = run(list(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    watched = os.pidfd_open(child)
    select.select([watched], [], [], HANGS if kill_after is None else kill_after)  # returns early if the child ends
    os.close(watched)
    os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def prepare(root: Path) -> Scratch:
    """A scratch folder; the commands run once in this process, so that the children find everything loaded."""
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors:
        scratch = new_scratch(root)
        for name, command in (("answers.jsonl", "collect"), ("heads", "train-heads")):
            if run(scratch.command(command, root / name)):
                raise SystemExit(f"{name} cannot be prepared: {errors.getvalue()}")
    if threads := len(list(Path("/proc/self/task").iterdir())) - 1:
        raise SystemExit(f"this process has {threads} threads besides the main one, so that it cannot be forked")
    return scratch


def kill_many(times: int, seed: int, root: Path) -> list[Trial]:
    """So many kills; the next one always goes to the job that has had the fewest."""
    scratch = prepare(root)
    chance = Random(seed)
    trials = [Trial(job, scratch, chance) for job in JOBS]
    killed = 0
    while killed < times:
        min(trials, key=lambda trial: trial.counted.killed).kill()
        before, killed = killed, sum(trial.counted.killed for trial in trials)
        if killed // REPORTED > before // REPORTED:
            print(f"{killed} kills, {sum(len(each.counted.losses) for each in trials)} losses", file=sys.stderr)
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="kills that come before the end of a run")
    parser.add_argument("--seed", type=int, default=0, help="draws the moments of the kills")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tqdm.monitor_interval = 0  # its monitor is a thread
    tqdm.set_lock(RLock())  # the default is shared with the children, and one that is killed may hold it
    with TemporaryDirectory() as root, chdir(root):
        os.environ["HDTOOL_HOME"] = str(Path(root, "home"))
        trials = kill_many(options.times, options.seed, Path(root, "scratch"))
    print(f"{'job':<24}{'seconds':>9}{'runs':>7}{'killed':>8}{'losses':>8}")
    for trial in trials:
        found = trial.counted
        print(f"{trial.name:<24}{found.seconds:>9.2f}{found.runs:>7}{found.killed:>8}{len(found.losses):>8}")
    losses = [loss for trial in trials for loss in trial.counted.losses]
    runs, killed = (sum(getattr(trial.counted, name) for trial in trials) for name in ("runs", "killed"))
    print(f"{runs} runs, {killed} of them killed before their end, {len(losses)} losses")
    for loss in losses:
        print(loss)
    sys.exit(bool(losses))


if __name__ == "__main__":
    main()
