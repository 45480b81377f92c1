"""The README of an exported folder: what the network is, how to open it, and what was measured when it was written.

The files it speaks of are written in exporting.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from anechoic.models.vit import ViTConfig

OPENING = {
    ("timm", False): """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
tokens = model.forward_features(images)""",
    ("timm", True): """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
logits = model(images)""",
    ("transformers", False): """from transformers import AutoModel

model = AutoModel.from_pretrained("FOLDER").eval()
tokens = model(images).last_hidden_state""",
    ("transformers", True): """from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("FOLDER").eval()
logits = model(images).logits""",
}
FOLDED = """
It was trained with decayed shortcuts, `alpha * x + f(x)`, and folded: these weights compute the same with plain ones,
`x + f(x)`. Folding gives every norm an eps of its own, where the config holds only one. These lines set them all:

```python
import json, pathlib

for name, eps in json.loads(pathlib.Path("FOLDER/norm_eps.json").read_text()).items():
    model.get_submodule(name).eps = eps
```

Largest difference from the original network, measured when this folder was written: {one_eps:.2g} as it opens,
{each_eps:.2g} with these lines.
"""


def model_card_text(library: str, config: ViTConfig, differences: Mapping[str, float], *, folded: bool) -> str:
    """Markdown with a YAML head. differences: as measured on the images the export was given."""
    height, width = config.size
    how = FOLDED.format(one_eps=differences["with one eps"], each_eps=differences["with an eps per norm"])
    return f"""---
library_name: {library}
tags:
- vision-transformer
- {"image-classification" if config.num_classes > 0 else "feature-extraction"}
---

# A vision transformer trained with anechoic

{config.depth} blocks of width {config.dim} with {config.num_heads} heads on {config.patch_size} x {config.patch_size}
patches of {height} x {width} images with {config.in_channels} channels.

```python
{OPENING[library, config.num_classes > 0]}
```
{how if folded else ""}"""
