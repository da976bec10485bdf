"""Products of a few rows on the CPU, ours against torch's: ``python -m tests.benchmarks.few_rows``.

Once for the demo model's matrices, which stay in the last cache together, and once for as many
matrices of a larger model as make 500 MB, which come from memory.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch.nn.functional import linear

from hdtool.runtime.layers import own_linear
from hdtool.runtime.surroundings import machine

LAYER = ((256, 256), (128, 256), (128, 256), (256, 256), (1024, 256), (1024, 256), (256, 1024))
MODELS = {"in cache (28 MB)": LAYER * 6 + ((4096, 256),), "from memory (500 MB)": ((1024, 1024),) * 119}
PRODUCTS = {"torch": linear, "ours": own_linear}
ROWS = (1, 2, 4, 8, 16, 32, 64)
REPEATS = 15


def milliseconds(weights: list[torch.Tensor], rows: int) -> dict[str, float]:
    """The best times for one pass over all weights, of each product in turn."""
    inputs = {weight.shape[1]: torch.randn(1, rows, weight.shape[1]) for weight in weights}
    best = dict.fromkeys(PRODUCTS, float("inf"))
    for _ in range(REPEATS):
        for name, product in PRODUCTS.items():
            started = time.perf_counter()
            for weight in weights:
                product(inputs[weight.shape[1]], weight)
            best[name] = min(best[name], time.perf_counter() - started)
    return {name: seconds * 1e3 for name, seconds in best.items()}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of torch; our product takes one")
    options = parser.parse_args()
    print(machine() + "\n")
    print("| weights | threads | rows | torch, ms | ours, ms | ratio |\n|---|---|---|---|---|---|")
    for name, shapes in MODELS.items():
        weights = [torch.randn(shape) for shape in shapes]
        for threads in options.threads:
            torch.set_num_threads(threads)
            for rows in ROWS:
                best = milliseconds(weights, rows)
                ratio = best["torch"] / best["ours"]
                print(f"| {name} | {threads} | {rows} | {best['torch']:.2f} | {best['ours']:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
