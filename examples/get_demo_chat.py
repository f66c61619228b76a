"""Fetch the larger demo chat set: 500 conversations and 999 instructions of the source package `llamafactory` 0.9.5. Only when you ask for it.

    python examples/get_demo_chat.py [OUT]

Licence: the package declares Apache-2.0 and says nothing per file; alpaca_en_demo.json very likely comes from a set published under CC BY-NC 4.0. Look before you ship
weights trained on it. Nothing of it is in this repository.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

FILES = ("v1_sft_demo.jsonl", "alpaca_en_demo.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=Path("runs/demo-chat"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "-d", folder,
                        "llamafactory==0.9.5"], check=True)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            for name in FILES:
                member = archive.extractfile(next(m for m in archive.getnames() if m.endswith(f"/data/{name}")))
                assert member is not None, "a file, not a folder"
                (args.out / name).write_bytes(member.read())
    print(args.out)


if __name__ == "__main__":
    main()
