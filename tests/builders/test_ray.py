"""Ray builds the store that this machine builds alone, whoever dies on the way. Run by ``make test-ray``."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

# Ray wants a token for clusters of its own, and none for others, unless told once for all.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "tests" * 7}
ray = pytest.importorskip("ray")
# Workers import the tokenizer of a test. Set only in the environment of these tests, not while others are collected.
FOUND = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(FOUND)
# Ray's own libraries warn about themselves and leave sockets to the collector.
pytestmark = pytest.mark.filterwarnings("default")

from hdtool.builders.stores import ray_executor as engines  # noqa: E402
from hdtool.builders.stores.build_stores import BUILDS  # noqa: E402
from hdtool.builders.stores.local_executor import BuildExecutor  # noqa: E402
from hdtool.builders.stores.ray_executor import ray_executor  # noqa: E402
from hdtool.cli.app import run  # noqa: E402
from hdtool.data.errors import ClusterError, RecordError  # noqa: E402
from hdtool.data.stores.manifest import Manifest, TokenizerFingerprint  # noqa: E402
from hdtool.data.stores.store_file_names import MANIFEST  # noqa: E402
from hdtool.data.stores.store_folder import read_manifest  # noqa: E402
from hdtool.data.texts_and_traces import RecordReader  # noqa: E402
from hdtool.runtime.settings.model import ModelConfig  # noqa: E402
from hdtool.runtime.target.load import load_tokenizer  # noqa: E402
from tests.support.traps import Traps  # noqa: E402

TEXTS = 6000
SHARD_BYTES = 40_000
"""Some twenty shards."""
AT_WORK = ("ray::_portions", "ray::_encode_portion", "ray::sort_shard")
"""How Ray calls a worker while it does these."""


def conversations(count: int) -> list[dict[str, Any]]:
    def turn(number: int, role: str) -> dict[str, str]:
        words = " ".join(f"word{(number * place) % 311} of {place % 7}" for place in range(12))
        return {"from": role, "value": f"{role} says {number}: {words}."}

    return [{"conversations": [turn(number, "human"), turn(number, "gpt")]} for number in range(count)]


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of several formats; one record cannot be used."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "a.json").write_text(json.dumps(conversations(TEXTS // 2)))
    lines = [json.dumps({"text": f"line {number} " * 9}) for number in range(2000)]
    lines[7] = "{broken"
    (folder / "b.jsonl").write_text("\n".join(lines))
    (folder / "c.txt").write_text("A plain text that stands alone.")
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one worker each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def build(kind: str, folder: Path, inputs: list[Path], executor: BuildExecutor, tokenizer: Any = None) -> Manifest:
    mark_of = load_tokenizer(ModelConfig())
    reading = RecordReader(inputs, answers_only=kind == "model")
    executor.prepare(reading)
    documents, mark = executor.documents(reading, tokenizer or mark_of), TokenizerFingerprint.of(mark_of)
    options = {"shard_bytes": SHARD_BYTES} if kind == "corpus" else {"top_k": 900}
    made = BUILDS[kind](folder, documents, mark, reading.sources, executor=executor, **options)
    assert reading.tally.bad == 1 and "b.jsonl:8: not valid JSON" in reading.tally.messages[0]
    return made


def content(manifest: Manifest) -> Any:
    """All but the names of files, and LMDB's, which lays its pages out as it likes."""
    files = {part: file.sha256 for part, file in manifest.files.items() if part != "record"}
    return manifest.kind, manifest.counts, manifest.options, manifest.sources, manifest.tokenizer, files


