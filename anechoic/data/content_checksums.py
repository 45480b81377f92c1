"""What bytes each image had when it was first read, so that a file changed at equal size and time is noticed.

A fingerprint is made of names, sizes and times, which is quick. This is the rest of the truth: a number for each image,
kept in the cache and compared whenever the image's own bytes are read. It knows nothing of images.
"""

from __future__ import annotations

import contextlib
import io
import os
import struct
import zlib
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from anechoic.errors import UserError

WORD = struct.Struct("<Q")
READ = 1 << 32  # set in the number of an image that was read; the rest is its CRC


class Contents:
    """A file of one number per image of a source, shared by all processes and threads that read it.

    Where the cache cannot be written there is nothing to compare with, and nothing is refused.
    """

    def __init__(self, path: Path, count: int) -> None:
        self.path, self.count = path, count

    def __reduce__(self) -> tuple[Any, ...]:
        return Contents, (self.path, self.count)

    def __del__(self) -> None:
        if self.__dict__.get("_file") is not None:
            self._file.close()  # type: ignore[union-attr]

    @cached_property
    def _file(self) -> io.FileIO | None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = io.FileIO(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666), "r+")
            file.truncate(WORD.size * self.count)  # what is new is zero: not read yet
        except OSError:
            return None
        return file

    def check(self, index: int, data: bytes, name_of: Callable[[int], str]) -> None:
        """UserError if this image had other bytes before; otherwise they are noted."""
        if self._file is None:
            return
        file = self._file.fileno()
        found, place = READ | zlib.crc32(data), WORD.size * int(index)
        with contextlib.suppress(OSError, struct.error):
            (before,) = WORD.unpack(os.pread(file, WORD.size, place))
            if before == found:
                return
            if before & READ:
                raise UserError(
                    f"The content of {name_of(index)!r} has changed since it was first read, though its size and time "
                    "have not: restore it, or give it a new time (touch) so that it counts as new data."
                )
            os.pwrite(file, WORD.pack(found), place)
