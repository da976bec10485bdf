"""One engine in a process of its own: ``python -m tests.vllm.engine ASKED ANSWERED``, both JSON files.

With the number of a pipe in place of the files, it reads its options, and then requests to answer, from the pipe.

Asked are the engine's options, waves of requests and, optionally, how many requests of each wave run at a time: then
each wave gets a new drafter. Answered are the token ids of each request, the CPU time of each call of the drafter, and,
after each wave, its seconds of CPU time, what vLLM counted so far and what memory there was.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, so that its drafter can be watched
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
ROOT = Path(__file__).parent.parent.parent
TIMEOUT_SECONDS = 900
"""Seconds that an engine may take, compiling included."""
REMEMBERS_NOTHING = "NgramProposer"
"""vLLM's drafter that need not be made anew, which would compile it again."""
PROPOSER = "hdtool.runtime.integrations.vllm.HierarchyProposer"


def drafting(tokens: int = 8, **told: Any) -> dict[str, Any]:
    """Options of an engine that drafts with hdtool."""
    speculation = {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": tokens}
    return {"speculative_config": speculation, "additional_config": {"hdtool": told}}


class Watch:
    """Listens to what a drafter is asked and what it answers."""

    def __init__(self, drafter: Any, *, look: bool) -> None:
        """``look`` whether drafts come from the row's own context; this takes longer than all else."""
        self._looks = look
        self.seconds: list[tuple[int, float]] = []
        """Of the processor, by rows: on a machine that does other things, too, the clock would count these."""
        self.foreign = 0
        self._propose, drafter.propose = drafter.propose, self

    def __call__(self, *arguments: Any, **options: Any) -> list[list[int]]:
        started = time.process_time()
        drafts: list[list[int]] = self._propose(*arguments, **options)
        self.seconds.append((len(drafts), time.process_time() - started))
        if self._looks:
            self._look(drafts, *arguments)
        return drafts

    def _look(self, drafts: list[list[int]], *arguments: Any) -> None:
        """Count drafts that do not stand in the row's own context; without stores there must be none."""
        _, lengths, contexts = arguments
        for row, draft in enumerate(drafts):
            own = contexts[row, : lengths[row]].tolist()
            pairs = set(itertools.pairwise(own))
            self.foreign += any(pair not in pairs for pair in zip([own[-1], *draft], draft, strict=False))


def runner_of(engine: Any) -> Any:
    """The model runner, which has the drafter, of an engine that lives in this process."""
    return engine.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def limit_running(engine: Any, count: int) -> None:
    """Let an engine in this process run ``count`` requests at a time."""
    engine.llm_engine.engine_core.engine_core.scheduler.max_num_active_reqs = count


def answer(asked: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What an engine answers that runs in a process of its own."""
    question, found = folder / "asked.json", folder / "answered.json"
    question.write_text(json.dumps(asked))
    command = [sys.executable, "-m", __name__, str(question), str(found)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    answered: dict[str, Any] = json.loads(found.read_text())
    return answered


def resident() -> int:
    """Bytes in memory that are this process's own: neither pages of files nor what the allocator keeps in reserve."""
    ctypes.CDLL(None).malloc_trim(0)
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) << 10


def load(options: dict[str, Any]) -> Any:
    """Start an engine in this process."""
    os.environ |= HERE | dict(os.environ)
    from vllm import LLM

    return LLM(**{"dtype": "float32", "enforce_eager": True} | options)


def answered_by(engine: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """What an engine in this process answers."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    def structure(request: dict[str, Any]) -> dict[str, Any]:
        return {"structured_outputs": StructuredOutputsParams(json=request["schema"])} if "schema" in request else {}

    runner, watches = runner_of(engine), list[Watch]()
    drafts = runner.speculative_config is not None
    answered: dict[str, Any] = {"ids": [], "resident": [], "seconds": [], "counted": []}
    for number, wave in enumerate(asked["waves"]):
        if at_a_time := asked.get("at a time"):
            limit_running(engine, at_a_time[number])
        if drafts and at_a_time and type(runner.drafter).__name__ != REMEMBERS_NOTHING:
            runner.drafter = type(runner.drafter)(runner.vllm_config)
        if drafts and (at_a_time or not number):
            watches.append(Watch(runner.drafter, look=asked.get("look", False)))
        prompts = [{"prompt_token_ids": request["prompt"]} for request in wave]
        sampling = [SamplingParams(**request["sampling"], **structure(request)) for request in wave]
        started = time.process_time()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        answered["seconds"].append(time.process_time() - started)
        answered["ids"] += [list(output.outputs[0].token_ids) for output in outputs]
        answered["resident"].append(resident())
        answered["counted"].append(
            {metric.name: metric.value for metric in engine.get_metrics() if hasattr(metric, "value")}
        )
    if drafts:
        answered |= {
            "propose": [watch.seconds for watch in watches],
            "foreign": sum(watch.foreign for watch in watches),
        }
        drafter = getattr(runner.drafter, "drafter", None)
        if drafter is not None:
            answered["tables"] = len(drafter)
    return answered


def serve(asked: Connection) -> None:
    """Answer what comes through a pipe, until nothing more comes."""
    engine = load(asked.recv())
    while request := asked.recv():
        asked.send(answered_by(engine, request))


def main() -> None:
    if len(sys.argv) == 2:
        return serve(Connection(int(sys.argv[1])))
    asked = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(answered_by(load(asked["engine"]), asked)))


if __name__ == "__main__":
    main()
