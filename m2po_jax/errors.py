"""What a user can mend."""


class UserError(Exception):
    """Something the user can mend: the message is one line that names the thing and the fix (exit code 2)."""


class ConfigError(UserError, ValueError):
    """A configuration that cannot run; the message names the field and the fix."""


def require(condition: bool, message: str) -> None:
    """Raises ConfigError with the message unless the condition holds."""
    if not condition:
        raise ConfigError(message)
