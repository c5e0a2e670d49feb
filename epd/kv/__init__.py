"""Paged KV memory: page geometry, the two pools, and the tensors behind them. Import the submodules."""
