"""Doors whose results are checked, too: what is read must be right, and nothing may leak into it.

A door here has its own kind of damage: other content at equal size and time, degenerate weights, names, slow JPEGs,
lines of metrics, paths in tables, and cards of other models. A failed assertion counts like any traceback.
"""

from __future__ import annotations

import csv
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from doors import DOORS, Door, encoded, make_folder, make_models, make_tars, make_zips, picture
from PIL import Image
from stored_doors import STORED_DOORS

LONG_AGO = 1_000_000_000


def date(root: Path) -> None:
    """Give all files the same time."""
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            os.utime(path, (LONG_AGO, LONG_AGO))


# ---- identity: two data sets of equal names, sizes and times


def make_pairs(folder: Path) -> None:
    for kind, make in (("folder", make_folder), ("zip", make_zips), ("tar", make_tars)):
        (folder / kind / "a").mkdir(parents=True)
        make(folder / kind / "a")
        shutil.copytree(folder / kind / "a", folder / kind / "b")


def damage_pair(root: Path, rng: random.Random) -> None:
    """Change bytes of one file of the second set; its length and all times stay."""
    path = rng.choice(sorted(path for path in (root / "b").rglob("*") if path.is_file()))
    data = bytearray(path.read_bytes())
    for _ in range(rng.choice([0, 1, 1, 9])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)
    date(root)


def pixels_of(source: Any, *, cache: bool) -> list[torch.Tensor] | str:
    from anechoic.data import Augment, Loader
    from anechoic.errors import UserError

    try:
        loader = Loader(source, image_size=16, batch_size=4, augment=Augment(kind="center"), cache=cache)
        return [batch.images for batch in loader]
    except UserError as error:
        return str(error)


def enter_pair(root: Path) -> str:
    """Both sets through one cache: each must have its own pixels, and equal identity only if it has equal bytes."""
    from anechoic.data import open_source
    from anechoic.errors import UserError

    found = []
    for place in sorted((root / "a").iterdir()):
        try:
            one, two = (open_source(root / half / place.name) for half in "ab")
        except UserError as error:
            found.append(str(error))
            continue
        files = [
            [p.read_bytes() for p in sorted((root / half / place.name).rglob("*")) if p.is_file()] for half in "ab"
        ]
        if place.is_file():
            files = [[(root / half / place.name).read_bytes()] for half in "ab"]
        assert (one.fingerprint == two.fingerprint) == (files[0] == files[1]), (
            "the fingerprint is not that of the bytes"
        )
        for source in (one, two):
            cached, direct = (pixels_of(source, cache=cache) for cache in (True, False))
            equal = type(cached) is type(direct) and (
                isinstance(cached, str) or (all(map(torch.equal, cached, direct)) and len(cached) == len(direct))
            )
            assert equal, "the cache changes the pixels"
    return str(found)


# ---- degenerate features


def make_learners(folder: Path) -> None:
    """A model without checksums and a few images, of which none is like another."""
    make_models(folder / "models")
    for kind in ("mae", "vit"):
        shutil.copytree(folder / "models" / kind, folder / kind / "model")
        (folder / kind / "images").mkdir()
        for k in range(9):
            noise = np.random.default_rng(k).integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(noise).save(folder / kind / "images" / f"{k}.png")
    shutil.rmtree(folder / "models")


def damage_learner(root: Path, rng: random.Random) -> None:
    """Set tensors to NaN, infinity, zero or a huge number, or make the images equal."""
    from safetensors.numpy import load_file, save_file

    path = root / "model" / "model.safetensors"
    tensors = {name: np.array(value) for name, value in load_file(path).items()}
    names = sorted(name for name, value in tensors.items() if value.dtype.kind == "f" and "alphas" not in name)
    value = rng.choice([0.0, 0.0, np.nan, np.inf, -np.inf, 1e30, 1e-40, 3.4e38])
    chosen = names if rng.random() < 0.4 else rng.sample(names, rng.randint(1, 3))
    for name in chosen:
        if rng.random() < 0.5 or len(chosen) > 3:
            tensors[name][...] = value
        else:
            tensors[name].flat[rng.randrange(tensors[name].size)] = value
    save_file(tensors, path)
    if rng.random() < 0.3:
        images = sorted((root / "images").iterdir())
        for other in images[1:]:
            shutil.copy(images[0], other)


