"""Pictures: every kind is written as PNG and SVG, the same bytes each time, labeled, and leaves matplotlib alone."""

from __future__ import annotations

import re
import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from PIL import Image

from anechoic.errors import UserError
from anechoic.pages import figures

rng = np.random.default_rng(0)
IMAGES = rng.random((4, 8, 8, 3))
POINTS = [
    {"run": f"r{a}", "alpha_min": a, "seen": seen, "accuracy": a * seen, "entropy_rows": 1 / a}
    for a in (0.6, 0.8, 1.0)
    for seen in (10, 20)
]
CORRELATIONS = [
    {"seen": 10, "r_rows": -0.9, "low_rows": None, "high_rows": None},
    {"seen": 20, "r_rows": -0.5, "low_rows": -0.9, "high_rows": 0.2},
]
NAMES = [[f"image {i}.{j}" for j in range(5)] for i in range(4)]
KINDS = {
    "tsne": lambda path: figures.draw_tsne(
        rng.random((30, 2)), np.arange(30) % 10, path, names=[f"class {i}" for i in range(10)], title="t"
    ),
    "reconstructions": lambda path: figures.draw_reconstructions(IMAGES, IMAGES[..., 0] > 0.5, IMAGES, path, title="t"),
    "maps": lambda path: figures.draw_maps(IMAGES, IMAGES, path, title="t"),
    "neighbors": lambda path: figures.draw_neighbors(
        IMAGES,
        IMAGES[None].repeat(4, 0),
        path,
        similarities=rng.random((4, 4)),
        names=NAMES,
        correct=np.eye(4, dtype=bool),
    ),
    "layers": lambda path: figures.draw_layers(
        {"rank": {"class": {0: 1.0, 1: 2.0, 2: None}, "mean": {0: 3.0, 8: 1.0}}, "CKA": {"class": {0: 1.0, 1: 0.5}}},
        path,
    ),
    "dynamics": lambda path: figures.draw_dynamics({"points": POINTS, "correlations": CORRELATIONS}, path),
}
WORDS = {
    "tsne": ["class 7", "t-SNE 1"],
    "reconstructions": ["original", "visible", "prediction"],
    "maps": ["t"],
    "neighbors": ["query"],
    "layers": ["rank", "CKA", "layer (0: embedding)", "mean"],
    "dynamics": ["alpha_min 0.6", "samples seen", "Pearson r"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_picture_is_written_twice_and_labeled(kind, tmp_path):
    before = dict(matplotlib.rcParams)
    png, svg = KINDS[kind](tmp_path / "new folder" / kind)
    assert (png.suffix, svg.suffix) == (".png", ".svg")
    with Image.open(png) as picture:
        assert min(picture.size) > 100
        assert np.asarray(picture.convert("L")).std() > 1  # something is on it
    text = svg.read_text()
    words = re.sub(r"<[^>]+>", "", text)
    for word in WORDS[kind]:
        assert word in words
    assert dict(matplotlib.rcParams) == before


def test_the_same_picture_is_the_same_file(tmp_path):
    curves = {"rank": {"class": {0: 1.0, 1: 2.0}}}
    first, second = (figures.draw_layers(curves, tmp_path / name) for name in ("a", "b"))
    for one, two in zip(first, second, strict=True):
        assert one.read_bytes() == two.read_bytes()


def test_lines_differ_without_color():
    styles = [figures.line_style(i) for i in range(6)]
    assert len({(str(style["linestyle"]), style["marker"]) for style in styles}) == 6


def test_nothing_to_draw():
    with pytest.raises(UserError, match="no checkpoints"):
        figures.draw_dynamics({"points": [], "correlations": []}, "x")


@pytest.mark.slow
def test_only_pictures_need_matplotlib():
    """Evaluation does not import it."""
    code = "import sys, anechoic.eval.evaluator, anechoic.eval.segmentation; assert 'matplotlib' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
