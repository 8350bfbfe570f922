"""From graph nodes to terms."""
