"""Task generators: every sample is a pure function of a seed and an index."""
