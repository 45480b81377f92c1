"""One thing, five hands: autoencoders on emoji, where the echo of the pixels is the hand and the abstraction the thing.

The protocol: all 5,150 drawings at 48 pixels in patches of 8, without labels, crops from half the area, the rest as in
pocket.py. Each optimiser is given its own best of the peak rates below, chosen by the loss on 256 held-out drawings
(seed 0), once for each arm; the claim is made with seeds that were never looked at before.
"""

from __future__ import annotations

from dataclasses import replace

from anechoic.config import Config
from anechoic.paper.pocket import mae

SAMPLES = 96_000
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
SEARCH_SEED = 0
SEEDS = (10, 11, 12, 13, 14)


def emoji(alpha_min: float, *, algorithm: str = "muon", lr: float = 1e-3, samples: int = SAMPLES) -> Config:
    """An autoencoder of drawings; no label is read."""
    config = mae(alpha_min, samples=samples, lr=lr, source="emoji", image_size=48)
    return replace(
        config,
        data=replace(config.data, scale=(0.5, 1.0)),
        optim=replace(config.optim, algorithm=algorithm),  # type: ignore[arg-type]
    )
