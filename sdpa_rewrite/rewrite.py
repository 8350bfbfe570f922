"""The only editor of graphs.

A replacement is plain differentiable PyTorch over the site's operands.  It is traced, forward and backward, to a
graph, spliced in beside the original, checked against it, and only then do readers move over.  Until that moment
nothing of the original has changed; whatever fails takes the new nodes out again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from sdpa_rewrite import config, seeds, verify
from sdpa_rewrite.algebra.axes import Irregular, Refine, shape_of
from sdpa_rewrite.algebra.term import subterms
from sdpa_rewrite.emit.arrange import Sizes, Unavailable, arrange, restrided, same_shapes, same_strides
from sdpa_rewrite.emit.base import Emitter, Inputs
from sdpa_rewrite.lift.layout import push
from sdpa_rewrite.lift.ops import LAYOUT, is_call, is_pointwise, opname
from sdpa_rewrite.site import Gradient, Operand, Site
from sdpa_rewrite.twins import described, moved

NOT_CARRIED = frozenset({"val", "tensor_meta", "unbacked_bindings", "eager_input_vals", "original_aten", "from_node"})
STRIDED = frozenset({"as_strided", "as_strided_scatter", "view_as_complex", "view_as_real", "set_"})
"""Operators whose results depend on the strides of what they read."""
SAVED = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


class Refused(Exception):
    """The replacement does not fit the graph; the message says how."""


@dataclass
class Traced:
    """A replacement as a graph: its inputs by role, its outputs in the order ``result``, then the gradients.

    The last ``cotangents`` tensors among the inputs are those of the backward.
    """

    module: GraphModule
    inputs: list[Node]
    results: list[Operand]
    cotangents: int = 1


@dataclass
class Memory:
    """What one graph's rewrites remember: traces, for sites that are alike, and what stands for replaced nodes.

    ``held`` are nodes that sites still to be rewritten read: these are replaced, not passed over.
    """

    held: frozenset[Node] = frozenset()
    traces: dict[Any, GraphModule] = field(default_factory=dict)
    replaced: dict[Node, Node] = field(default_factory=dict)

    def current(self, node: Node) -> Node:
        """``node``, or what has taken its place."""
        while node in self.replaced:
            node = self.replaced[node]
        return node


@dataclass
class Splice:
    """What was done to a graph so far, until it is committed or undone."""

    graph: Graph
    added: dict[Node, Node] = field(default_factory=dict)  # new node -> what it was put before
    attributes: list[str] = field(default_factory=list)
    moved: list[tuple[Node, Any, Any]] = field(default_factory=list)

    def move_readers(self, old: Node, new: Node) -> None:
        """Let everybody read ``new`` instead of ``old``."""
        for user in list(old.users):
            self.moved.append((user, user.args, user.kwargs))
            user.replace_input_with(old, new)

    def undo(self) -> None:
        """Put everything back: first the readers, then take the new nodes out again."""
        for user, args, kwargs in reversed(self.moved):
            user.args, user.kwargs = args, kwargs
        for node in reversed(list(self.added)):
            self.graph.erase_node(node)
        for name in self.attributes:
            delattr(self.graph.owning_module, name)


def rewrite(
    graph: Graph, site: Site, emitter: Emitter, order: dict[Node, int], memory: Memory | None = None
) -> list[Node]:
    """Replace the site by what ``emitter`` makes of it.  Returns the new nodes.

    ``memory`` is that of the rewrites made in this graph before.  Raises ``Refused``, or whatever a stage raises, and
    leaves no trace.
    """
    memory = memory or Memory()
    site = moved(site, memory.current)
    result = settled(site.result, memory.held)
    gradients = tuple(Gradient(g.role, settled(g.result, memory.held)) for g in site.gradients)
    try:
        traced = trace(site, emitter, result, gradients, graph, memory)
    except (Unavailable, Irregular, Refine) as error:
        raise Refused(str(error)) from error
    splice = Splice(graph)
    try:
        outputs = insert(splice, site.result.node, traced, result.node, [g.result.node for g in gradients], order)
        check(outputs, traced.results, forward=1)
        for old, new in zip(traced.results, outputs, strict=True):
            splice.move_readers(old.node, new)
        dead = unread([old.node for old in traced.results])
    except BaseException:
        splice.undo()
        raise
    # From here on the graph computes the new values; what is left to do cannot fail.
    for node in dead:
        graph.erase_node(node)
    for node in splice.added:
        seeds.draw(graph, node)
    memory.replaced.update((old.node, new) for old, new in zip(traced.results, outputs, strict=True))
    order.update((new, order[before]) for new, before in splice.added.items())
    return list(splice.added)


def settled(operand: Operand, held: frozenset[Node] = frozenset()) -> Operand:
    """Past the layout operators that only this result goes through: where the kernel's own layout may fit as it is."""
    node, dims = operand.node, operand.dims
    while len(node.users) == 1 and node not in held:
        user = next(iter(node.users))
        if not is_call(user) or opname(user) not in LAYOUT or opname(user) in ("expand", "repeat"):
            break
        try:
            dims = push(user, dims, _no_axis)
        except (Irregular, Refine):
            break
        node = user
    return Operand(node, dims)


