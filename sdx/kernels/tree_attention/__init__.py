"""Attention of a round's draft nodes over the committed cache and their own ancestors."""
