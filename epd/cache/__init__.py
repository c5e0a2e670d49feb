"""Prefix cache over the full and window pools. Start at epd.cache.prefix; import the submodules."""
