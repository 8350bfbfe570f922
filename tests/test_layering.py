"""Imports point one way: a module imports only what stands before it in this order."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sdpa_rewrite

ROOT = Path(sdpa_rewrite.__file__).parent

ORDER = [
    *("outcome", "compat", "config", "cleanroom", "processor"),
    *("algebra", "site", "reference", "lift", "twins"),
    *("candidates", "softmax", "match", "follow", "prove", "adjoint", "analyse", "calls"),
    *(
        "kernels",
        "emit",
        "costs",
        "choose",
        "verify",
        "seeds",
        "rewrite",
        "flex_meaning",
        "flex_calls",
        "describe",
        "authoring",
        "patterns",
        "pipeline",
    ),
    *("report", "graph_pass", "hook", "backend", "explanation", "testing", "__init__"),
    *("bench", "__main__"),
]


def top(module: str) -> str:
    """``sdpa_rewrite.lift.ops`` -> ``lift``."""
    return module.split(".")[1] if "." in module else "__init__"


def imports(tree: ast.AST) -> Iterator[str]:
    """The modules of ours that are imported anywhere, functions included, except for the type checker only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module == "sdpa_rewrite":
            yield from (f"sdpa_rewrite.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("sdpa_rewrite."):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.startswith("sdpa_rewrite"))
        else:
            yield from imports(node)


def upward(module: str, source: str) -> list[str]:
    """The imports of ``module`` that point up or sideways to a module that is not in the order."""
    here = ORDER.index(top(module))
    found = set(map(top, imports(ast.parse(source)))) - {top(module)}
    return sorted(name for name in found if name not in ORDER or ORDER.index(name) > here)


def modules() -> list[tuple[str, Path]]:
    files = sorted({*ROOT.rglob("*.py"), *(ROOT / "patterns").glob("*.py")})
    return [(".".join(("sdpa_rewrite", *path.relative_to(ROOT).with_suffix("").parts)), path) for path in files]


@pytest.mark.parametrize(("module", "path"), modules(), ids=[module for module, _ in modules()])
def test_imports_point_down(module: str, path: Path) -> None:
    assert top(module) in ORDER, f"{module} has no place in the order yet"
    assert not upward(module, path.read_text())


def test_no_relative_imports() -> None:
    relative = [
        str(path)
        for _, path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


@pytest.mark.parametrize(
    "source",
    [
        "from sdpa_rewrite import hook",
        "import sdpa_rewrite.hook",
        "def f():\n    from sdpa_rewrite.hook import enable",
        "try:\n    from sdpa_rewrite.hook import enable\nexcept ImportError: pass",
    ],
)
def test_an_upward_import_is_found(source: str) -> None:
    assert upward("sdpa_rewrite.match", source) == ["hook"]
    assert not upward("sdpa_rewrite.backend", source)


def test_a_type_checkers_import_does_not_count() -> None:
    assert not upward("sdpa_rewrite.match", "if TYPE_CHECKING:\n    from sdpa_rewrite.hook import enable")