def _no_axis(position: int, size: Any) -> Any:
    raise Irregular("a new axis")


def trace(
    site: Site, emitter: Emitter, result: Operand, gradients: tuple[Gradient, ...], graph: Graph, memory: Memory
) -> Traced:
    """The replacement, forward and backward, as a graph over the tensors of the site's operands."""
    read = emitter.prepared(site)
    roles: dict[str, Operand] = {"query": read.query, "key": read.key, "value": read.value}
    roles |= {c.name: c.operand for c in read.captures}
    numbers = _numbers(site, graph)
    nodes = [o.node for o in roles.values()]
    if gradients:
        assert site.cotangent is not None
        nodes.append(site.cotangent.node)
    nodes += list(numbers.values())
    results = [result, *(g.result for g in gradients)]
    key = _trace_key(site, emitter, nodes, results, gradients)
    if key in memory.traces:
        return Traced(memory.traces[key], nodes, results)
    if config.verify and (found := verify.difference(site, emitter)):
        raise Refused(found)
    wanted = list(dict.fromkeys(g.role for g in gradients))

    def joint(*values: Any) -> list[Tensor]:
        tensors = dict(zip(roles, values, strict=False))
        symbols = dict(zip(numbers, values[len(values) - len(numbers) :], strict=True)) if numbers else {}
        sizes = Sizes([(tensors[r], o.dims) for r, o in roles.items()], symbols)
        with torch.enable_grad():
            leaves = {r: x.detach().requires_grad_(r in wanted) for r, x in tensors.items()} if wanted else tensors
            inputs = Inputs({r: (leaves[r], o.dims) for r, o in roles.items()}, sizes)
            out, dims = emitter.emit(read.with_result(result), inputs)
            final = laid(arrange(out, dims, result.dims, sizes), result.node)
            if not wanted:
                return [final]
            assert site.cotangent is not None
            cotangent = arrange(values[len(roles)], site.cotangent.dims, dims, sizes).to(out.dtype)
            grads = torch.autograd.grad(out, [leaves[r] for r in wanted], cotangent, allow_unused=True)
        found = dict(zip(wanted, grads, strict=True))
        return [final.detach(), *(_gradient(g, found[g.role], roles[g.role], sizes) for g in gradients)]

    examples = [n.meta["val"] for n in nodes]
    mode = torch._guards.detect_fake_mode(examples)
    if mode is None:
        raise Refused("the graph has no fake tensors")
    with mode, torch.no_grad():
        module = make_fx(joint, decompositions(), tracing_mode="real")(*examples)
    module.graph.eliminate_dead_code()  # an operator's unused outputs: a kernel may not even have them
    memory.traces[key] = module
    return Traced(module, nodes, results)


def _trace_key(
    site: Site, emitter: Emitter, nodes: list[Node], results: list[Operand], gradients: tuple[Gradient, ...]
) -> Any:
    """All that a trace depends on.  Sites that are alike share their terms and axes, and so their keys."""
    outputs = tuple((o.dims, described(o.node)) for o in results)
    roles = tuple(g.role for g in gradients)
    cotangent = site.cotangent.dims if site.cotangent is not None else None
    return emitter.name, id(site.terms), tuple(map(described, nodes)), outputs, roles, cotangent


def _gradient(gradient: Gradient, value: Tensor | None, role: Operand, sizes: Sizes) -> Tensor:
    like = gradient.result.node.meta["val"]
    if value is None:
        raise Refused(f"the replacement has no gradient for {gradient.role}")
    found = arrange(value, role.dims, gradient.result.dims, sizes).to(like.dtype)
    return laid(found, gradient.result.node, gradient=True)


def laid(x: Tensor, node: Node, gradient: bool = False) -> Tensor:
    """``x`` with the strides of ``node``, unless these are those of a part of a larger tensor and nobody minds."""
    try:
        return restrided(x, node.meta["val"])
    except Unavailable:
        if takes_any_strides(node, gradient):
            return x.contiguous()  # which every view takes that a part of a larger tensor takes
        raise


def takes_any_strides(node: Node, gradient: bool) -> bool:
    """Whether all that reads ``node``, views of it included, computes the same from any strides.

    A ``gradient`` may be returned: autograd takes it in any layout.
    """
    stack, seen = [node], {node}
    while stack:
        for user in stack.pop().users:
            if user.op == "output" and gradient:
                continue
            if not is_call(user) or not isinstance(user.target, torch._ops.OpOverload):
                return False
            if user.target.namespace not in ("aten", "prims") or opname(user) in STRIDED:
                return False
            if (is_pointwise(user) or user.target.is_view or opname(user) in LAYOUT) and user not in seen:
                seen.add(user)
                stack.append(user)
    return True


def decompositions() -> dict[Any, Any]:
    """What Inductor takes apart while it traces."""
    from torch._inductor.decomposition import select_decomp_table

    return dict(select_decomp_table())


