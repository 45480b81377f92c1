"""The README of an exported folder: what the network is, how to open it, and what was measured when it was written."""

from __future__ import annotations

from collections.abc import Mapping

from anechoic.models.vit import ViTConfig

OPENING = {
    "timm": """import timm

model = timm.create_model("local-dir:FOLDER", pretrained=True).eval()
tokens = model.forward_features(images)""",
    "transformers": """from transformers import AutoModel

model = AutoModel.from_pretrained("FOLDER").eval()
tokens = model(images).last_hidden_state""",
    "transformers with a head": """from transformers import AutoModelForImageClassification

model = AutoModelForImageClassification.from_pretrained("FOLDER").eval()
logits = model(images).logits""",
}
EPS_LOOP = """import json

for name, eps in json.load(open("FOLDER/norm_eps.json")).items():
    model.get_submodule(name).eps = eps"""


def usage_of(library: str, config: ViTConfig) -> str:
    """The lines that open the folder."""
    headed = library == "transformers" and config.num_classes > 0
    return OPENING[f"{library} with a head" if headed else library]


def model_card_text(config: ViTConfig, usage: str, differences: Mapping[str, float]) -> str:
    """Markdown with a YAML head. differences: as measured on the images the export was given."""
    library = "timm" if "timm" in usage else "transformers"
    height, width = config.size
    return f"""---
library_name: {library}
tags:
- vision-transformer
- feature-extraction
---

# A vision transformer trained with anechoic

{config.depth} blocks of width {config.dim} with {config.num_heads} heads on {config.patch_size} x {config.patch_size}
patches of {height} x {width} images with {config.in_channels} channels. It was trained with decayed shortcuts,
`alpha * x + f(x)`, and folded: these weights compute the same with plain ones, `x + f(x)`.

```python
{usage}
```

Folding gives every norm an eps of its own, and the config above holds only one. These lines set them all:

```python
{EPS_LOOP}
```

Largest difference from the original network, measured when this folder was written:
{differences["with one eps"]:.2g} as it opens, {differences["with an eps per norm"]:.2g} with the lines above.
"""
