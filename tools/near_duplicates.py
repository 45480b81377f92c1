"""Detection of near-duplicates: altered copies inserted into a folder of photos, and what `explore` finds.

    python tools/near_duplicates.py results/near-duplicates.json RUN FOLDER

Twenty images each are compressed (quality 50), resized to 160 pixels, cropped to 95 % and to 85 % of the side, and made
15 % brighter. Found: pairs of an image and its copy; false: all other pairs. Every vector and scaling is measured.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageEnhance

from anechoic.data import open_source
from anechoic.eval.encoders import open_encoder
from anechoic.eval.feature_scaling import SCALINGS
from anechoic.index.collection import all_neighbors, duplicate_limit, duplicate_pairs
from anechoic.index.index import Searchable, open_index
from anechoic.outcome import Outcome
from anechoic.storage.files import write_json

EACH = 20


def inner(share: float) -> Callable[[Image.Image], Image.Image]:
    def crop(image: Image.Image) -> Image.Image:
        x, y = (round(side * (1 - share) / 2) for side in image.size)
        return image.crop((x, y, image.width - x, image.height - y))

    return crop


KINDS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "compressed": lambda image: image,
    "resized": lambda image: image.resize((160, 160)),
    "crop95": inner(0.95),
    "crop85": inner(0.85),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
}


def plant(folder: Path, out: Path) -> None:
    shutil.copytree(folder, out)
    files = sorted(folder.rglob("*.jpg"))
    chosen = np.random.default_rng(0).permutation(len(files))[: EACH * len(KINDS)]
    for place, number in enumerate(chosen.tolist()):
        kind = list(KINDS)[place // EACH]
        path = files[number]
        copy = KINDS[kind](Image.open(path).convert("RGB"))
        name = out / path.parent.relative_to(folder) / f"{path.stem}-{kind}.jpg"
        copy.save(name, quality=50 if kind == "compressed" else 88)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("run")
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "planted"
        plant(asked.folder, place)
        encoder, source = open_encoder(asked.run), open_source(place)
        vectors: Any
        for vectors in ("mean", "flat"):
            index = open_index(encoder, source, encoder_name=asked.run, place=str(place), vector=vectors, device="cpu")
            names = index.names()
            for scaling in SCALINGS:
                near = all_neighbors(Searchable.of(index.vectors, scaling).units)
                limit = duplicate_limit(near)
                found: Counter = Counter()
                for i, j, _ in duplicate_pairs(near, limit):
                    short, long = sorted((names[i], names[j]), key=len)
                    copied = long.startswith(short.removesuffix(".jpg") + "-")
                    found[long.removesuffix(".jpg").rpartition("-")[2] if copied else "false"] += 1
                counts = {kind: found[kind] for kind in (*KINDS, "false")}
                about = {"vector": vectors, "scaling": scaling, "share": limit.share, "dimension": limit.dimension}
                rows.append({**about, "found": sum(found.values()) - found["false"], **counts})
    metrics = {"images": len(names), "planted": EACH * len(KINDS), "rows": rows}
    config = {"run": Path(asked.run).name, "data": asked.folder.parent.name}
    done = Outcome(config=config, metrics=metrics, seed=0, seconds=time.perf_counter() - started)
    write_json(asked.output, done.to_json())
    print(done.to_frame().to_string())


if __name__ == "__main__":
    main()
