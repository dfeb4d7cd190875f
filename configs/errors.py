"""The one exception for what a user can put right."""


class InputError(ValueError):
    """One line that names the cause and what would be valid; scripts print it and exit 1."""
