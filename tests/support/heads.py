"""Random drafting heads, and a slow reference implementation of their logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hdtool.runtime.drafters.heads.checkpoint import ARCHITECTURES, EvalResult, SavedHeads, new_heads
from hdtool.runtime.drafters.heads.modules import NORM_EPSILON, ROTARY_BASE, Heads, HeadsShape, MtpHeads, ParallelHeads
from hdtool.runtime.model.model_fingerprint import fingerprint
from hdtool.runtime.settings.building import HeadsConfig
from hdtool.runtime.target.target import Target

VARIANTS = {
    "amphista": HeadsConfig(rank=8),
    "alpha": HeadsConfig(rank=8, auto_embedding=2),
    "no auto-embedding": HeadsConfig(rank=8, auto_embedding=0),
    "no positions": HeadsConfig(rank=8, positions=False),
    "no adaptation": HeadsConfig(rank=8, adaptation=0),
    "one adaptation layer": HeadsConfig(rank=8, adaptation=1),
    "no sampled token": HeadsConfig(rank=8, sampled_token=False),
    "full": HeadsConfig(rank=0),
    "three heads": HeadsConfig(heads=3, rank=8, mlp=20),
    "medusa": HeadsConfig(rank=8).plain,
    "draft vocabulary": HeadsConfig(rank=8, draft_vocabulary=20),
}
SHAPE = HeadsShape(width=16, vocabulary=53, embedding=12, attention_heads=2, mlp=24)

Floats = npt.NDArray[np.float64]


SEQUENTIAL = {
    "hydra": HeadsConfig("hydra", rank=8).resolved,
    "hydra of three heads": HeadsConfig("hydra", heads=3, rank=0, head_layers=2).resolved,
    "hydra++": HeadsConfig("hydra++", rank=8, mlp=20).resolved,
    "hydra++ with a draft vocabulary": HeadsConfig("hydra++", rank=8, draft_vocabulary=20).resolved,
    "mtp": HeadsConfig("mtp").resolved,
    "mtp with a draft vocabulary": HeadsConfig("mtp", heads=3, mlp=20, draft_vocabulary=20).resolved,
}


def random_heads(config: HeadsConfig, shape: HeadsShape = SHAPE, seed: int = 0, size: float = 0.3) -> ParallelHeads:
    """Create parallel heads with random numbers in all weights."""
    heads = random_kind(config, shape, seed, size)
    assert isinstance(heads, ParallelHeads)
    return heads


def random_kind(config: HeadsConfig, shape: HeadsShape = SHAPE, seed: int = 0, size: float = 0.3) -> Heads:
    """Create random heads of any kind. An MTP layer without a draft vocabulary has no output layer yet."""
    torch.manual_seed(seed)
    heads = ARCHITECTURES[config.kind](shape, config)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.copy_(torch.randn(weight.shape) * size)
    if heads.token_ids is not None:
        heads.token_ids.copy_(torch.randperm(shape.vocabulary)[: heads.vocabulary])
    return heads.eval().requires_grad_(False)


def random_for(target: Target, config: HeadsConfig, seed: int = 0, size: float = 0.3) -> SavedHeads:
    """Create random heads for a target, with a static tree."""
    columns = target.watch_hidden()
    every = replace(config, draft_vocabulary=None)
    like = new_heads(target.model, columns.stop - columns.start, target.config.vocab_size, every)
    paths = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [2]]
    judged = EvalResult(
        tree=[path for path in paths if len(path) <= config.heads], gains=[0.9**n for n in range(len(paths))]
    )
    heads = random_kind(config, like.shape, seed, size).to(target.device, target.dtype)
    if isinstance(heads, MtpHeads) and not config.draft_vocabulary:
        heads.share(target.model.get_output_embeddings())
    return SavedHeads(heads, fingerprint(target.model), "random", judged, {})


def reference_logits(heads: Heads, hidden: torch.Tensor, tokens: torch.Tensor, *, last: bool = False) -> Floats:
    """Compute logits ``[rows, heads, tokens]`` number by number, after every row or only after the ``last``."""
    weights = {name: weight.double().numpy() for name, weight in heads.state_dict().items()}
    config, width = heads.config, heads.shape.attention_heads
    states = hidden.double().numpy()
    stages = [] if config.adaptation else [states]
    for layer in range(config.adaptation):
        states = _adapted(weights, f"layers.{layer}.", states, tokens.double().numpy(), width, config)
        stages.append(states)
    found = np.zeros((len(states), config.heads, heads.vocabulary))
    for row in range(len(states) - 1 if last else 0, len(states)):
        own = []
        for head in range(config.heads):
            start = stages[head * len(stages) // config.heads][row]
            step = weights[f"steps.{head}.weight"] @ start
            own.append(start + step / (1 + np.exp(-step)) + (weights["positions"][head] if config.positions else 0))
        looked = np.array(own)
        for block in range(config.auto_embedding):
            looked = _attended(weights, f"auto_embedding.{block}.", looked, width, turned=False, causal=False)
        for head in range(config.heads):
            down = weights.get(f"outputs.{head}.down.weight")
            known = looked[head] if down is None else down @ looked[head]
            found[row, head] = weights[f"outputs.{head}.up.weight"] @ known
    return found


def reference_logits_after(heads: Heads, hidden: torch.Tensor, tokens: torch.Tensor, path: torch.Tensor) -> Floats:
    """Compute the logits of heads that draft token by token, after embedded accepted tokens and an embedded path."""
    weights = {name: weight.double().numpy() for name, weight in heads.state_dict().items()}
    config, width = heads.config, heads.shape.attention_heads
    states, read, ahead = (part.double().numpy() for part in (hidden, tokens, path))
    output = heads.output(len(path))
    if config.kind == "mtp":
        for token in ahead:
            after = _adapted(weights, "layers.0.", states, read, width, config)[-1]
            states, read = np.vstack([states, after]), np.vstack([read, token])
        state = _adapted(weights, "layers.0.", states, read, width, config)[-1]
    else:
        if config.adaptation:
            states = _adapted(weights, "layers.0.", states, read, width, config)
        state, known = states[-1], [_normed(token, weights["token_norm.weight"]) for token in (read[-1], *ahead)]
        for layer in range(config.head_layers or 1):
            given = np.concatenate([state, *known]) if layer == 0 else state
            step = weights[f"steps.{len(path)}.{layer}.weight"] @ given
            state = state + step / (1 + np.exp(-step))
    if output.down is not None:
        state = output.down.weight.detach().double().numpy() @ state
    return np.asarray(output.up.weight.detach().double().numpy() @ state)


def _adapted(weights: Any, name: str, states: Floats, tokens: Floats, heads: int, config: HeadsConfig) -> Floats:
    if config.sampled_token:
        told = np.array([_normed(token, weights[name + "token_norm.weight"]) for token in tokens])
        states = np.concatenate([states, told], axis=1) @ weights[name + "join.weight"].T
    states = _attended(weights, name + "attention.", states, heads, turned=True, causal=True)
    out = []
    for state in states:
        wide = weights[name + "widen.weight"] @ _normed(state, weights[name + "norm.weight"])
        gate, value = wide[: len(wide) // 2], wide[len(wide) // 2 :]
        out.append(state + weights[name + "narrow.weight"] @ (gate / (1 + np.exp(-gate)) * value))
    return np.array(out)


def _attended(weights: Any, name: str, states: Floats, heads: int, *, turned: bool, causal: bool) -> Floats:
    width = states.shape[1] // heads
    read = [weights[name + "read.weight"] @ _normed(state, weights[name + "norm.weight"]) for state in states]
    parts = [np.split(line, 3) for line in read]
    seen: list[list[Floats]] = [[] for _ in states]
    for head in range(heads):
        mine = slice(head * width, (head + 1) * width)
        queries, keys, values = ([part[kind][mine] for part in parts] for kind in range(3))
        if turned:
            queries, keys = ([_turned(part, place) for place, part in enumerate(those)] for those in (queries, keys))
        for row, query in enumerate(queries):
            end = row + 1 if causal else len(keys)
            scores = np.exp([query @ key / np.sqrt(width) for key in keys[:end]])
            seen[row].append(sum(score * value for score, value in zip(scores, values, strict=False)) / scores.sum())
    out = states.copy()
    for row, read_by_heads in enumerate(seen):
        out[row] += weights[name + "write.weight"] @ np.concatenate(read_by_heads)
    return out


def _turned(part: Floats, place: int) -> Floats:
    half, out = len(part) // 2, part.copy()
    for number in range(half):
        angle = place * ROTARY_BASE ** (-2 * number / len(part))
        first, second = part[number], part[number + half]
        out[number] = first * np.cos(angle) - second * np.sin(angle)
        out[number + half] = second * np.cos(angle) + first * np.sin(angle)
    return out


def _normed(state: Floats, weight: Floats) -> Floats:
    return np.asarray(state / np.sqrt(np.mean(state**2) + NORM_EPSILON) * weight)