def _numbers(site: Site, graph: Graph) -> dict[sympy.Symbol, Node]:
    """Nodes that hold the symbols of the site's sizes and symbolic numbers, as far as they come before it."""
    programs = [site.score, site.weight, *((site.sink,) if site.sink is not None else ())]
    wanted = {
        s
        for program in programs
        for t in subterms(program)
        if t.op == "number" and isinstance(t.attr, sympy.Basic)
        for s in t.attr.free_symbols
    }
    axes = (*site.batch, *site.rows, *site.columns, *site.depth, *site.width)
    wanted |= {s for atom in axes if not isinstance(atom.size, int) for s in atom.size.free_symbols}
    found: dict[sympy.Symbol, Node] = {}
    if not wanted:
        return found
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, (torch.SymInt, torch.SymFloat)) and value.node.expr in wanted:
            found.setdefault(value.node.expr, node)
        if node is site.result.node or len(found) == len(wanted):
            break
    return found


def insert(
    splice: Splice,
    origin: Node,
    traced: Traced,
    result: Node,
    gradients: Sequence[Node],
    order: dict[Node, int],
) -> list[Node]:
    """Copy the traced nodes in: the forward before the old result, the backward before the first old gradient.

    The forward's nodes come from where ``origin`` comes from.
    """
    inner = traced.module.graph
    placeholders = [n for n in inner.nodes if n.op == "placeholder"]
    copies: dict[Node, Node] = dict(zip(placeholders, traced.inputs, strict=True))
    first = min(gradients, key=order.__getitem__, default=result)
    at = _cotangent_at(traced, placeholders) + 1
    late = _late(inner, placeholders[at - traced.cotangents : at] if gradients else [])
    outputs: list[Node] = []
    for node in inner.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            outputs = [copies[n] for n in node.args[0]]
            continue
        before = first if node in late else result
        with splice.graph.inserting_before(before):
            copy = splice.graph.node_copy(node, copies.__getitem__)
        splice.added[copy] = before
        copy.meta = carried(origin if before is result else before, node)
        copies[node] = copy
        if copy.op == "get_attr":
            _adopt(splice, traced.module, copy)
    return outputs


def carried(old: Node, new: Node) -> dict[str, Any]:
    """The meta of a new node: where ``old`` came from (source line, module, tags of the partitioner), its own value."""
    meta = {k: v for k, v in old.meta.items() if k not in NOT_CARRIED}
    meta |= {k: new.meta[k] for k in ("val", "tensor_meta") if k in new.meta}
    if meta.get("recompute") in SAVED and not _is_kernel(new):
        # a policy that saves the results of matmuls means the output, not the masks
        meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return meta


def _is_kernel(node: Node) -> bool:
    if node.target is operator.getitem:
        return _is_kernel(node.args[0])  # type: ignore[arg-type]
    return "attention" in str(node.target)


def _cotangent_at(traced: Traced, placeholders: list[Node]) -> int:
    roles = len(placeholders) - 1
    while roles >= 0 and not isinstance(placeholders[roles].meta.get("val"), torch.Tensor):
        roles -= 1
    return roles


def _late(inner: Graph, cotangents: list[Node]) -> set[Node]:
    late = set(cotangents)
    for node in inner.nodes:
        if any(n in late for n in node.all_input_nodes):
            late.add(node)
    return late


def _adopt(splice: Splice, module: GraphModule, node: Node) -> None:
    """A constant or a subgraph of the replacement becomes one of the graph's own."""
    owner = splice.graph.owning_module
    value = getattr(module, str(node.target))
    k = 0
    while hasattr(owner, f"sdpa_rewrite_{k}"):
        k += 1
    name = f"sdpa_rewrite_{k}"
    setattr(owner, name, value)
    splice.attributes.append(name)
    node.target = name


def check(outputs: Iterable[Node], originals: Iterable[Operand], forward: int) -> None:
    """Each new value has the shape, type, device and strides of the old; the first are ``forward``, then gradients.

    Raises ``Refused``.
    """
    for k, (new, old) in enumerate(zip(outputs, originals, strict=True)):
        a, b = new.meta["val"], old.node.meta["val"]
        for what, x, y, same in (
            ("shape", shape_of(a), shape_of(b), same_shapes(a, b)),
            ("dtype", a.dtype, b.dtype, a.dtype == b.dtype),
            ("device", a.device, b.device, a.device == b.device),
        ):
            if not same:
                raise Refused(f"the replacement of {old.node.name} has {what} {x} instead of {y}")
        if not same_strides(a, b) and not takes_any_strides(old.node, gradient=k >= forward):
            raise Refused(f"the replacement of {old.node.name} has strides {a.stride()} instead of {b.stride()}")


def unread(nodes: Iterable[Node]) -> list[Node]:
    """``nodes`` that nobody reads, and what was only there for them, readers first."""
    dead: dict[Node, None] = {}
    stack = list(nodes)
    while stack:
        top = stack.pop()
        if top in dead or top.op in ("placeholder", "output") or any(user not in dead for user in top.users):
            continue
        dead[top] = None
        stack.extend(top.all_input_nodes)
    return list(dead)
