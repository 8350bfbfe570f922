"""Calls of FlexAttention on CPU, written out as the plain operators that they mean.

The engine then sees an attention like any other, with its backward, which torch's own C++ kernel lacks.  What is not
fused becomes the call again, unless it is trained: that no other code on CPU could do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.flex_attention import flex_attention as FORWARD
from torch._higher_order_ops.flex_attention import flex_attention_backward as BACKWARD
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from sdpa_rewrite import config, rewrite
from sdpa_rewrite.emit.arrange import Unavailable, restrided
from sdpa_rewrite.flex_meaning import Call, Meaning, readers
from sdpa_rewrite.lift.ops import is_tensor, source_line, value_of
from sdpa_rewrite.outcome import Outcome, Reason
from sdpa_rewrite.rewrite import Refused, Splice, Traced
from sdpa_rewrite.site import Operand


@dataclass
class Opened:
    """A call that is written out: its plain operators (``splice``), and which of them give its results."""

    call: Call
    splice: Splice
    results: list[tuple[Node, Node]]

    @property
    def training(self) -> bool:
        """Whether the call has a backward."""
        return self.call.backward is not None

    def holds(self, node: Node) -> bool:
        """Whether ``node`` is one of the plain operators."""
        return node in self.splice.added


@dataclass
class OpenedCalls:
    """The calls of one graph that were written out, and those that could not be."""

    opened: list[Opened] = field(default_factory=list)
    closed: list[Outcome] = field(default_factory=list)

    def of(self, node: Node) -> Opened | None:
        """The call that ``node`` is a part of."""
        return next((o for o in self.opened if o.holds(node)), None)


def open_calls(graph: Graph, upgrade: bool) -> OpenedCalls:
    """Write out the calls in ``graph`` that are on CPU, and let everybody read the results of the plain operators.

    Those of inference where they shall be ``upgrade``d, and in any case those that are trained.
    """
    found = OpenedCalls()
    order = {node: k for k, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.target is not FORWARD or value_of(node.args[0]).device.type != "cpu":
            continue
        backward = next((u for part in node.users for u in readers(part) if u.target is BACKWARD), None)
        if backward is None and not upgrade:
            continue
        try:
            found.opened.append(_opened(graph, Call(node, backward), order))
        except Exception as error:
            if config.strict and not isinstance(error, (Refused, Unavailable)):
                raise
            reason = Reason(str(error), "score", node.name, source_line(node))
            found.closed.append(Outcome("recognised", node.name, source_line(node), reasons=(reason,)))
    return found


def close(graph: Graph, opened: Opened, fused: bool) -> None:
    """Decide between a call and its plain operators: the latter stay if they were ``fused``, or are trained."""
    replaced = not {plain for _, plain in opened.results} <= set(graph.nodes)  # by a pattern's author
    keep = fused or replaced or opened.training
    for call, plain in () if keep else opened.results:
        plain.replace_all_uses_with(call)
    unused = opened.call.parts() if keep else [plain for _, plain in opened.results]
    for node in rewrite.unread(unused):
        graph.erase_node(node)


def _opened(graph: Graph, call: Call, order: dict[Node, int]) -> Opened:
    results, gradients = call.results(), call.gradients()
    wanted = [Operand(n, ()) for n in (*results.values(), *gradients.values())]
    traced = _traced(call, list(results), list(gradients), wanted)
    splice = Splice(graph)
    try:
        new = rewrite.insert(splice, call.forward, traced, call.forward, list(gradients.values()), order)
        rewrite.check(new, wanted, forward=len(results))
        for old, plain in zip(wanted, new, strict=True):
            splice.move_readers(old.node, plain)
    except BaseException:
        splice.undo()
        raise
    return Opened(call, splice, [(o.node, n) for o, n in zip(wanted, new, strict=True)])


def _traced(call: Call, kept: list[int], learned: list[int], wanted: list[Operand]) -> Traced:
    """The plain operators over what ``call`` reads: for its results ``kept``, then for the gradients ``learned``."""
    meaning = Meaning(call)
    roles = [*call.operands, *call.captured]
    others = (*call.masked, *call.blocks[2:6], *call.blocks[-3:-1], call.scale)
    read = dict.fromkeys(n for n in (*roles, *others) if isinstance(n, Node))
    tensors = [n for n in read if is_tensor(n)]
    cotangents = call.cotangents() if learned else {}
    inputs = [*tensors, *cotangents.values(), *(n for n in read if not is_tensor(n))]
    likes = [o.node.meta["val"] for o in wanted]

    def joint(*values: Any) -> list[Tensor]:
        given = dict(zip(inputs, values, strict=True))
        for node, value in zip(tensors, values, strict=False):
            given[node] = value  # an operand may be a cotangent too
        slopes = values[len(tensors) : len(tensors) + len(cotangents)]
        with torch.enable_grad():
            leaves = [given.get(n, n) for n in roles]
            leaves = [x.detach().requires_grad_() if k in learned else x for k, x in enumerate(leaves)]
            outs = meaning(leaves, given)
            sources = [leaves[k] for k in learned]
            roots = [outs[k] for k in cotangents]
            found = torch.autograd.grad(roots, sources, slopes, allow_unused=True) if sources else ()
        grads = [torch.zeros_like(x) if g is None else g for g, x in zip(found, sources, strict=True)]
        finals = [*(outs[k].detach() for k in kept), *grads]
        return [restrided(x.to(like.dtype), like) for x, like in zip(finals, likes, strict=True)]

    examples = [value_of(n) for n in inputs]
    mode = torch._guards.detect_fake_mode(examples)
    if mode is None:
        raise Refused("the graph has no fake tensors")
    with mode, torch.no_grad():
        module = make_fx(joint, rewrite.decompositions(), tracing_mode="real")(*examples)
    module.graph.eliminate_dead_code()
    return Traced(module, inputs, wanted, len(cotangents))
