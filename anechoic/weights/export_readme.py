"""The README of an exported folder: what the network is, how to open it, and what was measured when it was written."""

from __future__ import annotations

from collections.abc import Mapping

from anechoic.adapters.registry import ADAPTERS
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


def readme(library: str, config: ViTConfig, differences: Mapping[str, float], *, folded: bool) -> str:
    """Return Markdown with a YAML head. differences: as measured on the images the export was given."""
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

```python
{ADAPTERS[library].load().OPENING[classifies]}
```
{how if folded else ""}"""
