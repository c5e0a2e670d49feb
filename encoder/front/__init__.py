"""The encoder's own HTTP server: one process without torch that fetches media and asks the replicas behind it."""
