"""The exception for a user's mistake: its message is a sentence that names the cause and the remedy."""


class UserError(ValueError):
    """Something the caller can put right; the command line prints it and exits with code 2."""


class NotFiniteError(UserError):
    """Features that are no longer numbers: to whoever looks at them a mistake, to a sweep a run that diverged."""
