"""Conversations from the plays: one speaker is the user, the one who answers is the assistant.

    python examples/plays_to_chat.py examples/data/plays/*.txt > runs/plays-chat.jsonl

A line is {"messages": [...]}: a system message that names the play and the answering speaker, then 2 to 8 turns in which two speakers alternate. Speeches in
which a third person speaks end the conversation. Deterministic.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SPEAKER = re.compile(r"(?:[A-Z][A-Za-z']*)(?: [A-Z][A-Za-z']*){0,2}\.")
MAX_TURNS, MAX_WORDS = 8, 120


def speeches(text: str) -> Iterator[tuple[str, str]]:
    """(speaker, words) of every speech: a paragraph whose first line is a name with a full stop."""
    for paragraph in re.split(r"\n\s*\n", text):
        first, _, rest = paragraph.strip().partition("\n")
        words = re.sub(r"\[[^\]]*\]", "", rest).strip()
        if SPEAKER.fullmatch(first.strip()) and words:
            yield first.strip().rstrip(".").title(), words


def conversations(text: str, title: str) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Stretches of a play in which two speakers alternate, as chat."""
    stretch: list[tuple[str, str]] = []
    for speaker, words in [*speeches(text), ("", "")]:
        follows = len(stretch) < 2 or speaker == stretch[-2][0]
        if stretch and (not speaker or speaker == stretch[-1][0] or not follows or len(stretch) == MAX_TURNS or len(words.split()) > MAX_WORDS):
            stretch = stretch[: len(stretch) // 2 * 2]
            if stretch:
                yield {"messages": [{"role": "system", "content": f"You are {stretch[1][0]} in Shakespeare's {title}."},
                                    *({"role": role, "content": said} for (_, said), role in zip(stretch, ["user", "assistant"] * MAX_TURNS, strict=False))]}
            stretch = []
        if speaker and len(words.split()) <= MAX_WORDS:
            stretch.append((speaker, words))


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    for name in sys.argv[1:]:
        path = Path(name)
        for one in conversations(path.read_text("utf-8"), path.stem.replace("_", " ").title()):
            print(json.dumps(one))


if __name__ == "__main__":
    main()
