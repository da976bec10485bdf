"""llama.cpp among the contenders of a benchmark, by a stand-in for its library."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from hdtool.builders.evaluation.bench_plan import BenchPlan, ContenderFactory
from hdtool.builders.evaluation.llama_cpp_peer import (
    BUILD_KEY,
    LlamaCppContender,
    build_notes,
    check_same_model,
    describe_build,
    exclusion_reason,
    quantization_name,
    row_files,
)
from hdtool.cli.app import run
from hdtool.cli.result_tables import TABLE_WIDTH
from hdtool.data import demo
from hdtool.data.answered_questions import AnsweredTurn
from hdtool.data.bench_results import read_results
from hdtool.data.chat import encode_conversation
from hdtool.data.errors import ModelError, OptionError
from hdtool.data.gguf_header import GGUFHeader, GGUFTensor
from hdtool.data.prompts import interleave_categories, read_prompts
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.measuring import BenchConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded
from tests.support import fake_llama_cpp
from tests.support.gguf_files import tiny_llama, write_gguf

FILE = Path("model.gguf")
TOKENS = 24
PEER = "hdtool.builders.evaluation.llama_cpp_peer"


@pytest.fixture(scope="module")
def plain(embedded: Loaded) -> dict[tuple[int, ...], AnsweredTurn]:
    """The plain answers to two prompts."""
    lineup = ContenderFactory(
        embedded, StoreSet(), ModelConfig(), DecodeConfig(max_new_tokens=TOKENS), SamplingConfig()
    )
    contender = lineup.contenders(["ar"])["ar"]
    prompts = interleave_categories(read_prompts(demo.PROMPTS), 2)
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
    monkeypatch.setattr("hdtool.builders.evaluation.llama_cpp_peer.MIN_CONTEXT", 64)
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


def same_sizes(path: Path, kind: str = "F32", **changed: int) -> Path:
    """A GGUF file with random weights of the embedded model's sizes."""
    config = AutoConfig.from_pretrained(demo.MODEL)
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "tie_word_embeddings")
    return write_gguf(path, tiny_llama(**{**{size: getattr(config, size) for size in sizes}, **changed}), kind)


