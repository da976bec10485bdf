"""What the code for CUDA does on a simulated device: the CPU's tokens, few kernels, copies and waits, few captures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.device_processes import needs_no_cuda, scenarios
from tests.support.families import FAMILIES
from tests.support.simulated_cuda.counts import COPY_IN, COPY_OUT, KERNEL, REPLAY, REPLAYED, WAIT, waits

pytestmark = needs_no_cuda


class Kernels(NamedTuple):
    """The most kernels of a captured step."""

    per_layer: int
    others: int


KERNELS = {
    "llama": (Kernels(16, 37), Kernels(18, 37)),
    "gemma2": (Kernels(23, 51), Kernels(25, 51)),
    "gemma3": (Kernels(21, 57), Kernels(23, 57)),
    "gpt2": (Kernels(21, 29), Kernels(22, 29)),
    "qwen3_moe": (Kernels(34, 37), Kernels(36, 37)),
}
"""Those of a step of one row, and of one of many rows: as many as today, without Triton.

Of those of a layer of experts, 19 are the library's code of them.
"""


COMMIT = 12
"""Kernels that write the states of an accepted path, without Triton."""
WRITTEN_STATES = 2
"""Those with Triton: of the convolutions of all layers, and of the recurrences."""
RANKINGS = 3
"""Kernels that rank tokens outside of a graph, which may not overwrite the states."""
RECURRENT_STEP = 215
"""Kernels of a step of one gated delta layer and one of attention."""
EXTRA_WAITS = {"hd": 0, "sampled": 0, "hd, sampled": 8}
"""Waits of a step beside the one for its pass, to read a row of logits for each token but the first."""
REPLAYS = {"hd": 2, "sampled": 1, "hd, sampled": 2}
"""Replays of a step: of its pass, and of rankings, if a drafter reads them."""
EXTRA_KERNELS = {"hd": 0, "sampled": 2, "hd, sampled": 2}
"""Kernels that are not captured, to read rows of logits."""
KERNELS_AROUND_A_BLOCK = 5
"""Kernels that are not captured, which gather the hidden states of the accepted tokens."""
CAPTURES_BEFORE, CAPTURES_WITHIN = 11, 0
"""Until the first answer begins, two for each size and one of no step; and within answers, which have up to 512 tokens
if passes read an extent."""
NOTICED_BY_TOKENS = {
    "no wait for a step",
    "input reused before its copy",
    "logits left in the pool",
    "steps kept over new memory",
    "moves forgotten",
}
NOTICED_BY_FAULTS = {
    "tensor of a list in a capture": "cannot copy from memory that is not pinned during a capture",
    "number read in a capture": "operation not permitted when stream is capturing: reads a number",
    "indices on the host": "expected all tensors on cuda:0, but one of aten::index_select is on the CPU",
}
NOTICED_BY_WAITS = {"blocking copies"}
NOT_CAPTURED = {"falcon": "cannot copy from memory that is not pinned during a capture"}
"""Families whose code a graph cannot record, and why: Falcon makes a tensor of a number of the host in each layer."""
BY_LEVELS = {"jamba"}
"""Families whose passes depend on the shape of the tree, so that none is captured."""
FIRST = "llama", "qwen3_5"
"""Families that stand for the others: the usual layers, and recurrent ones."""
OFTEN = ("gpt_oss",), ("qwen3_5", "jamba")
"""Families of the long suite, each of a kind of its own; the exhaustive one has all."""
AT_ONCE = 5
"""Families that a process decodes with."""
BLOCKS = "dflash", "dspark", "dspark, gated", "dspark, rnn"
SMALL_MODELS = ("draft_models", "wrong"), ("assistants", "usual"), ("assistants", "clusters")
NEAR_TIE = 0.1
"""The distance of two logits, in standard deviations, of which bfloat16 may prefer either."""


def groups_of_families() -> list[Any]:
    """A few processes for all families, as each takes seconds to start."""
    others = sorted(set(FAMILIES).difference(*OFTEN))
    rarer = [others[first : first + AT_ONCE] for first in range(0, len(others), AT_ONCE)]
    of_long = [pytest.param(group, id=group[0]) for group in OFTEN]
    return [*of_long, *(pytest.param(group, id=group[0], marks=pytest.mark.exhaustive) for group in rarer)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which nothing was measured."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(
    scope="module",
    params=[pytest.param(names, marks=pytest.mark.long) for names in (FIRST, tuple(sorted({*KERNELS} - {*FIRST})))],
    ids=" and ".join,
)
def answers(home: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = scenarios(home, "answers", *request.param)["answers"]
    return found


def counted(answers: dict[str, Any]) -> list[str]:
    """Families whose kernels are limited."""
    return [name for name in KERNELS if name in answers]


@pytest.fixture(scope="module")
def others(home: Path) -> dict[str, Any]:
    """Groups that are short, in one process."""
    return scenarios(
        home,
        "assistants,blocks,changes,captures,draft_models,reserved,sampled,heads,hidden_without_extents,hydra,mtp,without_recovery,"
        "long_moves,short_memory,replaced_weights,refused_waits,basics",
    )


def test_answers_are_those_of_the_cpu(answers: dict[str, Any]) -> None:
    assert not answers["faults"]
    for family in counted(answers):
        found = answers[family]
        assert {way: answer["tokens"] for way, answer in found["ways"].items()} == found["expected"], family
        assert found["captures"], family
        assert found["fused"] == (family != "gpt2")


def test_a_captured_step_copies_in_and_out_and_waits_once(answers: dict[str, Any]) -> None:
    for family in counted(answers):
        for way in ("plain", "lying drafter"):
            steps = answers[family]["ways"][way]["steps"]
            assert len(steps) > 3
            for step in steps:
                expected = {COPY_IN: 1, COPY_OUT: 1, REPLAY: 1, WAIT + "an event": 1}
                assert step == {**expected, REPLAYED: step[REPLAYED]}, (family, way, answers["lines"])


def test_a_captured_step_of_a_batch_copies_in_and_out_once(answers: dict[str, Any]) -> None:
    for family in counted(answers):
        batch = answers[family]["batch"]
        assert batch["tokens"] == answers[family]["expected of slots"], family
        assert len(batch["steps"]) > 3
        for step in batch["steps"]:
            assert (step[COPY_IN], step[COPY_OUT], step[REPLAY]) == (1, 1, REPLAYS["hd"]), family
            assert KERNEL not in step and step[WAIT + "an event"] == 1, family
            assert waits(Counter(step)) == 1, (family, answers["lines"])


def test_what_a_step_costs_for_rankings_and_samples_is_bounded(answers: dict[str, Any]) -> None:
    for family in counted(answers):
        for way, extra in EXTRA_WAITS.items():
            steps: list[Counter[str]] = list(map(Counter, answers[family]["ways"][way]["steps"]))
            for step in steps:
                # Beside the outcome, the logits of each row that decides are copied.
                assert step[COPY_OUT] <= 1 + ("sampled" in way) + extra
                assert (step[COPY_IN], step[REPLAY]) == (1, REPLAYS[way])
                assert waits(step) <= 1 + extra, (family, way, answers["lines"])
                assert step[KERNEL] <= EXTRA_KERNELS[way], (family, way, answers["lines"])


def test_the_kernels_of_a_step_are_bounded(answers: dict[str, Any]) -> None:
    for family in counted(answers):
        layers, more = answers[family]["layers"]
        for way, budget in zip(("plain", "lying drafter"), KERNELS[family], strict=True):
            few, many = (
                max(step[REPLAYED] for step in found[way]["steps"])
                for found in (answers[family]["ways"], answers[family]["deeper"])
            )
            per_layer = (many - few) / (more - layers)
            assert per_layer <= budget.per_layer, (family, way)
            assert few - layers * per_layer <= budget.others, (family, way)


@pytest.mark.long
def test_a_step_with_recurrent_layers_waits_once(home: Path) -> None:
    """The states of the accepted path are written after a step, of all layers at once."""
    answers = scenarios(home, "answers", *FIRST)["answers"]
    assert not answers["faults"]
    found = answers["qwen3_5"]
    assert {way: answer["tokens"] for way, answer in found["ways"].items()} == found["expected"]
    assert found["batch"]["tokens"] == found["expected of slots"] and found["captures"]
    for way in ("plain", "lying drafter"):
        steps: list[Counter[str]] = list(map(Counter, found["ways"][way]["steps"]))
        for step in steps:
            assert (step[COPY_OUT], step[REPLAY], waits(step)) == (1, 1, 1)
            assert step[COPY_IN] == 1 and step[KERNEL] <= COMMIT
            assert step[REPLAYED] <= RECURRENT_STEP
    for step in map(Counter[str], found["batch"]["steps"]):
        assert (step[COPY_IN], step[COPY_OUT], step[REPLAY], waits(step)) == (1, 1, 1, 1)
        assert step[KERNEL] <= len(found["expected of slots"]) * COMMIT + RANKINGS


@pytest.mark.long
def test_the_captures_before_and_within_answers_are_bounded(others: dict[str, Any]) -> None:
    found = others["captures"]
    assert found["captures"] and not found["faults"]
    assert found["before"] <= CAPTURES_BEFORE
    assert sum(found["answers"]) <= CAPTURES_WITHIN


@pytest.mark.long
def test_sampling_waits_no_more_than_it_must(others: dict[str, Any]) -> None:
    """Top-k needs rankings alone, other draws wait for the rows after the root, and penalties for each token."""
    found, expected = others["sampled"]["found"], others["sampled"]["expected"]
    assert not others["sampled"]["faults"]
    for name, answers in found.items():
        assert {way: answer["tokens"] for way, answer in answers.items()} == dict.fromkeys(answers, expected[name])
        for answer in answers.values():
            drawn = "T" in name and "penalised" not in name
            for waited, tokens in answer["waits and tokens"]:
                extra = tokens if "penalised" in name else tokens - 1 if drawn and "top-k" not in name else 0
                assert waited <= 1 + extra, (name, others["sampled"]["lines"])


@pytest.mark.long
@pytest.mark.parametrize("family", FIRST)
def test_answers_that_take_turns_are_those_alone(family: str, home: Path) -> None:
    """Each token is compared within the scenario."""
    found = scenarios(home, "interleaved", family)["interleaved"]
    assert found["captures"] and not found["faults"]
    assert {"stream", "batch", "hook", "generate", "abandoned"} <= found["played"].keys()


@pytest.mark.long
@pytest.mark.parametrize(
    ("group", "drafter", "fewest"),
    [
        *(("blocks", drafter, 4) for drafter in BLOCKS),
        ("draft_models", "right", 3),
        *((group, drafter, 16) for group, drafter in SMALL_MODELS),
    ],
)
def test_a_draft_of_a_block_or_a_small_model_is_a_captured_pass(
    group: str, drafter: str, fewest: int, others: dict[str, Any]
) -> None:
    """Each step makes one beside the target's, with one copy in, one copy out and one wait for both."""
    found = others[group][drafter]
    for step in steps_with_drafts(found, fewest):
        assert step[REPLAY] == step[COPY_IN] == step[COPY_OUT] == step[WAIT + "an event"] == waits(step) == 2
        assert step[KERNEL] <= KERNELS_AROUND_A_BLOCK, found["lines"]


