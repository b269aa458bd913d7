"""What a command tells its user in a sentence, without a traceback."""


class ConfigError(ValueError):
    """The configuration asks for something that does not exist or does not fit together."""


class ConfigTypeError(ConfigError, TypeError):
    """A value of the configuration has the wrong type."""
