"""Decomposed relative position: a bias along the height of the keys and one along their width.

Found in: MViTv2, ViTDet and SAM's ``add_decomposed_rel_pos``.  The keys are an image of y by x positions, and each of
the two biases is the query times a table of that axis.
"""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from sdpa_rewrite.authoring import Scalar, named_form


@named_form
def decomposed_relative_position(
    q: Annotated[Tensor, "b i d"],
    k: Annotated[Tensor, "b y x d"],
    v: Annotated[Tensor, "b y x e"],
    vertical: Annotated[Tensor, "b i y"],
    horizontal: Annotated[Tensor, "b i x"],
    scale: Scalar,
) -> Tensor:
    """Two biases, each along one axis of an image of keys."""
    scores = (q * scale) @ k.flatten(1, 2).mT
    bias = vertical[:, :, :, None] + horizontal[:, :, None, :]
    return (scores.view_as(bias) + bias).flatten(2).softmax(-1) @ v.flatten(1, 2)


@decomposed_relative_position.near_miss("one softmax for each row of the image")
def _apart(q: Tensor, k: Tensor, v: Tensor, vertical: Tensor, horizontal: Tensor, scale: float) -> Tensor:
    scores = (q * scale) @ k.flatten(1, 2).mT
    bias = vertical[:, :, :, None] + horizontal[:, :, None, :]
    return (scores.view_as(bias) + bias).softmax(-1).flatten(2) @ v.flatten(1, 2)
