"""Retrieval by every pooling and scaling of some encoders, measured with labels that were not used in training.

    python tools/search_vectors.py results/search-vectors.json --emoji RUN ... --photos RUN TRAIN VAL

Emoji: the nearest drawing in another style is the same object (`emoji:test`). Photos: images of VAL are searched for in
TRAIN, and the result is of the same class. A scaling is fitted to what is searched in, as `anechoic search` does.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from anechoic.data import open_source
from anechoic.eval.encoders import Encoder, flat, open_encoder
from anechoic.eval.feature_cache import features_of
from anechoic.eval.feature_scaling import SCALINGS, rescaled
from anechoic.eval.metrics.retrieval import retrieval_accuracy
from anechoic.index.index import FLAT_WIDTH, Searchable
from anechoic.outcome import Outcome
from anechoic.storage.files import write_json

# Beyond this width a covariance does not fit a laptop, so such vectors are not whitened.
WIDEST = 2048


def vectors_of(run: str, source: str) -> dict[str, np.ndarray]:
    """class, mean, all: tokens pooled to one; flat: all patches side by side, as they are and as an index has them."""
    encoder: Encoder = open_encoder(run)
    opened = open_source(source, labels=True, channels=encoder.channels)
    pooled = features_of(encoder, opened, device="cpu")
    found = {key[1]: value for key, value in pooled.sets.items()}
    for name, width in (("flat", None), (f"flat {FLAT_WIDTH}", FLAT_WIDTH)):
        side_by_side = features_of(flat(encoder, width=width), opened, device="cpu", cached=False)
        assert len(pooled.ids) == len(side_by_side.ids) == len(opened)
        (found[name],) = side_by_side.sets.values()
    return found


def scalings_for(vectors: np.ndarray) -> list[Any]:
    return [scaling for scaling in SCALINGS if scaling != "whitened" or vectors.shape[1] <= WIDEST]


def across_styles(run: str) -> list[dict[str, Any]]:
    source = open_source("emoji:test", labels=True)
    things, styles = source.facets["object"], source.facets["style"]
    return [
        {"vector": name, "scaling": scaling, "first": retrieval_accuracy(rescaled(x, scaling), things, styles)}
        for name, x in vectors_of(run, "emoji:test").items()
        for scaling in scalings_for(x)
    ]


def same_class(run: str, train: str, val: str) -> list[dict[str, Any]]:
    labels = [np.asarray(open_source(place, labels=True).labels) for place in (train, val)]
    stored, asked = vectors_of(run, train), vectors_of(run, val)
    rows = []
    for name, x in stored.items():
        for scaling in scalings_for(x):
            found = Searchable.of(x, scaling).nearest(np.asarray(asked[name]), k=10)
            hits = labels[0][found.indices.numpy()] == labels[1][:, None]
            rows.append(
                {"vector": name, "scaling": scaling, "first": float(hits[:, 0].mean()), "ten": float(hits.mean())}
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--emoji", nargs="*", default=[])
    parser.add_argument("--photos", nargs=3, metavar=("RUN", "TRAIN", "VAL"))
    asked = parser.parse_args()
    started = time.perf_counter()
    rows = [{"data": "emoji:test", "run": Path(run).name, **row} for run in asked.emoji for row in across_styles(run)]
    if asked.photos:
        run, train, val = asked.photos
        rows += [{"data": Path(val).parent.name, "run": Path(run).name, **row} for row in same_class(run, train, val)]
    names = {"emoji": [Path(run).name for run in asked.emoji], "photos": asked.photos and Path(asked.photos[0]).name}
    done = Outcome(config=names, metrics={"rows": rows}, seed=0, seconds=time.perf_counter() - started)
    write_json(asked.output, done.to_json())
    print(done.to_frame().groupby(["data", "vector", "scaling"]).mean(numeric_only=True).round(4).to_string())


if __name__ == "__main__":
    main()
