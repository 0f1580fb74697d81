"""The text that comes with the demo."""

from __future__ import annotations

from importlib.resources import files

SOURCE = (
    '"Shakespeare" by E. K. Chambers, Encyclopaedia Britannica, 11th edition, 1911 (public domain; '
    "transcription by Open Shakespeare)"
)


def read_passage() -> str:
    """Return the text, one line a paragraph and an empty line between them."""
    text = (files("kvstore.demo") / "data" / "shakespeare_1911.txt").read_text(encoding="utf-8")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))