def steps_with_drafts(found: dict[str, Any], fewest: int) -> list[Counter[str]]:
    """The events of each step of a second answer; both answers must be those of the CPU."""
    assert not found["faults"]
    assert [answer["tokens"] for answer in found["found"]] == [found["expected"]] * 2
    steps: list[Counter[str]] = list(map(Counter, found["found"][1]["steps"]))
    assert len(steps) >= fewest
    return steps


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["heads", "hydra", "mtp"])
def test_a_draft_of_trained_heads_is_a_captured_pass(drafter: str, others: dict[str, Any]) -> None:
    """Also of those that draft token by token: the host waits for no pass of a draft but the last."""
    for step in steps_with_drafts(others[drafter], 4):
        assert step[REPLAY] == step[COPY_OUT] == step[WAIT + "an event"] == waits(step) == 2, others[drafter]["lines"]


@pytest.mark.long
@pytest.mark.parametrize("drafter", ["heads", "hydra", "mtp", *BLOCKS])
def test_only_the_last_piece_of_a_prompt_drafts(drafter: str, others: dict[str, Any]) -> None:
    """Earlier pieces only fill the drafter's cache, and nothing of them is copied to the host."""
    found = others["blocks"][drafter] if drafter in BLOCKS else others[drafter]
    one, three = found["pieces"]
    read = WAIT + "copies from the device to pageable memory"
    assert three[read] == one[read] > 0, found["lines"]
    assert three[KERNEL] - one[KERNEL] < 2 * one[KERNEL], "a piece that drafts takes as many kernels as the last one"


