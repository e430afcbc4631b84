"""Names of models: what they may be.

Names come from folders, settings, requests and manifests, and get into logs, labels of metrics,
headers and responses.
"""

MAX_CHARS = 256


class NameConflict(ValueError):
    """A name or alias is that of something else.

    Args:
        name: The name or alias.
        message: The problem, with the `repr` of the name.
    """

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def name_problem(name: str) -> str | None:
    """Return why a text cannot be the name or alias of a model, as "must ..."; None if it can be.

    Surrogates, which stand for bytes that are not UTF-8, control characters, characters that change
    the direction of text and all spaces but the common one are not printable.
    """
    if not 0 < len(name) <= MAX_CHARS:
        return f"must have 1 to {MAX_CHARS} characters"
    if not name.isprintable():
        return "must have printable characters only"
    if name != name.strip():
        return "must not begin or end with a space"
    return None


def check_name(name: str) -> None:
    """Check the name or alias of a model.

    Raises:
        ValueError: The name is invalid; the message shows it with escapes, on one line.
    """
    if (problem := name_problem(name)) is not None:
        shown = name if len(name) <= MAX_CHARS else f"{name[:MAX_CHARS]}..."
        raise ValueError(f"the name {shown!r} of a model {problem}")
