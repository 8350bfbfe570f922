"""For authors of patterns: tests of a pattern in one line, and assertions about what becomes of a function.

    def test_my_pattern() -> None:
        sdpa_rewrite.testing.check_pattern(my_pattern)

    sdpa_rewrite.testing.assert_rewrites(my_model, [x], by="my_pattern")
    sdpa_rewrite.testing.assert_misses(my_model, [x], reason="also read by output")
    with sdpa_rewrite.testing.record_graphs() as graphs: ...

Nothing here generates code: graphs run operator by operator, so a test costs a fraction of a second.
"""

from __future__ import annotations

from sdpa_rewrite.testing.assertions import Recorded as Recorded
from sdpa_rewrite.testing.assertions import assert_misses as assert_misses
from sdpa_rewrite.testing.assertions import assert_rewrites as assert_rewrites
from sdpa_rewrite.testing.assertions import compare as compare
from sdpa_rewrite.testing.assertions import record_graphs as record_graphs
from sdpa_rewrite.testing.suite import PAIRWISE as PAIRWISE
from sdpa_rewrite.testing.suite import Case as Case
from sdpa_rewrite.testing.suite import Checked as Checked
from sdpa_rewrite.testing.suite import Failure as Failure
from sdpa_rewrite.testing.suite import cases as cases
from sdpa_rewrite.testing.suite import check_pattern as check_pattern
