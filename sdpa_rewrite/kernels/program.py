"""Pointwise programs as data: a graph that fits into a string, so that a plain operator can carry it.

An operator with subgraphs as arguments is a higher-order one, of which every pass of torch must know; one with a
string is like any other.  A program is a list of calls; ``["v", n]`` stands for the n-th value: inputs come first.
"""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node


def written(module: GraphModule) -> str:
    """The text of a graph of operator calls."""
    numbers: dict[Node, int] = {}
    calls: list[Any] = []
    results: list[Any] = []
    for node in module.graph.nodes:
        if node.op == "output":
            results = _data(_listed(node.args[0]), numbers)
            continue
        numbers[node] = len(numbers)
        if node.op == "call_function":
            calls.append([_name(node.target), _data(list(node.args), numbers), _data(dict(node.kwargs), numbers)])
        elif node.op != "placeholder":
            raise ValueError(f"a program has a {node.op}: {node.target}")
    inputs = len(numbers) - len(calls)
    return json.dumps([inputs, calls, results], separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def read(text: str) -> GraphModule:
    """The graph of a text; not to be changed.  It returns a tuple."""
    inputs, calls, results = json.loads(text)
    graph = Graph()
    values: list[Node] = [graph.placeholder(f"x{k}") for k in range(inputs)]
    for name, args, kwargs in calls:
        target = _target(name)
        values.append(graph.call_function(target, tuple(_value(args, values)), _value(kwargs, values)))
    graph.output(tuple(_value(results, values)))
    return GraphModule(torch.nn.Module(), graph)


def _listed(x: Any) -> list[Any]:
    return list(x) if isinstance(x, (tuple, list)) else [x]


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return f"{target.namespace}.{target._schema.name.split('::')[-1]}.{target._overloadname}"
    if target is operator.getitem:
        return "getitem"
    raise ValueError(f"a program calls {target}, which is no operator of torch")


def _target(name: str) -> Callable[..., Any]:
    if name == "getitem":
        return operator.getitem
    namespace, operation, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), operation), overload)
    return found


def _data(x: Any, numbers: dict[Node, int]) -> Any:
    """What JSON can hold; what it cannot is tagged."""
    if isinstance(x, Node):
        return ["v", numbers[x]]
    if isinstance(x, (list, tuple)):
        return ["l", [_data(y, numbers) for y in x]]
    if isinstance(x, dict):
        return ["d", {k: _data(y, numbers) for k, y in x.items()}]
    if isinstance(x, (torch.dtype, torch.layout)):
        return ["t", str(x).removeprefix("torch.")]
    if isinstance(x, torch.device):
        return ["c", x.type]
    if x is None or isinstance(x, (bool, int, float, str)):
        return x
    raise ValueError(f"a program reads {x!r}")


def _value(x: Any, values: list[Node]) -> Any:
    if not isinstance(x, list):
        return x
    kind, held = x
    if kind == "v":
        return values[held]
    if kind == "l":
        return [_value(y, values) for y in held]
    if kind == "d":
        return {k: _value(y, values) for k, y in held.items()}
    return getattr(torch, held) if kind == "t" else torch.device(held)
