"""Full disks: every command that writes, on disks of every size up to the one that it needs.

`make crash-test` runs it after the trainings. Output and cache have a disk each. If the output's is full, the command
refuses with one sentence and leaves nothing half-written, or what the same command completes later. If the cache's is
full, the result is the same.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from disk_commands import COMMANDS, RESUMED, files_below, make_places, words_of

import anechoic.cli.main

PAGE, LARGE = 4096, 1 << 18  # bytes; pages of a disk that is never full
# Files of these kinds are equal byte for byte whenever they were written; pages and records have times.
EQUAL = (".npy", ".npz", ".parquet", ".tar", ".safetensors")


@contextmanager
def disk(place: Path, pages: int) -> Iterator[Path]:
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * PAGE}", "none", place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        place.rmdir()


def resize(place: Path, pages: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={pages * PAGE}", place], check=True)


def run(words: list[str], work: Path, cache: Path) -> tuple[int, str]:
    """Return how a command ends in a fork of this process, and what it prints."""
    log = work.with_suffix(".log")
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(work)
            os.environ["ANECHOIC_CACHE"] = str(cache)
            code = anechoic.cli.main.main(words)
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 98
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), log.read_text()


def content(out: Path) -> dict[str, bytes | None]:
    return {
        name: (out / name).read_bytes() if name.endswith(EQUAL) else None
        for name in files_below(out)
        if not name.endswith(".lock")
    }


def pages_of(*folders: Path) -> int:
    sizes = [os.lstat(path).st_size for folder in folders for path in folder.rglob("*")]
    return sum(-(-size // PAGE) + 1 for size in sizes)


def check_refusal(words: str) -> None:
    errors = [line for line in words.splitlines() if line.startswith("anechoic: ")]
    assert "Traceback" not in words
    assert errors, "it refuses without a sentence"
    assert "No space left" in errors[-1] or "free space" in errors[-1] or "disk" in errors[-1], errors


def try_output(command: str, words: list[str], work: Path, pages: int, straight: dict[str, bytes | None]) -> str:
    """Run a command whose output is on a disk of this size."""
    with disk(work / "out", pages) as out:
        code, printed = run(words, work, work / "cache")
        assert code in (0, 2), f"exit code {code}\n{printed}"
        if code == 2:
            check_refusal(printed)
            found = files_below(out)
            assert command in RESUMED or not found, f"left {found}"
            if command in RESUMED:
                resize(out, LARGE)
                again, printed = run(words, work, work / "cache")
                assert again == 0, f"it cannot be completed later\n{printed}"
        if code == 0 or command in RESUMED:
            assert content(out) == straight, f"{compared(content(out), straight)} differ"
    return "complete" if code == 0 else "refused"


def try_cache(words: list[str], work: Path, pages: int, straight: dict[str, bytes | None]) -> str:
    """Run a command whose cache is on a disk of this size, twice; the second time it has space."""
    with disk(work / "cache", pages) as cache:
        for size in (pages, LARGE):
            resize(cache, size)
            (work / "out").mkdir()
            code, printed = run(words, work, cache)
            assert code == 0, f"exit code {code}\n{printed}"
            assert "Traceback" not in printed, printed
            assert content(work / "out") == straight, f"{compared(content(work / 'out'), straight)} differ"
            shutil.rmtree(work / "out")
    return "cache full"


def compared(found: dict[str, bytes | None], straight: dict[str, bytes | None]) -> list[str]:
    return sorted(name for name in found.keys() | straight.keys() if found.get(name, b"") != straight.get(name, b""))[
        :5
    ]


def full_disks(work: Path, *, sizes: int, rng: random.Random, only: str = "") -> tuple[Counter[str], list[str]]:
    """Return the number of ends of each kind, and what is wrong. sizes: of disks, for each command and kind of disk."""
    places, tally, broken = make_places(work / "places"), Counter[str](), list[str]()
    for command in [name for name in COMMANDS if only in name]:
        words, home = words_of(command, places), work / command.replace(" ", "-")
        (home / "out").mkdir(parents=True)
        code, printed = run(words, home, home / "cache")
        assert code == 0, printed
        straight = content(home / "out")
        needed = {"out": pages_of(home / "out") + 8, "cache": pages_of(home / "cache") + 8}
        for name in needed:
            shutil.rmtree(home / name, ignore_errors=True)
        for name, most in needed.items():
            chosen = range(1, most + 1) if most <= sizes else sorted(rng.sample(range(1, most + 1), sizes))
            for pages in chosen if name == "out" or most > 8 else ():
                try:
                    if name == "out":
                        tally[try_output(command, words, home, pages, straight)] += 1
                    else:
                        tally[try_cache(words, home, pages, straight)] += 1
                except AssertionError as problem:
                    broken.append(f"{command}, {name} on a disk of {pages} pages: {problem}")
                    print(broken[-1], flush=True)
                shutil.rmtree(home / "out", ignore_errors=True)
                shutil.rmtree(home / "cache", ignore_errors=True)
        print(f"{command}: outputs of up to {needed['out']} pages, caches of up to {needed['cache']}", flush=True)
    return tally, broken
