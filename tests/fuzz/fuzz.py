"""A fuzzer for every reader of files: corrupted, malicious and unusual inputs, each in a subprocess.

`make fuzz` runs it. An input passes if its reader reads it or refuses it with a UserError of one line, within the
limits, without writing outside its folder and without running code. A failing input is stored in tests/fuzz/corpus,
which `make test` replays. The readers are in doors.py.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before anything is imported that reads them: no network, one thread, no caches of the user.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}

# CPU time is limited; the wall clock only ends what waits forever.
CPU_SECONDS, WALL_SECONDS, MEMORY = 5, 120, 1 << 30
CORPUS = Path(__file__).parent / "corpus"
RUNS_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.spawn")


# ---- one input in a process of its own


def isolated(action: Callable[[], str], *, home: Path) -> dict[str, Any]:
    """{"outcome": "read" | "refused" | what went wrong, "detail": ..., "memory": bytes beyond the start, "seconds"}"""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            report = limited(action, home)
            os.write(writer, json.dumps(report).encode()[:60_000])
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    status, usage = wait(child, started + WALL_SECONDS)
    with open(reader, "rb") as file:
        text = file.read()
    report = json.loads(text) if text else {"outcome": "died", "detail": f"status {status}"}
    if os.WIFSIGNALED(status):
        hung = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        report = {"outcome": "hung" if hung else "died", "detail": signal.Signals(os.WTERMSIG(status)).name}
    return {"memory": 0, **report, "seconds": usage.ru_utime + usage.ru_stime}


def wait(child: int, deadline: float) -> tuple[int, Any]:
    pause = 0.001
    while True:
        pid, status, usage = os.wait4(child, os.WNOHANG)
        if pid:
            return status, usage
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(pause)
        pause = min(0.05, 1.5 * pause)


def limited(action: Callable[[], str], home: Path) -> dict[str, Any]:
    from anechoic.errors import UserError

    offences: list[str] = []
    record_offences(offences, home)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    limit = address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    before = resident()
    try:
        outcome, detail = "read", action()
    except UserError as error:
        outcome, detail = "refused", str(error)
        if "\n" in detail or not 10 <= len(detail) <= 1000:
            outcome = "refused without a sentence"
    except BaseException:
        outcome, detail = "traceback", traceback.format_exc()[-4000:]
    if offences:
        outcome, detail = "offence", "; ".join(offences[:5])
    return {"outcome": outcome, "detail": detail, "memory": max(0, peak() - before)}


def record_offences(offences: list[str], home: Path) -> None:
    """Record every program started, connection made, and file written outside of home."""
    inside = str(home.resolve())

    def hook(event: str, arguments: tuple) -> None:
        if event in RUNS_PROGRAMS or event == "socket.connect":
            offences.append(f"{event} {arguments[0]!r:.80}")
        if event == "open" and isinstance(arguments[0], str | bytes) and len(arguments) > 2:
            mode, flags = arguments[1], arguments[2]
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            path = os.path.realpath(os.fsdecode(arguments[0]))
            if writes and not path.startswith((inside, "/dev/null", "/proc/self")):
                offences.append(f"writes {path}")
        if event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"):
            path = os.path.realpath(os.fsdecode(arguments[0])) if isinstance(arguments[0], str | bytes) else inside
            if not path.startswith(inside):
                offences.append(f"{event} {path}")

    sys.addaudithook(hook)


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak() -> int:
    """Return the peak resident memory; a fork starts with that of its parent."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- damage

ODD_NUMBERS = (0, 1, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, (1 << 64) - 1)
DEEP = "[" * 3000 + "]" * 3000


def odd_value(rng: random.Random, old: Any) -> Any:
    """Return another JSON value; strings that begin with RAW: become raw text such as NaN or deep nesting."""
    number = old if isinstance(old, int | float) and not isinstance(old, bool) else 1
    others = [
        *(
            None,
            True,
            -1,
            0,
            1,
            3,
            10**6,
            10**20,
            -(10**9),
            0.5,
            1e308,
            number + 1,
            number * 1000,
            "",
            "x",
            "../../etc",
        ),
        *("/dev/zero", "x" * 5000, [], {}, [1, 2], [None], {"a": 1}, "\0", "\ud800", "RAW:NaN", "RAW:-Infinity"),
        *(f"RAW:{DEEP}", f"RAW:{'9' * 5000}", [old], {"x": old}, str(old)),
    ]
    return rng.choice(others)


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """Change, remove or add one to three values anywhere in the tree."""
    tree = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        places = list(walk(tree))
        if not places:
            break
        owner, key = rng.choice(places)
        if rng.random() < 0.2:
            del owner[key]
        elif rng.random() < 0.1 and isinstance(owner, dict):
            owner[rng.choice(["extra", "", "__class__", "auto_map"])] = odd_value(rng, 1)
        else:
            owner[key] = odd_value(rng, owner[key])
    text = json.dumps(tree)
    while '"RAW:' in text:
        before, _, rest = text.partition('"RAW:')
        raw, _, after = rest.partition('"')
        text = before + raw + after
    return text.encode("utf-8", "surrogatepass")


