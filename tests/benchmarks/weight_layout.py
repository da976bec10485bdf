"""Row-major against column-major weights on the CPU: ``python -m tests.benchmarks.weight_layout``.

Once for the demo model's matrices, which stay in the last cache together, and once for as many
matrices of a larger model as make 200 MB, which come from memory.
"""

from __future__ import annotations

import time

import torch

from hdtool.runtime.surroundings import machine

LAYER = ((256, 256), (128, 256), (128, 256), (256, 256), (1024, 256), (1024, 256), (256, 1024))
MODELS = {"in cache (28 MB)": LAYER * 6 + ((4096, 256),), "from memory (200 MB)": ((1024, 1024),) * 47}
ROWS = (1, 8, 32)
REPEATS = 15


def milliseconds(weights: list[torch.Tensor], rows: int) -> float:
    """The best time for one pass over all weights."""
    inputs = {weight.shape[1]: torch.randn(1, rows, weight.shape[1]) for weight in weights}
    best = float("inf")
    for _ in range(REPEATS):
        started = time.perf_counter()
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        best = min(best, time.perf_counter() - started)
    return best * 1e3


@torch.inference_mode()
def main() -> None:
    print(machine() + "\n")
    print("| weights | threads | rows | row-major, ms | column-major, ms | ratio |\n|---|---|---|---|---|---|")
    for name, shapes in MODELS.items():
        plain = [torch.randn(shape) for shape in shapes]
        laid_out = [weight.t().contiguous().t() for weight in plain]
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for rows in ROWS:
                before, after = milliseconds(plain, rows), milliseconds(laid_out, rows)
                print(f"| {name} | {threads} | {rows} | {before:.2f} | {after:.2f} | {before / after:.2f} |")


if __name__ == "__main__":
    main()
