"""Every form of the library matches its own trace, is told from its near misses, and is never computed wrongly.

Here in few cases each; ``python -m tests.law`` runs them all.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from sdpa_rewrite import Pattern, patterns
from sdpa_rewrite.testing import PAIRWISE, Case, cases, check_pattern

FOLDER = Path(patterns.__file__).parent
LIBRARY = sorted((p for p in patterns.active() if p.function.__module__.startswith("sdpa_rewrite.patterns")), key=str)


@pytest.mark.parametrize("pattern", LIBRARY, ids=lambda p: p.name)
def test_the_law(pattern: Pattern) -> None:
    done = check_pattern(pattern, cases=PAIRWISE, near_misses=20)
    assert done.near_misses == 20


def test_one_file_a_form_named_after_it() -> None:
    files = {p.stem for p in FOLDER.glob("*.py")} - {"__init__", "operands"}
    assert files == {p.name for p in LIBRARY}
    for pattern in LIBRARY:
        assert pattern.function.__module__ == f"sdpa_rewrite.patterns.{pattern.name}"


@pytest.mark.parametrize("pattern", LIBRARY, ids=lambda p: p.name)
def test_it_says_where_it_is_found_and_what_it_is_not(pattern: Pattern) -> None:
    text = importlib.import_module(pattern.function.__module__).__doc__ or ""
    assert "Found in:" in text
    assert pattern.summary
    assert pattern.near_misses
    assert pattern.replacement or pattern.names_sites or pattern.why_not


def test_every_two_properties_of_a_case_meet() -> None:
    def pairs(some: list[Case]) -> set[tuple[object, ...]]:
        rows = [(c.dtype, c.training, c.dynamic, c.batch, c.permuted) for c in some]
        return {(i, r[i], j, r[j]) for r in rows for i in range(5) for j in range(i)}

    missing = pairs(list(cases())) - pairs(list(PAIRWISE))
    assert not {m for m in missing if not (m[0] == 2 and m[1]) and not (m[2] == 2 and m[3])}


def test_describe_shows_algebra() -> None:
    text = patterns.describe("causal")
    assert "q: [b h i d]" in text
    assert "softmax_j(where((i < j), -inf, scale * sum_d(q[b h i d] * k[b h j d])))" in text
    assert "not replaced: talking heads" in patterns.describe("talking_heads")
    with pytest.raises(KeyError):
        patterns.describe("no such pattern")