@pytest.mark.long
def test_steps_with_hidden_states_are_captured_before_the_first_answer(others: dict[str, Any]) -> None:
    found = others["hidden_without_extents"]
    assert not found["faults"]
    assert found["ahead"] > 1
    assert found["found"]["tokens"] == found["expected"]


@pytest.mark.long
def test_a_step_that_waits_is_refused_before_its_capture(others: dict[str, Any]) -> None:
    """Falcon's code makes tensors of numbers of the host: no capture fails by that, where none may."""
    told = others["without_recovery"]
    assert not told["faults"]
    assert {name: answer["tokens"] for name, answer in told["found"].items()} == told["expected"]
    assert told["found"]["llama"]["captures"] and not told["found"]["falcon"]["captures"]
    assert told["found"]["falcon"]["captured"] == 1, "that of nothing, which makes the seed of random numbers"


@pytest.mark.long
def test_a_pass_without_extents_is_captured_before_the_first_answer_and_never_again(others: dict[str, Any]) -> None:
    found = others["reserved"]
    assert found["captures"] and not found["faults"]
    assert found["tokens"] == found["expected"] and found["length"] > 512
    assert found["before"] <= CAPTURES_BEFORE
    assert found["answers"] == [0, 0, 0]
    assert found["capacities"][0] >= 4096 and found["capacities"][1] >= 4096, "all that the model can read"


@pytest.mark.long
def test_a_path_that_no_step_moves_is_moved_without_a_wait(others: dict[str, Any]) -> None:
    found = others["long_moves"]
    assert not found["faults"]
    assert found["found"] == pytest.approx(found["expected"], abs=1e-4)
    assert found["events"].keys() == {KERNEL}, found["lines"]


@pytest.mark.long
def test_a_capture_without_enough_memory_is_not_lost_for_ever(others: dict[str, Any]) -> None:
    found = others["short_memory"]
    assert found["captures"] and not found["faults"]
    for name in ("once", "for a while", "no longer"):
        case = found[name]
        assert case["tokens"] == case["expected"] and case["same pass"], name
        assert case["captured"] and case["replayed"], name


@pytest.mark.long
def test_graphs_are_captured_again_however_often_weights_are_replaced(others: dict[str, Any]) -> None:
    found = others["replaced_weights"]
    assert found["found"] == [True] * 3 and found["captures"] and not found["faults"]


@pytest.mark.long
def test_operations_that_wait_are_refused_in_one_thread_only(others: dict[str, Any]) -> None:
    found = others["refused_waits"]
    free = {"arithmetic", "indices of the device", "part", "new tensors", "on the host"}
    assert {name for name, refused in found["refused"].items() if not refused} == free
    assert not found["elsewhere"]


@pytest.mark.long
def test_a_model_that_changes_between_answers_gives_the_tokens_of_the_cpu(others: dict[str, Any]) -> None:
    found = others["changes"]
    assert found["device"] == found["expected"] and not found["faults"]
    for change, answer in found["device"].items():
        assert answer["after"] != answer["before"], change
    assert all(found["captures"])


@pytest.mark.long
def test_the_device_works_late_and_forgets(others: dict[str, Any]) -> None:
    found = others["basics"]
    assert found["read before and after a wait"] == [[0.0, 0.0], [1.0, 1.0]]
    assert found["written before the copy out of it"] == [5.0, 5.0]
    assert found["memory that nothing has written"] == [True, True]
    refused = "a graph uses freed memory: aten::add_.Tensor"
    assert found["graphs"] == {"found": [2.0], "overwritten": [True], "again": [4.0], "refused": refused}
    assert found["waits of a copy of parts"] == 1
    assert found["waits"] == 9, "one for the device, one for each list and each capture, and one for parts"
    assert found["faults"][0].startswith(refused) and len(found["faults"]) == 1


@pytest.mark.long
def test_faults_of_device_code_are_noticed(home: Path) -> None:
    found = scenarios(home, "mutations")["mutations"]
    sound = found.pop("nothing")
    assert sound == {"tokens differ": False, "captures": True, "faults": [], "raised": "", "most waits": 1}
    assert found.keys() == NOTICED_BY_TOKENS | NOTICED_BY_FAULTS.keys() | NOTICED_BY_WAITS
    for name, symptoms in found.items():
        if name in NOTICED_BY_TOKENS:
            assert symptoms["tokens differ"], name
        elif name in NOTICED_BY_WAITS:
            assert symptoms["most waits"] > sound["most waits"], name
        else:
            assert symptoms["faults"][0].startswith(NOTICED_BY_FAULTS[name])
            assert not symptoms["captures"] and not symptoms["tokens differ"]