def walk(tree: Any) -> Any:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield tree, key
        yield from walk(value)


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, zero, repeat or overwrite bytes, mostly in headers."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        if not found:
            return bytes(rng.randbytes(rng.randint(0, 64)))
        near = rng.choice([64, 512, len(found)])
        at = rng.choice([rng.randrange(min(near, len(found))), len(found) - 1 - rng.randrange(min(near, len(found)))])
        length = rng.choice([1, 2, 8, 64, 1000])
        kind = rng.randrange(7)
        if kind == 0:
            found[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del found[at:]
        elif kind == 2:
            found[at : at + length] = bytes(min(length, len(found) - at))
        elif kind == 3:
            found[at:at] = found[at : at + length]
        elif kind == 4:
            del found[at : at + length]
        elif kind == 5:
            size = rng.choice([1, 2, 4, 8])
            number = rng.choice(ODD_NUMBERS) & ((1 << 8 * size) - 1)
            found[at : at + size] = number.to_bytes(size, rng.choice(["little", "big"]))
        else:
            found[at : at + length] = rng.randbytes(length)
    return bytes(found)


def damage_safetensors(data: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(data[:8], "little")
    header = damage_json(data[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def damage_file(path: Path, rng: random.Random) -> None:
    """Change the content of one file, or replace it by a pipe, folder or link."""
    if rng.random() < 0.06:
        path.unlink()
        kind = rng.randrange(5)
        if kind == 0:
            os.mkfifo(path)
        elif kind == 1:
            path.symlink_to("/dev/zero")
        elif kind == 2:
            path.mkdir()
        elif kind == 3:
            path.symlink_to(path.name)
        return
    data = path.read_bytes()
    structured = rng.random() < 0.7
    if structured and path.suffix == ".json":
        data = damage_json(data, rng)
    elif structured and path.suffix == ".safetensors":
        data = damage_safetensors(data, rng)
    else:
        data = damage_bytes(data, rng)
    path.write_bytes(data)


def damage(root: Path, rng: random.Random) -> None:
    """Damage one or two of the files of an input."""
    files = sorted(path for path in [root, *root.rglob("*")] if path.is_file() and not path.is_symlink())
    for path in rng.sample(files, min(len(files), rng.choice([1, 1, 1, 2]))):
        damage_file(path, rng)


# ---- the run


def try_input(door: str, path: Path, home: Path) -> dict[str, Any]:
    from doors import DOORS

    def enter() -> str:
        os.chdir(home)
        os.environ["ANECHOIC_CACHE"] = str(home / "cache")
        return str(DOORS[door].enter(path))

    return isolated(enter, home=home)


def is_good(report: dict[str, Any]) -> bool:
    return report["outcome"] in ("read", "refused") and report["memory"] < MEMORY


def keep(door: str, name: str, path: Path, report: dict[str, Any]) -> None:
    folder = CORPUS / door / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    special: dict[str, Any] = {"pipes": [], "folders": [], "links": {}}
    for item in [path, *path.rglob("*")] if path.is_dir() else [path]:
        name = str(item.relative_to(path.parent))
        if item.is_symlink():
            special["links"][name] = os.readlink(item)
        elif item.is_fifo():
            special["pipes"].append(name)
        elif item.is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(item, folder / name)
        elif item.is_dir() and not any(item.iterdir()):
            special["folders"].append(name)
    note = {
        "name": path.name,
        **special,
        "outcome": report["outcome"],
        "detail": "".join(report["detail"].split("\n")[-2:])[-200:],
    }
    (folder / "input.json").write_text(json.dumps(note, indent=1) + "\n")


def kept(folder: Path, home: Path) -> Path:
    """Rebuild an input of the corpus, which holds only regular files: the note names pipes, links and empty folders."""
    note = json.loads((folder / "input.json").read_text())
    path = home / note["name"]
    if (folder / note["name"]).is_dir():
        shutil.copytree(folder / note["name"], path)
    elif (folder / note["name"]).is_file():
        shutil.copy2(folder / note["name"], path)
    for name in note["folders"]:
        (home / name).mkdir(parents=True, exist_ok=True)
    for name in note["pipes"]:
        os.mkfifo(home / name)
    for name, target in note.get("links", {}).items():
        (home / name).symlink_to(target)
    return path


def fuzz(*, inputs: int, seed: int, only: str | None = None, keep_failures: bool = True) -> dict[str, Any]:
    """Read every special input once, then corrupted ones of every reader in turn; return counts and failures."""
    from doors import DOORS, SPECIALS, load_everything, make_seeds

    load_everything()
    workshop = Path(tempfile.mkdtemp(prefix="fuzz-"))
    failures, outcomes, worst = [], Counter(), {"memory": 0, "seconds": 0.0}
    try:
        seeds = workshop / "seeds"
        seeds.mkdir()
        made = isolated_making(lambda: make_seeds(seeds))
        if made:
            raise SystemExit(f"The seeds could not be made: {made}")
        doors = [name for name in DOORS if only in (None, name)]
        jobs: list[tuple[str, str, Callable[[Path], Path]]] = [
            (door, f"special-{name}", make) for name, (door, make) in SPECIALS.items() if door in doors
        ]
        for number in range(max(0, inputs - len(jobs))):
            door = doors[number % len(doors)]
            jobs.append((door, f"{seed}-{number}", damaged_copy(seeds / door, f"{seed}-{number}")))
        for done, (door, name, make) in enumerate(jobs, 1):
            home = workshop / "home"
            home.mkdir()
            path = made_aside(make, home)
            report = try_input(door, path, home)
            outcomes[f"{door}: {report['outcome']}"] += 1
            worst = {key: max(worst[key], report[key]) for key in worst}
            if not is_good(report):
                failures.append({"door": door, "name": name, **report})
                print(f"{door} {name}: {report['outcome']}\n{report['detail'][-1500:]}", flush=True)
                if keep_failures:
                    keep(door, name, path, report)
            shutil.rmtree(home)
            if done % 500 == 0:
                print(f"{done} of {len(jobs)} inputs, {len(failures)} failures", flush=True)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return {"inputs": len(jobs), "failures": failures, "outcomes": dict(sorted(outcomes.items())), **worst}


def replay() -> int:
    """Read every input of the corpus again; return the number of failures."""
    from doors import load_everything

    load_everything()
    failures = 0
    for note in sorted(CORPUS.glob("*/*/input.json")):
        with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
            home = Path(folder) / "home"
            home.mkdir()
            report = try_input(note.parent.parent.name, kept(note.parent, home), home)
        if not is_good(report):
            failures += 1
            print(note.parent, report["outcome"], report["detail"], sep="\n")
    return failures


def isolated_making(make: Callable[[], None]) -> str:
    """Run in a subprocess, so that the process that forks stays without threads; return what went wrong."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            make()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return "" if status == 0 else f"status {status}"


def made_aside(make: Callable[[Path], Path], home: Path) -> Path:
    """Return make(home), run in a subprocess so that its memory does not count as that of reading."""
    note = home.with_suffix(".name")
    problem = isolated_making(lambda: note.write_text(str(make(home))) and None)
    assert not problem, problem
    return Path(note.read_text())


def damaged_copy(seed: Path, word: str) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        rng = random.Random(word)
        variants = sorted(seed.iterdir())
        chosen = rng.choice(variants)
        path = home / chosen.name
        if chosen.is_dir():
            shutil.copytree(chosen, path, symlinks=True)
        else:
            shutil.copy2(chosen, path)
        damage(path, rng)
        return path

    return make


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--door", default=None)
    arguments = parser.parse_args()
    started = time.monotonic()
    found = fuzz(inputs=arguments.inputs, seed=arguments.seed, only=arguments.door)
    for line, count in found["outcomes"].items():
        print(f"{count:6d}  {line}")
    print(
        f"{found['inputs']} inputs, seed {arguments.seed}: {len(found['failures'])} failures; at most "
        f"{found['memory'] / 2**20:.0f} MB and {found['seconds']:.1f} CPU seconds for one; "
        f"{time.monotonic() - started:.0f} s in all."
    )
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
