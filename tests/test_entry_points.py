"""The ways in, as users take them: each in a process of its own that knows us by name only."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import RunPython

# A matrix product needs no generated code, so compiling it is quick.
PRODUCT = """
    import sys, torch

    def product(x, y):
        return x @ y

    def graphs():
        from torch._dynamo.utils import counters
        return counters["sdpa_rewrite"]["graphs"]

    x, y = torch.randn(4, 5, requires_grad=True), torch.randn(5, 6)
"""


def script(body: str) -> str:
    return "\n".join(line.removeprefix("    ") for line in PRODUCT.splitlines()) + "\n" + body


def test_the_backend_is_found_by_name_and_not_imported_before(run_python: RunPython) -> None:
    done = run_python(
        script("""
assert not [name for name in sys.modules if name.startswith("sdpa_rewrite.")], "imported by `import torch`"
assert "sdpa_rewrite" in torch.compiler.list_backends()
compiled = torch.compile(product, backend="sdpa_rewrite", options={"dropout": "any"}, dynamic=False, fullgraph=True)
out = compiled(x, y)
torch.testing.assert_close(out, x @ y)
out.sum().backward()
print(graphs())
""")
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize(("value", "graphs"), [("1", "1"), (None, "0")])
def test_the_environment_switches_on_the_stock_backend(value: str | None, graphs: str, run_python: RunPython) -> None:
    environment = {} if value is None else {"SDPA_REWRITE": value}
    done = run_python(
        script("""
heavy = [name for name in ("torch._inductor", "torch._dynamo", "sympy") if name in sys.modules]
assert not heavy, f"imported by `import torch`: {heavy}"
print("sdpa_rewrite.hook" in sys.modules)
torch.testing.assert_close(torch.compile(product)(x, y), x @ y)
print(graphs())
"""),
        **environment,
    )
    assert done.stdout.split() == [str(value == "1"), graphs], done.stderr


def test_enable_before_inductor_is_imported(run_python: RunPython) -> None:
    done = run_python(
        script("""
import sdpa_rewrite
assert "torch._inductor" not in sys.modules and "sympy" not in sys.modules, "import sdpa_rewrite is not light"
sdpa_rewrite.enable()
assert "torch._inductor" not in sys.modules
torch.compile(product)(x, y)
sdpa_rewrite.disable()
torch._dynamo.reset()
torch.compile(product)(x, y)
with sdpa_rewrite.config.patch(enabled=True):
    torch._dynamo.reset()
    torch.compile(product)(x, y)
print(graphs())
""")
    )
    assert done.stdout == "2\n", done.stderr


def test_the_environment_counts_without_autoload(run_python: RunPython) -> None:
    done = run_python(
        script("import sdpa_rewrite; torch.compile(product)(x, y); print(graphs())"),
        SDPA_REWRITE="1",
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )
    assert done.stdout == "1\n", done.stderr


@pytest.mark.parametrize("flags", [(), ("-W", "error")])
@pytest.mark.parametrize("content", ["raise RuntimeError('broken')", "def ("])
def test_a_broken_package_does_not_break_torch(
    content: str, flags: tuple[str, ...], tmp_path: Path, run_python: RunPython
) -> None:
    broken = tmp_path / "sdpa_rewrite"
    broken.mkdir()
    (broken / "__init__.py").write_text(content)
    # not all of torch imports under -W error; what counts is that it gets as far as it does without us
    flags = (*flags, "-W", "ignore::DeprecationWarning") if flags else ()
    done = run_python("import torch; print(torch.ones(1).item())", *flags, SDPA_REWRITE="1", PYTHONPATH=str(tmp_path))
    assert done.stdout == "1.0\n", done.stderr
    assert done.stderr.startswith("sdpa_rewrite: SDPA_REWRITE is set but has no effect: ")
    assert len(done.stderr.splitlines()) == 1


def test_another_torch_is_refused_in_words(run_python: RunPython) -> None:
    done = run_python("""
        import torch
        torch.__version__ = "2.10.0"
        try:
            import sdpa_rewrite
        except ImportError as error:
            print(error)
    """)
    assert done.stdout == "sdpa_rewrite supports torch 2.11 to 2.15; this is torch 2.10.0\n", done.stderr


@pytest.mark.parametrize("environment", [{"TORCH_LOGS": "+sdpa_rewrite"}, {"SDPA_REWRITE_LOG": "info"}])
def test_the_log_can_be_turned_on(environment: dict[str, str], run_python: RunPython) -> None:
    body = """
        import sdpa_rewrite
        from sdpa_rewrite.report import record
        record((sdpa_rewrite.Outcome("fused", "bmm", "model.py:1", emitter="sdpa"),))
    """
    done = run_python(body, **environment)
    lines = [line for line in done.stderr.splitlines() if "fused by sdpa: model.py:1" in line]
    assert len(lines) == 1, done.stderr
    assert "fused by" not in run_python(body).stderr


def test_a_log_level_that_does_not_exist(run_python: RunPython) -> None:
    done = run_python("import sdpa_rewrite; print(1)", SDPA_REWRITE_LOG="loud")
    assert (done.stdout, done.stderr) == ("1\n", "sdpa_rewrite: SDPA_REWRITE_LOG=loud: no such level\n")


def test_patterns_is_no_package_of_its_own(run_python: RunPython) -> None:
    done = run_python("""
        import sdpa_rewrite.patterns
        try:
            import patterns
        except ImportError as error:
            print(error)
    """)
    assert done.stdout in (
        "this folder is the package sdpa_rewrite.patterns; import it by that name\n",  # a checkout
        "No module named 'patterns'\n",  # a wheel
    ), done.stderr
