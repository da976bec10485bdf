"""Decode on a simulated CUDA device, in a separate process, and print the results as JSON.

``python -m tests.support.device_scenarios GROUP,... [ARGUMENT ...]``. A group is a function of this file.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from hdtool.runtime.budget.node_budget import FixedBudget
from hdtool.runtime.caches.accepted_path_moves import MAX_DEFERRED_MOVES
from hdtool.runtime.caches.kv_cache import KVTensors
from hdtool.runtime.core.drafter import Drafter, NoDraft
from hdtool.runtime.core.request import Request
from hdtool.runtime.core.sampler import Sampler
from hdtool.runtime.core.session import decode, decode_batch
from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.drafters.drafter_factory import drafter_for
from hdtool.runtime.drafters.hierarchy.hierarchy import Hierarchy
from hdtool.runtime.drafters.standalone_drafter import StandaloneDrafter
from hdtool.runtime.drafters.trained.draft_model import DraftModel
from hdtool.runtime.drafters.trained.draft_passes import READ_CHUNK
from hdtool.runtime.drafters.trained.path_drafting import path_drafter
from hdtool.runtime.drafters.trained_drafter_factory import drafter_of, published_drafter
from hdtool.runtime.engines import captured_functions
from hdtool.runtime.engines.capturable_pass import StepOutput, StepPass
from hdtool.runtime.engines.captured import captured_passes
from hdtool.runtime.engines.cuda import cuda_graphs
from hdtool.runtime.engines.cuda.refused_waits import WaitError, waits_refused
from hdtool.runtime.model.pass_inputs import StepTensors
from hdtool.runtime.settings.building import HeadsConfig
from hdtool.runtime.settings.decoding import DecodeConfig
from hdtool.runtime.settings.model import SamplingConfig
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.target import Target
from tests.support.changes import with_adapter, with_other_data, with_other_parameter, with_weights_in_place
from tests.support.decoding import SAMPLINGS, answer_of, answers_of, request as asked
from tests.support.device_mutations import MUTATIONS, Undo
from tests.support.families import VOCABULARY, model_of
from tests.support.heads import SEQUENTIAL, random_for
from tests.support.interleaving import Interleaving
from tests.support.oracle import prompt_of
from tests.support.published_drafters import assistant, block_drafter, dflash, few_words, let_all_layers_share
from tests.support.rehearsed import captured_of
from tests.support.samplers import sampler_of
from tests.support.simulated_cuda.counts import CAPTURE, REPLAY, waits
from tests.support.simulated_cuda.graphs import GraphCapture
from tests.support.simulated_cuda.install import install, on_device
from tests.support.simulated_cuda.queue import DEVICE
from tests.support.trees import WrongDrafter
from tests.sweep.models import tiny_model

PROMPT = prompt_of(20)
MAX_NEW_TOKENS = 24
HEADS = HeadsConfig(rank=8)
GREEDY, SAMPLED = SamplingConfig(), SAMPLINGS["T 0.7"]
DEEPER = 4
NODES = 24
SLOTS = 5, 30, 12
"""Prompt lengths of a batch."""
BLOCKS: dict[str, Callable[..., Path]] = {
    "dflash": dflash,
    "dspark": partial(block_drafter, markov="vanilla"),
    "dspark, gated": partial(block_drafter, markov="gated"),
    "dspark, rnn": partial(block_drafter, markov="rnn", drafted=40),
}
"""Functions that write checkpoints of drafters that predict blocks."""
CLUSTERS: dict[str, dict[str, Any]] = {
    "usual": {},
    "clusters": {"use_ordered_embeddings": True, "num_centroids": 97, "centroid_intermediate_top_k": 12},
}
"""Settings of assistants."""
SEEDS = 5
"""Number of random interleavings."""
LONG = 1024
"""Cache size in positions that exceeds what an answer needs."""


def hierarchy() -> Drafter:
    return Hierarchy(budget=FixedBudget(NODES), recycled=True)


def plain(model: PreTrainedModel, sampling: SamplingConfig, prompt: list[int] = PROMPT) -> list[int]:
    """Return the answer of a model on the CPU, without drafts."""
    return answer_of(Target(model), prompt, sampling, MAX_NEW_TOKENS)


def watched(
    target: Target,
    sampling: SamplingConfig,
    drafter: Drafter | None = None,
    *,
    prompt: list[int] = PROMPT,
    max_new_tokens: int = MAX_NEW_TOKENS,
) -> dict[str, Any]:
    """Answer on the device, and return the device's events in each step that captured nothing.

    A step lasts from one token that the caller receives to the next: it waits for a pass and starts another one.
    """
    before = DEVICE.counts.events[CAPTURE]
    sampler, tokens, events, sizes = sampler_of(sampling, prompt), [], [], []
    for step in decode(target, prompt, sampler, max_new_tokens=max_new_tokens, drafter=drafter or NoDraft()):
        tokens += step.tokens
        sizes.append(len(step.tokens))
        events.append(Counter(DEVICE.counts.events))
    steps = [after - before for before, after in pairwise(events[:-1])]  # the last step starts no pass
    return {
        "tokens": tokens,
        "steps": [step for step in steps if not step[CAPTURE]],
        "waits and tokens": [
            (waits(step), size) for step, size in zip(steps, sizes[1:-1], strict=True) if not step[CAPTURE]
        ],
        "captures": DEVICE.counts.events[CAPTURE] - before,
    }


def deeper(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """Create a random model of the same family with ``layers`` layers."""
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    if kinds := getattr(config, "layer_types", None):
        config.layer_types = (kinds * layers)[:layers]
    torch.manual_seed(0)
    found: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    return found


def answers(*families: str) -> dict[str, Any]:
    """Answer in several ways on the CPU and on the device, and count the kernels of models of two depths."""
    expected = {
        family: {
            "plain": plain(model_of(family), GREEDY),
            "sampled": plain(model_of(family), SAMPLED),
            **{f"slot {length}": plain(model_of(family), GREEDY, prompt_of(length)) for length in SLOTS},
        }
        for family in families
    }
    install()
    return {family: answers_of_family(family, expected[family]) for family in families} | diagnostics()


def watched_batch(target: Target) -> dict[str, Any]:
    """Answer a batch with drafts, and return the device's events in each pass that captured nothing."""
    prompts = {f"slot {length}": prompt_of(length) for length in SLOTS}
    requests = (Request(slot, prompt, Sampler(GREEDY, prompt), hierarchy()) for slot, prompt in prompts.items())
    tokens: dict[str, list[int]] = {slot: [] for slot in prompts}
    events = []
    for request, step in decode_batch(
        target, partial(next, requests, None), len(prompts), max_new_tokens=MAX_NEW_TOKENS
    ):
        is_first = not tokens[request.key]
        tokens[request.key] += step.tokens
        events.append((is_first, Counter(DEVICE.counts.events)))
    steps = [
        after - before  # a first token comes from a prefill
        for (_, before), (is_first, after) in pairwise(events)
        if after[REPLAY] > before[REPLAY] and not is_first
    ]
    return {"tokens": tokens, "steps": [step for step in steps if not step[CAPTURE]]}


