"""The `mimo` command line: settings, supervision, and the commands. Nothing imports it."""
