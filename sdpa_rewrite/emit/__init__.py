"""Emitters: each makes fused attention of a site, or says why it cannot."""
