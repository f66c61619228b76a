"""How bytes, counts and times are spelled: the only room that turns them into text.

Inside shardwise sizes are whole bytes and times are seconds; GiB and minutes exist only on the screen.
"""

from __future__ import annotations

KIB, MIB, GIB = 2**10, 2**20, 2**30
_COUNTS = {"M": 10**6, "B": 10**9, "T": 10**12}


def gib(num_bytes: float) -> float:
    """Bytes as GiB."""
    return num_bytes / GIB


def bytes_text(num_bytes: float) -> str:
    """Bytes in the largest binary unit that keeps at least one whole: ``41.8 GiB``, ``277.3 MiB``, ``12 B``."""
    sign, size = ("-" if num_bytes < 0 else ""), abs(num_bytes)
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{sign}{size / unit:.1f} {name}"
    return f"{sign}{size:.0f} B"


def count_text(count: float) -> str:
    """A count with its decimal suffix: ``8.03 B``, ``135 M``, ``2,048``."""
    for suffix in ("T", "B", "M"):
        if count >= _COUNTS[suffix]:
            return f"{count / _COUNTS[suffix]:.3g} {suffix}"
    return f"{count:,.0f}"


def duration_text(seconds: float) -> str:
    """Seconds as a person says them: ``0.4 s``, ``1 min 50 s``, ``1 h 08 min``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
