"""Trains the demo models: ``python -m tests.benchmarks.demo_model --gsm8k DIR --out DIR``.

The default is a Llama of a few million parameters with its own byte-level BPE. ``--kind hybrid`` makes a model in which
three of four layers use the gated delta rule (Yang et al., "Gated Delta Networks", 2024), with a multi-token prediction
layer (DeepSeek-AI, "DeepSeek-V3", 2024) trained as ``model.mtp``: given the hidden state of a position and the next
token, it predicts the token after that. Seeds are fixed. ``--seconds`` limits the training time.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5GatedDeltaNet, Qwen3_5RMSNorm

from tests.benchmarks.demo_texts import TrainingDocument, arguments_of_texts, documents


@dataclass(frozen=True)
class Recipe:
    """Shape and training settings of a demo model; the defaults describe the embedded model."""

    kind: str = "llama"
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
    rounds: int = 1
    matrix_rate: float = 0.012
    vector_rate: float = 0.003
    matrix_decay: float = 0.01
    seed: int = 0

    @property
    def shape(self) -> dict[str, Any]:
        """Settings that both kinds of models share."""
        return {
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.context,
            "tie_word_embeddings": True,
        }


HYBRID_RECIPE = Recipe(kind="hybrid", layers=8, mlp=320, batch=64, steps=3000, rounds=4, matrix_decay=0.1)
"""Recipe with a third of the embedded model's attention layers, and four times its tokens per step."""

RECIPES = {recipe.kind: recipe for recipe in (Recipe(), HYBRID_RECIPE)}

TEXT_START_TOKEN, USER_TOKEN, ASSISTANT_TOKEN, TURN_END_TOKEN = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int, context: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer in which every digit is a separate token."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[TEXT_START_TOKEN, TURN_END_TOKEN, USER_TOKEN, ASSISTANT_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    start = (TEXT_START_TOKEN, bpe.token_to_id(TEXT_START_TOKEN))
    bpe.post_processor = processors.TemplateProcessing(single=f"{TEXT_START_TOKEN} $A", special_tokens=[start])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=TEXT_START_TOKEN,
        eos_token=TURN_END_TOKEN,
        pad_token=TEXT_START_TOKEN,
        additional_special_tokens=[USER_TOKEN, ASSISTANT_TOKEN],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=context,
    )


def as_text(document: TrainingDocument) -> str:
    if not document.question:
        return TEXT_START_TOKEN + document.answer
    question = f"{USER_TOKEN}{document.question}{TURN_END_TOKEN}"
    return f"{TEXT_START_TOKEN}{question}{ASSISTANT_TOKEN}{document.answer}{TURN_END_TOKEN}"


Tokens = npt.NDArray[np.uint16]

PASSES = {"math": 3.0, "explain": 2.0, "prose": 1.0, "write": 1.0, "edit": 0.7, "code": 0.6}
"""Number of passes over the documents of each kind per round."""


def encode(tokenizer: PreTrainedTokenizerBase, group: Iterable[TrainingDocument]) -> dict[str, list[Tokens]]:
    """Tokenize the documents; return their token ids by kind."""
    encoded: dict[str, list[Tokens]] = {kind: [] for kind in PASSES}
    for document in group:
        ids = tokenizer(as_text(document), add_special_tokens=False, verbose=False)["input_ids"]
        encoded[document.kind].append(np.asarray(ids, np.uint16))
    return encoded


def training_stream(encoded: dict[str, list[Tokens]], recipe: Recipe) -> Tokens:
    """Return the training tokens of all rounds of ``recipe``, concatenated."""
    return np.concatenate([one_round(encoded, recipe.seed + number) for number in range(recipe.rounds)])


def one_round(encoded: dict[str, list[Tokens]], seed: int) -> Tokens:
    """Return the tokens of one round: documents in random order, each taken ``PASSES[kind]`` times on average."""
    order = np.random.default_rng(seed)
    pieces = [
        document
        for kind, group in encoded.items()
        for share in pass_fractions(PASSES[kind])
        for document in group
        if order.random() < share
    ]
    order.shuffle(pieces)
    return np.concatenate(pieces)


def pass_fractions(passes: float) -> list[float]:
    """Split a number of passes into whole passes and a fraction: 2.5 gives ``[1.0, 1.0, 0.5]``."""
    return [1.0] * int(passes) + ([passes % 1] if passes % 1 else [])


