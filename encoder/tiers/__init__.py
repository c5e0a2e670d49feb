"""The second tier of the embedding cache: what outlives the arena and the process, in a directory or in Redis."""
