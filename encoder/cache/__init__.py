"""The shared-memory embedding cache: an arena of slots, an index of keys and leases, and their facade."""
