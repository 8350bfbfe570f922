"""Named axes, terms over them, and what they are worth."""
