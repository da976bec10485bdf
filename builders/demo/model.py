"""Train the embedded demo model: ``python -m hdtool.builders.demo.model --gsm8k DIR --out DIR``.

A Llama of a few million parameters with a byte-level BPE of its own, saved as ``save_pretrained``
lays a checkpoint out. Everything is drawn from fixed seeds; a killed run goes on from its last
checkpoint at the same step. ``--width 384 --layers 8`` makes the larger model (about 15 million
parameters) that wants a GPU.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from hdtool.builders.demo.corpus import Document, arguments, documents
from hdtool.builders.demo.tokenizer import as_text, train_tokenizer
from hdtool.builders.heads.training import checkpoint_with
from hdtool.data.errors import ModelError
from hdtool.data.files.atomic_write import OutputFile
from hdtool.data.files.ownership import json_object

Tokens = npt.NDArray[np.uint16]

PASSES = {"math": 3.0, "explain": 2.0, "prose": 1.0, "write": 1.0, "edit": 0.7, "code": 0.6}
"""Passes over the documents of each kind in one epoch."""


RESCUE_EVERY = 50
"""Steps between checkpoints."""


@dataclass(frozen=True)
class Recipe:
    """Size, data order and optimiser of one training run."""

    vocabulary: int = 4096
    width: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 1024
    context: int = 1024
    window: int = 512
    long_share: float = 0.15
    batch: int = 16
    steps: int = 3400
    matrix_rate: float = 0.012
    vector_rate: float = 0.003
    seed: int = 0


def encode(tokenizer: PreTrainedTokenizerFast, group: Iterable[Document]) -> dict[str, list[Tokens]]:
    """The tokens of each document, by kind."""
    encoded: dict[str, list[Tokens]] = {kind: [] for kind in PASSES}
    for document in group:
        ids = tokenizer(as_text(document), add_special_tokens=False, verbose=False)["input_ids"]
        encoded[document.kind].append(np.asarray(ids, np.uint16))
    return encoded


def stream(encoded: dict[str, list[Tokens]], seed: int) -> Tokens:
    """One epoch: documents of all kinds, shuffled and concatenated."""
    order = np.random.default_rng(seed)
    pieces = [
        document
        for kind, group in encoded.items()
        for share in shares(PASSES[kind])
        for document in group
        if order.random() < share
    ]
    order.shuffle(pieces)
    return np.concatenate(pieces)


def shares(passes: float) -> list[float]:
    """2.5 passes are two whole ones and one half."""
    return [1.0] * int(passes) + ([passes % 1] if passes % 1 else [])


def batch_at(step: int, tokens: Tokens, recipe: Recipe) -> torch.Tensor:
    """Windows of ``window + 1`` tokens; the last steps read windows as long as the context instead.

    Drawn from (seed, step) alone, so that a resumed run reads the same batches.
    """
    is_long = step >= recipe.steps * (1 - recipe.long_share)
    length = recipe.context if is_long else recipe.window
    rows = recipe.batch * recipe.window // length
    starts = np.random.default_rng((recipe.seed, step)).integers(0, len(tokens) - length, rows)
    return torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))


# Training --------------------------------------------------------------------------------------


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(recipe.seed)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": [tokenizer.eos_token_id, tokenizer.bos_token_id],
        "pad_token_id": tokenizer.pad_token_id,
    }
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=recipe.width,
            intermediate_size=recipe.mlp,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.kv_heads,
            max_position_embeddings=recipe.context,
            tie_word_embeddings=True,
            **special,
        )
    )
    model.generation_config = GenerationConfig(**special)
    return model


def optimizers(model: LlamaForCausalLM, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, which needs about half the steps, and AdamW for the others."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(others, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, steps: int) -> float:
    """Share of the full learning rate: warm-up over 50 steps, constant, then linear to zero over the last 45 %."""
    return min(1.0, (step + 1) / 50, (steps - step) / (steps * 0.45))


def loss_of(model: Callable[..., Any], batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    flat = logits.float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(flat, batch[:, 1:].flatten())


def train(
    model: LlamaForCausalLM, tokens: Tokens, recipe: Recipe, rescue: Path, device: str, *, compiled: bool = True
) -> float:
    """Run all steps, or those that a killed run left; returns the seconds over all runs."""
    model.train()
    torch.nn.Module.to(model, device)
    # One graph per length (there are two): a graph for dynamic lengths is three times as slow.
    stepped = torch.compile(model, dynamic=False) if compiled else model
    tools = optimizers(model, recipe)
    done, spent = restore(rescue, model, tools)
    started = time.monotonic() - spent
    for step in range(done, recipe.steps):
        loss = loss_of(stepped, batch_at(step, tokens, recipe).to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool, rate in zip(tools, (recipe.matrix_rate, recipe.vector_rate), strict=True):
            for group in tool.param_groups:
                group["lr"] = rate * learning_rate_factor(step, recipe.steps)
            tool.step()
            tool.zero_grad()
        spent = time.monotonic() - started
        if step % 10 == 9:
            print(f"step {step + 1}/{recipe.steps}  loss {loss.item():.3f}  {spent:.0f} s", flush=True)
        if (step + 1) % RESCUE_EVERY == 0:
            state = {"model": model.state_dict(), "tools": [tool.state_dict() for tool in tools]}
            with rescue_file(rescue).replaced() as stream:
                torch.save({**state, "step": step + 1, "spent": spent}, stream)
    return spent


def rescue_file(path: Path) -> OutputFile:
    """The checkpoint of a run, replaced and deleted only if this script wrote it."""
    is_ours = checkpoint_with({"model", "tools", "step", "spent"})
    return OutputFile(path, "a checkpoint of this script", is_ours, ModelError)


def restore(path: Path, model: LlamaForCausalLM, tools: list[torch.optim.Optimizer]) -> tuple[int, float]:
    if not rescue_file(path).exists():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for tool, kept in zip(tools, state["tools"], strict=True):
        tool.load_state_dict(kept)
    return state["step"], state["spent"]


# Evaluation and saving ----------------------------------------------------------------------------


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, group: list[Tokens], recipe: Recipe) -> dict[str, float]:
    """Mean loss per token over the held-out documents of one kind, each read from its own start."""
    model.eval()
    total, count = 0.0, 0
    for document in group[:200]:
        ids = torch.from_numpy(document[: recipe.window].astype(np.int64))[None]
        if ids.shape[1] < 2:
            continue
        logits = model(input_ids=ids).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return {"loss_per_token": total / count, "tokens": count}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Save weights in half precision for a smaller download; the configuration sets float32."""
    torch.nn.Module.to(model, "cpu", torch.float16)
    with TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        config = Path(scratch, "config.json")
        settings = json.loads(config.read_text())
        settings["dtype"] = "float32"
        config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
        for path in sorted(Path(scratch).iterdir()):
            # ``refuse_foreign_folder`` has recognised the folder as a whole.
            OutputFile(out / path.name, "a file of this model", lambda _: True, ModelError).write(path.read_bytes())


