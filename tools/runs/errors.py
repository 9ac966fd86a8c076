"""The one exception that a verb turns into a message and exit status 2."""


class RecordError(Exception):
    """Input that cannot be used; the text names the file, what was found and expected, and the next step."""
