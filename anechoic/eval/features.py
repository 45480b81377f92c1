"""What a network computes inside: the stream after every block, pooled to one vector per image, and its branches.

It does not decode images, evaluate features or know families: a model is anything
with `blocks` in execution order and `num_prefix_tokens`. Layers are counted like hidden states: layer 0 is the input of
the first block (the embedding), layer k the output of the k-th block; if the model ends with a norm, the tokens behind
it are one more layer; -1 is the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anechoic.choices import AllLayers, Pooling
from anechoic.errors import UserError
from anechoic.eval.metrics.rank import effective_rank
from anechoic.eval.tensors import check_finite
from anechoic.models.packed import FrozenTransformer, count_layers, in_groups, is_served
from anechoic.models.vit import VisionTransformer
from anechoic.shortcut import Shortcut

POOLINGS: tuple[Pooling, ...] = ("class", "mean", "all")
Key = tuple[int, Pooling]
Rows = dict[Key, dict[str, Any]]


def trunk(model: nn.Module) -> nn.Module:
    """The network whose blocks are read: the encoder of a masked autoencoder, any other model itself."""
    return dict(model.named_children()).get("encoder", model)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    blocks = getattr(trunk(model), "blocks", None)
    if blocks is None:
        raise UserError(
            f"{type(model).__name__} has no `blocks`, so its layers cannot be read; wrap it with evals.encoders."
        )
    return list(blocks)


@contextmanager
def capture(model: nn.Module) -> Iterator[list[Tensor]]:
    """While open, a forward of the model fills the list with the first block's input and every block's output."""
    stream: list[Tensor] = []
    blocks = blocks_of(model)

    def keep_input(module: nn.Module, inputs: tuple) -> None:
        stream.clear()
        stream.append(inputs[0].detach())

    def keep_output(module: nn.Module, inputs: tuple, output: Tensor | tuple) -> None:
        stream.append((output[0] if isinstance(output, tuple) else output).detach())

    handles = [blocks[0].register_forward_pre_hook(keep_input)]
    handles += [block.register_forward_hook(keep_output) for block in blocks]
    try:
        yield stream
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def capture_branches(model: nn.Module) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """While open, a forward fills the list with (mean ||f||, mean ||alpha x||) over tokens, a pair per Shortcut."""
    norms: list[tuple[Tensor, Tensor]] = []

    def measure(module: nn.Module, inputs: tuple) -> None:
        assert isinstance(module, Shortcut)
        x, fx = inputs[:2]
        norms.append((token_norm(module.beta * fx), token_norm(module.alpha * x)))

    handles = [m.register_forward_pre_hook(measure) for m in trunk(model).modules() if isinstance(m, Shortcut)]
    try:
        yield norms
    finally:
        for handle in handles:
            handle.remove()


def token_norm(x: Tensor) -> Tensor:
    """Mean L2 norm over channels of tokens (B, N, D) or of the places of maps (B, C, H, W)."""
    return x.detach().norm(dim=1 if x.ndim == 4 else -1).mean()


def pool(x: Tensor, *, pooling: Pooling, num_prefix_tokens: int) -> Tensor:
    """Tokens (B, N, D) to (B, D): the first one, the mean of the patches, or of all; of a map, the mean of places."""
    if x.ndim == 4:
        return x.mean(dim=(2, 3))
    if pooling == "class":
        if num_prefix_tokens == 0:
            raise UserError("This model has no class token; use --pooling mean.")
        return x[:, 0]
    return x[:, num_prefix_tokens:].mean(dim=1) if pooling == "mean" else x.mean(dim=1)


def prefix_tokens(model: nn.Module) -> int:
    """How many tokens precede the patches; a network of maps has none."""
    return int(getattr(trunk(model), "num_prefix_tokens", 0))


def poolings_of(model: nn.Module) -> tuple[Pooling, ...]:
    """The poolings that differ for this model: without prefix tokens there is only the mean of the patches."""
    return POOLINGS if prefix_tokens(model) else ("mean",)


def choose_layers(layers: Sequence[int] | AllLayers, *, count: int) -> list[int]:
    """Layer numbers 0 .. count - 1; negative ones count from the end."""
    if layers == "all":
        return list(range(count))
    wrong = [layer for layer in layers if not -count <= layer < count]
    if wrong:
        raise UserError(f"There is no layer {wrong[0]}: this model has 0 (its embedding) to {count - 1} (its output).")
    return [layer % count for layer in layers]


def with_output(stream: list[Tensor], output: object) -> list[Tensor]:
    """Return the stream, and the model's output if that is the last layer's tokens behind a norm."""
    last = stream[-1]
    # NaN is no layer of its own because it differs from itself.
    if (
        isinstance(output, Tensor)
        and output.shape == last.shape
        and not torch.equal(output.nan_to_num(), last.nan_to_num())
    ):
        return [*stream, output.detach()]
    return stream


@torch.inference_mode()
def layer_widths(model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], object] | None = None) -> list[int]:
    """The number of channels of every layer, found by running the model on these images."""
    with evaluating(model), capture(model) as stream:
        output = (forward or trunk(model))(images)
    return [x.shape[1] if x.ndim == 4 else x.shape[-1] for x in with_output(stream, output)]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode while open; afterwards the mode the model was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.inference_mode()
def extract_batches(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Sequence[int] | AllLayers = (-1,),
    poolings: Sequence[Pooling] = POOLINGS,
    forward: Callable[[Tensor], object] | None = None,
) -> Iterator[dict[Key, Tensor]]:
    """For every batch of normalized images, the pooled float32 features (B, D) by (layer, pooling), never masked.

    `forward` replaces the plain call of the trunk, for networks that want more than images (a time, a label).
    """
    network = trunk(model)
    if forward is None and is_served(network):
        assert isinstance(network, VisionTransformer)
        with evaluating(model):
            for found in frozen_batches(network, batches, layers=layers, poolings=poolings):
                check_features(found)
                yield found
        return
    run, prefix = forward or network, prefix_tokens(model)
    with evaluating(model), capture(model) as stream:
        for images in batches:
            output = run(images)
            tokens = with_output(stream, output)
            found = {
                (layer, pooling): pool(tokens[layer].float(), pooling=pooling, num_prefix_tokens=prefix)
                for layer in choose_layers(layers, count=len(tokens))
                for pooling in poolings
            }
            check_features(found)
            yield found


def check_features(found: Mapping[Key, Tensor]) -> None:
    """Refuse features that are not finite, and name the layer."""
    for (layer, pooling), values in found.items():
        check_finite(values, f"of layer {layer} ({pooling})")


def frozen_batches(
    network: VisionTransformer,
    batches: Iterable[Tensor],
    *,
    layers: Sequence[int] | AllLayers,
    poolings: Sequence[Pooling],
) -> Iterator[dict[Key, Tensor]]:
    """`extract_batches` of a transformer of ours on the CPU, by its fast forward."""
    chosen = choose_layers(layers, count=count_layers(network))
    depth = len(network.blocks)
    # The last block need not compute the patches if nobody reads them behind it.
    class_only = set(poolings) == {"class"}
    fast = FrozenTransformer(network, deepest=max(chosen), class_only=class_only and max(chosen) >= depth)

    def run(images: Tensor) -> dict[Key, Tensor]:
        found: dict[Key, Tensor] = {}

        def keep(tokens: Tensor, layer: int) -> None:
            if layer in chosen:
                for pooling in poolings:
                    found[layer, pooling] = pool(tokens, pooling=pooling, num_prefix_tokens=1).clone()

        fast(images, keep)
        return {(layer, pooling): found[layer, pooling] for layer in chosen for pooling in poolings}

    grid = network.config.grid_size
    yield from in_groups(run, batches, tokens=1 + grid[0] * grid[1])


def extract(
    model: nn.Module,
    batches: Iterable[Tensor],
    *,
    layers: Sequence[int] | AllLayers = (-1,),
    poolings: Sequence[Pooling] = POOLINGS,
    forward: Callable[[Tensor], object] | None = None,
) -> dict[Key, np.ndarray]:
    """All batches' features in memory: (layer, pooling) -> float32 (n, D)."""
    parts: dict[Key, list[np.ndarray]] = {}
    for found in extract_batches(model, batches, layers=layers, poolings=poolings, forward=forward):
        for key, value in found.items():
            parts.setdefault(key, []).append(value.numpy(force=True))
    return {key: np.concatenate(values) for key, values in parts.items()}


