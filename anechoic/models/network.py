"""The base of every network: its frozen config, its shortcuts, and the marks that keep weights and alphas together.

Layers are in layers.py.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from anechoic.choices import ShortcutForm
from anechoic.errors import UserError
from anechoic.shortcut import (
    AlphaMin,
    Shortcut,
    Stream,
    resolve_alpha_min,
    schedule_alphas,
    schedule_by_name,
    shortcut_factors,
)

# Numbers in a table of positions, a quarter of a gigabyte.
MAX_TABLE = 1 << 26

# ---- configuration common to all networks


@dataclass(frozen=True, kw_only=True)
class NetworkConfig:
    """Options of every network; alpha_min="auto" is replaced by its number, and a schedule that is a function by its
    alphas, so that a saved config is complete."""

    image_size: int | tuple[int, int] = 224
    in_channels: int = 3
    alpha_min: AlphaMin = 1.0
    schedule: str | tuple[float, ...] = "linear"
    form: ShortcutForm = "identity"
    zero_init: bool | None = False

    def __post_init__(self) -> None:
        if isinstance(self.image_size, list):
            object.__setattr__(self, "image_size", tuple(self.image_size))
        if isinstance(self.schedule, list):
            object.__setattr__(self, "schedule", tuple(self.schedule))
        if self.in_channels < 1:
            raise UserError(f"in_channels must be at least 1, not {self.in_channels}.")
        if isinstance(self.schedule, str) or callable(self.schedule):
            schedule = schedule_by_name(self.schedule) if isinstance(self.schedule, str) else self.schedule
            number = resolve_alpha_min(self.alpha_min, len(self.branch_kinds), schedule=schedule)
            object.__setattr__(self, "alpha_min", number)
        if callable(self.schedule):
            object.__setattr__(self, "schedule", tuple(schedule_alphas(len(self.branch_kinds), number, schedule)))

    @property
    def branch_kinds(self) -> list[str]:
        """The kind of every decayed residual branch, in execution order."""
        raise AssertionError("each network's config lists its branches")

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)"""
        return self.image_size if isinstance(self.image_size, tuple) else (self.image_size, self.image_size)

    @property
    def factors(self) -> list[tuple[float, float]]:
        """(alpha, beta) of every branch, in execution order."""
        return shortcut_factors(self.branch_kinds, alpha_min=self.alpha_min, schedule=self.schedule, form=self.form)

    def make_shortcuts(self) -> list[Shortcut]:
        learnable = self.form == "learnable"
        return [
            Shortcut(alpha, beta, learnable=learnable, kind=kind)
            for kind, (alpha, beta) in zip(self.branch_kinds, self.factors, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(NetworkConfig):
    """A network of `depth` pre-norm blocks on patches: two residual branches a block, attention first."""

    patch_size: int = 16
    dim: int = 768
    depth: int = 12
    num_heads: int = 12
    mlp_ratio: float = 4.0
    norm_eps: float | tuple[float, ...] = 1e-6

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise UserError(f"depth must be at least 1, not {self.depth}.")
        if isinstance(self.norm_eps, list):
            object.__setattr__(self, "norm_eps", tuple(self.norm_eps))
        super().__post_init__()
        check_grid(self.size, self.patch_size)
        check_heads(self.dim, self.num_heads)
        if math.prod(self.grid_size) * self.dim > MAX_TABLE:
            h, w = self.grid_size
            raise UserError(f"{h} x {w} patches of width {self.dim} are beyond any memory: choose larger patches.")
        if not 0 < self.mlp_ratio <= 1000 or int(self.dim * self.mlp_ratio) < 1:
            raise UserError(f"mlp_ratio must be positive and at most 1000, not {self.mlp_ratio}.")

    @property
    def branch_kinds(self) -> list[str]:
        return ["attention", "mlp"] * self.num_blocks

    @property
    def num_blocks(self) -> int:
        return self.depth

    @property
    def grid_size(self) -> tuple[int, int]:
        """(rows, columns) of patches"""
        return self.size[0] // self.patch_size, self.size[1] // self.patch_size

    def eps_per_norm(self, count: int) -> list[float]:
        """One eps per norm, in execution order."""
        if not isinstance(self.norm_eps, tuple):
            return [self.norm_eps] * count
        if len(self.norm_eps) != count:
            raise UserError(
                f"norm_eps lists {len(self.norm_eps)} numbers for {count} norms: give one number or one each."
            )
        return list(self.norm_eps)


def check_grid(size: tuple[int, int], patch_size: int) -> None:
    if min(*size, patch_size) < 1 or size[0] % patch_size or size[1] % patch_size:
        raise UserError(
            f"Images of {size[0]} x {size[1]} cannot be cut into {patch_size} x {patch_size} patches: choose "
            f"multiples of {patch_size}."
        )


def check_heads(dim: int, num_heads: int) -> None:
    if num_heads < 1 or dim < 1 or dim % num_heads:
        raise UserError(f"A width of {dim} cannot be split into {num_heads} heads: choose a divisor of {dim}.")


# ---- the base of every network

MARKS = ("alphas", "betas")


class Network(nn.Module):
    """A network whose residual branches meet in Shortcuts.

    Factors other than 1 are also kept in the buffers `alphas` and `betas`: they mark the state dict, so that weights
    are not loaded into a network that would use them differently. The forward pass uses the Shortcuts' own floats.
    """

    config: NetworkConfig
    # Of a denoiser trained on latents: their LatentSpace (data/latents.py).
    latents: Any = None
    # Reading images belongs to higher packages; eval/embedding.py sets its function here.
    embedder: ClassVar[Callable[..., Any] | None] = None

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config

    def embed(self, images: Any, **options: Any) -> Any:
        """Return one vector per image (n, D) of a path, a folder, a Pillow image, an array or a list of such; unmasked.

        options: layer=-1, pooling="class" | "mean" | "all", device="auto", workers=0.
        """
        if Network.embedder is None:
            raise UserError("Networks embed images once they come from anechoic.load.")
        return Network.embedder(self, images, **options)

    def mark(self, shortcuts: Sequence[Shortcut]) -> None:
        if any(shortcut.learnable for shortcut in shortcuts):
            return  # the learned alphas are parameters, and their keys mark the state dict
        alphas, betas = zip(*(shortcut.factors for shortcut in shortcuts), strict=True)
        for name, factors in (("alphas", alphas), ("betas", betas)):
            if any(factor != 1 for factor in factors):
                self.register_buffer(name, torch.tensor(factors))

    def stream(self) -> Stream:
        """Return the residual stream, for surgery."""
        raise AssertionError("each network describes its own stream")

    def norms(self) -> list[nn.LayerNorm]:
        """Return every norm that has an eps of its own in the config, in execution order."""
        raise AssertionError("each network lists its own norms")

    def current_config(self) -> NetworkConfig:
        """Return the config with every eps as it is now: a network built from it takes this one's state dict."""
        eps, config = tuple(norm.eps for norm in self.norms()), self.config
        if not eps or not isinstance(config, TransformerConfig) or set(eps) == {config.norm_eps}:
            return config
        return dataclasses.replace(config, norm_eps=eps)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        check_marks(self, state_dict)
        return super().load_state_dict(state_dict, strict=strict, assign=assign)


def check_marks(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Refuse weights whose shortcut factors are not the model's, before anything is written."""
    own = {name: value for name, value in model.named_buffers() if name.rpartition(".")[2] in MARKS}
    given = {name: value for name, value in state_dict.items() if name.rpartition(".")[2] in MARKS}
    for name in sorted(own.keys() | given.keys()):
        if name not in own:
            raise UserError(
                f"These weights belong to shortcuts with factors {_span(given[name])}, but this network's are plain: "
                f"build it with the alpha_min, schedule and form they were trained with, or fold them first."
            )
        if name not in given:
            raise UserError(
                f"These weights belong to plain shortcuts, but this network's have factors {_span(own[name])}: "
                f"build it with alpha_min=1, or convert the plain network with anechoic.decay."
            )
        if own[name].is_meta:
            continue
        same_length = own[name].shape == given[name].shape
        if not same_length or not torch.allclose(
            own[name].cpu().double(), given[name].cpu().double(), atol=4e-3, rtol=0
        ):
            raise UserError(
                f"These weights belong to shortcuts with factors {_span(given[name])}, but this network's are "
                f"{_span(own[name])}: build it with the alpha_min, schedule and form they were trained with."
            )


def _span(factors: Tensor) -> str:
    if factors.is_meta:
        return f"of their own over {len(factors)} branches"
    return f"{float(factors[0]):.4g} to {float(factors[-1]):.4g} over {len(factors)} branches"
