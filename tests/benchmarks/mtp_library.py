"""Compares MTP drafting by transformers and by hdtool: ``python -m tests.benchmarks.mtp_library``.

The embedded demo model, which only has attention layers, gets a layer for multi-token prediction. The layer is trained
here on the demo's corpus index with the model frozen. Then transformers, which drafts one token, and hdtool answer
held-out prompts in turn.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from hdtool.data import demo
from hdtool.data.chat import encode_conversation
from hdtool.data.prompts import read_prompts
from hdtool.runtime.answerer import decode
from hdtool.runtime.config import DecodeConfig, SamplingConfig
from hdtool.runtime.drafters.methods import drafter_for
from hdtool.runtime.drafters.trained.mtp import WithMtpLayers, patterns_of
from hdtool.runtime.samplers import sampler_for
from hdtool.runtime.stores.corpus_index import CorpusIndex
from hdtool.runtime.stores.store_set import StoreSet
from hdtool.runtime.target.load import Loaded, load
from tests.support.mtp import add_layers

WINDOW, BATCH, RATE = 96, 16, 2e-3
METHODS = (("ar", None), ("mtp", 1), ("mtp", None), ("hd", None), ("hd+mtp", None), ("hd+mtp", 24))
"""Methods with their draft tokens; None chooses their number by measurement."""


def checkpoint_with_layer(folder: Path, steps: int) -> None:
    """Train an MTP layer for ``steps`` steps, and save the demo model with it."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_pretrained(demo.MODEL, dtype=torch.float32).requires_grad_(False).eval()
    model.config.num_mtp_layers = 1
    told: Any = WithMtpLayers(model, 1)
    layers: Any = MtpModel(told, 1)
    own = list(layers.layers.parameters())
    for parameter in own:
        parameter.requires_grad_(True)
    texts = torch.from_numpy(CorpusIndex(demo.CORPUS_INDEX).shards.tokens.astype("int64"))
    texts = texts.clamp(max=model.config.vocab_size - 1)
    optimizer = torch.optim.AdamW(own, RATE)
    positions = torch.arange(1, WINDOW - 1)[None]
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / 20, 2 * (1 - step / steps))
        starts = torch.randint(len(texts) - WINDOW, (BATCH,))
        ids = torch.stack([texts[start : start + WINDOW] for start in starts.tolist()])
        with torch.no_grad():
            hidden = model.model(ids).last_hidden_state
        states = layers.forward_layer(0, hidden[:, :-2], positions, None, input_ids=ids[:, 1:-1])
        loss = functional.cross_entropy(model.lm_head(states).flatten(0, 1), ids[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss after {steps} steps: {float(loss.detach()):.2f}")
    model.save_pretrained(folder)
    add_layers(folder, model, layers)


def library_answers(folder: Path) -> dict[str, Callable[[list[int], int], tuple[list[int], int]]]:
    """Return functions that call ``generate`` without and with the layer; they return tokens and model passes."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    model._keys_to_ignore_on_load_unexpected = patterns_of(model)
    passes = [0]
    model.model.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))

    def answer(ids: list[int], max_new_tokens: int, **options: Any) -> tuple[list[int], int]:
        passes[0] = 0
        found = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, do_sample=False, **options)
        return found[0, len(ids) :].tolist(), passes[0]

    return {
        "`generate`": answer,
        "`generate`, `use_mtp`": lambda ids, max_new_tokens: answer(ids, max_new_tokens, use_mtp=True),
    }


def own_answer(
    loaded: Loaded, method: str, nodes: int | None, ids: list[int], max_new_tokens: int
) -> tuple[list[int], int]:
    drafter = drafter_for(DecodeConfig(method, draft_tokens=nodes), loaded.target, StoreSet())
    sampler, stops = sampler_for(loaded, SamplingConfig(), ids, max_new_tokens=max_new_tokens)
    steps = list(decode(loaded.target, ids, sampler, max_new_tokens=max_new_tokens, stops=stops, drafter=drafter))
    return [token for step in steps for token in step.tokens], len(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        checkpoint_with_layer(folder, options.steps)
        for file in demo.MODEL.iterdir():
            if not (folder / file.name).exists():
                (folder / file.name).symlink_to(file)
        loaded = load(str(folder))
        contenders: dict[str, Any] = dict(library_answers(folder))
        for method, nodes in METHODS:
            name = f"`{method}`" + (f", {nodes} nodes" if nodes else "")
            contenders[name] = lambda ids, max_new_tokens, method=method, nodes=nodes: own_answer(
                loaded, method, nodes, ids, max_new_tokens
            )
        compare(contenders, loaded, options.num_prompts, options.max_new_tokens)


def compare(contenders: dict[str, Any], loaded: Loaded, number: int, max_new_tokens: int) -> None:
    tokens, passes, seconds = defaultdict[str, int](int), defaultdict[str, int](int), defaultdict[str, float](float)
    prompts, differ = read_prompts(demo.PROMPTS), 0
    names = list(contenders)
    for turn, prompt in enumerate(prompts[:: len(prompts) // number or 1][:number]):
        ids = encode_conversation(loaded.tokenizer, prompt.messages)
        answers = {}
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began = time.perf_counter()
            answers[name], used = contenders[name](ids, max_new_tokens)
            seconds[name] += time.perf_counter() - began
            tokens[name] += len(answers[name])
            passes[name] += used
        differ += sum(answer != answers["`ar`"] for answer in answers.values())
    print("| | tokens per step | tokens/s |\n|---|---|---|")
    for name in names:
        print(f"| {name} | {tokens[name] / passes[name]:.2f} | {tokens[name] / seconds[name]:.1f} |")
    print(f"{differ} answers differ from plain decoding")


if __name__ == "__main__":
    main()
