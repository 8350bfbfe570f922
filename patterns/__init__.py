"""The library: one attention form a file, each named after the form it is.  Imported as ``sdpa_rewrite.patterns``.

A file says where its form is found in the wild and holds the pattern and its near misses.  A ``named_form`` names what
the engine takes anyway; a ``pattern`` has a replacement, or the reason why there is none.  Adding one is one file, and
one line below.
"""

from __future__ import annotations

if __name__ == "patterns":
    raise ImportError("this folder is the package sdpa_rewrite.patterns; import it by that name")

from sdpa_rewrite.authoring.adopt import adopt as adopt
from sdpa_rewrite.authoring.describe import describe as describe
from sdpa_rewrite.authoring.registry import active as active
from sdpa_rewrite.authoring.registry import register as register
from sdpa_rewrite.authoring.registry import scope as scope
from sdpa_rewrite.authoring.registry import unregister as unregister
from sdpa_rewrite.patterns.alibi import alibi as alibi
from sdpa_rewrite.patterns.causal import causal as causal
from sdpa_rewrite.patterns.cosine_attention import cosine_attention as cosine_attention
from sdpa_rewrite.patterns.decomposed_relative_position import (
    decomposed_relative_position as decomposed_relative_position,
)
from sdpa_rewrite.patterns.differential_attention import differential_attention as differential_attention
from sdpa_rewrite.patterns.disentangled_attention import disentangled_attention as disentangled_attention
from sdpa_rewrite.patterns.document_mask import document_mask as document_mask
from sdpa_rewrite.patterns.dropout import dropout as dropout
from sdpa_rewrite.patterns.key_padding import key_padding as key_padding
from sdpa_rewrite.patterns.key_value_cache import key_value_cache as key_value_cache
from sdpa_rewrite.patterns.prefix import prefix as prefix
from sdpa_rewrite.patterns.relative_bias import relative_bias as relative_bias
from sdpa_rewrite.patterns.relative_shift import relative_shift as relative_shift
from sdpa_rewrite.patterns.returned_probabilities import returned_probabilities as returned_probabilities
from sdpa_rewrite.patterns.safe_softmax import safe_softmax as safe_softmax
from sdpa_rewrite.patterns.sigmoid_attention import sigmoid_attention as sigmoid_attention
from sdpa_rewrite.patterns.sink import sink as sink
from sdpa_rewrite.patterns.sliding_window import sliding_window as sliding_window
from sdpa_rewrite.patterns.soft_cap import soft_cap as soft_cap
from sdpa_rewrite.patterns.softmax_plus_one import softmax_plus_one as softmax_plus_one
from sdpa_rewrite.patterns.talking_heads import talking_heads as talking_heads
