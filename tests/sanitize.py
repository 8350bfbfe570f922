"""Run the emitted C++ kernels under the address and undefined-behaviour sanitizers.

python -m tests.sanitize                      # the whole sweep: hours, most of them spent in the C++ compiler
python -m tests.sanitize --isa portable --forms "dropout,learned bias"

The sweep runs in a child process in which the sanitizers' runtime is loaded first and our kernels, with all that they
inline, are instrumented.  Symbolic shapes let one kernel see many sizes.  Each run begins with a kernel that reads
past its input on purpose: a sanitizer that stays silent then is not at work.  Linux with GCC.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from sdpa_rewrite import processor, report

Function = Callable[..., Tensor]
Size = tuple[int, int, int, int, int, int]
INFINITY = float("inf")
BLOCK = 48
OURS = "namespace sdpa_rewrite"
SANITIZED = (
    *("-fsanitize=address,undefined", "-fsanitize-recover=address,undefined"),
    *("-O1", "-g1", "-fno-omit-frame-pointer"),
)
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=0:verify_asan_link_order=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "OMP_NUM_THREADS": "2",
}


@dataclass(frozen=True)
class InstructionSet:
    """What Inductor is told to compile for, and how bfloat16 is multiplied if not as is best on this CPU."""

    options: dict[str, Any] = field(default_factory=dict)
    pairs: str | None = None


ISAS = {
    "native": InstructionSet(),
    "dots": InstructionSet(pairs="dots"),
    "tiles": InstructionSet(pairs="tiles"),
    "avx2": InstructionSet({"cpp.simdlen": 256}),
    "portable": InstructionSet({"cpp.simdlen": 1}),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# -- the forms -----------------------------------------------------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * 0.3).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x[:, ::2].repeat_interleave(2, dim=1) for x in (k, v))
    return plain(q, k, v)


def strided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Inputs whose last dimension is not the innermost, and an output that is transposed."""
    q, k, v = (x.mT.contiguous().mT for x in (q, k, v))
    return plain(q, k, v).transpose(1, 2).contiguous()


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, m = q.shape[-2], k.shape[-2]
    hidden = torch.arange(m) > torch.arange(n)[:, None] + (m - n)
    return (q @ k.mT * 0.3).masked_fill(hidden, -INFINITY).softmax(-1) @ v


def window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    behind = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return (q @ k.mT).masked_fill((behind < 0) | (behind >= 70), torch.finfo(q.dtype).min).softmax(-1) @ v


