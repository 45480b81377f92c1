"""A fuzzer for every reader of files: corrupted, malicious and unusual inputs, each in a subprocess.

`make fuzz` runs it. An input passes if its reader reads it or refuses it with a UserError of one line, within the
limits, without writing outside its folder and without running code. A failing input is stored in tests/fuzz/corpus,
which `make test` replays. The readers are in doors.py.
"""

from __future__ import annotations

import argparse
import gc
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from doors import Door

# Before anything is imported that reads them: no network, one thread, no caches of the user.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
# Modules that are first imported by an input must not be compiled to files outside its folder.
sys.dont_write_bytecode = True

# CPU time is limited; the wall clock only ends what waits forever.
CPU_SECONDS, WALL_SECONDS, MEMORY = 5, 120, 1 << 30
# Inputs that are read by one subprocess.
BATCH = 16
CORPUS = Path(__file__).parent / "corpus"
RUNS_PROGRAMS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.spawn", "pty.spawn")


# ---- one input in a process of its own


def isolated(action: Callable[[], str], *, home: Path) -> dict[str, Any]:
    """{"outcome": "read" | "refused" | what went wrong, "detail": ..., "memory": bytes beyond the start, "seconds"}"""
    return isolated_batch([action], home=home)[0]


def isolated_batch(actions: Sequence[Callable[[], str]], *, home: Path) -> list[dict[str, Any]]:
    """Run actions one after the other in one subprocess; if it dies, that is the report of all of them."""
    reader, writer = os.pipe()
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            reports = limited(actions, home)
            os.write(writer, json.dumps(reports).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    status, usage = wait(child, started + WALL_SECONDS * (len(actions) + 1) // 2)
    with open(reader, "rb") as file:
        text = file.read()
    seconds = usage.ru_utime + usage.ru_stime
    if text and not os.WIFSIGNALED(status):
        reports = json.loads(text)
        return [{**report, "seconds": seconds if len(actions) == 1 else report["seconds"]} for report in reports]
    outcome, detail = "died", f"status {status}"
    if os.WIFSIGNALED(status):
        hung = os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)
        outcome, detail = "hung" if hung else "died", signal.Signals(os.WTERMSIG(status)).name
    return [{"outcome": outcome, "detail": detail, "memory": 0, "seconds": seconds} for _ in actions]


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


def limited(actions: Sequence[Callable[[], str]], home: Path) -> list[dict[str, Any]]:
    offences: list[str] = []
    record_offences(offences, home)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    seconds = CPU_SECONDS * (len(actions) + 1) // 2
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    limit = address_space() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    return [attempt(action, offences, detail=60_000 // len(actions) - 1000) for action in actions]


def attempt(action: Callable[[], str], offences: list[str], *, detail: int) -> dict[str, Any]:
    from anechoic.errors import UserError

    before, started = resident(), time.process_time()
    offences.clear()
    try:
        outcome, text = "read", action()
    except UserError as error:
        outcome, text = "refused", str(error)
        if "\n" in text or not 10 <= len(text) <= 1000:
            outcome = "refused without a sentence"
    except BaseException:
        outcome, text = "traceback", traceback.format_exc()[-4000:]
    if offences:
        outcome, text = "offence", "; ".join(offences[:5])
    used = {"memory": max(0, peak() - before), "seconds": time.process_time() - started}
    return {"outcome": outcome, "detail": text[-detail // 6 :], **used}  # JSON may write a character in 6 bytes


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


def entering(door: str, path: Path, home: Path) -> Callable[[], str]:
    from checked_doors import ALL_DOORS

    def enter() -> str:
        os.chdir(home)
        os.environ["ANECHOIC_CACHE"] = str(home / "cache")
        return str(ALL_DOORS[door].enter(path))

    return enter


def try_input(door: str, path: Path, home: Path) -> dict[str, Any]:
    return isolated(entering(door, path, home), home=home)


def is_good(report: dict[str, Any]) -> bool:
    within = report["memory"] < MEMORY and report["seconds"] <= CPU_SECONDS
    return report["outcome"] in ("read", "refused") and within


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


Job = tuple[str, str, Callable[[Path], Path]]  # its door, its name, and what makes it


def fuzz(*, inputs: int, seed: int, only: str | None = None, keep_failures: bool = True) -> dict[str, Any]:
    """Read every special input once, then corrupted ones of every reader in turn; return counts and failures."""
    from checked_doors import ALL_DOORS
    from doors import SPECIALS, load_everything, make_seeds

    load_everything()
    gc.collect()
    gc.freeze()  # a fork copies what its garbage collector touches
    workshop = Path(tempfile.mkdtemp(prefix="fuzz-"))
    failures, outcomes, worst = [], Counter(), {"memory": 0, "seconds": 0.0}
    try:
        seeds = workshop / "seeds"
        seeds.mkdir()
        doors = {name: door for name, door in ALL_DOORS.items() if only in (None, name)}
        made = isolated_making(lambda: make_seeds(seeds, doors))
        if made:
            raise SystemExit(f"The seeds could not be made: {made}")
        specials: list[Job] = [
            (door, f"special-{name}", make) for name, (door, make) in SPECIALS.items() if door in doors
        ]
        batches: list[list[Job]] = [[job] for job in specials]
        for position, door in enumerate(doors):
            numbers = range(position, max(0, inputs - len(specials)), len(doors))
            jobs = [(door, f"{seed}-{k}", damaged_copy(seeds / door, f"{seed}-{k}", doors[door])) for k in numbers]
            batches += [jobs[k : k + BATCH] for k in range(0, len(jobs), BATCH)]
        done = 0
        for batch in batches:
            for (door, name, _), report, path in reports_of(batch, workshop):
                outcomes[f"{door}: {report['outcome']}"] += 1
                worst = {key: max(worst[key], report[key]) for key in worst}
                if not is_good(report):
                    failures.append({"door": door, "name": name, **report})
                    print(f"{door} {name}: {report['outcome']}\n{report['detail'][-1500:]}", flush=True)
                    if keep_failures:
                        keep(door, name, path, report)
            done += len(batch)
            if done // 500 > (done - len(batch)) // 500:
                print(f"{done} of {sum(map(len, batches))} inputs, {len(failures)} failures", flush=True)
    finally:
        shutil.rmtree(workshop, ignore_errors=True)
    return {"inputs": done, "failures": failures, "outcomes": dict(sorted(outcomes.items())), **worst}


def reports_of(batch: Sequence[Job], workshop: Path) -> Iterator[tuple[Job, dict[str, Any], Path]]:
    """Yield each input's report and path. If one of several fails, all are read again, each in its own subprocess."""
    with folder_for(workshop) as home:
        if len(batch) > 1:
            actions = []
            for k, (door, _, make) in enumerate(batch):
                (home / str(k)).mkdir()
                actions.append(entering(door, make(home / str(k)), home / str(k)))
            reports = isolated_batch(actions, home=home)
            if all(map(is_good, reports)):
                yield from ((job, report, home) for job, report in zip(batch, reports, strict=True))
                return
    for job in batch:
        with folder_for(workshop) as home:
            path = made_aside(job[2], home)
            yield job, try_input(job[0], path, home), path


@contextmanager
def folder_for(workshop: Path) -> Iterator[Path]:
    home = workshop / "home"
    home.mkdir()
    try:
        yield home
    finally:
        shutil.rmtree(home)


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


def damaged_copy(seed: Path, word: str, door: Door) -> Callable[[Path], Path]:
    def make(home: Path) -> Path:
        rng = random.Random(word)
        variants = sorted(seed.iterdir())
        chosen = rng.choice(variants)
        path = home / chosen.name
        if chosen.is_dir():
            shutil.copytree(chosen, path, symlinks=True)
        else:
            shutil.copy2(chosen, path)
        (door.damage or damage)(path, rng)
        return path

    return make


def cpu_seconds() -> float:
    return sum(os.times()[:4])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=8000)
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
        f"{time.monotonic() - started:.0f} s in all, {cpu_seconds():.0f} CPU seconds."
    )
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
