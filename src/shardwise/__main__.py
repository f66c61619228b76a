"""``python -m shardwise`` is the command ``shardwise``."""

from .cli import main

if __name__ == "__main__":
    raise SystemExit(main())
