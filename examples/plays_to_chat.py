"""Conversations from the plays: one speaker is the user, the one who answers is the assistant.

    python examples/plays_to_chat.py examples/data/plays/*.txt --out runs/plays-chat.jsonl

A line is {"messages": [...]}: a system message that names the play and the answering speaker, then 2 to 8 turns in
which two speakers alternate. A new scene, a third voice, a crowd or a speech of more than 120 words ends a
conversation. Deterministic. Says on stderr how many conversations each play gave; a file that gives none is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

SPEAKER = re.compile(r"[A-Z][A-Za-z']*(?: [A-Z][A-Za-z']*){0,2}\.")
HEADING = re.compile(r"\s*(?:ACT|SCENE)\b", re.IGNORECASE)
NUMERAL = re.compile(r"[IVX]+\.")  # a stanza of a song
NOBODY = re.compile(
    r"(?:All|Both)(?: .*)?|Song|Court|Danes|Children|Players|Citizens|Gentlemen|Ghosts|Lords|Mariners|Soldiers"
)  # crowds
MAX_TURNS, MAX_WORDS = 8, 120
SMALL = {"a", "about", "and", "de", "for", "of", "or", "the"}

# Two plays shorten their speakers; the names are those of the plays' own lists of persons.
SHORT = {
    "Hamlet": {
        "Ber": "Bernardo", "Capt": "Captain", "For": "Fortinbras", "Fort": "Fortinbras", "Fran": "Francisco", "Gent": "Gentleman",
        "Guil": "Guildenstern", "Ham": "Hamlet", "Hor": "Horatio", "I Play": "First Player", "I Player": "First Player",
        "I Sailor": "First Sailor", "King": "King Claudius", "Laer": "Laertes", "Luc": "Lucianus", "Mar": "Marcellus",
        "Mess": "Messenger", "Oph": "Ophelia", "Osr": "Osric", "Pol": "Polonius", "Pro": "Prologue", "Queen": "Queen Gertrude",
        "Rey": "Reynaldo", "Ros": "Rosencrantz", "Volt": "Voltimand",
    },
    "Lear": {
        "Alb": "Albany", "Bur": "Burgundy", "Capt": "Captain", "Cor": "Cordelia", "Corn": "Cornwall", "Cur": "Curan",
        "Doct": "Doctor", "Edg": "Edgar", "Edm": "Edmund", "First Serv": "First Servant", "Gent": "Gentleman", "Glou": "Gloster",
        "Gon": "Goneril", "Her": "Herald", "Mess": "Messenger", "Off": "Officer", "Osw": "Oswald", "Phys": "Physician",
        "Reg": "Regan", "Second Serv": "Second Servant", "Third Serv": "Third Servant",
    },
}  # fmt: skip


def cased(words: str) -> str:
    """``THE LIFE OF KING HENRY V`` -> ``The Life of King Henry V``; names and titles alike."""
    made = [
        w if re.fullmatch(r"[IVX]+", w) and i else w.lower() if w.lower() in SMALL and i else w.capitalize()
        for i, w in enumerate(words.split())
    ]
    return " ".join(made)


def speeches(text: str) -> Iterator[tuple[str, str]]:
    """(speaker, words) of every speech, in order; ("", "") where a scene begins.

    A speech is a paragraph whose first line is a name and a full stop. Stage directions in brackets are left out.
    """
    title = cased(text.partition("\n")[0])
    short = next((names for word, names in SHORT.items() if word in title), {})
    for paragraph in re.split(r"\n\s*\n", text):
        first, _, rest = paragraph.strip().partition("\n")
        words = re.sub(r"\[[^\]]*\]", "", rest).strip()
        if HEADING.match(first):
            yield "", ""
        elif words and SPEAKER.fullmatch(first.strip()) and not NUMERAL.fullmatch(first.strip()):
            name = first.strip().rstrip(".")
            yield short.get(name) or cased(name), words


def conversations(text: str) -> Iterator[dict[str, list[dict[str, str]]]]:
    """Stretches of a play in which two speakers alternate, as chat."""
    title = cased(text.partition("\n")[0].partition(";")[0])
    stretch: list[tuple[str, str]] = []
    for speaker, words in [*speeches(text), ("", "")]:
        usable = bool(speaker) and not NOBODY.fullmatch(speaker) and len(words.split()) <= MAX_WORDS
        third_voice = len(stretch) >= 2 and speaker != stretch[-2][0]
        goes_on = usable and stretch and speaker != stretch[-1][0] and not third_voice and len(stretch) < MAX_TURNS
        if not goes_on:
            stretch = stretch[: len(stretch) // 2 * 2]  # the assistant has the last word
            if stretch:
                system = {"role": "system", "content": f"You are {stretch[1][0]} in Shakespeare's {title}."}
                turns = [{"role": ("user", "assistant")[i % 2], "content": said} for i, (_, said) in enumerate(stretch)]
                yield {"messages": [system, *turns]}
            stretch = []
        if usable:
            stretch.append((speaker, words))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plays", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="file to write; its folder is made (default: stdout)")
    args = parser.parse_args()
    lines = []
    for path in args.plays:
        made = list(conversations(path.read_text("utf-8")))
        if not made:
            print(
                f"error: no two speakers alternate in {path}: it is no play in the form of examples/data/plays", file=sys.stderr
            )
            return 2
        print(
            f"{path.stem:26} {len(made):4} conversations, {sum(len(one['messages']) - 1 for one in made):5,} speeches",
            file=sys.stderr,
        )
        lines += [json.dumps(one) + "\n" for one in made]
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text("".join(lines), "utf-8")
    else:
        sys.stdout.writelines(lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