def enter_learner(root: Path) -> str:
    """Features of every consumer are finite, or it refuses."""
    from anechoic.cli.embed import embed
    from anechoic.cli.explore import explore
    from anechoic.cli.search import search
    from anechoic.errors import UserError

    found: list[str] = []

    def attempt(command: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return command(root / "model", root / "images", *arguments, **options)
        except UserError as error:
            found.append(str(error))

    if attempt(embed, out=root / "vectors.npz"):
        with np.load(root / "vectors.npz") as arrays:
            assert np.isfinite(arrays["features"]).all(), "embed wrote numbers that are not finite"
    for command, arguments, options in (
        (search, (["3"],), {}),
        (explore, (), {"out": root / "page.html", "clusters": 2}),
    ):
        if outcome := attempt(command, *arguments, **options):
            json.dumps(outcome.to_json(), allow_nan=False)
    return str(found)


# ---- names


ODD_NAMES = [
    *(
        b"=1+1.png",
        b"+x.png",
        b"-x.png",
        b"@SUM(1).png",
        b"\tx.png",
        b"\xff\xfe.png",
        b"a\x1b[31m.png",
        b"a\nb.png",
        b"\r.png",
    ),
    *(
        b"<script>alert(1)<b>.png",
        b"\"'><b>.png",
        "\u202egnp.png".encode(),
        b"%s%n{0}.png",
        b" .png",
        b"a,b;c.png",
    ),
    *(
        "é.png".encode(),
        "e\u0301.png".encode(),
        b"\xed\xa0\x80.png",
        b"x" * 251 + b".png",
        b"\x7f.png",
        b"`id`$(id).png",
    ),
    *(
        b"`id`$(id).png",
        b"CON.png",
        b"~.png",
        b"a\\b.png",
        b"\xc2\x85.png",
        b"=cmd|'x'!A1.png",
        b"x.png.png",
        b"\\udcff.png",
    ),
]


def damage_names(root: Path, rng: random.Random) -> None:
    """Give files and folders hostile names."""
    images = sorted(os.fsencode(path) for path in (root / "images").iterdir())
    for name, old in zip(rng.sample(ODD_NAMES, rng.randint(1, 6)), rng.sample(images, 6), strict=False):
        os.rename(old, os.path.join(os.path.dirname(old), name))
    if rng.random() < 0.4:
        inside = os.fsencode(root / "images" / "d") + rng.choice(ODD_NAMES)[:200]
        os.mkdir(inside)
        (Path(os.fsdecode(inside)) / "0.png").write_bytes(encoded("PNG"))


def enter_names(root: Path) -> str:
    """Tables and pages hold every name in a harmless form, as UTF-8."""
    from anechoic.cli.embed import embed
    from anechoic.cli.search import search

    images = [p for p in (root / "images").rglob("*") if p.is_file()]
    for kind in ("csv", "npz", "parquet"):
        embed(root / "model", root / "images", out=root / f"vectors.{kind}")
    with open(root / "vectors.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 1 + len(images), "the table has not a row per image"
    formulas = [row[0] for row in rows[1:] if row[0][:1] in tuple("=+-@\t\r")]
    assert not formulas, f"a name is a formula: {formulas[0]!r}"
    done = search(root / "model", root / "images", ["0"], out=root / "page.html")
    json.dumps(done.to_json()).encode()
    assert "\x1b" not in str(done), "control characters reach the terminal"
    page = (root / "page.html").read_text("utf-8")
    assert not any(text in page for text in ("<script>alert(1)", "\"'><b>")), "a name becomes part of the page"
    return str(len(images))


# ---- slow decoders


def make_progressive(folder: Path) -> None:
    for side in (64, 1024, 4096):
        picture(size=(side, side) if side < 2000 else (side, 512)).save(folder / f"{side}.jpg", progressive=True)


def damage_scans(path: Path, rng: random.Random) -> None:
    """Repeat one scan of a progressive JPEG."""
    data = path.read_bytes()
    starts = [k for k in range(len(data) - 1) if data[k : k + 2] == b"\xff\xda"]
    ends = [*starts[1:], len(data) - 2]
    k = rng.randrange(len(starts))
    scan = data[starts[k] : ends[k]]
    times = min(rng.choice([1, 10, 150, 1000, 8000]), (4 << 20) // len(scan))
    path.write_bytes(data[: ends[k]] + scan * times + data[ends[k] :])


# ---- metrics of a run


def make_runs(folder: Path) -> None:
    from anechoic.config import to_json
    from anechoic.recipes import recipe

    run = folder / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(to_json(recipe("pocket_mae_digits"))))
    lines = [{"kind": "start", "seen": 0, "time": 1.0}]
    for k in range(1, 9):
        lines.append({"kind": "train", "seen": 64 * k, "loss": 1.0 / k, "lr": 1e-3, "seconds": 0.5 * k, "speed": 99.0})
        if k % 4 == 0:
            lines.append({"kind": "validation", "seen": 64 * k, "loss": 0.9, "rank": 3.5, "knn": 0.5, "seconds": 0.1})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def damage_metrics(root: Path, rng: random.Random) -> None:
    from fuzz import damage_bytes, damage_json

    path = root / "metrics.jsonl"
    lines = path.read_bytes().splitlines()
    for k in rng.sample(range(len(lines)), rng.randint(1, 3)):
        lines[k] = rng.choice([damage_json, damage_json, damage_bytes])(lines[k], rng)
        if rng.random() < 0.1:
            lines[k] = rng.choice([b"", b"[]", b"null", b"7", b'"x"', b'{"kind":"train","seen":1%s}' % (b"0" * 400)])
    path.write_bytes(b"\n".join(lines) + rng.choice([b"\n", b"\n", b""]))


def enter_run(root: Path) -> str:
    from anechoic.pages.runs import curves, facts, open_run
    from anechoic.runtime.run import last_seen
    from anechoic.server.page import live_page, status_of

    run = open_run(root)
    json.dumps([curves(run), facts(run), status_of(run, state="stopped", resume_command="x")], default=str)
    live_page(run, "stopped")
    return f"{last_seen(root)} {run.finished}"


# ---- paths in tables


def make_named(folder: Path) -> None:
    (folder / "set" / "table").mkdir(parents=True)
    for k in range(3):
        (folder / "set" / "table" / f"{k}.png").write_bytes(encoded("PNG"))
    Image.new("RGB", (20, 17), (77, 77, 77)).save(folder / "set" / "secret.png")


def damage_paths(root: Path, rng: random.Random) -> None:
    """Write a table with paths that lead out of its folder, or try to."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    secret = str(root / "secret.png")
    hostile = [
        *("../secret.png", secret, "table/../../secret.png", "./.././secret.png", "..//secret.png", f"//{secret}"),
        *("~/secret.png", f"file://{secret}", "..\\secret.png", "0.png/../../secret.png", "", ".", "..", "x" * 5000),
        *("../\0secret.png", "/dev/zero", "/proc/self/environ", f"/proc/self/root{secret}", "%2e%2e/secret.png"),
    ]
    rows = [{"bytes": None, "path": rng.choice(hostile)} if rng.random() < 0.4 else None for _ in range(3)]
    rows = [row or {"bytes": None, "path": f"{k}.png"} for k, row in enumerate(rows)]
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    pq.write_table(pa.table({"image": pa.array(rows * 12, kind)}), root / "table" / "rows.parquet")


def enter_paths(root: Path) -> str:
    """No pixel of an image outside the table's folder is read or copied."""
    from anechoic.data import BadImage, open_source
    from anechoic.data.shards import write_shards
    from anechoic.errors import UserError

    source = open_source(root / "table")
    assert source.fingerprint
    read = [image for image in source.read_many(range(len(source))) if not isinstance(image, BadImage)]
    assert not any(bool((image == 77).all()) for image in read), "an image outside the folder was read"
    try:
        write_shards(source, root / "shards")
    except UserError as error:
        return str(error)
    secret = (root / "secret.png").read_bytes()
    assert not any(secret in path.read_bytes() for path in (root / "shards").iterdir()), "an image was copied out"
    return str(len(read))


# ---- cards of other models


def make_cards(folder: Path) -> None:
    """Two models of one architecture, with their checksums, and one of another."""
    from doors import tiny

    from anechoic.data.preprocess import Preprocess
    from anechoic.runtime.checkpoint import model_card, write_model

    for name, mean in (("one", 0.5), ("two", 0.1)):
        model = tiny("vit_tiny_patch4", num_classes=3, **({} if name == "one" else {"alpha_min": 0.7}))
        with torch.no_grad():
            model.get_parameter(next(name for name, _ in model.named_parameters())).add_(mean)
        card = model_card(model, Preprocess((mean,) * 3, (0.5,) * 3, 16, 3))
        write_model(folder / "models" / name, model.state_dict(), card)
        shutil.copytree(folder / "models" / name, folder / "models" / f"true-{name}")


def damage_card(root: Path, rng: random.Random) -> None:
    """Exchange or edit the card or the weights of one model, at equal times."""
    from fuzz import damage_json

    name = rng.choice(["config.json", "config.json", "model.safetensors"])
    path, other = root / "one" / name, root / "two" / name
    if rng.random() < 0.4 or name != "config.json":
        shutil.copy(other, path)
    else:
        path.write_bytes(damage_json(path.read_bytes(), rng))
    date(root)


def enter_card(root: Path) -> str:
    """A model is what was written, or it is refused."""
    from anechoic.runtime.checkpoint import load

    model = load(root / "one")

    def written(folder: str) -> tuple[Any, bytes]:
        return json.loads((root / folder / "config.json").read_text()), (
            root / folder / "model.safetensors"
        ).read_bytes()

    true = [written("true-one"), written("true-two")]
    # A card without its own checksum is that of an earlier version, or made by hand: it is believed, with a warning.
    found = written("one")
    assert found in true or not {"weights_sha256", "checksum"} <= set(found[0]), "an edited model is believed"
    return type(model).__name__


CHECKED_DOORS = {
    "identity": Door(make_pairs, enter_pair, damage_pair),
    "features": Door(make_learners, enter_learner, damage_learner),
    "names": Door(make_learners, enter_names, damage_names),
    "scans": Door(make_progressive, DOORS["image"].enter, damage_scans),
    "metrics": Door(make_runs, enter_run, damage_metrics),
    "table paths": Door(make_named, enter_paths, damage_paths),
    "cards": Door(make_cards, enter_card, damage_card),
}
ALL_DOORS = {**DOORS, **CHECKED_DOORS, **STORED_DOORS}
