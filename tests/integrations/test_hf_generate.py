"""Decoding inside ``model.generate``: output, streams and return values equal those without hdtool."""

from __future__ import annotations

import copy
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from accelerate import cpu_offload
from transformers import (
    EosTokenCriteria,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
    SynthIDTextWatermarkingConfig,
    T5Config,
    T5ForConditionalGeneration,
    TextIteratorStreamer,
    TopKLogitsWarper,
    WatermarkingConfig,
)
from transformers.cache_utils import DynamicCache
from transformers.generation.streamers import BaseStreamer

from hdtool.data.errors import FamilyError, OptionError, PromptError, StoreError
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode
from hdtool.runtime.core.step import Finish
from hdtool.runtime.core.top_k_top_p import NOT_FINITE
from hdtool.runtime.integrations.generate_request import UnsupportedCallError
from hdtool.runtime.integrations.hf_generate import Generator, _Recorder
from hdtool.runtime.model.transformers_internals import cache_argument
from hdtool.runtime.settings.decoding import DecodeConfig, StoresConfig
from hdtool.runtime.settings.model import ModelConfig, SamplingConfig
from hdtool.runtime.target.load import Loaded, load
from hdtool.runtime.target.target import Target
from tests.support.families import VOCABULARY, model_of
from tests.support.oracle import generated, prompt_of
from tests.support.rehearsed import Rehearsed
from tests.support.samplers import sampler_of
from tests.support.trees import WrongDrafter

PROMPT = prompt_of(20)
MAX_NEW_TOKENS = 28


def ask(model: Any, prompt: list[int] | None = None, **options: Any) -> Any:
    ids = torch.tensor([prompt or PROMPT])
    settings = {"do_sample": False, "max_new_tokens": MAX_NEW_TOKENS, "attention_mask": torch.ones_like(ids), **options}
    return model.generate(ids, **settings)


def hooked(model: Any, truth: list[int], *, lies: int = 0, **options: Any) -> tuple[Any, WrongDrafter]:
    """The same call through the hook, with drafts that are partly true; and the drafter that lied."""
    wrong_drafter = WrongDrafter(len(PROMPT), truth, VOCABULARY, lies)
    return ask(model, custom_generate=Generator(wrong_drafter), **options), wrong_drafter


