"""Times captured decoding steps of a model's shape on a GPU: ``python -m tests.benchmarks.gpu_step llama-3-8b``.

Compares hdtool's fused pass, transformers' layers with hdtool's attention, and transformers' layers with masks. Prints
milliseconds per step by context and draft tokens, alone and in a batch, and which share of them a copy of the bytes
read would take. ``--trace`` adds the kernels of one step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from hdtool.builders.evaluation.random_models import load_shape, weight_bytes_read
from hdtool.builders.evaluation.recorded_bench import copy_bandwidth
from hdtool.runtime.caches.slots import Cache
from hdtool.runtime.core.tree import DraftTree
from hdtool.runtime.engines.capturable_pass import StepPass
from hdtool.runtime.engines.captured.static_steps import StaticSteps
from hdtool.runtime.engines.proofs.probes import some_context
from hdtool.runtime.kernels.machine_name import machine
from hdtool.runtime.settings.model import ModelConfig
from hdtool.runtime.target.target import Target
from tests.benchmarks.laboratory import parser_of
from tests.support.rehearsed import captured_of

TURNS, SHOWN = 15, 14


def main() -> None:
    parser = parser_of(__doc__, device="cuda", contexts=[1000, 7000], nodes=[0, 7, 31, 63, 64], slots=8, trace=False)
    parser.add_argument("shape", help="a shape, or a config.json")
    options = parser.parse_args()
    loaded = load_shape(options.shape, ModelConfig(device=options.device))
    target = loaded.target
    steps = captured_of(target).steps
    assert steps, "its steps are not captured"
    print(f"{loaded.name} in {target.dtype}, {machine(target.device)}")
    speed = copy_bandwidth(target.device)
    for step_pass in captured_of(target)._passes:
        steps.use(step_pass)
        name = name_of(step_pass)
        for context in options.contexts:
            limit = 1e3 * bytes_read(target, context) / speed
            for nodes in options.nodes:
                found = milliseconds(target, target.cache, [tree_of(nodes)], context)
                print(
                    f"{name}, {context} tokens, {nodes} nodes: {found:.2f} ms, {limit / found:.0%} of a copy",
                    flush=True,
                )
        batch = target.allocate(options.slots)
        for nodes in options.nodes[:2]:
            found = milliseconds(target, batch, [tree_of(nodes)] * options.slots, options.contexts[0])
            print(f"{name}, {options.slots} x {options.contexts[0]} tokens, {nodes} nodes: {found:.2f} ms", flush=True)
        del batch
    if options.trace:
        steps.use(captured_of(target)._passes[0])
        trace(target, steps, options.contexts[0])


def name_of(step_pass: StepPass) -> str:
    own = getattr(step_pass, "_attention", None)
    return {"ProgramPass": "fused"}.get(
        type(step_pass).__name__, "library, tree attention" if own else "library, masks"
    )


def tree_of(nodes: int) -> DraftTree:
    """Return a binary tree with ``nodes`` nodes."""
    return DraftTree.of(1, [(3 * node + 2) % 100 for node in range(nodes)], [node // 2 - 1 for node in range(nodes)])


def milliseconds(target: Target, cache: Cache, trees: Sequence[DraftTree], context: int) -> float:
    """Return the median milliseconds per step, without the steps that capture; accepted paths move in the KV cache."""
    for slot in range(len(trees)):
        target.prefill(cache, slot, some_context(context, target.vocabulary), room=300)
    found: list[float] = []
    for _ in range(TURNS):
        step_once(target, cache, trees)
        found.append(1e3 * target.log.last_seconds)
    return median(found[2:])


def step_once(target: Target, cache: Cache, trees: Sequence[DraftTree]) -> None:
    target.verify(cache, trees)
    for slot, tree in enumerate(trees):
        target.commit(cache, slot, [0, 2] if len(tree) > 2 else [])


def bytes_read(target: Target, context: int) -> int:
    """Return the bytes of the weights and of the context's KV cache."""
    shapes = [shape for layer in target.facts.shapes for shape in layer.kept]
    return weight_bytes_read(target) + context * sum(one.heads * one.width * one.dtype.itemsize for one in shapes)


def trace(target: Target, steps: StaticSteps, context: int) -> None:
    """Print the kernels of one step over 32 rows."""
    from torch.profiler import ProfilerActivity, profile

    trees = [tree_of(31)]
    milliseconds(target, target.cache, trees, context)
    run: Callable[[], None] = lambda: step_once(target, target.cache, trees)  # noqa: E731
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    events: Any = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]  # type: ignore[attr-defined]
    count, time = Counter[str](), Counter[str]()
    for event in events:
        count[event.name] += 1
        time[event.name] += event.device_time_total
    print(f"a step over 32 rows after {context} tokens: {len(events)} kernels and copies, {sum(time.values()):.0f} us")
    for name, microseconds in time.most_common(SHOWN):
        print(f"{microseconds:9.0f} us {count[name]:5} x {name[:90]}")


if __name__ == "__main__":
    main()