def batch_at(step: int, progress: float, tokens: Tokens, recipe: Recipe) -> torch.Tensor:
    """Return a batch of windows, each with ``window + 1`` tokens or, near the end of training, ``context + 1`` tokens.

    Where the windows start depends on their length, the seed and the step alone, so a resumed run repeats the batches.
    """
    is_long = progress >= 1 - recipe.long_share
    length = recipe.context if is_long else recipe.window
    rows = recipe.batch * recipe.window // length
    starts = np.random.default_rng((recipe.seed, step)).integers(0, len(tokens) - length, rows)
    return torch.from_numpy(np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64))


MTP_LOSS_WEIGHT = 0.3
"""Weight of the MTP layer's loss relative to the model's own."""

MTP_SETTINGS: dict[str, Any] = {
    "num_mtp_layers": 1,
    "mtp_layer_types": ["full_attention"],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
"""Configuration of the MTP layer: two settings that transformers reads, and two from Qwen3.5's configurations."""

SAVED_NAME_PREFIXES = {
    "mtp.mtp_block.": "mtp.layers.0.",
    "mtp.enorm.": "mtp.pre_fc_norm_embedding.",
    "mtp.hnorm.": "mtp.pre_fc_norm_hidden.",
    "mtp.eh_proj.": "mtp.fc.",
    "mtp.post_norm.": "mtp.norm.",
}
"""Maps prefixes of weight names in transformers to prefixes in Qwen3.5's checkpoints."""


def new_hybrid(recipe: Recipe, special: dict[str, Any]) -> PreTrainedModel:
    rotating = recipe.width // recipe.heads // 4
    config = Qwen3_5TextConfig(
        head_dim=recipe.width // recipe.heads,
        linear_num_key_heads=recipe.kv_heads,
        linear_num_value_heads=recipe.heads,
        linear_key_head_dim=recipe.width // recipe.heads,
        linear_value_head_dim=recipe.width // recipe.heads,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [(rotating // 2 + 2 - axis) // 3 for axis in range(3)],
        },
        **recipe.shape,
        **special,
        **MTP_SETTINGS,
    )
    model = Qwen3_5ForCausalLM(config)
    model.mtp = MtpLayer(config.get_mtp_config(), Qwen3_5DecoderLayer, Qwen3_5RMSNorm, 0)
    model.mtp.apply(model._init_weights)
    for module in model.modules():
        if isinstance(module, Qwen3_5GatedDeltaNet):
            set_time_steps(module.dt_bias)
    return model


def set_time_steps(bias: torch.Tensor) -> None:
    """Initialize ``bias`` so that the time steps lie between 0.001 and 0.1, as in Mamba.

    With transformers' initial bias of 1, most states would decay within one token.
    """
    steps = torch.empty_like(bias).uniform_(math.log(0.001), math.log(0.1)).exp()
    bias.data.copy_(steps + torch.log(-torch.expm1(-steps)))


