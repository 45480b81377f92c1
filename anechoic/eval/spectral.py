"""Spectral clustering across images: soft assignments that are, as nearly as can be, eigenvectors of one feature graph.

Zhang, Yunis and Maire (2024), the version with one graph over the tokens of many images. It knows features, not images
or labels; segment.py scores what it finds. (Figure 4.)
Legend: n tokens of a batch, N images, C channels of the assignment, S side of a table, h side of the token grid.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from anechoic.config import Count, Positive, Section, Share, Whole
from anechoic.errors import UserError

SIDE = 32


@dataclass(frozen=True)
class SpectralOptions(Section):
    """The published settings; `epochs` and `batch` decide the cost."""

    channels: Count = 100
    epochs: Count = 201
    batch: Count = 40
    neighbors: Count = 50
    threshold: float = 0.1
    steps: Count = 5
    lr: Positive = 1e-2
    ema: Share = 0.99
    seed: Whole = 12345


def token_graph(tokens: Tensor, *, neighbors: int = 50, threshold: float = 0.1) -> Tensor:
    """tokens (B, hw, D) -> A = D^-1 W, sparse (n, n), n = B hw.

    W keeps, for every token, its most similar tokens (cosine) within its own image and as many in the other images,
    without itself; similarities up to the threshold become 0, and W is symmetrized. A token without neighbors has a
    row of zeros.
    """
    B, per_image, _ = tokens.shape
    x = F.normalize(tokens.flatten(0, 1), dim=1)
    rows, columns, values = [], [], []
    for b in range(B):
        first = b * per_image
        own = torch.arange(first, first + per_image, device=x.device)
        similarities = x[own] @ x.T
        inside = similarities[:, own].clone().fill_diagonal_(0)
        similarities[:, own] = 0
        for part, offset in ((inside, first), (similarities, 0)):
            best, where = part.topk(min(neighbors, part.shape[1]), dim=1)
            keep = best > threshold
            rows.append(own[:, None].expand_as(where)[keep])
            columns.append(where[keep] + offset)
            values.append(best[keep])
    row, column, value = torch.cat(rows), torch.cat(columns), torch.cat(values) / 2
    n = len(x)
    indices = torch.stack([torch.cat([row, column]), torch.cat([column, row])])
    w = torch.sparse_coo_tensor(indices, torch.cat([value, value]), (n, n), check_invariants=True).coalesce()
    degree = torch.zeros(n, device=x.device).index_add_(0, w.indices()[0], w.values())
    scale = torch.where(degree > 0, 1 / degree.clamp(min=1e-12) + 1e-6, 0.0)
    return torch.sparse_coo_tensor(
        w.indices(), w.values() * scale[w.indices()[0]], (n, n), check_invariants=True
    ).coalesce()


def symmetric_part(a: Tensor) -> Tensor:
    """(A + A^T) / 2 in compressed rows: the same quadratic form as A, and its own transpose."""
    with warnings.catch_warnings():
        # This layout is several times faster to multiply with; torch calls it beta once per process.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return ((a + a.T.coalesce()) / 2).coalesce().to_sparse_csr()


def spectral_loss(assignments: Tensor, a: Tensor, *, weight: float = 1.0) -> Tensor:
    """assignments (n, C) >= 0, a the symmetric part of A (n, n). With z_c the L2-normalized columns:

    mean_c | weight (z_c^T A z_c - 1) |  +  mean_{c != c'} weight (z_c . z_c')^2.
    """
    z = F.normalize(assignments, dim=0)
    with torch.no_grad():
        image = a @ z
    # z^T A z and its gradient 2 A z for symmetric A, with one product instead of two.
    product = (z * image).sum(dim=0)
    eigenvalues = 2 * product - product.detach()
    overlaps = z.T @ z
    C = len(overlaps)
    off_diagonal = overlaps.square().sum() - overlaps.diagonal().square().sum()
    return (weight * (eigenvalues - 1)).abs().mean() + weight * off_diagonal / max(1, C * (C - 1))


def pooled(tables: Tensor, side: int) -> Tensor:
    """Tables (B, C, S, S) -> soft assignments of the tokens (B side^2, C), averaged over each token's cells."""
    p = F.adaptive_avg_pool2d(tables.softmax(dim=1), side)
    return p.permute(0, 2, 3, 1).flatten(0, 2)


def spectral_tables(tokens: Tensor, options: SpectralOptions) -> Tensor:
    """tokens (N, h, h, D) -> averaged tables (N, C, S, S); a softmax over C makes them soft assignments.

    Every epoch visits the images in random batches; each batch builds its graph and takes `steps` AdamW steps on the
    tables of its images. The moving average of all tables moves once per batch.
    """
    N, h = tokens.shape[:2]
    if N < 1 or h < 2:
        raise UserError("Clustering needs at least one image of 2 x 2 patches; give larger images.")
    flat = tokens.flatten(1, 2)
    generator = torch.Generator().manual_seed(options.seed)
    start = torch.randn(N, options.channels, SIDE, SIDE, generator=generator).to(tokens.device)
    # One parameter per image: the optimizer passes over those that are not in the batch.
    tables = [table.clone().requires_grad_() for table in start]
    average = start
    optimizer = torch.optim.AdamW(tables, lr=options.lr, weight_decay=0.0)
    for _ in tqdm(range(options.epochs), desc="spectral clustering", leave=False, disable=None):
        for batch in torch.randperm(N, generator=generator).split(options.batch):
            graph = token_graph(flat[batch], neighbors=options.neighbors, threshold=options.threshold)
            a = symmetric_part(graph)
            for _ in range(options.steps):
                optimizer.zero_grad(set_to_none=True)
                own = torch.stack([tables[i] for i in batch.tolist()])
                spectral_loss(pooled(own, h), a, weight=SIDE / h).backward()
                optimizer.step()
            with torch.no_grad():
                average.lerp_(torch.stack(tables), 1 - options.ema)
    return average


def soft_cells(tables: Tensor, *, side: int) -> Tensor:
    """Tables (N, C, S, S) -> soft assignments (N, side, side, C) for the RGB picture, resized with antialiasing."""
    p = F.interpolate(tables.softmax(dim=1), size=(side, side), mode="bilinear", antialias=True)
    return p.permute(0, 2, 3, 1)
