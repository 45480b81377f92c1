"""The one exception for a user's mistake: its message is a sentence that names the cause and the remedy."""


class UserError(ValueError):
    """Something the caller can put right; the command line prints it and exits with code 2."""