def test_a_bench_tells_how_many_answers_are_identical(
    plain: dict[tuple[int, ...], AnsweredTurn],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One answer differs, as by rounding: the run succeeds and counts it, and names what llama.cpp is."""
    answers = {ids: [*turn.output_ids, 5] for ids, turn in plain.items()}
    first = next(iter(answers.values()))
    first[3] += 1
    made = fake_llama_cpp.install(monkeypatch, answers)
    monkeypatch.setattr(f"{PEER}.has_feature", lambda name: name in ("avx2", "avx512f", "avx512vnni"))
    own, other = same_sizes(tmp_path / "own.gguf", "Q4_1"), same_sizes(tmp_path / "other.gguf", "Q4_0")
    monkeypatch.setattr(f"{PEER}.gguf_file", lambda model: own)
    few = ["--num-prompts", "2", "--max-new-tokens", f"{TOKENS}", "--warm-up", "0", "--quiet", "--methods", "ar"]
    out = tmp_path / "out"
    asked = ["bench", *few, "--peers", "--llama-cpp-file", str(other), "--out", str(out)]
    assert run([*asked, "--json"]) == 0
    printed = json.loads(capfd.readouterr().out)
    overall = printed["tasks"]["overall"]
    assert list(overall) == ["generate", "generate-pld", "llama.cpp", "llama.cpp-pld", "llama.cpp-file", "ar"]
    assert [score["identical"] for score in overall.values()] == [2, 2, 1, 1, 1, 2]
    assert {llama.path for llama in made} == {str(own), str(other)}
    assert printed["llama_cpp"] == {
        "version": "0.0.1",
        "llama_cpp_version": None,
        "features": ["SSE3", "AVX", "AVX2", "F16C", "FMA", "BMI2", "REPACK"],
        "lacking": ["AVX512", "AVX512_VNNI"],
        "files": {
            "llama.cpp": {"file": "own.gguf", "quantization": "Q4_1"},
            "llama.cpp-pld": {"file": "own.gguf", "quantization": "Q4_1"},
            "llama.cpp-file": {"file": "other.gguf", "quantization": "Q4_0"},
        },
    }
    assert overall["llama.cpp"]["tokens_per_step"] == 1.0 < overall["llama.cpp-pld"]["tokens_per_step"]
    assert read_results(out).run.surroundings["llama_cpp"] == "0.0.1"
    assert run(asked) == 0
    shown = capfd.readouterr().out
    assert "\nllama.cpp (0.0.1) rounds activations: its answers may differ" in shown
    assert max(map(len, shown.splitlines())) <= TABLE_WIDTH
    words = " ".join(shown.split())
    assert "llama.cpp on own.gguf (Q4_1), " in words and "llama.cpp-file on other.gguf (Q4_0)" in words
    assert "llama-cpp-python 0.0.1, built with SSE3, AVX, AVX2, F16C, FMA, BMI2, REPACK" in words
    assert "is not its fastest: it lacks AVX512, AVX512_VNNI, which this machine has" in words


@pytest.mark.parametrize(
    ("on_gpu", "offloads", "lacking", "advice"),
    [
        (False, False, ["AVX2"], "CMAKE_ARGS=-DGGML_NATIVE=ON"),
        (True, False, ["GPU offload"], "CMAKE_ARGS=-DGGML_CUDA=ON"),
        (True, True, [], ""),
    ],
)
def test_what_a_build_lacks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, offloads: bool, lacking: list[str], advice: str
) -> None:
    fake_llama_cpp.install(monkeypatch, {}, "CPU : AVX = 1 | SVE_CNT = 16 | ", offloads=offloads)
    monkeypatch.setattr("llama_cpp.llama_version", lambda: b"1.2.3", raising=False)
    monkeypatch.setattr(f"{PEER}.has_feature", lambda name: name in ("avx", "avx2"))
    build = describe_build({"llama.cpp": same_sizes(tmp_path / "own.gguf")}, on_gpu=on_gpu)
    assert (build["features"], build["lacking"]) == (["AVX", "SVE_CNT"], lacking)
    files, library, *notes = build_notes({BUILD_KEY: build})
    assert files == "llama.cpp on own.gguf (F32)"
    assert library == "llama-cpp-python 0.0.1 (llama.cpp 1.2.3), built with AVX, SVE_CNT"
    assert [note.endswith(advice) for note in notes] == [True] * bool(lacking)
    assert build_notes({}) == []


@pytest.mark.parametrize(
    ("values", "kinds", "expected"),
    [
        ({"general.file_type": 15}, {14: 9}, "Q4_K_M"),
        ({"general.file_type": 0}, {0: 9}, "F32"),
        ({"general.file_type": 1024}, {2: 9, 0: 1}, "Q4_0"),
        ({"general.file_type": 9999}, {8: 9, 0: 1}, "Q8_0"),
        ({}, {3: 9, 0: 1}, "Q4_1"),
        ({}, {777: 9}, "unknown quantization"),
        ({}, {}, "unknown quantization"),
    ],
)
def test_quantizations_have_the_names_of_llama_cpp(
    values: dict[str, int], kinds: dict[int, int], expected: str
) -> None:
    tensors = tuple(GGUFTensor(f"{kind}", numbers, kind, 0) for kind, numbers in kinds.items())
    assert quantization_name(GGUFHeader(values, tensors, 0)) == expected


def test_a_file_for_llama_cpp_is_of_the_same_model(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_llama_cpp.install(monkeypatch, {})
    text = tmp_path / "notes.txt"
    text.write_text("not a model")
    files = {
        tmp_path / "none.gguf": "which is no file: name a GGUF file of the same model",
        text: "is a file and not in GGUF format",
        same_sizes(tmp_path / "deep.gguf", num_hidden_layers=1): "a model of 1 layers, and hdtool-demo has 6",
        same_sizes(tmp_path / "wide.gguf", hidden_size=64): "a model of 64 columns, and hdtool-demo has 256",
    }
    out = tmp_path / "out"
    for file, said in files.items():
        asked = ["bench", "--num-prompts", "1", "--methods", "ar,llama.cpp-file", "--llama-cpp-file", str(file)]
        assert run([*asked, "--out", str(out), "--quiet"]) == 1
        assert said in " ".join(capfd.readouterr().err.split())
        assert not out.exists() or not list(out.glob("*.json*"))


def test_a_file_with_fewer_tokens_is_of_another_model(embedded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    header = GGUFHeader({"general.architecture": "llama", "tokenizer.ggml.tokens": 99}, (), 0)
    monkeypatch.setattr(GGUFHeader, "read", lambda path: header)
    with pytest.raises(
        ModelError, match=r"names model\.gguf, with 99 tokens, and the tokenizer of hdtool-demo has 4,0"
    ):
        check_same_model(FILE, embedded)


def test_a_model_in_another_form_is_compared_with_a_file_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{PEER}.find_spec", lambda name: True)
    model, greedy = ModelConfig("some/model"), SamplingConfig()
    files = row_files(model, "~/q4.gguf")
    assert files == {"llama.cpp-file": Path("~/q4.gguf").expanduser()}
    assert exclusion_reason("llama.cpp-file", files, model, greedy) == ""
    assert exclusion_reason("llama.cpp", files, model, greedy).startswith("runs on GGUF files")


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
    monkeypatch.setattr("hdtool.builders.evaluation.llama_cpp_peer.find_spec", lambda name: installed or None)
    config = ModelConfig(model)
    assert exclusion_reason("llama.cpp-pld", row_files(config), config, sampling).startswith(said)
    plan = BenchPlan([], BenchConfig(("ar", "llama.cpp-pld"), out="out"), ModelConfig(model), sampling=sampling)
    monkeypatch.setattr("hdtool.builders.evaluation.bench_plan.load", lambda config: pytest.fail("the model is loaded"))
    if said:
        with pytest.raises(ModelError, match=f"^llama.cpp-pld {said}"):
            plan.results()


def test_peers_are_added_to_the_methods_as_far_as_they_can_run() -> None:
    config = BenchConfig(("hd", "generate-pld"), peers=True)
    assert config.chosen(has_corpus=False) == ("generate", "hd", "generate-pld")
    runnable = ("llama.cpp", "llama.cpp-pld")
    assert config.chosen(has_corpus=False, llama_cpp=runnable)[:4] == ("generate", *runnable, "hd")
    assert "llama.cpp-file" in config.chosen(has_corpus=False, llama_cpp=("llama.cpp-file",))
    assert "generate-assisted" in replace(config, assistant="x").chosen(has_corpus=False)
    assert replace(config, peers=False).chosen(has_corpus=False, llama_cpp=runnable) == config.methods
    assert not {"llama.cpp", "llama.cpp-pld"} & set(BenchConfig().chosen(has_corpus=True))


def test_further_temperatures_leave_it_out() -> None:
    plan = BenchPlan([], BenchConfig(("ar", "llama.cpp")))
    assert plan.at(0.7).bench.methods == ("ar",)
    assert plan.at(0.0).bench.methods == ("ar", "llama.cpp")
    beside = BenchPlan([], BenchConfig(("ar", "llama.cpp-file"), llama_cpp_file="q4.gguf"))
    assert (beside.at(0.7).bench.methods, beside.at(0.7).bench.llama_cpp_file) == (("ar",), None)
    assert BenchPlan([], BenchConfig(llama_cpp_file="q4.gguf")).at(0.7).bench.methods is None


@pytest.mark.parametrize(
    ("methods", "file", "said"),
    [
        (("ar",), "q4.gguf", "left out without the method llama.cpp-file"),
        (("ar", "llama.cpp-file"), None, "another GGUF file of the model for llama.cpp-file"),
    ],
)
def test_the_file_and_the_method_go_together(methods: tuple[str, ...], file: str | None, said: str) -> None:
    with pytest.raises(OptionError, match=said):
        BenchConfig(methods, llama_cpp_file=file)
