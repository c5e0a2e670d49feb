"""Differentiable, batch-oriented twins of the served networks. Same arithmetic, same tensor names on export."""
