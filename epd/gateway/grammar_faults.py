"""What of a schema cannot be enforced."""


class Unenforceable(Exception):
    """A part of a schema that cannot be enforced; `path` leads to it from the schema's root."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(why)
        self.path = path