@pytest.fixture(scope="module")
def expected(inputs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("expected")
    return {kind: content(build(kind, folder / kind, inputs, BuildExecutor(1))) for kind in BUILDS}


@pytest.mark.parametrize("kind", BUILDS)
def test_a_cluster_builds_the_same_bytes(
    kind: str, cluster: Any, inputs: list[Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    with ray_executor(cluster.address, None) as engine:
        made = build(kind, tmp_path, inputs, engine)
    assert content(made) == expected[kind]
    assert kind == "model" or made.counts["shards"] > 10


def test_tables_too_small_for_a_part_change_nothing(
    cluster: Any, inputs: list[Path], expected: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "hdtool.builders.stores.frequent_sequences.MAX_TABLE_SLOTS", 1 << 12
    )  # of this process: more and smaller parts
    with ray_executor(cluster.address, None) as engine:
        assert content(build("model", tmp_path, inputs, engine)) == expected["model"]


class DeadlyTokenizer:
    """Kills the first worker that uses it."""

    def __init__(self, tokenizer: Any, mark: Path) -> None:
        self.tokenizer, self.mark = tokenizer, mark

    def __len__(self) -> int:
        return len(self.tokenizer)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.tokenizer(*arguments, **options)


def test_a_worker_that_dies_over_its_texts_costs_nothing(
    cluster: Any, inputs: list[Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    deadly = DeadlyTokenizer(load_tokenizer(ModelConfig()), tmp_path / "killed")
    with ray_executor(cluster.address, None) as engine:
        assert content(build("corpus", tmp_path / "store", inputs, engine, deadly)) == expected["corpus"]
    assert (tmp_path / "killed").exists()


def test_workers_killed_in_the_middle_cost_nothing(
    inputs: list[Path], expected: dict[str, Any], tmp_path: Path
) -> None:
    """Whatever they are at: reading, tokenizing or sorting."""
    killed: list[str] = []
    over = threading.Event()

    def kill() -> None:
        while not over.wait(0.5) and len(killed) < 4:
            for process in psutil.Process().children(recursive=True):
                try:
                    what = process.cmdline()[0]
                    if what.startswith(AT_WORK):
                        process.kill()
                        killed.append(what)
                        break
                except (psutil.Error, IndexError):
                    continue

    with ray_executor(None, 2) as engine:
        killer = threading.Thread(target=kill)
        killer.start()
        try:
            made = build("corpus", tmp_path, inputs, engine)
        finally:
            over.set()
            killer.join()
    assert content(made) == expected["corpus"]
    assert killed, "nobody was at work long enough to be killed"


def test_the_driver_killed_leaves_no_store_and_no_litter_after_the_next_build(
    inputs: list[Path], tmp_path: Path
) -> None:
    words = [*map(str, inputs), "--out", str(tmp_path), "--shard-bytes", str(SHARD_BYTES), "--quiet"]
    command = [sys.executable, "-m", "hdtool.cli", "build-corpus-db", *words, "--engine", "ray", "--workers", "2"]
    driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("documents-*")):
        assert driver.poll() is None and time.monotonic() < deadline, driver.stderr and driver.stderr.read()
        time.sleep(0.02)
    family = psutil.Process(driver.pid).children(recursive=True)
    workers = [process for process in family if "Agent" not in process.name()]  # these look around now and then
    driver.kill()
    driver.wait()
    assert list(tmp_path.glob("documents-*")) and not (tmp_path / MANIFEST).exists()
    assert not psutil.wait_procs(workers, timeout=30)[1], "Ray's processes end with the one that started them"
    assert run(["build-corpus-db", *words]) == 0
    left = {path.name for path in tmp_path.iterdir()} - {".lock", MANIFEST}
    assert left == {file.name for file in read_manifest(tmp_path).files.values()}


def test_workers_execute_nothing_of_the_current_folder(inputs: list[Path], tmp_path: Path) -> None:
    (folder := tmp_path / "current").mkdir()
    traps = Traps(folder)
    script = str(Path(sys.executable).parent / "hdtool")
    command = [script, "build-corpus-db", str(inputs[2]), "--out", str(tmp_path / "store"), "--engine", "ray"]
    done = subprocess.run([*command, "--workers", "2"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not traps.executed


def test_progress_is_shown(inputs: list[Path], tmp_path: Path) -> None:
    """To who looks: tqdm shows nothing in a file, so the build is given a terminal."""
    read_end, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 25, 100, 0, 0))
    command = [sys.executable, "-m", "hdtool.cli", "build-corpus-db", str(inputs[0]), "--out", str(tmp_path)]
    options = ["--shard-bytes", str(SHARD_BYTES), "--engine", "ray", "--workers", "2"]
    building = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    told = b""
    while building.poll() is None or select.select([read_end], [], [], 0)[0]:
        if select.select([read_end], [], [], 0.2)[0]:
            try:
                told += os.read(read_end, 4096)
            except OSError:  # the other end is closed
                break
    assert building.wait(60) == 0, told
    assert b"reading: 100%" in told and b"sorting: 100%" in told


# What goes wrong ---------------------------------------------------------------------------------


def complaint(capfd: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(["build-corpus-db", *arguments, "--engine", "ray", "--quiet"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    return line


def test_no_cluster_at_an_address(capfd: pytest.CaptureFixture[str], inputs: list[Path], tmp_path: Path) -> None:
    out = ["--out", str(tmp_path)]
    for address, told in (
        ("127.0.0.1:1", "no Ray cluster can be reached at 127.0.0.1:1 (Connection refused)"),
        ("auto", "address is 'auto': give HOST:PORT"),
    ):
        assert told in complaint(capfd, str(inputs[0]), *out, "--address", address)


def test_a_cluster_that_asks_for_a_token(cluster: Any, inputs: list[Path], tmp_path: Path) -> None:
    """Ray's own words are a line a second, and not what to do."""
    words = ["build-corpus-db", str(inputs[0]), "--out", str(tmp_path), "--engine", "ray", "--address", cluster.address]
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    command = [sys.executable, "-m", "hdtool.cli", *words]
    done = subprocess.run(command, env=without, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"the Ray cluster at {cluster.address} requires a token" in line and "RAY_AUTH_MODE=token" in line


def test_an_input_that_workers_do_not_see(cluster: Any) -> None:
    """A file of this process's own."""
    with open("/proc/self/comm", "rb") as opened:
        own = fcntl.fcntl(opened, fcntl.F_DUPFD, 900)  # a number that no worker has open
        reading = RecordReader([Path(f"/proc/self/fd/{own}")])
        with (
            ray_executor(cluster.address, None) as engine,
            pytest.raises(ClusterError, match=r"fd/9\d\d cannot be read by all workers: node .* does not see it"),
        ):
            engine.prepare(reading)
        os.close(own)


def test_what_a_worker_complains_of_is_told_here(
    capfd: pytest.CaptureFixture[str], cluster: Any, inputs: list[Path], tmp_path: Path
) -> None:
    (tmp_path / "binary.json").write_bytes(b"[\0]")
    given = [str(inputs[2]), str(tmp_path / "binary.json"), "--out", str(tmp_path / "store")]
    assert "binary.json holds binary data" in complaint(capfd, *given, "--address", cluster.address)
    assert not (tmp_path / "store" / MANIFEST).exists()


def test_too_many_bad_records(cluster: Any, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "good"}\n{"text": 1}\n{broken\n')
    reading = RecordReader([tmp_path / "bad.jsonl"])
    with (
        ray_executor(cluster.address, None) as engine,
        pytest.raises(RecordError, match=r"2 of 3 records cannot be used, the first at .*bad.jsonl:2 "),
    ):
        list(engine.documents(reading, load_tokenizer(ModelConfig())))


def test_a_shard_that_no_node_can_sort(cluster: Any, inputs: list[Path], tmp_path: Path) -> None:
    with ray_executor(cluster.address, None) as engine, pytest.MonkeyPatch.context() as patch:
        patch.setattr(engines, "SORT_MEMORY_FACTOR", 1 << 40)
        with pytest.raises(ClusterError, match=r"no node of the Ray cluster offers more.*smaller --shard-bytes"):
            build("corpus", tmp_path, inputs, engine)
    assert not (tmp_path / MANIFEST).exists()


def test_other_versions_on_a_node(cluster: Any, inputs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with ray_executor(cluster.address, None) as engine:
        monkeypatch.setattr(engines, "_versions", lambda: "hdtool 0.0.0")
        with pytest.raises(ClusterError, match=r"has hdtool \S+, .* this process has hdtool 0.0.0"):
            engine.prepare(RecordReader(inputs))