@torch.inference_mode()
def block_statistics(
    model: nn.Module,
    images: Tensor,
    *,
    pooling: Pooling = "mean",
    forward: Callable[[Tensor], object] | None = None,
) -> dict[str, list[float]]:
    """Statistics of a batch of normalized images, unmasked: a number per layer (the embedding first) or per Shortcut.

    Keys: entropy_columns, rank_columns, entropy_rows, rank_rows, token_norm (per layer); branch_ratio (per Shortcut,
    the mean norm of the branch over that of the decayed shortcut).
    """
    with evaluating(model), capture(model) as stream, capture_branches(model) as norms:
        (forward or trunk(model))(images)
    found: dict[str, list[float]] = {"entropy_columns": [], "rank_columns": [], "entropy_rows": [], "rank_rows": []}
    for tokens in stream:
        pooled = pool(tokens.float(), pooling=pooling, num_prefix_tokens=prefix_tokens(model))
        for center in ("columns", "rows"):
            entropy, rank = effective_rank(pooled, center=center)
            found[f"entropy_{center}"].append(entropy)
            found[f"rank_{center}"].append(rank)
    found["token_norm"] = [token_norm(tokens).item() for tokens in stream]
    found["branch_ratio"] = [(branch / shortcut.clamp(min=1e-12)).item() for branch, shortcut in norms]
    return found


@torch.inference_mode()
def patch_maps(model: nn.Module, images: Tensor) -> Tensor:
    """The last block's patch tokens in their places, (B, h, w, D); square images only."""
    with evaluating(model), capture(model) as stream:
        trunk(model)(images)
    last = stream[-1]
    if last.ndim == 4:
        return last.permute(0, 2, 3, 1)
    tokens = last[:, prefix_tokens(model) :]
    side = math.isqrt(tokens.shape[1])
    if side**2 != tokens.shape[1]:
        raise UserError(
            "The patches of this model do not form a square, so there is no map of them; use square images."
        )
    return tokens.unflatten(1, (side, side))


def block_gains(model: nn.Module) -> list[float]:
    """What each block leaves of its input on the identity path: the product of the alphas of its Shortcuts."""
    return [
        math.prod(float(part.alpha) for part in block.modules() if isinstance(part, Shortcut))
        for block in blocks_of(model)
    ]


@torch.inference_mode()
def block_ratios(
    model: nn.Module, images: Tensor, *, forward: Callable[[Tensor], object] | None = None
) -> list[float | None]:
    """Per block, mean ||x_out - gain x_in|| / mean ||gain x_in|| over tokens: what it adds over what it keeps.

    None where a block changes the shape of the stream.
    """
    with evaluating(model), capture(model) as stream:
        (forward or trunk(model))(images)
    ratios: list[float | None] = []
    for gain, before, after in zip(block_gains(model), stream[:-1], stream[1:], strict=True):
        kept = gain * before
        same = before.shape == after.shape
        ratios.append((token_norm(after - kept) / token_norm(kept).clamp(min=1e-12)).item() if same else None)
    return ratios
