"""The estimate of steps on GPUs: it runs the fused pass, and counts what that reads."""

from __future__ import annotations

from tests.benchmarks.gpu_estimate import GPUS, count


def test_a_longer_context_and_more_slots_read_more() -> None:
    short, long, batch = count("tiny", 1, 1, 100), count("tiny", 1, 1, 8000), count("tiny", 8, 1, 8000)
    assert short.weight_bytes == long.weight_bytes == batch.weight_bytes
    assert short.kernels == long.kernels == batch.kernels
    assert short.key_bytes < long.key_bytes < batch.key_bytes
    for gpu in GPUS.values():
        assert short.seconds(gpu) < long.seconds(gpu) < batch.seconds(gpu)
        assert short.limit(gpu) < short.seconds(gpu)