def report_file(out: Path) -> OutputFile:
    """The report on a training, which identifies the folder of a model."""

    def is_ours(path: Path) -> bool:
        return {"recipe", "training_tokens", "tokens_seen", "held_out"} <= json_object(path).keys()

    return OutputFile(out / "training.json", "a report of this script", is_ours, ModelError)


def refuse_foreign_folder(out: Path, rescue: Path) -> None:
    """Raise unless the folder is new or empty, or this script has begun or finished a model in it."""
    finished, begun = report_file(out).exists(), rescue_file(rescue).exists()
    if out.exists() and any(out.iterdir()) and not (finished or begun):
        raise ModelError(f"{out} is not empty and holds no model of this script: choose another --out")


def build(
    gsm8k: Path,
    docs: Path,
    out: Path,
    recipe: Recipe,
    device: str,
    *,
    library: Path | None = None,
    compiled: bool = True,
) -> dict[str, Any]:
    """Train a tokenizer and a model and save them; returns the report on the training."""
    rescue = out.with_suffix(".rescue")
    refuse_foreign_folder(out, rescue)
    out.mkdir(parents=True, exist_ok=True)
    everything = list(documents(gsm8k, docs, library))
    learned = [document for document in everything if not document.held_out]
    validation = [document for document in everything if document.held_out]
    tokenizer = train_tokenizer((as_text(document) for document in learned), recipe.vocabulary, recipe.context)
    encoded = encode(tokenizer, learned)
    sizes = {kind: sum(map(len, group)) for kind, group in encoded.items()}
    print(f"tokens to learn from: {sizes}", flush=True)
    model = new_model(recipe, tokenizer)
    print(f"{model.num_parameters():,} parameters", flush=True)
    seconds = train(model, stream(encoded, recipe.seed), recipe, rescue, device, compiled=compiled)
    save(model, tokenizer, out)
    torch.nn.Module.to(model, "cpu", torch.float32)
    report = {
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "training_tokens": sizes,
        "tokens_seen": recipe.steps * recipe.batch * recipe.window,
        "seconds": round(seconds),
        "device": device,
        "held_out": {
            kind: held_out_loss(model, group, recipe) for kind, group in encode(tokenizer, validation).items()
        },
    }
    report_file(out).write(json.dumps(report, indent=2) + "\n")
    rescue_file(rescue).remove()
    return report


def main() -> None:
    parser = arguments(__doc__, "where the checkpoint goes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    for field in fields(Recipe):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    options = parser.parse_args()
    recipe = Recipe(**{field.name: getattr(options, field.name) for field in fields(Recipe)})
    print(json.dumps(build(options.gsm8k, options.docs, options.out, recipe, options.device), indent=2))


if __name__ == "__main__":
    main()
