"""The two ways in which a question to a script ends without a pass."""


class Broken(Exception):
    """A law that does not hold: its name, and what was found."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(f"{law}: {text}")
        self.law, self.text = law, text


class NotChecked(Exception):
    """A question that could not be asked, and why."""