class Counting(LogitsProcessor):
    """A user's own processor, with a state, that writes into what it is given."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        self.lengths.append(input_ids.shape[1])
        scores[:, len(self.lengths) % VOCABULARY] = torch.inf
        return scores


PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram": {"no_repeat_ngram_size": 2},
    "min_length": {"min_new_tokens": 15, "eos_token_id": list(range(2, 60))},
    "bad_words": {"bad_words_ids": [[5], [7, 8], [11]]},
    "sequence_bias": {"sequence_bias": {(3,): 4.0, (3, 9): 10.0}},
    "suppress": {"suppress_tokens": list(range(0, 90, 3)), "begin_suppress_tokens": [1, 4, 7]},
    "forced_end": {"forced_eos_token_id": 6, "eos_token_id": 6},
    "decaying_length": {"exponential_decay_length_penalty": (5, 1.4), "eos_token_id": 6},
    "prompt_bias": {"encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2},
    "allowed": {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids[-1]) * 7 + step) % 97 for step in range(5)]},
    "guidance": {"guidance_scale": 1.5},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "normalized": {"renormalize_logits": True, "remove_invalid_values": True},
}
WARPERS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical": {"typical_p": 0.5},
    "epsilon, eta": {"epsilon_cutoff": 1e-3, "eta_cutoff": 1e-3},
    "top_h": {"top_h": 0.5},
    "synth_id": {"watermarking_config": SynthIDTextWatermarkingConfig(keys=[3, 5, 7, 11], ngram_len=3)},
    "all": {"temperature": 1.2, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
}


# Output ----------------------------------------------------------------------------------------


@pytest.mark.each_value
@pytest.mark.parametrize("options", PROCESSORS.values(), ids=PROCESSORS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "qwen3_moe", "deepseek_v3"])
def test_greedy_equals_generate(family: str, options: dict[str, Any]) -> None:
    model: Any = model_of(family)
    expected = ask(model, **options)
    truth = expected[0, len(PROMPT) :].tolist()
    found, wrong_drafter = hooked(model, truth, **options)
    assert found.tolist() == expected.tolist()
    assert found.dtype == expected.dtype
    assert wrong_drafter.accepted > 0 or len(truth) < 4


@pytest.mark.parametrize("options", WARPERS.values(), ids=WARPERS)
@pytest.mark.one_in(2)
def test_a_sampled_answer_is_made_from_the_scores_of_generate(options: dict[str, Any]) -> None:
    """Its own scores, in every step, are those that generate gives to the same context."""
    model: Any = model_of("llama")
    told: dict[str, Any] = {"do_sample": True, "top_k": 0, **options}
    told |= {"return_dict_in_generate": True, "output_scores": True}
    plain = ask(model, custom_generate=Generator(), seed=5, **told)
    drafted, wrong_drafter = hooked(model, plain.sequences[0, len(PROMPT) :].tolist(), seed=5, **told)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert wrong_drafter.accepted > 0
    unrecorded = ask(model, custom_generate=Generator(), seed=5, do_sample=True, **{"top_k": 0, **options})
    assert unrecorded.tolist() == plain.sequences.tolist()

    class Replay(LogitsProcessor):
        """Makes generate sample what the hook has sampled, after every warper has had its say."""

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            seen.append(scores.clone())
            forced = torch.full_like(scores, -torch.inf)
            forced[:, int(plain.sequences[0, input_ids.shape[1]])] = 0
            return forced  # type: ignore[return-value]

    seen: list[torch.Tensor] = []
    forced = ask(model, logits_processor=[], **{**told, "custom_generate": replaying(Replay())})
    assert forced.sequences.tolist() == plain.sequences.tolist()
    for ours, theirs in zip(plain.scores, seen, strict=True):
        torch.testing.assert_close(ours, theirs)


def replaying(processor: LogitsProcessor) -> Any:
    """generate's own sampling, with one more processor after its warpers."""

    def sample(model: Any, input_ids: Any, logits_processor: Any, **arguments: Any) -> Any:
        logits_processor.append(processor)
        return model._sample(input_ids, logits_processor=logits_processor, **arguments)

    return sample


def test_a_processor_with_a_state_sees_each_token_once() -> None:
    model: Any = model_of("llama")
    theirs, ours = Counting(), Counting()
    expected = ask(model, logits_processor=[theirs])
    told: dict[str, Any] = {"return_dict_in_generate": True, "output_logits": True}
    found, wrong_drafter = hooked(model, expected[0, len(PROMPT) :].tolist(), logits_processor=[ours], **told)
    assert found.sequences.tolist() == expected.tolist()
    assert ours.lengths == theirs.lengths == list(range(len(PROMPT), len(PROMPT) + MAX_NEW_TOKENS))
    assert wrong_drafter.accepted > 0
    assert all(logits.isfinite().all() for logits in found.logits), "the processor wrote into the model's logits"


def test_the_seed_is_hdtools_own() -> None:
    """An answer of the hook is that of the loop, and so of the command line, with the same seed."""
    model: Any = model_of("llama")
    sampling = SamplingConfig(temperature=0.8, top_k=20, seed=11)
    target = Generator()._target_for(model)
    said = [
        token
        for step in decode(target, PROMPT, sampler_of(sampling, PROMPT), max_new_tokens=MAX_NEW_TOKENS)
        for token in step.tokens
    ]
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 20}
    for found in (
        ask(model, custom_generate=Generator(seed=11), **settings),
        ask(model, custom_generate=Generator(seed=3), seed=11, **settings),
    ):
        assert found[0, len(PROMPT) :].tolist() == said


def test_torchs_seed_reproduces_a_program_but_not_an_answer_within_it() -> None:
    model: Any = model_of("llama")

    def program() -> list[list[int]]:
        torch.manual_seed(4)
        generator = Generator()
        return [ask(model, custom_generate=generator, do_sample=True)[0].tolist() for _ in range(2)]

    first, again = program(), program()
    assert first == again
    assert first[0] != first[1]


# Where it ends ---------------------------------------------------------------------------------


