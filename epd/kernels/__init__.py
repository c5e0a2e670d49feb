"""Attention over keys and values: the protocol (`base`) and its plain torch form (`reference`)."""
