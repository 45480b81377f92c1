"""Low-dimensional pictures of features: t-SNE maps and RGB colors from eigenvectors (Figures 3 and 4)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from anechoic.errors import UserError
from anechoic.eval.tensors import as_matrix, check_finite, doubled


def tsne(features: np.ndarray | Tensor, *, perplexity: float = 30.0, seed: int = 0) -> np.ndarray:
    """Return (n, 2) coordinates of t-SNE, started from the principal components; perplexity is lowered for few samples.

    Vectors that are all equal are all placed at 0: their principal components do not exist.
    """
    from sklearn.manifold import TSNE

    z = as_matrix(features).float().numpy(force=True)
    if len(z) < 4:
        raise UserError(f"t-SNE needs at least 4 samples; there are {len(z)}.")
    if np.ptp(z, axis=0).max() <= 1e-6 * np.abs(z).max():
        return np.zeros((len(z), 2), np.float32)
    perplexity = min(perplexity, (len(z) - 1) / 3)
    return TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(z)


def eigenvector_colors(cells: Tensor, *, first: int = 0) -> Tensor:
    """RGB of Figure 4: cells (n, h, w, C), one vector per place of n images, to (n, h, w, 3) in 0 .. 1.

    Each vector is L2-normalized; left singular vectors first .. first + 2 of all places of all images together (no
    centering) become red, green and blue, each min-max scaled over all images, so a color means the same everywhere.
    """
    n, h, w, C = cells.shape
    check_finite(cells)
    if first + 3 > C:
        raise UserError(f"{C} channels have no singular vectors {first} to {first + 2}; choose a smaller first.")
    flat = torch.nn.functional.normalize(doubled(cells.reshape(-1, C)), dim=1)
    # u = X v / s; the scale s disappears in the min-max below, and v comes from the small C x C product.
    _, directions = torch.linalg.eigh(flat.T @ flat)
    u = flat @ directions.flip(1)[:, first : first + 3]
    # A singular vector has no sign of its own: make its largest component positive, so that pictures are repeatable.
    u = u * torch.sign(u.gather(0, u.abs().argmax(0, keepdim=True)))
    low, high = u.amin(0), u.amax(0)
    return ((u - low) / (high - low).clamp(min=1e-12)).view(n, h, w, 3).float()