class Until(StoppingCriteria):
    """A user's criterion that records its arguments, scores included."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.asked: list[tuple[list[int], int]] = []

    def __call__(self, input_ids: torch.LongTensor, scores: Any, **_: Any) -> torch.BoolTensor:
        self.asked.append((input_ids[0].tolist(), 0 if scores is None else len(scores)))
        return torch.tensor([len(self.asked) >= self.most])  # type: ignore[return-value]


@pytest.mark.parametrize("details", [False, True])
def test_each_criterion_is_called_as_in_generate(details: bool) -> None:
    model: Any = model_of("llama")
    told: dict[str, Any] = {"return_dict_in_generate": details, "output_scores": details}
    truth = ask(model)[0, len(PROMPT) :].tolist()
    for most in (1, 2, 13):
        theirs, ours = Until(most), Until(most)
        expected = ask(model, stopping_criteria=[theirs], **told)
        found, _ = hooked(model, truth, lies=most, stopping_criteria=[ours], **told)
        assert ours.asked == theirs.asked
        if details:
            expected, found = expected.sequences, found.sequences
        assert found.tolist() == expected.tolist()
        assert found.shape[1] == len(PROMPT) + most


def test_several_tokens_may_end_an_answer() -> None:
    model: Any = model_of("llama")
    truth = ask(model)[0, len(PROMPT) :].tolist()
    for ends in ([truth[7]], [truth[15], truth[4], 96], truth[20]):
        expected = ask(model, eos_token_id=ends)
        for seed in range(4):
            assert hooked(model, truth, lies=seed, eos_token_id=ends)[0].tolist() == expected.tolist()


def test_lengths_of_all_kinds() -> None:
    model: Any = model_of("llama")
    truth = ask(model)[0, len(PROMPT) :].tolist()
    lengths: list[dict[str, Any]] = [
        {"max_new_tokens": 1},
        {"max_new_tokens": None, "max_length": 33},
        {"stopping_criteria": StoppingCriteriaList([MaxLengthCriteria(25), EosTokenCriteria(truth[3])])},
        {"stopping_criteria": [MaxLengthCriteria(5)]},
    ]
    for options in lengths:
        expected = ask(model, **options)
        assert hooked(model, truth, **options)[0].tolist() == expected.tolist()


def test_an_answer_that_is_cut_finishes_by_its_length() -> None:
    model: Any = model_of("llama")
    truth = ask(model)[0, len(PROMPT) :].tolist()
    generator = Generator()
    ends: dict[Finish, list[dict[str, Any]]] = {
        Finish.LENGTH: [
            {"max_new_tokens": 5},
            {"max_new_tokens": None, "max_length": len(PROMPT) + 5},
            {"stopping_criteria": [MaxLengthCriteria(len(PROMPT) + 9), MaxLengthCriteria(len(PROMPT) + 5)]},
        ],
        Finish.STOP: [
            {"max_new_tokens": 5, "eos_token_id": truth[4]},
            {"stopping_criteria": [lambda ids, scores: ids.new_full((1,), ids.shape[1] == len(PROMPT) + 5).bool()]},
        ],
    }
    for finish, calls in ends.items():
        for options in calls:
            answer = ask(model, custom_generate=generator, **options)[0, len(PROMPT) :].tolist()
            assert (answer, generator.stats.finish) == (truth[:5], finish)


@pytest.fixture(scope="module")
def embedded() -> Loaded:
    return load(ModelConfig())


def test_a_loaded_model_is_not_checked_again_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load(ModelConfig())
    model: Any = loaded.target.model
    truth = ask(model).tolist()
    with monkeypatch.context() as patched:
        patched.setattr(Target, "_prove", lambda target: pytest.fail("the model is checked again"))
        generator = Generator()
        assert ask(model, custom_generate=generator).tolist() == truth
        assert generator._target and generator._target.compiled
        held = model.model.layers[0].input_layernorm.weight
        model.model.layers[0].input_layernorm.weight = torch.nn.Parameter(2 * held.detach())
        with pytest.raises(pytest.fail.Exception):
            ask(model, custom_generate=Generator())
    assert ask(model, custom_generate=Generator()).tolist() == ask(model).tolist() != truth


def test_the_choices_of_load_hold() -> None:
    loaded = load(ModelConfig(fused_layers=False))
    generator = Generator()
    ask(loaded.target.model, custom_generate=generator)
    assert generator._target and not generator._target.compiled


@pytest.mark.parametrize("is_nested", [False, True])
def test_generators_and_decode_may_use_a_loaded_model_in_turn(embedded: Loaded, is_nested: bool) -> None:
    model: Any = embedded.target.model
    prompts = [prompt_of(6 + number) for number in range(4)]
    expected = [generated(model, prompt, MAX_NEW_TOKENS) for prompt in prompts]
    generators, turns = [Generator(), Generator()], itertools.count()

    def ask_another() -> None:
        turn = next(turns)
        prompt = prompts[1 + turn % 3]
        found = ask(model, prompt, custom_generate=generators[turn % 2])
        assert found[0, len(prompt) :].tolist() == expected[1 + turn % 3]

    class Asking(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            ask_another()
            return scores

    processors = LogitsProcessorList([Asking()] if is_nested else [])
    sampler = Sampler(SamplingConfig(), prompts[0], processors=processors)
    tokens = list[int]()
    for step in decode(embedded.target, prompts[0], sampler, max_new_tokens=MAX_NEW_TOKENS):
        tokens += step.tokens
        ask_another()
    assert tokens == expected[0]


def test_threads_may_use_a_loaded_model_at_the_same_time(embedded: Loaded) -> None:
    model: Any = embedded.target.model
    prompts = [prompt_of(8 + turn) for turn in range(4)]
    expected = [ask(model, prompt)[0].tolist() for prompt in prompts]
    together = Barrier(len(prompts))

    def answers(prompt: list[int]) -> list[Any]:
        generator = Generator()
        together.wait()
        return [ask(model, prompt, custom_generate=generator)[0].tolist() for _ in range(5)]

    with ThreadPoolExecutor(len(prompts)) as pool:
        for truth, found in zip(expected, pool.map(answers, prompts), strict=True):
            assert found == [truth] * 5


def test_stop_strings_end_inside_a_draft(embedded: Loaded) -> None:
    """Those of a criterion, and those that are found with the tokenizer of the generator."""
    model: Any = embedded.target.model
    prompt = embedded.tokenizer("def ")["input_ids"]
    truth = generated(model, prompt, MAX_NEW_TOKENS)
    text = str(embedded.tokenizer.decode(truth))
    criterion = StopStringCriteria(embedded.tokenizer, [text[20:23], "never said"])
    expected = ask(model, prompt, stopping_criteria=[criterion])
    assert expected.shape[1] < len(prompt) + MAX_NEW_TOKENS
    for seed in range(4):
        wrong_drafter = WrongDrafter(len(prompt), truth, 1000, seed)
        found = ask(model, prompt, stopping_criteria=[criterion], custom_generate=Generator(wrong_drafter))
        assert found.tolist() == expected.tolist()
    stop: dict[str, Any] = {"stop_strings": [text[20:23], "never said"], "tokenizer": embedded.tokenizer}
    drafting = Generator.drafting(embedded.tokenizer, DecodeConfig("ar"))
    for options in (stop, {"stop_strings": text[20:23]}):
        assert ask(model, prompt, **options, custom_generate=drafting).tolist() == expected.tolist()
    with pytest.raises(UnsupportedCallError, match=r"stop_strings are given.*Generator\.drafting\(tokenizer\)"):
        ask(model, prompt, **stop, custom_generate=Generator())


def test_a_full_context_ends_the_answer_with_a_warning() -> None:
    model: Any = model_of("gpt2")
    prompt = prompt_of(500)
    with pytest.warns(UserWarning, match="the model's context is full"):
        found = ask(model, prompt, custom_generate=Generator())
    assert found.shape[1] == 512
    with pytest.raises(PromptError, match="context holds 512"):
        ask(model, prompt_of(512), custom_generate=Generator())


# What it returns and streams -------------------------------------------------------------------


class Noting(BaseStreamer):
    def __init__(self) -> None:
        self.put_in: list[Any] = []
        self.ended = 0

    def put(self, value: torch.Tensor) -> None:
        self.put_in.append(value.tolist())

    def end(self) -> None:
        self.ended += 1


def test_streamers_get_what_generate_gives_them() -> None:
    model: Any = model_of("llama")
    theirs, ours = Noting(), Noting()
    expected = ask(model, streamer=theirs)
    hooked(model, expected[0, len(PROMPT) :].tolist(), streamer=ours)
    assert ours.put_in == theirs.put_in
    assert ours.ended == theirs.ended == 1


def test_text_can_be_iterated_over_from_another_thread(embedded: Loaded) -> None:
    streamer: Any = TextIteratorStreamer(embedded.tokenizer, skip_prompt=True, timeout=30)
    prompt = embedded.tokenizer("def ")["input_ids"]
    model: Any = embedded.target.model
    options = {"streamer": streamer, "custom_generate": Generator()}
    thread = Thread(target=ask, args=(model, prompt), kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    assert text == embedded.tokenizer.decode(generated(model, prompt, MAX_NEW_TOKENS))


def test_scores_and_logits_are_those_of_generate() -> None:
    model: Any = model_of("llama")
    told: dict[str, Any] = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    told["repetition_penalty"] = 1.2
    expected = ask(model, **told)
    found, wrong_drafter = hooked(model, expected.sequences[0, len(PROMPT) :].tolist(), **told)
    assert wrong_drafter.accepted > 0
    assert type(found) is type(expected)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)
        assert not any(kept.is_inference() for kept in ours)
    bare = ask(model, custom_generate=Generator(), return_dict_in_generate=True)
    assert (bare.scores, bare.logits) == (None, None)


def test_other_criteria_see_the_token_that_ends_an_answer() -> None:
    class Seen(StoppingCriteria):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **_: Any) -> torch.BoolTensor:
            last.append(int(input_ids[0, -1]))
            return cast(torch.BoolTensor, torch.zeros(len(input_ids), dtype=torch.bool))

    model: Any = model_of("llama")
    last: list[int] = []
    answer = ask(model)[0, len(PROMPT) :].tolist()
    for generator in (None, Generator()):
        last.clear()
        ask(model, stopping_criteria=[Seen()], eos_token_id=answer[3], custom_generate=generator)
        assert last == answer[: answer.index(answer[3]) + 1]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8}, {"top_p": 0.9}, {"top_k": 4}], ids=str)
def test_captured_steps_record_all_scores(options: dict[str, Any]) -> None:
    """Captured steps bring rows and rankings to the host, from which other samplers draw at once."""
    model: Any = model_of("llama")
    told: dict[str, Any] = {"do_sample": True, "top_k": 0, **options, "return_dict_in_generate": True}
    expected = ask(model, custom_generate=Generator(seed=3), output_scores=True, output_logits=True, **told)
    generator = Generator(seed=3)
    generator._target = Target(model, lambda device: Rehearsed())
    found = ask(model, custom_generate=generator, output_scores=True, output_logits=True, **told)
    assert found.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in ((found.scores, expected.scores), (found.logits, expected.logits)):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


def test_rows_that_overflowed_are_not_recorded() -> None:
    request: Any = SimpleNamespace(draws=True, prompt=[1], padding=(), wants_scores=True, wants_logits=True)
    sampler = _Recorder(request, LogitsProcessorList([TopKLogitsWarper(2)]), 0, torch.device("cpu"))
    choose = sampler.chooser(torch.tensor([[0.0, 1.0, 2.0], [torch.nan] * 3]), finite_only=True)
    assert choose(1) == NOT_FINITE
    assert (sampler.scores_recorded, sampler.logits_recorded) == ((), ())
    assert choose(0) in (1, 2)
    assert len(sampler.scores_recorded or ()) == len(sampler.logits_recorded or ()) == 1


@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.3}, {"no_repeat_ngram_size": 2, "min_length": 40}])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_padding_on_the_left_is_left_out(family: str, options: dict[str, Any]) -> None:
    model: Any = model_of(family)
    padded = [0] * 7 + PROMPT
    mask = torch.tensor([[0] * 7 + [1] * len(PROMPT)])
    expected = ask(model, padded, attention_mask=mask, **options)
    wrong_drafter = WrongDrafter(len(PROMPT), expected[0, len(padded) :].tolist(), VOCABULARY, seed=1)
    found = ask(model, padded, attention_mask=mask, custom_generate=Generator(wrong_drafter), **options)
    assert found.tolist() == expected.tolist()
    assert wrong_drafter.accepted > 0


# The model around it ---------------------------------------------------------------------------


def test_a_generator_keeps_its_target_and_its_figures() -> None:
    model: Any = model_of("llama")
    generator = Generator()
    ask(model, custom_generate=generator)
    target = generator._target
    ask(model, prompt_of(9), custom_generate=generator, max_new_tokens=5)
    assert generator._target is target is not None
    assert (generator.stats.tokens, generator.stats.steps) == (5, 5)
    ask(model_of("gpt2"), custom_generate=generator, max_new_tokens=5)
    assert generator._target is not target


@pytest.mark.long
def test_a_model_with_a_new_dtype_is_checked_again() -> None:
    model: Any = copy.deepcopy(model_of("llama"))
    made: list[Target] = []

    def make(target: Target) -> NoDraft:
        made.append(target)
        return NoDraft()

    generator = Generator(make)
    ask(model, custom_generate=generator)
    held = generator._target
    model.to(torch.float64)
    assert ask(model, custom_generate=generator).tolist() == ask(model).tolist()
    assert generator._target is not held
    assert made == [held, generator._target], "a drafter belongs to its target"


def test_threads_that_share_a_generator_take_turns() -> None:
    model: Any = copy.deepcopy(model_of("llama"))
    prompts = [prompt_of(8 + turn) for turn in range(6)]
    expected = [ask(model, prompt)[0].tolist() for prompt in prompts]
    generator = Generator(WrongDrafter(len(prompts[0]), expected[0][len(prompts[0]) :], VOCABULARY, 0))
    together, active, most = Barrier(len(prompts)), [0], [0]

    class Counted(LogitsProcessor):
        """Gives other threads a chance to run in the middle of each call."""

        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            active[0] += 1
            most[0] = max(most[0], active[0])
            time.sleep(0.0005)
            active[0] -= 1
            return scores

    def answer(prompt: list[int]) -> list[int]:
        together.wait(30)
        found: list[int] = ask(model, prompt, custom_generate=generator, logits_processor=[Counted()])[0].tolist()
        return found

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(answer, prompts)) == expected
    assert most == [1]


@pytest.mark.parametrize("where", ["processor", "criterion", "streamer"])
def test_a_call_from_inside_a_call_is_refused(where: str) -> None:
    model: Any = model_of("llama")
    generator = Generator()

    def nested() -> None:
        ask(model, custom_generate=generator)

    class Nesting(Noting, LogitsProcessor, StoppingCriteria):
        def __call__(self, *_: Any, **__: Any) -> Any:
            nested()

        def put(self, value: torch.Tensor) -> None:
            if len(value) == 1 and value.dim() == 1:  # not the prompt, which generate puts in before the call
                nested()

    option = {"processor": "logits_processor", "criterion": "stopping_criteria", "streamer": "streamer"}[where]
    given: dict[str, Any] = {option: Nesting() if where == "streamer" else [Nesting()]}
    with pytest.raises(OptionError, match="called from inside its own call of generate"):
        ask(model, custom_generate=generator, **given)
    assert ask(model, custom_generate=generator).tolist() == ask(model).tolist(), "the lock is free again"


def test_an_inner_call_with_a_generator_of_its_own_is_answered() -> None:
    model: Any = model_of("llama")
    inner = Generator()
    expected = ask(model).tolist()

    class Nesting(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
            assert ask(model, custom_generate=inner).tolist() == expected
            return scores

    assert ask(model, custom_generate=Generator(), logits_processor=[Nesting()], max_new_tokens=3).shape[1] == 23


def test_an_offloaded_model_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = cpu_offload(copy.deepcopy(model_of("llama")), torch.device("cpu"))
    assert model.device != torch.device("cpu")
    made: list[Any] = []

    def target(offloaded: Any) -> Target:
        made.append(offloaded)
        return Target(offloaded)

    monkeypatch.setattr("hdtool.runtime.integrations.hf_generate.Target", target)
    generator = Generator()
    expected = ask(model_of("llama")).tolist()
    for _ in range(3):
        assert ask(model, custom_generate=generator).tolist() == expected
    assert len(made) == 1


def test_a_model_in_training_is_given_back_in_training() -> None:
    model: Any = copy.deepcopy(model_of("gpt2"))
    expected = ask(model).tolist()
    model.train()
    model.transformer.h[0].eval()
    before = [module.training for module in model.modules()]
    generator = Generator()
    for _ in range(2):
        assert ask(model, custom_generate=generator).tolist() == expected, "dropout must not play a part"
        assert [module.training for module in model.modules()] == before


def test_attention_is_given_back_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention implementation without arbitrary masks is replaced during the call and restored."""
    monkeypatch.setattr("hdtool.runtime.model.transformers_internals.MASKED_ATTENTION", ("sdpa",))
    model: Any = copy.deepcopy(model_of("llama"))
    model.set_attn_implementation("eager")
    expected = ask(model).tolist()
    generator = Generator()
    for _ in range(2):
        assert ask(model, custom_generate=generator).tolist() == expected
        assert model.config._attn_implementation == "eager"


