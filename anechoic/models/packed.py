"""A vision transformer of ours without gradients on a CPU: the numbers of its own forward, in less time.

Four measures, quantified in docs/speed.md: weights packed once in the order in which oneDNN reads them, with GELU and
the sum with the stream inside the products; images in small groups whose activations stay in the cache; one thread per
group instead of all threads on each operation; only requested outputs. It serves `features` only and supports no
hooks; GPUs and other networks use the plain forward.
Legend: B images of a group, N tokens, D width, H heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.models.layers import Block, check_images, patchify
from anechoic.models.vit import VisionTransformer
from anechoic.shortcut import Shortcut

# Tokens of a group. Their activations take a few megabytes; more leave the cache, fewer make thin products.
TOKENS = 1024
# (tokens of a layer (B, N, D), its number) -> what is kept of it
Keep = Callable[[Tensor, int], None]


def is_served(model: nn.Module) -> bool:
    """Return whether `FrozenTransformer` can replace the model's forward: ours, float32, on the CPU, no hooks."""
    if type(model) is not VisionTransformer or not torch.backends.mkldnn.is_available():
        return False
    if torch.is_autocast_enabled("cpu") or torch.get_default_device().type != "cpu":
        return False
    if any(parameter.device.type != "cpu" or parameter.dtype != torch.float32 for parameter in model.parameters()):
        return False
    return not is_hooked(model) and all(type(block) is Block for block in model.blocks)


def is_hooked(model: nn.Module) -> bool:
    """Return whether other code takes part in the forward of a module, so that weights alone do not tell its output."""
    return any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())


@dataclass(frozen=True)
class PackedLinear:
    """A linear layer whose weight lies in the order of the CPU's kernel; bias as it was or None."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, layer: nn.Linear, *, scale: float = 1.0) -> PackedLinear:
        weight, bias = layer.weight.detach(), None if layer.bias is None else layer.bias.detach()
        if scale != 1:
            weight, bias = scale * weight, None if bias is None else scale * bias
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TOKENS), bias)

    def __call__(self, x: Tensor, *, gelu: str | None = None) -> Tensor:
        """gelu: "none" (exact) or "tanh" applies it to the result."""
        attribute, algorithm = ("none", "") if gelu is None else ("gelu", gelu)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, attribute, [], algorithm)

    def added_to(self, stream: Tensor, x: Tensor) -> Tensor:
        """stream + linear(x), the sum made where the product is written."""
        return torch.ops.mkldnn._linear_pointwise.binary(x, stream, self.weight, self.bias, "add")


class PackedBlock:
    """A pre-norm block: alpha x + beta attention(norm x), then alpha x + beta mlp(norm x); beta is in the weights."""

    def __init__(self, block: Block) -> None:
        self.norms = (block.norm1, block.norm2)
        self.num_heads = block.attn.num_heads
        self.alphas = tuple(shortcut.factors[0] for shortcut in (block.shortcut1, block.shortcut2))
        self.qkv, self.fc1 = PackedLinear.of(block.attn.qkv), PackedLinear.of(block.mlp.fc1)
        self.proj = PackedLinear.of(block.attn.proj, scale=beta(block.shortcut1))
        self.fc2 = PackedLinear.of(block.mlp.fc2, scale=beta(block.shortcut2))
        self.gelu = block.mlp.act.approximate

    def __call__(self, x: Tensor, *, rows: int | None = None) -> Tensor:
        """x (B, N, D), which is written over -> (B, N, D), or only its first rows -> (B, rows, D)."""
        B, N, D = x.shape
        qkv = self.qkv(self.norms[0](x)).view(B, N, 3, self.num_heads, D // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if rows is not None:
            q, x = q[:, :, :rows], x[:, :rows].contiguous()
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, -1, D)
        x = self.proj.added_to(decayed(x, self.alphas[0]), attended)
        hidden = self.fc1(self.norms[1](x), gelu=self.gelu)
        return self.fc2.added_to(decayed(x, self.alphas[1]), hidden)


def beta(shortcut: Shortcut) -> float:
    return shortcut.factors[1]


def decayed(x: Tensor, alpha: float) -> Tensor:
    return x if alpha == 1 else x.mul_(alpha)


class FrozenTransformer:
    """The layers of a transformer whose weights do not change while this object lives.

    Layers are counted as in `features`: 0 the embedding, k the k-th block, one more behind the final norm if the model
    returns tokens. `deepest` is the last layer wanted, and the layers behind it are not computed; with `class_only`
    the block before the end computes the class token alone.
    """

    def __init__(self, model: VisionTransformer, *, deepest: int, class_only: bool) -> None:
        self.model, self.deepest = model, deepest
        self.blocks = [PackedBlock(block) for block in list(model.blocks)[:deepest]]
        self.class_only = class_only

    def __call__(self, images: Tensor, keep: Keep) -> None:
        """Normalized images (B, C, h, w) -> each layer's tokens (B, N, D), handed to keep before they are changed."""
        check_images(images, self.model.config.in_channels)
        p = self.model.config.patch_size
        x = self.model.embed_tokens(patchify(images, p), (images.shape[2] // p, images.shape[3] // p))
        keep(x, 0)
        for number, block in enumerate(self.blocks, 1):
            x = block(x, rows=1 if self.class_only and number == len(self.blocks) else None)
            keep(x, number)
        if self.deepest > len(self.blocks):
            assert self.model.norm is not None
            keep(self.model.norm(x), self.deepest)


def count_layers(model: VisionTransformer) -> int:
    return 1 + len(model.blocks) + (model.norm is not None and model.head is None)


def in_groups(run: Callable[[Tensor], dict], batches: Iterable[Tensor], *, tokens: int) -> Iterator[dict]:
    """run(images) of every batch, a dict of (B, ...) tensors, computed in small groups by as many threads as torch has.

    Each thread has the kernels of a group to itself: waiting for each other after every operation costs more, and idle
    threads of OpenMP spin. The next batch is fetched, and waits, while this one is computed.
    """
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    @torch.inference_mode()
    def compute(images: Tensor) -> dict:
        return run(images)

    def joined(parts: list[Future[dict]]) -> dict:
        found = [part.result() for part in parts]
        return {key: torch.cat([part[key] for part in found]) for key in found[0]}

    waiting: deque[list[Future[dict]]] = deque()
    fetched = iter(batches)
    try:
        while True:
            # One thread while batches are fetched and groups awaited; the consumer of the results has all of them.
            with one_thread():
                images = next(fetched, None)
                if images is not None:
                    waiting.append([pool.submit(compute, part) for part in images.split(max(1, TOKENS // tokens))])
                if not waiting:
                    return
                ready = joined(waiting.popleft()) if images is None or len(waiting) > 1 else None
            if ready is not None:
                yield ready
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
