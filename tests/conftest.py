"""Shared set-up: quiet libraries, one thread a worker, no network, a home of the tests' own."""

import gc
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Workers share the cores with the processes that tests start; two busy threads each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton's kernels run on the CPU, by its interpreter: it is chosen before Triton is imported, and torch may import it.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

HOME = TemporaryDirectory(prefix="hdtool-tests-")  # what is measured in tests is not kept for the user
os.environ["HDTOOL_HOME"] = HOME.name

collect_ignore = ["smoke"]  # for an installation: make test-newest
collect_ignore += [engine for engine in ("sglang", "vllm") if not find_spec(engine)]

FAMILIES = ("llama", "gemma2", "gpt2", "llama4")
"""Full, sliding and chunked attention, learned positions, a mixture of experts.

`make test` runs the first one and, by the name of a test, one of the others; `make test-long` a quarter of the rest.
"""
RUN_MODELS = {"builders", "decoding", "drafters", "evaluation", "integrations", "model", "server"}
"""Folders of slow tests: of many cases of one, `make test` runs every second, and `make test-long` the others."""
MANY_CASES = 4


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "each_value: of all combinations of parameters, `make test` runs as few as hold each value once, "
        "`make test-long` every sixteenth one of the others, and `make test-all` the rest",
    )
    config.addinivalue_line(
        "markers",
        "one_in(number): of its cases, `make test` runs every so many, `make test-long` those after them, "
        "and `make test-all` the rest",
    )
    # The process that hands tests to workers runs none, and loading torch takes seconds.
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        _set_up_libraries(max_examples=200 if config.getoption("markexpr") == "exhaustive" else 25)


def _set_up_libraries(max_examples: int) -> None:
    import hypothesis
    import torch
    from transformers.utils import logging

    from hdtool.builders.evaluation import timing
    from hdtool.runtime.budget import measure_passes

    # What is printed must not depend on how busy the machine is.
    timing.MAX_WAITED = timing.MAX_SPREAD = math.inf
    measure_passes.MAX_QUICK_REPETITIONS = 4  # the many small models of the tests would be timed for minutes
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    hypothesis.settings.register_profile(
        "hdtool", deadline=None, derandomize=True, print_blob=True, max_examples=max_examples
    )
    hypothesis.settings.load_profile("hdtool")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of a test's own."""
    monkeypatch.setenv("HDTOOL_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def torch_threads() -> Iterator[int]:
    """torch's number of threads, which a test may change."""
    import torch

    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def pytest_collection_finish() -> None:
    gc.freeze()  # collections need not look again at libraries and tests


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # nanobind reports objects that are left at exit


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    crossed: dict[str, list[pytest.Function]] = defaultdict(list)
    others: dict[str, list[pytest.Function]] = defaultdict(list)
    families: dict[str, list[pytest.Function]] = defaultdict(list)
    sampled: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    daily: dict[str, list[pytest.Function]] = defaultdict(list)
    soon = _families_of_tests(items)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            family, test = item.callspec.params.get("family"), item.nodeid.partition("[")[0]
            is_long = item.get_closest_marker("long") is not None
            is_crossed = item.get_closest_marker("each_value") and not is_long
            is_other = isinstance(family, str) and family not in (FAMILIES if is_long else soon[test])
            if is_crossed:
                (others if is_other else crossed)[test].append(item)
            elif is_other:
                families[test].append(item)
            elif (mark := item.get_closest_marker("one_in")) and not is_long:
                sampled[test, mark.args[0]].append(item)
            elif not is_long and not item.get_closest_marker("exhaustive") and item.nodeid.split("/")[1] in RUN_MODELS:
                daily[test].append(item)
    # The wheel and the script of GPU checks take longest: begun last, one worker would wait for the other.
    items.sort(key=lambda item: "project" not in item.path.parts)
    for test, cases in crossed.items():
        chosen = set(_each_value_once(cases))
        others[test] = [case for case in cases if case not in chosen] + others[test]
    for groups, step in ((others, 16), (families, 4)):
        for test, cases in groups.items():
            # Each test begins with another one, so that together they take all families.
            for number, case in enumerate(cases, crc32(test.encode())):
                case.add_marker(pytest.mark.exhaustive if number % step else pytest.mark.long)
    for (test, step), cases in sampled.items():
        for number, case in enumerate(cases, crc32(test.encode())):
            if number % step:
                case.add_marker(pytest.mark.long if number % step == 1 else pytest.mark.exhaustive)
    for cases in daily.values():
        for case in cases[1::2] if len(cases) >= MANY_CASES else ():
            case.add_marker(pytest.mark.long)


def _families_of_tests(items: list[pytest.Item]) -> dict[str, set[str]]:
    """By tests: the families that are not left to the exhaustive suite, in part."""
    found: dict[str, set[str]] = defaultdict(set)
    for item in items:
        family = item.callspec.params.get("family") if hasattr(item, "callspec") else None
        if family in FAMILIES:
            found[item.nodeid.partition("[")[0]].add(family)
    for test, known in found.items():
        if len(others := [family for family in FAMILIES[1:] if family in known]) > 1:
            known -= {*others} - {others[crc32(test.encode()) % len(others)]}
    return found


def _each_value_once(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Few cases that hold each value, and among those many pairs of values."""
    values = {case: {(name, repr(value)) for name, value in case.callspec.params.items()} for case in cases}
    pairs = {case: set(combinations(sorted(values[case]), 2)) for case in cases}
    missing, unpaired = set.union(*values.values()), set.union(*pairs.values())
    chosen = []
    while missing:
        best = max(cases, key=lambda case: (len(values[case] & missing), len(pairs[case] & unpaired)))
        chosen.append(best)
        missing -= values[best]
        unpaired -= pairs[best]
    return chosen


@pytest.fixture
def known_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward passes cost what this curve says; measuring them takes most of the time of a short answer."""
    from hdtool.runtime.budget.cost_curve import CostCurve
    from hdtool.runtime.drafters import drafter_factory

    monkeypatch.setattr(drafter_factory, "cost_curve_for", lambda target, batch: CostCurve.parse("0:1,64:2"))
