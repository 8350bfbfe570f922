"""Fused attention of our own: an operator, its meaning in eager PyTorch, and its kernels."""
