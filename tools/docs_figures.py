"""Draw the figures of the docs that show no measurement: alpha over depth, and objects in five styles.

Run by hand after a change: python tools/docs_figures.py
"""

from pathlib import Path

import numpy as np

from anechoic import linear
from anechoic.data.emoji import read_index, sheet
from anechoic.pages.figures import draw_decay, draw_sheet

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"
BRANCHES = 24  # of a ViT-B
OBJECTS = ("honeybee", "elephant", "sunflower", "strawberry", "rocket", "bicycle", "violin", "snowman")


def main() -> None:
    values = {f"alpha_min {alpha:g}": linear(BRANCHES, alpha_min=alpha) for alpha in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)}
    draw_decay(values, FIGURES / "decay")
    index = read_index()
    chosen = [index["names"].index(name) for name in OBJECTS]
    styles = np.stack([sheet(style)[chosen] for style in index["styles"]]) / 255
    draw_sheet(styles, FIGURES / "emoji-styles", rows=index["styles"])


if __name__ == "__main__":
    main()