def diagnostics() -> dict[str, Any]:
    """Return faults and frequent events, which help to explain a failing test."""
    counts = DEVICE.counts
    lines = [f"{number} of {kind}, at {line}" for (kind, line), number in counts.lines.most_common(20)]
    return {"faults": list(counts.faults), "lines": lines}


def answers_of_family(family: str, expected: dict[str, list[int]]) -> dict[str, Any]:
    model, greedy = model_of(family), expected["plain"]
    target = Target(on_device(model))
    ways = {
        "plain": watched(target, GREEDY),
        "lying drafter": watched(target, GREEDY, wrong_drafter(greedy)),
        "hd": watched(target, GREEDY, hierarchy()),
        "sampled": watched(target, SAMPLED),
        "hd, sampled": watched(target, SAMPLED, hierarchy()),
    }
    batch, captures, fused = watched_batch(target), target.captures, target.is_fused
    target = Target(on_device(deeper(model, DEEPER)))
    deep = watched(target, GREEDY)
    return {
        "expected": {way: expected["sampled" if "sampled" in way else "plain"] for way in ways},
        "ways": ways,
        "expected of slots": {slot: tokens for slot, tokens in expected.items() if slot.startswith("slot")},
        "batch": batch,
        "captures": captures and target.captures,
        "fused": fused,
        "layers": [model.config.num_hidden_layers, DEEPER],
        "deeper": {"plain": deep, "lying drafter": watched(target, GREEDY, wrong_drafter(deep["tokens"]))},
    }


