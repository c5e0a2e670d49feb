"""The hybrid text model: configuration, layers, draft heads and weight files. Import the submodule you need."""
