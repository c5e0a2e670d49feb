"""Trainer of the built-in model mimo-nano: task generators, networks, optimiser and export."""