def wrong_drafter(truth: Sequence[int], prompt: Sequence[int] = PROMPT) -> Drafter:
    return WrongDrafter(len(prompt), truth, VOCABULARY, seed=1)


def captures() -> dict[str, Any]:
    """Count the captures before the first answer and within answers, with a measured budget."""
    install()
    earlier = DEVICE.counts.events[CAPTURE]
    target = Target(on_device(model_of("llama")))
    drafter = drafter_for(DecodeConfig(method="hd"), target, StoreSet())
    before = DEVICE.counts.events[CAPTURE] - earlier
    found = [watched(target, GREEDY, drafter, max_new_tokens=60)["captures"] for _ in range(3)]
    return {"before": before, "answers": found, "captures": target.captures} | diagnostics()


def sampled() -> dict[str, Any]:
    """Answer with every sampling setting, with and without drafts."""
    model = model_of("llama")
    samplings = SAMPLINGS | {"T 1, top-k 50": SamplingConfig(temperature=1.0, top_k=50, seed=4)}
    expected = {name: plain(model, sampling) for name, sampling in samplings.items()}
    install()
    target = Target(on_device(model))
    found = {
        name: {"plain": watched(target, sampling), "hd": watched(target, sampling, hierarchy())}
        for name, sampling in samplings.items()
    }
    return {"expected": expected, "found": found} | diagnostics()


def interleaved(family: str) -> dict[str, Any]:
    """Interleave answers, some of which have drafters that are made meanwhile and capture steps again."""
    install()
    target = Target(on_device(model_of(family)))

    interleaving = Interleaving(target, {"heads": with_heads}, in_threads=False)
    for seed in range(SEEDS):
        interleaving.play(seed)
    return {"played": interleaving.played, "captures": target.captures} | diagnostics()


def with_heads(target: Target, config: HeadsConfig = HEADS) -> Drafter:
    trained = drafter_of(random_for(target, config), target)
    return StandaloneDrafter(trained, FixedBudget(NODES))


def heads(make: Callable[[Target], Drafter] = with_heads, model: PreTrainedModel | None = None) -> dict[str, Any]:
    """Answer twice with the drafts of a drafter, by default of heads, whose passes are captured too."""
    model = model or model_of("llama")
    expected = plain(model, GREEDY)
    install()
    target = Target(on_device(model))
    drafter = make(target)
    found = [watched(target, GREEDY, drafter) for _ in range(2)]
    return {"expected": expected, "found": found, "pieces": events_of_pieces(drafter)} | diagnostics()


def events_of_pieces(drafter: Any) -> list[Counter[str]]:
    """Let a trained drafter draft after prompts of one piece and of three; return the events of each."""
    module, events = drafter.trained.module, []
    for pieces in (1, 3) if hasattr(module, "_new_hidden") else ():  # others read prompts as models do
        number = READ_CHUNK * (pieces - 1) + 40
        module.begin([1])
        before = Counter(DEVICE.counts.events)
        module.start(torch.ones((number, module._new_hidden.shape[-1]), device="cuda"), [1] * number)()
        events.append(Counter(DEVICE.counts.events) - before)
    return events


