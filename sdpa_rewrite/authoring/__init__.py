"""The pattern-authoring API: teach the plugin a form of attention, and what shall take its place.

Design.  A pattern is a plain function whose annotations declare facts (``parameters``).  It is traced once per reading
of it (each choice, each option), and that trace is opened by the same code as the graph (``opener``), operator by
operator, and matched against it from the result down (``unify``): sums and products are unordered, numbers fold,
layout and casts are looked through.  Which axis is which follows from where each occurs (``correspond``).  Nothing of
this is trusted: the region is evaluated on random data beside the pattern, forward and for each gradient (``certify``),
and so is the replacement.  The backward is found by its values (``adjoint``) and comes from the replacement's
autograd.  Then the one editor of graphs puts it in (``replace``).

    authoring, registry ─> lifted ─┐
                  graph ─> opener ─┴> unify ─> correspond ─> region ─> certify, adjoint ─> replace
"""

from __future__ import annotations

from sdpa_rewrite.authoring.parameters import PatternError as PatternError
from sdpa_rewrite.authoring.parameters import Program as Program
from sdpa_rewrite.authoring.parameters import Scalar as Scalar
from sdpa_rewrite.authoring.pattern import Match as Match
from sdpa_rewrite.authoring.pattern import MatchedScalar as MatchedScalar
from sdpa_rewrite.authoring.pattern import MatchedTensor as MatchedTensor
from sdpa_rewrite.authoring.pattern import NoMatch as NoMatch
from sdpa_rewrite.authoring.pattern import Pattern as Pattern
from sdpa_rewrite.authoring.pattern import named_form as named_form
from sdpa_rewrite.authoring.pattern import pattern as pattern
