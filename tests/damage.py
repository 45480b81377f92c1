"""Damage as disks do it to files, for tests."""

from __future__ import annotations

from pathlib import Path


def flip_a_bit(path: Path, place: int | None = None) -> None:
    """Change a bit of the byte at this place, or in the middle, in a new file: cache entries may share the old one."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 1
    path.unlink()
    path.write_bytes(data)