def test_a_failed_call_does_not_affect_later_ones() -> None:
    model: Any = model_of("llama")
    generator = Generator()

    class Failing(Noting):
        def put(self, value: torch.Tensor) -> None:
            super().put(value)
            if len(self.put_in) == 5:
                raise InterruptedError("the reader has gone")

    with pytest.raises(InterruptedError):
        ask(model, custom_generate=generator, streamer=Failing())
    assert ask(model, custom_generate=generator).tolist() == ask(model).tolist()


def test_it_drafts_by_any_method_from_the_stores_of_that_method(tmp_path: Path) -> None:
    loaded = load(ModelConfig())
    model: Any = loaded.target.model
    prompt = loaded.tokenizer("The built-in `map` takes a function and")["input_ids"]
    nowhere = StoresConfig(str(tmp_path), str(tmp_path))
    for config, store_set in ((DecodeConfig(draft_tokens=16), None), (DecodeConfig("pld"), nowhere)):
        generator = Generator.drafting(loaded.tokenizer, config, store_set)
        assert ask(model, prompt, custom_generate=generator).tolist() == ask(model, prompt).tolist()
        assert generator.stats.accepted.sum() > 0
    with pytest.raises(StoreError, match="holds no store"):
        Generator.drafting(loaded.tokenizer, DecodeConfig("hd"), nowhere)