def soft_cap(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, m = q.shape[-2], k.shape[-2]
    scores = 5 * torch.tanh(q @ k.mT * 0.3 / 5)
    return scores.masked_fill(torch.arange(m) > torch.arange(n)[:, None] + (m - n), -INFINITY).softmax(-1) @ v


def mask(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(hidden, -INFINITY).softmax(-1) @ v


def blocks(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """A mask of blocks, as a call of FlexAttention with a ``BlockMask`` has it: read as a table of blocks."""
    rows, columns = seen.shape[-2:]
    apart = seen[:, None, :, None, :, None].expand(-1, 1, -1, BLOCK, -1, BLOCK)
    return (q @ k.mT).masked_fill(~apart.reshape(-1, 1, rows * BLOCK, columns * BLOCK), -INFINITY).softmax(-1) @ v


def padding(q: Tensor, k: Tensor, v: Tensor, keys: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(keys, torch.finfo(q.dtype).min).softmax(-1) @ v


def safe(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (q @ k.mT).masked_fill(hidden, -INFINITY)
    return torch.ops.aten._safe_softmax(scores, -1) @ v


def sink(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    scores = q @ k.mT
    more = sinks.expand(*scores.shape[:-1], 1)
    return torch.cat([scores, more], dim=-1).softmax(-1)[..., :-1] @ v


def learned_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, temperature: Tensor, hidden: Tensor) -> Tensor:
    scores = q @ k.mT * temperature.exp() + bias
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1) @ v


def edge_bias(q: Tensor, k: Tensor, v: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return (q @ k.mT + row + column).softmax(-1) @ v


def dropout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.nn.functional.dropout((q @ k.mT * 0.3).softmax(-1), 0.25) @ v


def causal_dropout(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    scores = (q @ k.mT * 0.3).masked_fill(hidden, -INFINITY)
    return torch.nn.functional.dropout(scores.softmax(-1), 0.25) @ v


def no_more(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return []


def hidden(size: Size, dtype: torch.dtype) -> list[Tensor]:
    b, _, n, m, _, _ = size
    found = torch.rand(b, 1, n, m) > 0.7
    found[:, :, n // 2] = True
    found[..., m // 2 :] = True
    found[..., n // 2 + 1 :, 0] = False
    return [found]


def of_keys(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.rand(size[0], 1, 1, size[3]) > 0.5]


def of_blocks(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.rand(size[0], size[2] // BLOCK, size[3] // BLOCK) > 0.5]


def biases(size: Size, dtype: torch.dtype) -> list[Tensor]:
    _, h, n, m, _, _ = size
    return [torch.randn(h, n, m, dtype=dtype), torch.randn(h, 1, 1, dtype=dtype), *hidden(size, dtype)]


def of_heads(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(size[1], 1, 1, dtype=dtype)]


def edges(size: Size, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(size[1], size[2], 1, dtype=dtype), torch.randn(size[3], dtype=dtype)]


# Batch, heads, queries, keys, head size, width of the values.  One compilation sees all of these: multiples of nothing,
# two keys, several pieces of rows, keys shared by threads, wide heads.  (Batch and heads differ: equal ones would be
# one symbol.)
SIZES: tuple[Size, ...] = (
    (3, 2, 17, 33, 40, 24),
    (3, 4, 5, 2, 3, 7),
    (4, 2, 403, 131, 19, 33),
    (3, 2, 3, 1500, 80, 96),
    (3, 2, 65, 63, 256, 250),
)
# A size of one is not symbolic: a compilation each.  One row, one of nearly all, one row of many keys.
ONES: tuple[Size, ...] = ((1, 2, 1, 70, 8, 8), (1, 1, 1, 2, 3, 3), (1, 1, 1, 1500, 24, 24))
BLOCKS: tuple[Size, ...] = ((2, 3, 96, 480, 16, 16), (1, 2, 432, 48, 8, 24))


@dataclass(frozen=True)
class Form:
    """A function of query, key, value and what ``more`` makes for their sizes.

    It is compiled once for all sizes ``dynamic``, and for each of ``static``.
    """

    function: Function
    more: Callable[[Size, torch.dtype], list[Tensor]] = no_more
    dynamic: tuple[Size, ...] = SIZES
    static: tuple[Size, ...] = ()


FORMS = {
    "plain": Form(plain, static=ONES),
    "grouped heads": Form(grouped),
    "strided": Form(strided),
    "causal": Form(causal),
    "window": Form(window),
    "soft-cap": Form(soft_cap),
    "mask": Form(mask, hidden, static=ONES),
    "blocks": Form(blocks, of_blocks, (), BLOCKS),
    "padding": Form(padding, of_keys),
    "safe": Form(safe, hidden),
    "sink": Form(sink, of_heads),
    "learned bias": Form(learned_bias, biases, static=ONES),
    "edge bias": Form(edge_bias, edges),
    "dropout": Form(dropout, static=ONES),
    "dropout and mask": Form(causal_dropout, hidden),
}

# -- the child -----------------------------------------------------------------------------------------------------

PLANTED = """
#include <cstdint>
namespace sdpa_rewrite {}
extern "C" void kernel(const float* in, float* out, const int64_t n)
{
  out[0] = in[n];
}
"""


@contextlib.contextmanager
def instrumented() -> Iterator[None]:
    """Our kernels are built with the sanitizers; Inductor's own, which share torch's headers, are not."""
    from torch._inductor import codecache
    from torch._inductor import config as inductor

    original = codecache.CppCodeCache.load_async.__func__

    def load(cls: Any, code: str, *args: Any, extra_flags: Sequence[str] = (), **options: Any) -> Any:
        more = SANITIZED if OURS in code else ()
        return original(cls, code, *args, extra_flags=(*extra_flags, *more), **options)

    options = {"fx_graph_cache": False, "cpp_cache_precompile_headers": False, "compile_threads": 1}
    caches = torch._functorch.config.patch(enable_autograd_cache=False)  # type: ignore[attr-defined]
    with patch.object(codecache.CppCodeCache, "load_async", classmethod(load)), inductor.patch(options), caches:
        yield


@contextlib.contextmanager
def compiled_for(isa: InstructionSet) -> Iterator[None]:
    """What is compiled meanwhile is for ``isa``."""
    from torch._inductor import config as inductor

    with contextlib.ExitStack() as stack:
        stack.enter_context(inductor.patch(isa.options))
        if isa.pairs:
            stack.enter_context(patch.object(processor, "pairs", lambda: isa.pairs))
        yield


def read_past_an_input() -> None:
    """What a sanitizer that is at work must find."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    kernel = CppPythonBindingsCodeCache.load_pybinding(["const float*", "float*", "const int64_t"], PLANTED)
    kernel(torch.zeros(1000), torch.zeros(1), 1000)


def run(form: Form, size: Size, dtype: torch.dtype, compiled: Function) -> None:
    """Forward and backward once, then forward alone."""
    b, h, n, m, d, e = size
    q, k, v = torch.randn(b, h, n, d), torch.randn(b, h, m, d), torch.randn(b, h, m, e)
    given = [*(x.to(dtype) for x in (q, k, v)), *form.more(size, dtype)]
    own = [x.requires_grad_() if x.is_floating_point() else x for x in given]
    out = compiled(*own)
    torch.autograd.grad(out, [x for x in own if x.requires_grad], torch.randn_like(out))
    with torch.no_grad():
        compiled(*own)


def ours(form: Form, dynamic: bool) -> Function:
    """The form, compiled anew for our kernels."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"emitters": ("fused",), "strict": True, "cost_model": False}
    return torch.compile(form.function, backend="sdpa_rewrite", dynamic=dynamic, options=options)


def runs(form: Form, quick: bool) -> Iterator[tuple[Size, Function]]:
    """The sizes of a form, each with the function compiled for it; ``quick``: one size."""
    dynamic, static = form.dynamic, form.static
    if quick:
        dynamic, static = dynamic[:1], () if dynamic else static[:1]
    if dynamic:
        compiled = ours(form, dynamic=True)
        yield from ((size, compiled) for size in dynamic)
    yield from ((size, ours(form, dynamic=False)) for size in static)


def sweep(forms: Sequence[str], dtypes: Sequence[str], isas: Sequence[str], quick: bool) -> int:
    """Run all of it; returns how many forms our kernels did not take at all."""
    torch.manual_seed(0)
    torch.set_num_threads(2)
    missed = 0
    with instrumented():
        print("planted", file=sys.stderr, flush=True)
        read_past_an_input()
        for isa, dtype, name in ((i, d, f) for i in isas for d in dtypes for f in forms):
            if ISAS[isa].pairs and (dtype != "bfloat16" or ISAS[isa].pairs == processor.pairs()):
                continue  # as native
            with compiled_for(ISAS[isa]), report.collect() as collected:
                for size, compiled in runs(FORMS[name], quick):
                    print(f"case {isa} {dtype} {name} {size}", file=sys.stderr, flush=True)
                    run(FORMS[name], size, DTYPES[dtype], compiled)
            left = [o for o in collected.sites if o.emitter != "fused"]
            missed += len(left) == len(collected.sites)
            for outcome in left:
                print(f"not fused: {isa} {dtype} {name}: {'; '.join(map(str, outcome.reasons))}", flush=True)
    return missed


# -- the parent ----------------------------------------------------------------------------------------------------

FINDING = re.compile(r"(runtime error: .*|ERROR: AddressSanitizer: \S+.*)")


@dataclass(frozen=True)
class Finding:
    """What a sanitizer said, during which case."""

    case: str
    text: str
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.case}: {self.text}", *(f"    {line}" for line in self.stack)])


def findings(log: str) -> list[Finding]:
    """The findings in what the child wrote, each kind once per case."""
    found: dict[tuple[str, str], Finding] = {}
    case = "planted"
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("case "):
            case = line.removeprefix("case ")
        match = FINDING.search(line)
        if match:
            text = re.sub(r"0x[0-9a-f]+", "0x", match.group(1))
            stack = [x.strip() for x in lines[number + 1 : number + 12] if x.lstrip().startswith("#")]
            found.setdefault((case, text), Finding(case, match.group(1), tuple(stack[:6])))
    return list(found.values())


def child(arguments: Sequence[str]) -> tuple[int, str]:
    """Run this module again with the sanitizers' runtime loaded; its progress is shown as it comes."""
    libraries = [_library(n) for n in ("libasan.so", "libubsan.so", "libstdc++.so")]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TORCHINDUCTOR_CACHE_DIR": folder, "LD_PRELOAD": " ".join(libraries)}
        command = [sys.executable, "-m", "tests.sanitize", "--inside", *arguments]
        environment = {**os.environ, **ENVIRONMENT, **caches}
        log = []
        with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, errors="replace") as process:
            assert process.stderr is not None
            for line in process.stderr:
                log.append(line)
                if line.startswith("case ") or FINDING.search(line):
                    print(line, end="", file=sys.stderr, flush=True)
        return process.returncode, "".join(log)


def _library(name: str) -> str:
    compiler = os.environ.get("CXX", "g++")
    return subprocess.run(
        [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()


def judged(status: int, log: str) -> tuple[bool, str]:
    """Whether the child's run is clean, and in words what it was."""
    found = findings(log)
    planted = [f for f in found if f.case == "planted"]
    real = [f for f in found if f.case != "planted"]
    cases = sum(line.startswith("case ") for line in log.splitlines())
    if not planted:
        return False, f"{log[-2000:]}\nthe planted error was not found: the sanitizers are not at work"
    text = [*map(str, real), f"{cases} cases, {len(real)} findings (the planted one was found)"]
    if status:
        text.append(f"the run ended with status {status}: {log[-2000:]}")
    return not real and not status, "\n".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code is 0 where nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    listed = {"forms": FORMS, "dtypes": DTYPES, "isa": ISAS}
    for name, known in listed.items():
        parser.add_argument(f"--{name}", default=",".join(known), help=", ".join(known))
    parser.add_argument("--quick", action="store_true", help="one size of each form")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    chosen = {name: getattr(options, name).split(",") for name in listed}
    for name, known in listed.items():
        unknown = sorted(set(chosen[name]) - set(known))
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(unknown)}")
    if options.inside:
        return sweep(chosen["forms"], chosen["dtypes"], chosen["isa"], options.quick)
    passed = [f"--{name}={','.join(chosen[name])}" for name in listed]
    clean, text = judged(*child([*passed, *(["--quick"] if options.quick else [])]))
    print(text)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
