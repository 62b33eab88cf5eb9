"""Rounding, written where a spec states it: references compute in float64 and round only by these names."""

from __future__ import annotations

import torch


def f64(x: torch.Tensor) -> torch.Tensor:
    """The stored value in float64, exactly."""
    return x.to(torch.float64)


def round_to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` (float64) rounded once to ``dtype``, nearest even, returned in float64.

    float64 to a narrower dtype goes through round-to-odd float32, so that no value is rounded twice.
    """
    return store(x, dtype).to(torch.float64)


def store(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` (float64) as stored in ``dtype``: rounded once, nearest even. E4M3 saturates at 448 and keeps NaN."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return x.to(dtype)
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-448, 448)
    near = x.to(torch.float32)
    exact = near.to(torch.float64) == x
    # Round to odd: truncate towards zero, then set the last bit when anything was cut off.
    bits = near.view(torch.int32)
    too_far = near.to(torch.float64).abs() > x.abs()
    truncated = torch.where(too_far, bits - 1, bits)
    odd = torch.where(exact | ~torch.isfinite(x), bits, truncated | 1)
    return odd.view(torch.float32).to(dtype)


def ulp(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring values of ``dtype`` at the magnitude of ``x`` (float64), in float64.

    Below the smallest normal number it is the distance between subnormal ones."""
    digits = {torch.bfloat16: 7, torch.float16: 10, torch.float32: 23}[dtype]
    exponent = torch.frexp(x.abs().clamp_min(torch.finfo(dtype).tiny)).exponent - 1
    return torch.ldexp(torch.ones_like(x), exponent - digits)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in the dtype of ``x``."""
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight
