"""Inductor's counter-based generator on CPU, Philox 4x32-10 (Salmon et al., 2011), in eager PyTorch.

Inductor draws the number at linear index n of a random tensor as the first word of the block whose counter is n and
whose key is the seed, both cut to 32 bits; 31 bits of it make a float in [0, 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
TO_UNIT = 4.6566127342e-10


def uniform(seed: Tensor, index: Tensor) -> Tensor:
    """Numbers in [0, 1), float32, at the linear indices ``index`` (int64)."""
    zero = torch.zeros_like(index)
    counter = [index & MASK, zero, zero, zero]
    key = [seed & MASK, torch.zeros_like(seed)]
    for _ in range(10):
        high0, low0 = _multiplied(counter[0], MULTIPLIERS[0])
        high1, low1 = _multiplied(counter[2], MULTIPLIERS[1])
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(k + w) & MASK for k, w in zip(key, WEYL, strict=True)]
    return (counter[0] & 0x7FFFFFFF).to(torch.float32) * TO_UNIT


def _multiplied(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product of words, in int64 arithmetic without overflow."""
    low = (a & 0xFFFF) * b
    high = (a >> 16) * b + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)
