"""llama.cpp among the contenders of a benchmark, by a stand-in for its library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hdtool.cli.app import run
from hdtool.data import demo
from hdtool.data.bench_results import read_results
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import ModelError
from hdtool.data.prompts import of_all_categories, read_prompts
from hdtool.data.spec_bench import AnsweredTurn
from hdtool.runtime.config import BenchConfig, DecodeConfig, ModelConfig, SamplingConfig
from hdtool.runtime.evaluation.bench_plan import Plan
from hdtool.runtime.evaluation.lineup import Lineup
from hdtool.runtime.evaluation.llama_cpp_peer import LlamaCppContender, why_not
from hdtool.runtime.model.load import Loaded, load
from hdtool.runtime.stores.store_set import StoreSet
from tests.support import fake_llama_cpp

FILE = Path("model.gguf")
TOKENS = 24
PLACES = ("llama_cpp_peer", "lineup")


@pytest.fixture(scope="module")
def embedded() -> Loaded:
    return load(ModelConfig())


@pytest.fixture(scope="module")
def plain(embedded: Loaded) -> dict[tuple[int, ...], AnsweredTurn]:
    """The plain answers to two prompts."""
    lineup = Lineup(embedded, StoreSet(), ModelConfig(), DecodeConfig(max_new_tokens=TOKENS), SamplingConfig())
    contender = lineup.contenders(["ar"])["ar"]
    prompts = of_all_categories(read_prompts(demo.PROMPTS), 2)
    asked = [encode_conversation(embedded.tokenizer, prompt.messages) for prompt in prompts]
    return {tuple(ids): contender.answer(ids) for ids in asked}


@pytest.mark.parametrize("lookup", [False, True])
def test_the_answer_and_its_passes_are_those_of_the_library(
    embedded: Loaded, plain: dict[tuple[int, ...], AnsweredTurn], monkeypatch: pytest.MonkeyPatch, lookup: bool
) -> None:
    answers = {ids: [*turn.output_ids, *[5] * 8] for ids, turn in plain.items()}
    made = fake_llama_cpp.install(monkeypatch, answers)
    contender = LlamaCppContender(embedded, FILE, TOKENS, lookup=lookup)
    for ids, expected in plain.items():
        found = contender.fresh().answer(list(ids))
        assert (found.output_ids, found.text, found.finish) == (expected.output_ids, expected.text, expected.finish)
        assert found.step_tokens == made[0].passes and found.seconds > 0
        assert (max(found.step_tokens) > 1) == lookup == (found.nodes > 0)
        assert found.nodes >= len(found.output_ids) - len(found.step_tokens)
    (llama,) = made
    assert (llama.path, llama.options["n_ctx"], llama.options["n_gpu_layers"]) == (str(FILE), 2048, 0)
    assert llama.options["n_threads"] == llama.options["n_threads_batch"] == torch.get_num_threads()
    assert llama.options["logits_all"] == lookup


def test_an_answer_ends_at_an_end_token(
    embedded: Loaded, plain: dict[tuple[int, ...], AnsweredTurn], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, (end, *_) = next(iter(plain)), sorted(embedded.stops)
    fake_llama_cpp.install(monkeypatch, {ids: [7, 8, end, 9]})
    found = LlamaCppContender(embedded, FILE, TOKENS, lookup=True).answer(list(ids))
    assert (found.output_ids, found.finish) == ([7, 8, end], "stop")


def test_no_answer_is_given_from_the_kv_cache_of_another(
    embedded: Loaded, plain: dict[tuple[int, ...], AnsweredTurn], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = fake_llama_cpp.install(monkeypatch, {ids: [5] * 99 for ids in plain})
    contender = LlamaCppContender(embedded, FILE, TOKENS, lookup=False)
    ids = list(next(iter(plain)))
    assert [contender.answer(ids).seconds > 0 for _ in range(3)] == [True] * 3
    (llama,) = made
    assert llama.reused == [0, 0, 0]
    for _ in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
        break
    assert llama.reused[-1] == len(ids), "without the reset, the library reuses it"


def test_a_longer_question_gets_a_longer_kv_cache(embedded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hdtool.runtime.evaluation.llama_cpp_peer.LEAST_CONTEXT", 64)
    short, long = (5,) * 40, (5,) * 41
    made = fake_llama_cpp.install(monkeypatch, {short: [6] * 99, long: [6] * 99})
    contender = LlamaCppContender(embedded, FILE, TOKENS, lookup=False)
    for ids in (short, short, long, short):
        contender.answer(list(ids))
    assert [llama.options["n_ctx"] for llama in made] == [64, 128]


def test_a_file_that_it_cannot_load_is_named(embedded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_llama_cpp.install(monkeypatch, {})

    def fail(*arguments: object, **options: object) -> None:
        raise ValueError("Failed to load model from file: model.gguf")

    monkeypatch.setattr("llama_cpp.Llama", fail)
    with pytest.raises(ModelError, match=r"llama\.cpp cannot load model\.gguf \(Failed to load model from file"):
        LlamaCppContender(embedded, FILE, TOKENS, lookup=False).answer([5])


def test_a_bench_tells_how_many_answers_are_identical(
    plain: dict[tuple[int, ...], AnsweredTurn],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One answer differs, as by rounding: the run succeeds and counts it."""
    answers = {ids: [*turn.output_ids, 5] for ids, turn in plain.items()}
    first = next(iter(answers.values()))
    first[3] += 1
    fake_llama_cpp.install(monkeypatch, answers)
    for place in PLACES:
        monkeypatch.setattr(f"hdtool.runtime.evaluation.{place}.gguf_file", lambda model: FILE)
    few = ["--num-prompts", "2", "--max-new-tokens", f"{TOKENS}", "--warm-up", "0", "--quiet", "--methods", "ar"]
    asked = ["bench", *few, "--peers", "--out", str(tmp_path)]
    assert run([*asked, "--json"]) == 0
    overall = json.loads(capfd.readouterr().out)["tasks"]["overall"]
    assert list(overall) == ["generate", "generate-pld", "llama.cpp", "llama.cpp-pld", "ar"]
    assert [score["identical"] for score in overall.values()] == [2, 2, 1, 1, 2]
    assert overall["llama.cpp"]["tokens_per_step"] == 1.0 < overall["llama.cpp-pld"]["tokens_per_step"]
    assert read_results(tmp_path).run.surroundings["llama_cpp"] == "0.0.1"
    assert run(asked) == 0
    assert "\nllama.cpp (0.0.1) rounds activations: its answers may differ" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("model", "sampling", "installed", "said"),
    [
        (None, SamplingConfig(), True, "runs on GGUF files, and hdtool-demo is none: name one with --model"),
        ("some/model", SamplingConfig(), True, "runs on GGUF files, and some/model is none"),
        ("model.gguf", SamplingConfig(), False, "needs llama-cpp-python, not installed here: pip install llama-cpp"),
        ("model.gguf", SamplingConfig(temperature=0.5), True, "is measured with greedy answers alone"),
        ("model.gguf", SamplingConfig(repetition_penalty=1.2), True, "is measured with greedy answers alone"),
        ("model.gguf", SamplingConfig(repetition_penalty=1.0), True, ""),
    ],
)
def test_what_it_needs_is_told_if_it_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str | None,
    sampling: SamplingConfig,
    installed: bool,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    FILE.write_bytes(b"GGUF")
    monkeypatch.setattr("hdtool.runtime.evaluation.llama_cpp_peer.find_spec", lambda name: installed or None)
    assert why_not(ModelConfig(model), sampling).startswith(said)
    plan = Plan([], BenchConfig(("ar", "llama.cpp-pld"), out="out"), ModelConfig(model), sampling=sampling)
    monkeypatch.setattr("hdtool.runtime.evaluation.bench_plan.load", lambda config: pytest.fail("the model is loaded"))
    if said:
        with pytest.raises(ModelError, match=f"^llama.cpp-pld {said}"):
            plan.results()


def test_peers_are_added_to_the_methods_as_far_as_they_can_run() -> None:
    config = BenchConfig(("hd", "generate-pld"), peers=True)
    assert config.chosen(has_corpus=False) == ("generate", "hd", "generate-pld")
    assert config.chosen(has_corpus=False, llama_cpp=True)[:4] == ("generate", "llama.cpp", "llama.cpp-pld", "hd")
    assert "generate-assisted" in replace(config, assistant="x").chosen(has_corpus=False)
    assert replace(config, peers=False).chosen(has_corpus=False, llama_cpp=True) == config.methods
    assert not {"llama.cpp", "llama.cpp-pld"} & set(BenchConfig().chosen(has_corpus=True))


def test_further_temperatures_leave_it_out() -> None:
    plan = Plan([], BenchConfig(("ar", "llama.cpp")))
    assert plan.at(0.7).bench.methods == ("ar",)
    assert plan.at(0.0).bench.methods == ("ar", "llama.cpp")
