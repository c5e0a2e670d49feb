"""What every command may fail with. Light: `mimo --help` loads this and nothing that serves."""


class ConfigError(Exception):
    """Settings that cannot be used; the message names the key, its value and what is allowed."""
