"""The one exception that means "the user can fix this".

The command line prints the message of a UserError and exits with 2; anything else is our fault, keeps its
traceback and exits with 1. A message names the key or file, the value found, the limit, and the change that
fixes it.
"""


class UserError(ValueError):
    """Something in the input, the config or the machine that the user can change."""


class NonFinite(UserError):
    """A loss, a gradient or a weight is NaN or infinite."""
