"""A call of FlexAttention in a graph, and what it means: plain operators on its tensors."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from sdpa_rewrite.lift.ops import NUMBERS, argument, is_call, is_pointwise, opname, rank, value_of
from sdpa_rewrite.rewrite import Refused

WHOLE = 1 << 20
"""Positions of a block that is longer than any sequence: the mask of a call that was given none."""


@dataclass(frozen=True)
class Call:
    """A call and, in training, its backward."""

    forward: Node
    backward: Node | None

    @property
    def operands(self) -> list[Node]:
        """Query, key and value: (batch, heads, positions, head size)."""
        return list(self.forward.args[:3])  # type: ignore[arg-type]

    @property
    def blocks(self) -> tuple[Any, ...]:
        """The block mask: lengths, tensors of block numbers, the two block sizes, and the mask's graph."""
        blocks: tuple[Any, ...] = self.forward.args[4]  # type: ignore[assignment]
        return blocks

    @property
    def scale(self) -> Any:
        """What scores are multiplied by."""
        return self.forward.args[5]

    @property
    def captured(self) -> list[Any]:
        """What ``score_mod`` reads besides its arguments."""
        return list(argument(self.forward, 7, "score_mod_other_buffers", ()))

    @property
    def masked(self) -> list[Any]:
        """What ``mask_mod`` reads besides its arguments."""
        return list(argument(self.forward, 8, "mask_mod_other_buffers", ()))

    def cotangents(self) -> dict[int, Node]:
        """The gradients that the backward is given, of the output and of the logsumexp."""
        given = self.backward.args[5:7] if self.backward is not None else ()
        return {k: n for k, n in enumerate(given) if isinstance(n, Node)}

    def results(self) -> dict[int, Node]:
        """The results that somebody reads, besides the backward."""
        parts = {u.args[1]: u for u in self.forward.users if u.target is operator.getitem}
        found = {k: n for k, n in parts.items() if any(user is not self.backward for user in readers(n))}
        return dict(sorted(found.items()))  # type: ignore[arg-type]

    def parts(self) -> list[Node]:
        """The call, its backward, and what is taken of their results."""
        calls = [n for n in (self.forward, self.backward) if n is not None]
        taken = [user for n in calls for user in n.users]
        return [*calls, *taken, *self.gradients().values()]

    def gradients(self) -> dict[int, Node]:
        """The gradients that somebody reads: of query, key, value and then of what ``score_mod`` reads."""
        found: dict[int, Node] = {}
        for user in self.backward.users if self.backward is not None else ():
            place: int = user.args[1]  # type: ignore[assignment]
            if place == 3:
                found.update({3 + part.args[1]: part for part in user.users})  # type: ignore[misc, operator]
            else:
                found[place] = user
        return dict(sorted(found.items()))


def readers(node: Node) -> Iterator[Node]:
    """Who reads ``node``, aliases looked through."""
    for user in node.users:
        if is_call(user) and opname(user) in ("alias", "detach"):
            yield from readers(user)
        else:
            yield user