def hydra() -> dict[str, Any]:
    """Answer with drafts of heads that read the tokens drafted so far, whose passes are captured too."""
    return heads(partial(with_heads, config=SEQUENTIAL["hydra++"]))


def mtp() -> dict[str, Any]:
    """Answer with drafts of an MTP layer, whose passes are captured too."""
    return heads(partial(with_heads, config=SEQUENTIAL["mtp"]))


def draft_models() -> dict[str, Any]:
    """Answer with drafts of a model that is always right, and of one that is often wrong."""
    found = dict[str, Any]()
    for name, change in (("right", copy.deepcopy), ("wrong", partial(deeper, layers=1))):

        def drafter_for_target(target: Target, change: Any = change) -> Drafter:
            module = DraftModel(Target(on_device(change(model_of("llama")))), target.vocabulary)
            trained = path_drafter(module, module.drafts_in_one_run, None, None)
            return StandaloneDrafter(trained, FixedBudget(NODES))

        found[name] = heads(drafter_for_target)
    return found


def assistants() -> dict[str, Any]:
    """Answer with drafts of assistants of a Gemma 4 model, without and with clusters of tokens."""
    found = dict[str, Any]()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        let_all_layers_share(patch)
        for name, settings in CLUSTERS.items():
            model = few_words(tiny_model("gemma4_text"))
            written = str(assistant(Path(folder) / name, model, **settings))

            def drafter_for_target(target: Target, written: str = written) -> Drafter:
                return StandaloneDrafter(published_drafter(written, target), FixedBudget(NODES))

            found[name] = heads(drafter_for_target, model)
    return found


def blocks() -> dict[str, Any]:
    """Answer with drafts of a DFlash and of a DSpark drafter, whose blocks are captured passes."""
    found = dict[str, Any]()
    for name, write in BLOCKS.items():
        with tempfile.TemporaryDirectory() as folder:

            def drafter_for_target(target: Target, folder: str = folder, write: Any = write) -> Drafter:
                write(Path(folder), model_of("llama"), target_layer_ids=[0, 1])
                return StandaloneDrafter(published_drafter(folder, target), FixedBudget(NODES))

            found[name] = heads(drafter_for_target)
    return found


def hidden_without_extents() -> dict[str, Any]:
    """Answer with drafts of heads by a pass without extents, which is captured once more to return hidden states."""
    model = model_of("llama")
    expected = plain(model, GREEDY)
    install()
    usual = captured_passes.passes_of
    captured_passes.passes_of = lambda stock, facts: [WholeCache(usual(stock, facts)[0])]
    target = Target(on_device(model))
    captured_passes.passes_of = usual
    before = DEVICE.counts.events[CAPTURE]
    drafter = with_heads(target)
    ahead = DEVICE.counts.events[CAPTURE] - before
    return {"expected": expected, "ahead": ahead, "found": watched(target, GREEDY, drafter)} | diagnostics()


def without_recovery() -> dict[str, Any]:
    """Count what is captured if torch cannot capture after a failure, for models that can be captured or not."""
    models = {name: model_of(name) for name in ("llama", "falcon")}
    expected = {name: plain(model, GREEDY) for name, model in models.items()}
    install()
    cuda_graphs.can_capture_after_failure = lambda: False
    found: dict[str, Any] = {}
    for name, model in models.items():
        before = DEVICE.counts.events[CAPTURE]
        target = Target(on_device(model))
        answer = watched(target, GREEDY)
        captured = DEVICE.counts.events[CAPTURE] - before
        found[name] = {"tokens": answer["tokens"], "captures": target.captures, "captured": captured}
    cuda_graphs.can_capture_after_failure = lambda: True
    return {"expected": expected, "found": found} | diagnostics()