# What it refuses -------------------------------------------------------------------------------


GAP = torch.tensor([[1] * 5 + [0] + [1] * (len(PROMPT) - 6)])
REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"num_beams": 2}, "num_beams is 2"),
    ({"attention_mask": GAP}, "the attention mask has gaps"),
    ({"attention_mask": torch.tensor([[1] * (len(PROMPT) - 1) + [0]])}, "the attention mask has gaps"),
    ({"position_ids": torch.arange(3, 3 + len(PROMPT))[None]}, "position_ids are not 0, 1, 2"),
    (cache_argument(model_of("llama"), DynamicCache()), "a KV cache is given"),
    ({"prompt_lookup_num_tokens": 3}, "the mode is assisted_generation"),
    ({"return_dict_in_generate": True, "output_hidden_states": True}, "output_attentions or output_hidden"),
    ({"inputs": None, "inputs_embeds": torch.zeros(1, 4, 32), "attention_mask": None}, "inputs_embeds are given"),
]


@pytest.mark.parametrize(("options", "said"), REFUSALS, ids=[said for _, said in REFUSALS])
def test_unsupported_calls_are_refused_with_the_reason(options: dict[str, Any], said: str) -> None:
    model: Any = model_of("llama")
    ids = torch.tensor([PROMPT])
    settings = {"inputs": ids, "max_new_tokens": 5, "attention_mask": torch.ones_like(ids), **options}
    with pytest.raises(OptionError, match=f"cannot decode this call of generate: {said}"):
        model.generate(**settings, custom_generate=Generator())


def test_encoder_decoders_are_refused() -> None:
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    config.decoder_start_token_id = 0
    model: Any = T5ForConditionalGeneration(config)
    with pytest.raises(FamilyError, match="encoder-decoder"):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=5, custom_generate=Generator())