class Meaning:
    """What a call of FlexAttention means, as a function of its tensors.

    A block of the score matrix is visible where the block mask lists it as full, or lists it and ``mask_mod`` says so.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.score_mod = self._over_all(call.forward.args[3], 1, len(call.captured))
        self.mask_mod = self._over_all(call.blocks[-1], 0, len(call.masked))

    def _over_all(self, node: Any, scores: int, captured: int) -> Callable[..., Tensor]:
        """The function of one position that ``node`` holds, on all positions at once."""
        module: GraphModule = getattr(node.graph.owning_module, node.target)
        stubborn = next((n for n in module.graph.nodes if not _broadcasts(n)), None)
        if stubborn is None:
            return module
        if self.call.backward is None:
            raise Refused(f"{opname(stubborn)} in the function of one score is not pointwise")
        function: Callable[..., Tensor] = module
        for axis in (3, 2, 1, 0):
            places = [0 if k == axis else None for k in range(4)]
            function = torch.vmap(function, (*[0] * scores, *places, *[None] * captured))
        return lambda *args: function(
            *args[:scores], *(x.flatten() for x in args[scores : scores + 4]), *args[scores + 4 :]
        )

    def __call__(self, leaves: Sequence[Any], given: dict[Node, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The output, and in units of log(2) the logsumexp and the maximum of the scores."""
        query, key, value, *captured = leaves
        wide = torch.promote_types(query.dtype, torch.float32)
        key, value = (_for_each_head(x, query) for x in (key, value))
        scores = query.to(wide) @ key.to(wide).mT * given.get(self.call.scale, self.call.scale)
        places = [_positions(scores, k) for k in range(4)]
        visible = self._visible(places, [given.get(n, n) for n in self.call.masked], given)
        logits = self.score_mod(scores, *places, *captured).to(wide)
        logits = logits if visible is None else torch.where(visible, logits, -math.inf)
        out = torch._safe_softmax(logits, -1).to(query.dtype) @ value
        return out, logits.logsumexp(-1) / math.log(2), logits.amax(-1) / math.log(2)

    def _visible(self, places: list[Tensor], masked: list[Any], given: dict[Node, Any]) -> Tensor | None:
        """Where a position may be seen; None where all are."""
        said = self.mask_mod(*places, *masked)
        rows, columns = (given.get(n, n) for n in self.call.blocks[-3:-1])
        if all(isinstance(n, int) and n >= WHOLE for n in (rows, columns)):
            return None if _is_true(self.call.blocks[-1]) else said
        numbers, indices, full_numbers, full_indices = (given.get(n, n) for n in self.call.blocks[2:6])
        over = Blocks(places[2].flatten(), places[3].flatten(), rows, columns)
        if self.call.backward is None and not over.fit:
            raise Refused("blocks that do not divide the lengths would become a mask as large as the scores")
        seen = over.listed(numbers, indices) & said
        return seen if full_numbers is None else seen | over.listed(full_numbers, full_indices)


def _broadcasts(node: Node) -> bool:
    """Whether a call on single numbers does the same on tensors of them."""
    if not is_call(node) or is_pointwise(node) or opname(node) in ("alias", "detach", "clone", "lift_fresh_copy"):
        return True
    if opname(node) == "index":
        source, places = node.args[:2]
        return None not in places and len(places) == rank(source)  # type: ignore[operator, arg-type]
    return opname(node) in NUMBERS | {"new_ones", "new_full"} and value_of(node).dim() == 0


def _is_true(mask_mod: Node) -> bool:
    """Whether a graph returns nothing but true: the mask of a call that was given none."""
    module: GraphModule = getattr(mask_mod.graph.owning_module, str(mask_mod.target))
    (returned,) = next(n for n in module.graph.nodes if n.op == "output").all_input_nodes
    return opname(returned) in ("ones", "new_ones") or (opname(returned) == "full" and returned.args[1] is True)


def _for_each_head(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values, one for each head of the query, and for each of its batch."""
    batch, heads, length, size = x.shape
    group = query.shape[1] // heads
    if group != 1:
        x = x.unsqueeze(2).expand(batch, heads, group, length, size).reshape(batch, heads * group, length, size)
    return x.expand(query.shape[0], -1, -1, -1)


def _positions(scores: Tensor, axis: int) -> Tensor:
    shape = [n if k == axis else 1 for k, n in enumerate(scores.shape)]
    return torch.arange(scores.shape[axis], device=scores.device).reshape(shape)


@dataclass(frozen=True)
class Blocks:
    """Rows and columns, cut into blocks of so many."""

    rows: Tensor
    columns: Tensor
    height: Any
    width: Any

    def listed(self, numbers: Tensor, indices: Tensor) -> Tensor:
        """Which positions lie in listed blocks: the first ``numbers`` of the ``indices`` of each row of blocks."""
        count = (self.columns.numel() + self.width - 1) // self.width
        used = torch.arange(indices.shape[-1], device=indices.device) < numbers.unsqueeze(-1)
        table = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
        table = table.scatter(-1, torch.where(used, indices, count).long(), True)[..., :count]
        if not self.fit:
            return table.index_select(-2, self.rows // self.height).index_select(-1, self.columns // self.width)
        wide = table[..., :, None, :, None].expand(*table.shape[:-1], self.height, count, self.width)
        return wide.reshape(*table.shape[:-2], self.rows.numel(), self.columns.numel())

    @property
    def fit(self) -> bool:
        """Whether all blocks are whole, so that a table of blocks is a broadcast one of positions."""
        sizes = (self.rows.numel(), self.columns.numel(), self.height, self.width)
        if not all(isinstance(n, int) for n in sizes):
            return False
        return bool(sizes[0] % sizes[2] == 0 and sizes[1] % sizes[3] == 0)