def short_memory() -> dict[str, Any]:
    """Let captures fail for lack of memory: once, then for longer than a shape waits for the next attempt."""
    model = model_of("llama")
    expected = [plain(model, GREEDY, prompt_of(length)) for length in SLOTS]
    install()
    target = Target(on_device(model))
    usual, failures = GraphCapture.__enter__, 0

    def enter(capture: GraphCapture) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        usual(capture)

    GraphCapture.__enter__ = enter  # type: ignore[method-assign]
    captured_functions.RETRY_AFTER = 8
    found: dict[str, Any] = {}
    for name, slots, number in (("once", 2, 1), ("for a while", 3, 4), ("no longer", 3, 0)):
        failures, passes = number, captured_of(target)._passes[0]
        replays, captured = DEVICE.counts.events[REPLAY], DEVICE.counts.events[CAPTURE]
        found[name] = {
            "tokens": batch_of(target, slots),
            "expected": expected[:slots],
            "replayed": DEVICE.counts.events[REPLAY] > replays,
            "captured": DEVICE.counts.events[CAPTURE] > captured,
            "same pass": captured_of(target)._passes[:1] == [passes],
        }
    GraphCapture.__enter__ = usual  # type: ignore[method-assign]
    return found | {"captures": target.captures} | diagnostics()


def batch_of(target: Target, slots: int) -> list[list[int]]:
    tokens = answers_of(target, map(asked, range(slots), map(prompt_of, SLOTS)), slots, MAX_NEW_TOKENS)
    return [tokens[slot] for slot in range(slots)]


def replaced_weights() -> dict[str, Any]:
    """Replace a weight before each of several pairs of batches, as a trainer does, which releases all graphs."""
    install()
    target = Target(on_device(model_of("llama")))
    passes, found = captured_of(target)._passes[0], []
    for _ in range(3):
        with_other_parameter(target.model)
        tokens = [batch_of(target, 2) for _ in range(2)]
        found.append(tokens[0] == tokens[1] and type(captured_of(target)._passes[0]) is type(passes))
    return {"found": found, "captures": target.captures} | diagnostics()


def long_moves() -> dict[str, Any]:
    """Commit a path that is longer than a step moves, on the CPU and on the device, and verify another root."""
    length = MAX_DEFERRED_MOVES + 4
    tree = DraftTree.of(5, range(3, 3 + 2 * length), [max(ROOT, node - 2) for node in range(2 * length)])

    def committed(target: Target) -> tuple[list[float], Counter[str]]:
        cache = target.allocate()
        target.prefill(cache, 0, PROMPT, room=100)
        target.verify(cache, [tree])
        before = Counter(DEVICE.counts.events)
        target.commit(cache, 0, range(1, 2 * length, 2))
        events = Counter(DEVICE.counts.events) - before
        return target.verify(cache, [DraftTree.bare(7)])[0].logits[0].tolist(), events

    model = model_of("llama")
    expected, _ = committed(Target(model))
    install()
    found, events = committed(Target(on_device(model)))
    return {"expected": expected, "found": found, "events": events} | diagnostics()


def refused_waits() -> dict[str, Any]:
    """Return which operations are refused where a capture must not fail, in this thread and in another one."""
    install()
    there, here = torch.arange(4, device="cuda:0"), torch.arange(4)
    mask, operations = there > 1, dict[str, Callable[[], Any]]()
    operations["item"] = lambda: there[0].item()
    operations["if"] = lambda: bool(mask[0])
    operations["nonzero"] = lambda: there.nonzero()
    operations["mask"] = lambda: there[mask]
    operations["write by mask"] = lambda: there.__setitem__(mask, 0)
    operations["list of indices"] = lambda: there[[0, 1]]
    operations["indices of the host"] = lambda: there[here]
    operations["tensor of numbers"] = lambda: torch.tensor([1.0], device="cuda:0")
    operations["to the host"] = lambda: there.cpu()
    operations["from the host"] = lambda: here.to("cuda:0")
    operations["written from the host"] = lambda: there.copy_(here)
    operations["arithmetic"] = lambda: (there * 2 + 1).sum()
    operations["indices of the device"] = lambda: there[there]
    operations["part"] = lambda: there[1:, None]
    operations["new tensors"] = lambda: there.new_zeros(3) + torch.ones(3, device="cuda:0")
    operations["on the host"] = lambda: here[here > 1].tolist()

    def is_refused(operation: Callable[[], Any]) -> bool:
        try:
            operation()
        except WaitError:
            return True
        return False

    with waits_refused():
        refused = {name: is_refused(operation) for name, operation in operations.items()}
        with ThreadPoolExecutor(1) as other:
            elsewhere = other.submit(is_refused, lambda: here.sum().item()).result()
    return {"refused": refused, "elsewhere": elsewhere} | diagnostics()