def mtp_logits(model: PreTrainedModel, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the MTP layer's logits for the token after next at each position; ``following`` holds the next tokens."""
    positions = torch.arange(1, following.shape[1] + 1, device=following.device)[None]
    embedded = model.model.embed_tokens(following)
    rotary = model.model.rotary_emb(embedded, positions)
    layer: Any = model.mtp
    logits: torch.Tensor = model.lm_head(layer(embedded, hidden, rotary, None, positions, None))
    return logits


def hybrid_loss(model: PreTrainedModel, batch: torch.Tensor) -> torch.Tensor:
    """Return the next-token loss plus ``MTP_LOSS_WEIGHT`` times the MTP layer's loss on the token after the next."""
    no_masks = {
        "full_attention": None,
        "linear_attention": None,
    }  # if masks are given, transformers does not sync with the GPU to build masks
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        hidden = model.model(input_ids=batch[:, :-1], attention_mask=no_masks, use_cache=False).last_hidden_state
        logits, later = model.lm_head(hidden), mtp_logits(model, hidden[:, :-1], batch[:, 1:-1])
    next_token_loss = cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    return next_token_loss + MTP_LOSS_WEIGHT * cross_entropy(later.float().flatten(0, 1), batch[:, 2:].flatten())


def saved_state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights under the names that Qwen3.5's checkpoints use."""

    def saved_name(name: str) -> str:
        return next((new + name[len(old) :] for old, new in SAVED_NAME_PREFIXES.items() if name.startswith(old)), name)

    return {saved_name(name): value for name, value in model.state_dict().items()}


def new_model(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    torch.manual_seed(recipe.seed)
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": [tokenizer.eos_token_id, tokenizer.bos_token_id],
        "pad_token_id": tokenizer.pad_token_id,
    }
    if recipe.kind == "hybrid":
        model = new_hybrid(recipe, special)
    else:
        model = LlamaForCausalLM(LlamaConfig(**recipe.shape, **special))
    model.generation_config = GenerationConfig(**special)
    return model


def optimizers(model: PreTrainedModel, recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' matrices, because it halves the steps needed, and AdamW for all other weights."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    vectors = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=recipe.matrix_rate, momentum=0.95, weight_decay=recipe.matrix_decay),
        torch.optim.AdamW(vectors, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate_factor(step: int, progress: float) -> float:
    """Return the factor that scales the learning rate at a step.

    The factor rises to 1 over 50 steps, stays there, and falls linearly to zero over the last 45 % of the training.
    """
    return min(1.0, (step + 1) / 50, (1 - progress) / 0.45)


def next_token_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def train(
    model: PreTrainedModel, tokens: Tokens, recipe: Recipe, device: str, *, compiled: bool, seconds: float
) -> int:
    """Train until all steps are done or the time is up; return the number of steps."""
    model.train()
    torch.nn.Module.to(model, device)
    # One graph for each of the two lengths, as a graph with dynamic lengths is three times slower.
    stepped: Any = torch.compile(model, dynamic=False) if compiled and recipe.kind == "llama" else model
    loss_of = hybrid_loss if recipe.kind == "hybrid" else next_token_loss
    tools = optimizers(model, recipe)
    step, started = 0, time.monotonic()
    while (progress := max(step / recipe.steps, (time.monotonic() - started) / seconds)) < 1:
        loss = loss_of(stepped, batch_at(step, progress, tokens, recipe).to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool, rate in zip(tools, (recipe.matrix_rate, recipe.vector_rate), strict=True):
            for group in tool.param_groups:
                group["lr"] = rate * learning_rate_factor(step, progress)
            tool.step()
            tool.zero_grad()
        step += 1
        if step % 10 == 0:
            print(f"step {step}/{recipe.steps}  loss {loss.item():.3f}", flush=True)
    return step


@torch.no_grad()
def held_out_loss(model: PreTrainedModel, group: list[Tokens], recipe: Recipe) -> float:
    """Return the loss per token of the first 200 documents, each cut to one window."""
    model.eval()
    total, count = 0.0, 0
    for document in group[:200]:
        ids = torch.from_numpy(document[: recipe.window].astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0, :-1].float()
        total += cross_entropy(logits, ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    return total / count


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, recipe: Recipe) -> None:
    """Save the tokenizer and the model, storing weights in 16 bits for a small download; they load as float32."""
    is_hybrid = recipe.kind == "hybrid"
    torch.nn.Module.to(model, "cpu", torch.bfloat16 if is_hybrid else torch.float16)
    model.save_pretrained(out, state_dict=saved_state(model) if is_hybrid else None)
    tokenizer.save_pretrained(out)
    config = out / "config.json"
    settings = json.loads(config.read_text()) | {"dtype": "float32"}
    config.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def build_model(
    everything: list[TrainingDocument],
    out: Path,
    recipe: Recipe,
    device: str,
    *,
    tokenizer_of: Path | None = None,
    compiled: bool = True,
    seconds: float = math.inf,
) -> dict[str, Any]:
    """Train and save a model, with the tokenizer in ``tokenizer_of`` or a newly trained one; return the report."""
    learned = [document for document in everything if not document.held_out]
    tokenizer = (
        AutoTokenizer.from_pretrained(tokenizer_of, trust_remote_code=False)
        if tokenizer_of
        else train_tokenizer((as_text(document) for document in learned), recipe.vocabulary, recipe.context)
    )
    encoded = encode(tokenizer, learned)
    model = new_model(recipe, tokenizer)
    steps = train(model, training_stream(encoded, recipe), recipe, device, compiled=compiled, seconds=seconds)
    save(model, tokenizer, out, recipe)
    torch.nn.Module.to(model, "cpu", torch.float32)
    held_out = encode(tokenizer, (document for document in everything if document.held_out))
    report = {
        "recipe": asdict(recipe),
        "parameters": model.num_parameters(),
        "training_tokens": {kind: sum(map(len, group)) for kind, group in encoded.items()},
        "tokens_seen": steps * recipe.batch * recipe.window,
        "device": device,
        "held_out": {kind: held_out_loss(model, group, recipe) for kind, group in held_out.items() if group},
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n")
    return report


def main() -> None:
    parser = arguments_of_texts(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--kind", choices=sorted(RECIPES), default="llama", help="which layers it has")
    parser.add_argument("--tokenizer", type=Path, help="folder of a model whose tokenizer to use; else one is trained")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end sooner, the learning rate falling sooner")
    options = parser.parse_args()
    everything = list(documents(options.gsm8k, options.docs))
    report = build_model(
        everything,
        options.out,
        RECIPES[options.kind],
        options.device,
        tokenizer_of=options.tokenizer,
        seconds=options.seconds,
    )
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
