"""The precision of training: bfloat16 where the device multiplies it natively."""

from __future__ import annotations

import torch


def takes_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 natively."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(device.type == "cpu" and supported and supported())


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=takes_bfloat16(device))