class WholeCache:
    """Pass that reads the whole cache instead of an extent, so that its steps do not depend on lengths."""

    reads_extent = False

    def __init__(self, inner: StepPass) -> None:
        self._inner = inner

    def run(self, step: StepTensors, storage: KVTensors, extent: int) -> StepOutput:
        return self._inner.run(step, storage, storage.capacity)


def reserved() -> dict[str, Any]:
    """Count the captures of a pass without extents, after loading and in answers that outgrow a short cache."""
    model = model_of("llama")
    model.config.max_position_embeddings = 4096
    long = prompt_of(40) * 13
    expected = [plain(model, GREEDY, prompt) for prompt in (PROMPT, long)]
    install()
    usual = captured_passes.passes_of
    captured_passes.passes_of = lambda stock, facts: [WholeCache(usual(stock, facts)[0])]
    earlier = DEVICE.counts.events[CAPTURE]
    target = Target(on_device(model))
    before = DEVICE.counts.events[CAPTURE] - earlier
    answers = [watched(target, GREEDY, wrong_drafter(expected[0])), watched(target, GREEDY, prompt=long)]
    answers.append(watched(target, GREEDY, hierarchy()))
    batch = target.allocate(2)
    target.prefill(batch, 0, PROMPT)
    captured_passes.passes_of = usual
    return {
        "before": before,
        "answers": [answer["captures"] for answer in answers],
        "tokens": [answer["tokens"] for answer in answers],
        "expected": [expected[0], expected[1], expected[0]],
        "length": len(long),
        "capacities": [target.cache.capacity, batch.capacity],
        "captures": target.captures,
    } | diagnostics()


CHANGES = with_adapter, with_other_parameter, with_other_data, with_weights_in_place


def changes() -> dict[str, Any]:
    """Answer before and after a change of the model, on the CPU and on the device."""

    def answered_twice(target: Target, change: Callable[[Any], None]) -> dict[str, Any]:
        before = answer_of(target, PROMPT, GREEDY, MAX_NEW_TOKENS)
        change(target.model)
        return {"before": before, "after": answer_of(target, PROMPT, GREEDY, MAX_NEW_TOKENS)}

    model = model_of("llama")
    expected = {change.__name__: answered_twice(Target(copy.deepcopy(model)), change) for change in CHANGES}
    install()
    targets = [Target(on_device(model)) for _ in CHANGES]
    found = {change.__name__: answered_twice(target, change) for change, target in zip(CHANGES, targets, strict=True)}
    return {"expected": expected, "device": found, "captures": [target.captures for target in targets]} | diagnostics()


def mutations() -> dict[str, Any]:
    """Return the symptoms of each fault that is put into hdtool."""
    model = model_of("llama")
    model.config.max_position_embeddings = 4096  # lets a cache grow
    prompts = PROMPT, prompt_of(45)
    expected = [plain(model, sampling, prompt) for prompt in prompts for sampling in (GREEDY, SAMPLED)]
    install()
    model = on_device(model)
    return {name: symptoms(model, prompts, expected, fault) for name, fault in MUTATIONS.items()}


