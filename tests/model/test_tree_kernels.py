"""Kernels of passes on CUDA: on a CPU by Triton's interpreter, and compiled ahead for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hdtool.runtime.core.tree import ROOT, DraftTree
from hdtool.runtime.engines.captured import captured_passes
from hdtool.runtime.engines.reference.operations import (
    HeadLayout,
    HeadNorms,
    Norm,
    Operations,
    Residual,
)
from hdtool.runtime.model.pass_inputs import FULL, AttentionMasks, AttentionWindow, StepInput, StepTensors
from hdtool.runtime.program.embedding_and_head import Rotary
from hdtool.runtime.program.llama_like_families import NormKind
from hdtool.runtime.target.target import Target
from tests.support.compiled_kernels import SHARED_MEMORY, compiled
from tests.support.described import assert_right
from tests.support.families import model_of
from tests.support.interpreted import interpreted_kernels
from tests.support.oracle import assert_same_logits, plain_logits, prompt_of
from tests.support.rehearsed import captured_of, direct
from tests.support.trees import step_of, tokens_to

CPU = torch.device("cpu")
CAPACITY = 576


@pytest.fixture(autouse=True, scope="module")
def interpreted() -> Iterator[None]:
    with interpreted_kernels():
        yield


def operations_of(
    dtype: torch.dtype,
    window: AttentionWindow,
    step: StepTensors,
    residuals: tuple[Residual, ...] = (),
    heads: tuple[HeadNorms, ...] = (),
) -> list[Operations]:
    from hdtool.runtime.engines.cuda.triton_operations import TritonOperations

    triton = TritonOperations(CPU)
    triton._processors = 8
    both: list[Operations] = [Operations(AttentionMasks([window], dtype, CPU)), triton]
    for operations in both:
        operations.prepare(residuals, heads)
        operations.begin(step, CAPACITY)
    return both


def exact_attention(
    queries: torch.Tensor, cache: list[torch.Tensor], layout: HeadLayout, step: StepTensors
) -> torch.Tensor:
    """In float64, key by key as a tree is defined."""
    slots, rows = step.tokens.shape
    groups = layout.query_heads // layout.key_heads
    keys, values = (part.double().repeat_interleave(groups, 1) for part in cache)
    heads = queries.double().view(slots, rows, -1, layout.width)[:, :, : layout.query_heads]
    scores = torch.einsum("srhw,shcw->shrc", heads, keys) * layout.scale
    if layout.softcap:
        scores = layout.softcap * torch.tanh(scores / layout.softcap)
    window = layout.window.window or CAPACITY
    for slot in range(slots):
        length, positions = int(step.length[slot]), step.positions[slot].tolist()
        for row in range(rows):
            bits = int(step.ancestor_mask[slot, row])
            mine = {length + 1 + node: positions[node + 1] for node in range(rows - 1) if bits >> node & 1}
            seen = {column: column for column in range(length + 1)} | mine
            shown = [column for column, position in seen.items() if position > positions[row] - window]
            hidden = torch.ones(CAPACITY, dtype=torch.bool).index_fill(0, torch.tensor(shown), False)
            scores[slot, :, row, hidden] = -torch.inf
    if layout.sinks is not None:
        sinks = layout.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("shrc,shcw->srhw", weights, values).reshape(slots * rows, -1)


CASES: dict[str, dict[str, Any]] = {
    "one row": {"rows": 1, "heads": 4, "keys": 2, "width": 32, "lengths": [100]},
    "one head of keys": {"rows": 8, "heads": 4, "keys": 1, "width": 64, "lengths": [300]},
    "an odd width, a batch": {"rows": 16, "heads": 6, "keys": 2, "width": 80, "lengths": [5, 517]},
    "a window": {"rows": 33, "heads": 4, "keys": 2, "width": 16, "lengths": [500], "window": 64},
    "windows of a batch": {"rows": 8, "heads": 4, "keys": 4, "width": 32, "lengths": [0, 63, 64], "window": 16},
    "bounded scores": {"rows": 5, "heads": 4, "keys": 2, "width": 16, "lengths": [90], "softcap": 2.0},
    "sinks": {"rows": 5, "heads": 4, "keys": 2, "width": 16, "lengths": [90, 2], "sinks": True},
    "values of another width": {"rows": 5, "heads": 2, "keys": 2, "width": 24, "values": 16, "lengths": [40]},
    "a long context beside short ones": {"rows": 2, "heads": 4, "keys": 2, "width": 16, "lengths": [3, 560, 0, 9]},
    "the largest tree": {"rows": 65, "heads": 2, "keys": 1, "width": 16, "lengths": [200]},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.each_value
def test_attention_is_that_of_each_row_to_its_path(case: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(case["rows"])
    rows, width, lengths = case["rows"], case["width"], case["lengths"]
    window = AttentionWindow("sliding_attention", case["window"]) if "window" in case else AttentionWindow(FULL)
    sinks = torch.randn(case["heads"]).to(dtype) if "sinks" in case else None
    layout = HeadLayout(case["heads"], case["keys"], width, 0.4, window, case.get("softcap"), sinks)
    step = step_of(rows, lengths)
    shape = len(lengths) + 1, case["keys"], CAPACITY  # a slot more than there are trees
    cache = [torch.randn(*shape, one).to(dtype) for one in (width, case.get("values", width))]
    queries = torch.randn(len(lengths) * rows, (case["heads"] + 2 * case["keys"]) * width).to(dtype)
    expected = exact_attention(queries, [part[: len(lengths)] for part in cache], layout, step)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    plain, triton = operations_of(dtype, window, step)
    for operations in (triton, *([plain] if "values" not in case else [])):
        found = operations.attention(queries, (cache[0], cache[1]), layout)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_a_slot_that_a_step_leaves_out_reads_no_keys() -> None:
    """Its keys and values are NaN, which any use of them would spread."""
    torch.manual_seed(3)
    sizes = StepInput(CPU, 3)
    for slot, length in enumerate((40, 500, 7)):
        sizes.fill(slot, DraftTree.bare(1), 1, length)
    sizes.leave_out(1, 1)
    sizes.send(3, 1)
    step, layout = sizes.tensors(3, 1), HeadLayout(4, 2, 16, 0.4, AttentionWindow(FULL))
    cache = [torch.randn(3, 2, CAPACITY, 16) for _ in range(2)]
    queries = torch.randn(3, 8 * 16)
    expected = exact_attention(queries, cache, layout, step)
    expected[1] = 0
    for part in cache:
        part[1] = torch.nan
    triton = operations_of(torch.float32, layout.window, step)[1]
    found = triton.attention(queries, (cache[0], cache[1]), layout)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
TOLERANCES = {torch.float32: 2e-5, torch.float16: 8e-3}
NORM_KINDS = {"llama": NormKind(), "gemma": NormKind(1.0, rounds=False), "olmo": NormKind(rounds=False)}
KINDS = pytest.mark.parametrize("kind", NORM_KINDS.values(), ids=NORM_KINDS)
LAYER_NORMS = {
    "phi": NormKind(rounds=False, is_centered=True, has_bias=True),
    "cohere": NormKind(rounds=False, is_centered=True),
}
ALL_KINDS = pytest.mark.parametrize("kind", (NORM_KINDS | LAYER_NORMS).values(), ids=NORM_KINDS | LAYER_NORMS)


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def exact_norm(rows: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    if norm is None:
        return rows
    if norm.kind.is_centered:
        rows = rows - rows.mean(-1, keepdim=True)
    scale = (rows.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
    return rows * scale * (norm.kind.offset + norm.weight.double()) + (0 if norm.bias is None else norm.bias.double())


@DTYPES
@ALL_KINDS
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("where", ["before", "after", "both", "neither"])
@pytest.mark.each_value
def test_a_residual_is_that_of_float64(kind: NormKind, dtype: torch.dtype, multiplier: float, where: str) -> None:
    torch.manual_seed(1)
    rows, added = (torch.randn(5, 96).to(dtype) + 1 for _ in range(2))
    weights, biases = torch.randn(2, 2, 96).to(dtype)
    after, before = (
        Norm(weight, 1e-5, kind, bias if kind.has_bias else None) if where in (name, "both") else None
        for weight, bias, name in zip(weights, biases, ("after", "before"), strict=True)
    )
    residual = Residual(after, before, multiplier)
    for operations in operations_of(dtype, AttentionWindow(FULL), step_of(1, [4]), (residual,)):
        for more in (None, added):
            sums = rows.clone()
            found = operations.add_norm(sums, more, residual)
            expected = rows.double()
            if more is not None:
                expected = expected + multiplier * exact_norm(more.double(), after)
            assert_near(sums, expected, dtype)
            assert_near(found, exact_norm(expected, before), dtype)
            assert (found is sums) == (before is None)


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
def test_gates_are_those_of_float64(activation: str, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    gates = (3 * torch.randn(7, 2 * 1500)).to(dtype)
    gates[0, :4] = torch.tensor([-40.0, 40.0, 0.0, -9.0])
    gate, up = gates.double().chunk(2, dim=-1)
    active = {
        "silu": gate * gate.sigmoid(),
        "gelu_tanh": 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))),
        "gelu": 0.5 * gate * (1 + torch.erf(gate / 2**0.5)),
    }[activation]
    for operations in operations_of(dtype, AttentionWindow(FULL), step_of(1, [4])):
        assert_near(operations.gate(gates, activation), active * up, dtype)


ROTATED = {"the whole head": (80, False), "a part": (48, False), "pairs of a part": (48, True), "nothing": (0, False)}


@DTYPES
@KINDS
@pytest.mark.parametrize("rotated", ROTATED.values(), ids=ROTATED)
@pytest.mark.parametrize("normed", ["no norms", "each head", "all heads together"])
@pytest.mark.each_value
def test_rotated_heads_are_those_of_float64(
    kind: NormKind, dtype: torch.dtype, rotated: tuple[int, bool], normed: str
) -> None:
    """Queries and keys of a batch with normed heads, and what is stored of keys and values."""
    torch.manual_seed(3)
    layout, lengths, rows = HeadLayout(6, 2, 80, 0.1, AttentionWindow(FULL)), [5, 517], 4
    step, tokens, (width, is_interleaved) = step_of(rows, lengths), len(lengths) * rows, rotated
    qkv, tables = torch.randn(tokens, 10 * 80).to(dtype), torch.randn(2, tokens, max(2, width)).to(dtype)
    widths = {"no norms": (), "each head": (80, 80), "all heads together": (6 * 80, 2 * 80)}[normed]
    norms = [Norm(torch.randn(width).to(dtype), 1e-5, kind) for width in widths]
    stored = torch.randn(2, 3, 2, CAPACITY, 80).to(dtype)
    parts = list(qkv.double().view(tokens, 10, 80).split([6, 2, 2], dim=1))
    for part, norm in enumerate(norms):
        whole = parts[part].flatten(1) if len(norm.weight) > 80 else parts[part]
        parts[part] = exact_norm(whole, norm).view(parts[part].shape)
    cos, sin = (table.double()[:, None] for table in tables)
    order = torch.arange(width)
    order = order.view(-1, 2).flip(1).flatten() if is_interleaved else order.roll(width // 2)
    for part in (0, 1):
        turned = parts[part][..., :width] * cos[..., :width] + parts[part][..., order] * sin[..., :width]
        parts[part] = torch.cat([turned, parts[part][..., width:]], dim=-1)
    given = (norms[0], norms[1]) if norms else None
    for operations in operations_of(dtype, layout.window, step, heads=(given,)):
        mine, cache = qkv.clone(), stored.clone()
        found = operations.rotate_and_store(
            mine,
            Rotary(tables[0], tables[1], is_interleaved) if width else None,
            given,
            (cache[0], cache[1]),
            layout,
        )
        assert_near(found[:, :480], parts[0].flatten(1), dtype)
        expected = stored.double()
        for slot, length in enumerate(lengths):
            for tensor, part in zip(expected, parts[1:], strict=True):
                tensor[slot, :, length : length + rows] = part.view(len(lengths), rows, 2, 80)[slot].transpose(0, 1)
        assert_near(cache, expected, dtype)


@DTYPES
@KINDS
@pytest.mark.parametrize("pairs", ["halves", "pairs", "pairs that move to halves", "nothing"])
def test_latents_are_those_of_float64(kind: NormKind, dtype: torch.dtype, pairs: str) -> None:
    """Rotated queries of a batch, and the latent vectors and keys that are stored."""
    torch.manual_seed(4)
    lengths, rows, rank, rotated = [5, 517], 4, 80, 32
    step, tokens = step_of(rows, lengths), len(lengths) * rows
    queries, latents = torch.randn(tokens, 6, 48).to(dtype)[..., 16:], torch.randn(tokens, 200).to(dtype)[:, 88:]
    cos, sin = torch.randn(2, tokens, rotated).to(dtype)
    norm = Norm(torch.randn(rank).to(dtype), 1e-5, kind)
    stored = [torch.randn(3, 1, CAPACITY, width).to(dtype) for width in (rank, rotated)]
    heads = torch.cat([latents[:, None, rank:], queries], dim=1).double()
    if pairs.endswith("halves") and pairs != "halves":
        heads = heads.unflatten(2, (-1, 2)).mT.flatten(2)
    order = torch.arange(rotated)
    order = order.view(-1, 2).flip(1).flatten() if pairs == "pairs" else order.roll(rotated // 2)
    if pairs != "nothing":
        heads = heads * cos.double()[:, None] + heads[..., order] * sin.double()[:, None]
    rotary = Rotary(cos, sin, pairs == "pairs", pairs == "pairs that move to halves")
    expected = [part.double() for part in stored]
    for slot, length in enumerate(lengths):
        new = slice(slot * rows, slot * rows + rows)
        expected[0][slot, 0, length : length + rows] = exact_norm(latents[new, :rank].double(), norm)
        expected[1][slot, 0, length : length + rows] = heads[new, 0]
    for operations in operations_of(dtype, AttentionWindow(FULL), step, heads=((norm, norm),)):
        mine = [part.clone() for part in stored]
        given = None if pairs == "nothing" else rotary
        found = operations.rotate_and_store_latents(queries, latents, given, norm, (mine[0], mine[1]))
        assert_near(found, heads[:, 1:], dtype)
        for part, other in zip(mine, expected, strict=True):
            assert_near(part, other, dtype)


@DTYPES
def test_attention_to_latents_is_that_to_their_keys(dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    lengths, rows, rank, rotated = [5, 517], 8, 80, 48
    step, window = step_of(rows, lengths), AttentionWindow(FULL)
    cache = [torch.randn(3, 1, CAPACITY, width).to(dtype) for width in (rank, rotated)]
    queries = torch.randn(len(lengths) * rows, 6 * (rank + rotated)).to(dtype)
    keys, used = torch.cat(cache, dim=3)[:2], cache[0][:2]
    expected = exact_attention(queries, [keys, used], HeadLayout(6, 1, rank + rotated, 0.2, window), step)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    layout = HeadLayout(6, 1, rank, 0.2, window, rotated=rotated)
    for operations in operations_of(dtype, window, step):
        found = operations.attention(queries, (cache[0], cache[1]), layout)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_tables_in_float32_rotate_without_rounding_products() -> None:
    layout = HeadLayout(6, 2, 64, 0.1, AttentionWindow(FULL))
    qkv, tables = torch.randn(4, 10 * 64).half(), torch.randn(2, 4, 64).half()
    step, stored = step_of(4, [5]), torch.zeros(2, 1, 2, CAPACITY, 64).half()
    found = [
        operations.rotate_and_store(qkv.clone(), Rotary(*given), None, (stored[0], stored[1]), layout)[:, :384]
        for given in (tables.float(), tables)
        for operations in operations_of(torch.float16, layout.window, step)
    ]
    exact, of_kernel, rounded, rounded_by_kernel = found
    assert torch.equal(of_kernel, exact)
    assert min((of_kernel != other).float().mean() for other in (rounded, rounded_by_kernel)) > 0.1


@DTYPES
def test_positions_move_as_in_torch(dtype: torch.dtype) -> None:
    stored = torch.randn(4, 2, 2, CAPACITY, 80).to(dtype)
    moved = []
    for operations in operations_of(dtype, AttentionWindow(FULL), step_of(16, [5, 517])):
        moved.append(stored.clone())
        operations.move([moved[-1]])
    assert torch.equal(*moved) and not torch.equal(moved[0], stored)


RARER = ("mistral", "qwen3_moe", "gemma2")
"""Their windows, experts and bounded scores are those of a family that is tested beside them."""


@pytest.mark.long
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2"])
def test_layers_of_the_library_attend_by_the_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_passes, "fuse", lambda *_: None)
    assert_trees_of_a_batch_are_right(family)


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["qwen3", "gpt_oss", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in RARER)]
)
def test_trees_of_a_batch_get_the_logits_of_their_plain_paths(family: str) -> None:
    assert_trees_of_a_batch_are_right(family)


def assert_trees_of_a_batch_are_right(family: str) -> None:
    target = Target(model_of(family), direct)
    assert not captured_of(target)._passes[0].reads_extent, "the kernels must be used"
    assert_right(target.model, target, ((9, 9), (4, 4)), (70, 11))


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.long)])
def test_idle_slots_keep_their_contexts_and_few_steps_serve_all_batches(family: str) -> None:
    model = model_of(family)
    target = Target(model, direct)
    cache = target.allocate(4)
    contexts = [prompt_of(12 + 5 * slot) for slot in range(4)]
    for slot, context in enumerate(contexts):
        target.prefill(cache, slot, context, room=100)
    tree = DraftTree.of(5, [6, 7, 8], [ROOT, ROOT, 1])
    for number in (1, 3, 4):
        found = target.verify(cache, [tree] * number)
        for slot, verified in enumerate(found):
            contexts[slot] += tokens_to(tree, 2)
            assert_same_logits(verified.logits[3], plain_logits(model, contexts[slot]))
            target.commit(cache, slot, [1, 2])
    steps = captured_of(target).steps
    assert steps and [slots for slots, *_ in steps._steps[cache.storage]] == [1, 4]
    cache.slots[3].kv.settle()
    cache.slots[3].kv._interrupted_from = 2  # a move that an interrupt left halfway
    target.verify(cache, [tree] * 3)
    assert cache.slots[3].valid == 2


ATTENTION = """
names = triton_kernels.attention_kernel.arg_names
pointers = dict.fromkeys(("qkv", "keys", "rotated", "values"), "")
pointers |= dict.fromkeys(("lengths", "positions", "ancestors"), "i64")
for width in widths:
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        for queries in (16, 32, 64):
            blocks = TileSizes.of(queries, width, dtype, capability // 10)
            if blocks.queries < queries:
                continue
            constants = dict(
                SLOTS=16, SPLITS=16, LEAST=128, WIDTH=width, LOADED=padded(width),
                VALUES=width, VALUES_LOADED=padded(width),
                ROTATED=64 * (width > 256), ROTATED_LOADED=64,
                BLOCK_M=blocks.queries, BLOCK_N=blocks.keys, WINDOW=False, SOFTCAP=False, PRECISION="ieee",
            )
            kinds = {one: "*" + (kind or name) for one, kind in pointers.items()}
            kinds |= {"parts": "*fp32", "levels": "*fp32", "scale": "fp32", "softcap": "fp32"}
            compiled(f"{name}-{width}-{queries}", triton_kernels.attention_kernel, kinds, constants, *blocks[2:])
"""
BETWEEN = """
GEMMA, LLAMA = dict(OFFSET=1.0, ROUNDS=False), dict(OFFSET=0.0, ROUNDS=True)
RMS, LAYER = dict(CENTERS=False, BIAS=False), dict(CENTERS=True, BIAS=True, OFFSET=0.0, ROUNDS=False)
pointers = "hidden", "added", "after_weight", "after_bias", "weight", "bias", "normed"
for name in ("bf16", "fp32"):
    for block in widths:
        kinds = dict.fromkeys(pointers, "*" + name)
        kinds |= dict.fromkeys(("after_epsilon", "epsilon", "multiplier"), "fp32")
        cases = (True, False, RMS | GEMMA), (False, True, RMS | LLAMA), (True, False, LAYER)
        for case, (after, scales, kind) in zip(("sandwich", "scaled", "layer"), cases):
            constants = dict(ADDS=True, AFTER=after, BEFORE=True, SCALES=scales, BLOCK=block, **kind)
            compiled(f"{case}-{name}-{block}", triton_kernels.add_norm_kernel, kinds, constants, 8)
        kinds = dict.fromkeys(("qkv", "query_norm", "key_norm"), "*" + name) | {"epsilon": "fp32"}
        compiled(f"heads-{name}-{block}", triton_kernels.norm_parts_kernel, kinds, dict(BLOCK=block, **LLAMA), 8)
    kinds = dict.fromkeys(("qkv", "cos", "sin", "query_norm", "key_norm", "keys", "values"), "*" + name)
    kinds |= {"lengths": "*i64", "epsilon": "fp32"}
    for half, rest in ((32, 0), (64, 0), (128, 0), (48, 32)):
        for rotates in (True, False):
            constants = dict(HALF=half, BLOCK=padded(half), REST=rest, REST_BLOCK=max(1, rest), ROTATES=rotates)
            constants |= dict(PAIRS=rest > 0, NORMS=True, **GEMMA)
            compiled(f"rotary-{name}-{half}-{rest}-{rotates}", triton_kernels.rotary_kernel, kinds, constants, 1)
    kinds |= dict(cos="*fp32", sin="*fp32")
    constants |= dict(ROTATES=True)
    compiled(f"exact-rotary-{name}", triton_kernels.rotary_kernel, kinds, constants, 1)
    names = "queries", "latents", "cos", "sin", "norm", "turned", "cached_latents", "cached_keys"
    kinds = dict.fromkeys(names, "*" + name) | {"lengths": "*i64", "epsilon": "fp32"}
    constants = dict(RANK=512, RANK_BLOCK=512, HALF=32, BLOCK=32, ROTATES=True, PAIRS=False, SPLITS=True, **LLAMA)
    compiled(f"latents-{name}", triton_kernels.latent_kernel, kinds, constants, 1)
    for activation in ("silu", "gelu_tanh", "gelu"):
        kinds = dict.fromkeys(("gate_up", "gated"), "*" + name)
        compiled(f"{activation}-{name}", triton_kernels.gate_kernel, kinds, dict(ACTIVATION=activation, BLOCK=1024), 4)
"""
MOST_REGISTERS = 128
"""Registers of a thread of an operation between matmuls, so that several blocks of it run at once."""


OFTEN = (89, 128), (90, 256), (100, 64)
"""The least shared memory and the newest generations, each with another width; the exhaustive suite has all."""
COMPILED = [
    pytest.param(capability, width, marks=pytest.mark.long if (capability, width) in OFTEN else pytest.mark.exhaustive)
    for capability in SHARED_MEMORY
    for width in (64, 128, 256, 512)
]


@pytest.mark.parametrize(("capability", "width"), COMPILED)
def test_attention_compiles_without_spills(capability: int, width: int, tmp_path: Path) -> None:
    cases = compiled(ATTENTION, capability, (width,), tmp_path)
    assert len(cases) > 1
    for case, found in cases.items():
        assert not found.spilled and found.shared <= SHARED_MEMORY[capability] * 1024, (case, found)


@pytest.mark.parametrize(
    "capability",
    [pytest.param(each, marks=pytest.mark.long if each == 90 else pytest.mark.exhaustive) for each in SHARED_MEMORY],
)
def test_what_lies_between_matmuls_compiles_within_few_registers(capability: int, tmp_path: Path) -> None:
    """For hidden states of up to 8192 numbers."""
    cases = compiled(BETWEEN, capability, (2048, 8192), tmp_path)
    assert len(cases) == 42
    for case, found in cases.items():
        assert not found.spilled and found.registers <= MOST_REGISTERS and found.shared <= 1024, (case, found)
