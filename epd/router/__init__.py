"""Which worker takes a request (`policy`, pure) and what is known about each worker (`workers`)."""
