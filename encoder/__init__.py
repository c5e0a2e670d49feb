"""The encoder: a server that turns media into embedding rows, and the towers it runs.

Importing this package loads no torch; the gateway depends on that. Import the submodule that is wanted.
"""