def symptoms(
    model: PreTrainedModel, prompts: Sequence[list[int]], expected: Sequence[list[int]], mutation: Callable[[], Undo]
) -> dict[str, Any]:
    """Return the symptoms of a fault: other tokens, faults of the device, no captures, more waits.

    The fault is put in after loading, which would otherwise refuse the model or run it without captures.
    """
    target, tokens, most_waits = Target(model), [], 0
    DEVICE.counts.clear()
    undo = mutation()
    try:
        for number, (prompt, greedy) in enumerate(zip(prompts, expected[::2], strict=True)):
            target.cache.reserve(LONG << number)  # new memory for the second prompt, which is read in full
            drafter = wrong_drafter(greedy, prompt)
            found = watched(target, GREEDY, drafter, prompt=prompt), watched(target, SAMPLED, prompt=prompt)
            tokens += [answer["tokens"] for answer in found]
            most_waits = max([most_waits, *(waits(Counter(step)) for step in found[0]["steps"])])
        raised = ""
    except Exception as error:
        raised = str(error)
    undo()
    DEVICE.abandon()
    return {
        "tokens differ": tokens != expected,
        "captures": target.captures,
        "faults": list(DEVICE.counts.faults),
        "raised": raised,
        "most waits": most_waits,
    }


def basics() -> dict[str, Any]:
    """Return how the device orders its work, and what its memory holds."""
    install()
    DEVICE.counts.clear()
    host = torch.zeros(2, pin_memory=True)
    there = torch.ones(2, device="cuda:0")
    host.copy_(there, non_blocking=True)
    early = host.tolist()
    torch.cuda.synchronize()
    late = host.tolist()
    there.copy_(host, non_blocking=True)
    host.fill_(5)
    sent_late = there.tolist()
    before = waits(DEVICE.counts.events)
    torch.zeros(2, 2, pin_memory=True)[:, :1].copy_(torch.ones(2, 2, device="cuda:0")[:, :1], non_blocking=True)
    return {
        "waits of a copy of parts": waits(DEVICE.counts.events) - before,
        "read before and after a wait": [early, late],
        "written before the copy out of it": sent_late,
        "memory that nothing has written": torch.empty(2, device="cuda:0").isnan().tolist(),
        "graphs": graphs(),
        "waits": waits(DEVICE.counts.events),
        "faults": list(DEVICE.counts.faults),
    }


def graphs() -> dict[str, Any]:
    """Capture two graphs in one pool, of which the second overwrites what the first has computed."""
    pool, number = torch.cuda.graph_pool_handle(), torch.ones(1, device="cuda:0")
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(first, pool=pool):
        doubled = number * 2
    with torch.cuda.graph(second, pool=pool):
        number.add_(1)
    first.replay()
    found = doubled.tolist()
    second.replay()
    overwritten = doubled.isnan().tolist()
    first.replay()
    again = doubled.tolist()
    del number
    try:
        second.replay()
        refused = ""
    except RuntimeError as error:
        refused = str(error)
    return {"found": found, "overwritten": overwritten, "again": again, "refused": refused}


Groups = dict[str, Callable[..., dict[str, Any]]]


def main(groups: Groups, arguments: Sequence[str], *, keeps_triton: bool = False) -> None:
    """Print the results of the groups named in the first argument.

    Triton is disabled unless the groups interpret its kernels, because it cannot compile for the simulated device.
    """
    torch.set_num_threads(1)
    if not keeps_triton:
        sys.modules["hdtool.runtime.engines.cuda.triton_operations"] = None  # type: ignore[assignment]
    logging.set_verbosity_error()
    names, *others = arguments
    print(json.dumps({name: groups[name](*others) for name in names.split(",")}))


GROUPS = (
    answers,
    assistants,
    basics,
    blocks,
    captures,
    changes,
    draft_models,
    heads,
    hidden_without_extents,
    hydra,
    interleaved,
    long_moves,
    mtp,
    mutations,
    refused_waits,
    replaced_weights,
    reserved,
    sampled,
    short_memory,
    without_recovery,
)

if __name__ == "__main__":
    main({group.__name__: group for group in GROUPS}, sys.argv[1:])
