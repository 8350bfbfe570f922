"""``torch.compile(model, backend="sdpa_rewrite")``: Inductor with our pass on, whatever the switch says.

Found by name through the entry point ``torch_dynamo_backends``; ``mode`` and ``options`` work as for the stock
backend, and our own options may be given among ``options``, also as ``"sdpa_rewrite.<name>"``.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from sdpa_rewrite import config

PREFIX = "sdpa_rewrite."


def compile_graph(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The backend: compile ``gm`` by Inductor, its attention rewritten."""
    inductor_options, our_options = split_options(options or {})
    # the stock wrapper knows the modes and checks the types of Inductor's options
    stock = torch._TorchCompileInductorWrapper(mode, inductor_options, None)
    return compile_with(gm, example_inputs, stock.config, our_options)


def compile_with(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    inductor_options: dict[str, Any],
    our_options: dict[str, Any],
    inner_compile: Callable[..., Any] | None = None,
) -> Any:
    """Compile ``gm`` with these options; ``inner_compile`` may stand in for Inductor's code generation."""
    # looked up when called, here and below: tools replace compile_fx and compile_fx_inner
    from torch._inductor import compile_fx as inductor

    with config.patch({"enabled": True, **our_options}):
        if problems := config.problems():
            raise ValueError("; ".join(problems))
        # A backward is compiled when it first runs, in whatever thread that is: it sees what holds here.
        values = {name: getattr(config, name) for name in config.names()}

        def inner(*args: Any, **kwargs: Any) -> Any:
            with config.patch(values):
                return (inner_compile or inductor.compile_fx_inner)(*args, **kwargs)

        return inductor.compile_fx(gm, example_inputs, inner_compile=inner, config_patches=inductor_options)


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inductor's options and ours.  A name that both have is Inductor's, unless it has our prefix."""
    from torch._inductor import config as inductor_config

    theirs, ours = set(inductor_config.get_config_copy()), set(config.names())
    inductor_options, our_options = {}, {}
    for key, value in options.items():
        name = key.replace("-", "_")
        if name in theirs:
            inductor_options[name] = value
        elif (bare := name.removeprefix(PREFIX)) in ours:
            our_options[bare] = value
        else:
            raise ValueError(_unknown(key, theirs | ours | {PREFIX + each for each in ours}, ours))
    return inductor_options, our_options


def _unknown(key: str, known: set[str], ours: set[str]) -> str:
    close = difflib.get_close_matches(key.replace("-", "_"), known, n=3)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return (
        f"backend 'sdpa_rewrite' has no option {key!r}{hint}"
        f" Options are ours ({', '.join(sorted(ours))}) and Inductor's (torch._inductor.list_options())."
    )
