"""Unicode: texts that cannot be encoded as UTF-8."""

from __future__ import annotations


def lone_surrogate(text: str) -> str | None:
    """The first half of a surrogate pair, as ``U+D83D at character 3``; None if the text is valid Unicode.

    JSON escapes and broken bytes on a command line can give one; no tokenizer accepts it.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X} at character {error.start}"
    return None
