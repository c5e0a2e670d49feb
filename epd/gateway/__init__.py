"""The HTTP edge: chat completions in, token ids and media spans out to the workers, text back. Loads no torch."""
