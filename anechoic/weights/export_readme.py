"""The README of an exported folder: what the network is, how to open it, and what was measured when it was written."""

from __future__ import annotations

from collections.abc import Mapping

from anechoic.adapters.registry import ADAPTERS
from anechoic.data.preprocess import Preprocess
from anechoic.models.vit import ViTConfig

FOLDED = """
It was trained with decayed shortcuts, `alpha * x + f(x)`, and folded: these weights compute the same with plain ones,
`x + f(x)`. Folding changes the eps of every norm, where the config holds only one. These lines set them all:

```python
import json, pathlib

for name, eps in json.loads(pathlib.Path("FOLDER/norm_eps.json").read_text()).items():
    model.get_submodule(name).eps = eps
```

Largest difference from the original network, measured when this folder was written: {one_eps:.2g} as it opens,
{each_eps:.2g} with these lines.
"""

VECTOR = """
## The vector of `anechoic embed`

It is the class token of the last block{end}. Here `images` is a float tensor of prepared images{after}.

```python
import torch

{lines}
```
"""


STORED = """
It reads {type} values as files store them, not 8-bit pictures: {curve}, then minus mean, divided by std.

| channel | mean | std |{clips}
|---|---|---|{rule}
{rows}
"""


def stored_pixels(preprocess: Preprocess) -> str:
    """Return how stored values are prepared, with the statistics of every channel; nothing for 8-bit pictures."""
    pixels = preprocess.pixels
    if not pixels.stored:
        return ""
    extra = {
        name: values for name in ("clip_low", "clip_high", "center", "spread") if (values := getattr(pixels, name))
    }
    names = pixels.select or tuple(map(str, range(preprocess.channels)))
    rows = [
        f"| {' | '.join([name, *(f'{value:.6g}' for value in numbers)])} |"
        for name, *numbers in zip(names, preprocess.mean, preprocess.std, *extra.values(), strict=True)
    ]
    return STORED.format(
        type=pixels.type,
        curve=CURVES[pixels.stretch],
        clips="".join(f" {name} |" for name in extra),
        rule="---|" * len(extra),
        rows="\n".join(rows),
    )


CURVES = {
    "linear": "clipped where the table has limits",
    "log": "clipped where the table has limits, log(1 + u) of u = (value - center) / spread",
    "asinh": "clipped where the table has limits, asinh(u) of u = (value - center) / spread",
}


def embedding(library: str, config: ViTConfig, *, normed: bool, gain: float, folded: bool) -> str:
    """Return how the library computes the vector of `embed`. gain: of the trained network's stream at its end."""
    factor = "" if normed or gain == 1 else f"{gain!r} * "
    end = ", after the final norm" if normed else ", before the final norm"
    end += "; folding moved the factor into the weights" if factor else ""
    lines = ADAPTERS[library].load().embed_lines(config.num_classes > 0, raw=not normed, factor=factor)
    return VECTOR.format(end=end, after=", and the lines above have set every eps" if folded else "", lines=lines)


def readme(
    library: str,
    config: ViTConfig,
    preprocess: Preprocess,
    differences: Mapping[str, float],
    *,
    folded: bool,
    normed: bool,
    gain: float,
) -> str:
    """Return Markdown with a YAML head. differences: as measured on the images the export was given.

    normed: whether `embed` reads behind a final norm. gain: the product of its alphas.
    """
    height, width = config.size
    classifies = config.num_classes > 0
    how = FOLDED.format(one_eps=differences["with one eps"], each_eps=differences["with an eps per norm"])
    return f"""---
library_name: {library}
tags:
- vision-transformer
- {"image-classification" if classifies else "feature-extraction"}
---

# A vision transformer trained with anechoic

{config.depth} blocks of width {config.dim} with {config.num_heads} heads on {config.patch_size} x {config.patch_size}
patches of {height} x {width} images with {config.in_channels} channels.
{stored_pixels(preprocess)}
```python
{ADAPTERS[library].load().OPENING[classifies]}
```
{how if folded else ""}{embedding(library, config, normed=normed, gain=gain, folded=folded)}"""
