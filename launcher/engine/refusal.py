"""What the engine says to a model, a loss or a setting that it cannot train with."""


class UnusableError(ValueError):
    """The user's to mend: the text says what was given, what the rule is, and what to do."""
