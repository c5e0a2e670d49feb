"""Refusals of the import."""


class GgufError(ValueError):
    """A file that is no GGUF, is damaged, or holds something this model does not implement; the message names it."""


class CacheError(OSError):
    """The directory that imported models are kept in cannot be written; the message names it."""