@pytest.mark.long
@pytest.mark.parametrize("names", groups_of_families())
def test_all_families_conform(names: list[str], home: Path) -> None:
    found = scenarios(home, "families", *names, module="device_long_scenarios")["families"]
    for name, family in found.items():
        if name in NOT_CAPTURED:
            assert family["faults"][0].startswith(NOT_CAPTURED[name]) and not family["captures"]
        else:
            assert family["captures"] == (name not in BY_LEVELS) and not family["faults"], name


@pytest.mark.parametrize("names", groups_of_families())
@pytest.mark.long
def test_bfloat16_prefers_other_tokens_in_near_ties_only(names: list[str], home: Path) -> None:
    found = scenarios(home, "bfloat16", *names, module="device_long_scenarios")["bfloat16"]
    for name, family in found.items():
        assert max(family["gaps"]) < NEAR_TIE, name
        assert family["captures"] == (name not in NOT_CAPTURED and name not in BY_LEVELS), name


@pytest.mark.long
def test_grammars_are_kept_as_on_the_cpu(home: Path) -> None:
    found = scenarios(home, "grammars", module="device_long_scenarios")["grammars"]
    assert not found["faults"]
    for way, answers in found["found"].items():
        assert answers == found["expected"], way


@pytest.mark.long
def test_every_method_gives_the_tokens_of_the_cpu(home: Path) -> None:
    found = scenarios(home, "methods", module="device_long_scenarios")["methods"]
    assert found["captures"] and not found["faults"]
    for method, answers in found["found"].items():
        assert answers == found["expected"], method


STEP_KERNELS = {"qwen3_5": 470, "nemotron_h": 260, "falcon_h1": 690, "lfm2": 190}
"""The most kernels of a step of a hybrid with as many layers as a published model, with Triton, of 1 row and of 64."""


@pytest.mark.long
def test_the_kernels_of_a_hybrids_step_are_bounded(home: Path) -> None:
    pytest.importorskip("triton")
    found = scenarios(home, "kernels", *STEP_KERNELS, module="device_kernels")["kernels"]
    for name, most in STEP_KERNELS.items():
        for kernels in found[name].values():
            assert sum(kernels.values()) <= most <= 700, (name, kernels)


@pytest.mark.exhaustive
def test_a_captured_step_whose_draws_are_races_copies_in_and_out_and_waits_once(home: Path) -> None:
    pytest.importorskip("triton")
    answers = scenarios(home, "sampled", FIRST[0], module="device_kernels")["sampled"]
    expected = answers["expected"]
    assert answers["captures"] and not answers["faults"]
    for name, ways in answers["found"].items():
        for way, answer in ways.items():
            assert answer["tokens"] == expected[name], (name, way)
            for step, (_, size) in zip(map(Counter[str], answer["steps"]), answer["waits and tokens"], strict=True):
                read = size if way == "undecided" else 0
                assert (step[COPY_IN], waits(step)) == (1, 1 + read), (name, way, answers["lines"])
                assert step[COPY_OUT] == 1 + read and step[REPLAY] == 2 + (way == "hd"), (name, way)
                assert step[KERNEL] == 0 or read, (name, way)
        assert any(size > 1 for _, size in ways["lying drafter"]["waits and tokens"])
    assert answers["batch"] == expected, "beside answers that no race decides"


@pytest.mark.long
def test_a_hybrids_answers_by_kernels_are_those_of_the_cpu(home: Path) -> None:
    pytest.importorskip("triton")
    answers = scenarios(home, "answers", FIRST[1], module="device_kernels")["answers"]
    assert not answers["faults"]
    found = answers["found"][FIRST[1]]
    assert found["fused"]
    for answer in found["answers"].values():
        assert answer["tokens"] == found["expected"] and answer["steps"]
        for step in map(Counter[str], answer["steps"]):
            assert step[COPY_IN] == step[COPY_OUT] == step[REPLAY] == waits(step) == 1
            assert step[KERNEL] == WRITTEN_STATES, answers["lines"]
