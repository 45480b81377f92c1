"""The two residual branches of a block as one autograd function each, for training on a CPU in float32.

The same mathematics as the modules in layers.py, which remain the reference, in less time: products run in the faster
of two libraries, sums are made in place, and the shortcut reuses the memory of the branch's output. Anything else
(GPUs, autocast, hooks inside a block, drop path, learned factors) takes the plain path.
Legend: B batch, N tokens, M asked-for tokens, D width, H heads, T = B * N.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from anechoic.shortcut import Shortcut

# oneDNN's product, 10 to 15 % faster than the BLAS behind torch.mm where it was measured; not every build has it.
_onednn: Any = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None
# The kernels behind scaled_dot_product_attention, layer_norm and gelu, named exactly to skip the overload lookup.
_attention: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attention_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_norm_backward: Any = torch.ops.aten.native_layer_norm_backward.default
_gelu_backward: Any = torch.ops.aten.gelu_backward.grad_input
# Compiled, attention is faster as products where the width of a head plus the number of tokens is at most this.
SHORT = 96
# The compiler supports oneDNN's product for constant weights only, so it calls one that it does not look into.
_library = torch.library.Library("anechoic", "FRAGMENT")
_library.define("product(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.impl("product", lambda x, weight, bias: _onednn(x, weight, bias, "none", [], ""), "CPU")
torch.library.register_fake("anechoic::product", lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0]))
_opaque: Any = torch.ops.anechoic.product.default
_is_exporting = getattr(torch.compiler, "is_exporting", lambda: False)  # not in every version


def covers(block: Any, x: Tensor) -> bool:
    """Return whether the functions here may replace the modules of a block on x, whose gradient is needed."""
    if not (
        torch.is_grad_enabled()
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.is_autocast_enabled("cpu")
        and (is_compiled() or is_ordinary(x))
        and (block.drop_path1.rate == 0 or not block.training)
    ):
        return False
    attn, mlp = block.attn, block.mlp
    parts = (
        (nn.LayerNorm, (block.norm1, block.norm2)),
        (nn.Linear, (attn.qkv, attn.proj, mlp.fc1, mlp.fc2)),
        (nn.GELU, (mlp.act,)),
        (Shortcut, (block.shortcut1, block.shortcut2)),
    )
    whole = (attn, mlp, block.drop_path1, block.drop_path2, *(module for _, modules in parts for module in modules))
    return (
        all(type(module) is kind for kind, modules in parts for module in modules)
        and not (block.shortcut1.learnable or block.shortcut2.learnable)
        and not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in whole)
    )


def is_compiled() -> bool:
    """Return whether torch.compile traces this to run it here; an exported program must not need our operators."""
    return (
        torch.compiler.is_dynamo_compiling() and not _is_exporting() and not torch._C._are_functorch_transforms_active()
    )


def is_ordinary(x: Tensor) -> bool:
    """Return whether x holds numbers and nothing traces or transforms the operations on it."""
    return not (
        type(x) is not Tensor
        or torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (T, K) times the transpose of weight (N, K), plus bias (N)."""
    if _onednn is not None:
        if is_compiled():
            return _opaque(x, weight, bias)
        return _onednn(x, weight, bias, "none", [], "")
    return torch.mm(x, weight.T) if bias is None else torch.addmm(bias, x, weight.T)


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Of a linear map's weight (N, K), from its output's gradient (T, N) and its input x (T, K)."""
    if _onednn is not None and gradient.shape[1] < x.shape[1]:
        return product(gradient.T, x.T)
    return torch.mm(gradient.T, x)


def add_shortcut(x: Tensor, fx: Tensor, alpha: float, beta: float) -> Tensor:
    """alpha * x + beta * fx, in the memory of fx."""
    return (fx if beta == 1 else fx.mul_(beta)).add_(x, alpha=alpha)


def normalized(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm: output, mean, reciprocal of the deviation."""
    return torch.native_layer_norm(x, (x.shape[-1],), weight, bias, eps)


def through_norm(gradient: Tensor, x: Tensor, mean: Tensor, deviation: Tensor, weight: Tensor, bias: Tensor) -> Any:
    """LayerNorm's gradients: input, weight, bias."""
    return _norm_backward(gradient, x, (x.shape[-1],), mean, deviation, weight, bias, (True, True, True))


class MlpBranch(torch.autograd.Function):
    """x (T, D) -> alpha * x + beta * fc2(gelu(fc1(norm(x))))"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: tuple, *weights: Tensor) -> Tensor:
        eps, gelu, alpha, beta = ctx.settings = settings
        norm_weight, norm_bias, weight1, bias1, weight2, bias2 = weights
        inner, mean, deviation = normalized(x, norm_weight, norm_bias, eps)
        hidden = product(inner, weight1, bias1)
        active = torch.nn.functional.gelu(hidden, approximate=gelu)
        ctx.save_for_backward(x, mean, deviation, inner, hidden, active, norm_weight, norm_bias, weight1, weight2)
        return add_shortcut(x, product(active, weight2, bias2), alpha, beta)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple:
        _, gelu, alpha, beta = ctx.settings
        x, mean, deviation, inner, hidden, active, norm_weight, norm_bias, weight1, weight2 = ctx.saved_tensors
        outer = outer.contiguous()
        gradient = outer if beta == 1 else outer * beta
        of_weight2, of_bias2 = weight_gradient(gradient, active), gradient.sum(0)
        of_hidden = product(gradient, weight2.T)
        _gelu_backward(of_hidden, hidden, approximate=gelu, grad_input=of_hidden)
        of_weight1, of_bias1 = weight_gradient(of_hidden, inner), of_hidden.sum(0)
        of_inner = product(of_hidden, weight1.T)
        of_x, of_norm_weight, of_norm_bias = through_norm(of_inner, x, mean, deviation, norm_weight, norm_bias)
        of_x.add_(outer, alpha=alpha)
        return of_x, None, of_norm_weight, of_norm_bias, of_weight1, of_bias1, of_weight2, of_bias2


class AttentionBranch(torch.autograd.Function):
    """x (B, N, D) -> alpha * x + beta * proj(attention(norm(x))), or that at rows (B, M) only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor | None, settings: tuple, *weights: Any) -> Tensor:
        heads, eps, alpha, beta = ctx.settings = settings
        norm_weight, norm_bias, weight, bias, proj_weight, proj_bias = weights
        B, N, D = x.shape
        flat = x.reshape(B * N, D)
        inner, mean, deviation = normalized(flat, norm_weight, norm_bias, eps)
        if rows is None:
            asked, index = inner, None
            qkv = product(inner, weight, bias)
            q, k, v = split_heads(qkv, B, 3, heads)
        else:
            index = flat_rows(rows, N)
            asked = inner.index_select(0, index)
            first, others = (None, None) if bias is None else (bias[:D], bias[D:])
            (q,) = split_heads(product(asked, weight[:D], first), B, 1, heads)
            k, v = split_heads(product(inner, weight[D:], others), B, 2, heads)
        heard, memory = attend(q, k, v)
        mixed = heard.transpose(1, 2).reshape(-1, D)
        inputs = (flat, mean, deviation, inner, asked, index, q, k, v, heard, memory)
        ctx.save_for_backward(*inputs, norm_weight, norm_bias, weight, proj_weight)
        kept = flat if index is None else flat.index_select(0, index)
        ctx.has_bias = bias is not None
        return add_shortcut(kept, product(mixed, proj_weight, proj_bias), alpha, beta).view(B, -1, D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple:
        heads, _, alpha, beta = ctx.settings
        flat, mean, deviation, inner, asked, index, q, k, v, heard, memory, *weights = ctx.saved_tensors
        norm_weight, norm_bias, weight, proj_weight = weights
        B, D = outer.shape[0], outer.shape[2]
        outer = outer.reshape(-1, D)
        gradient = outer if beta == 1 else outer * beta
        of_proj_weight = weight_gradient(gradient, heard.transpose(1, 2).reshape(-1, D))
        of_proj_bias = gradient.sum(0)
        of_heard = product(gradient, proj_weight.T).view(B, -1, heads, D // heads).transpose(1, 2)
        of_parts = [part.transpose(1, 2).reshape(-1, D) for part in through_attention(of_heard, q, k, v, heard, memory)]
        if index is None:
            of_qkv = torch.cat(of_parts, dim=1)
            of_weight, of_bias = weight_gradient(of_qkv, inner), of_qkv.sum(0)
            of_inner = product(of_qkv, weight.T)
        else:
            of_q, of_kv = of_parts[0], torch.cat(of_parts[1:], dim=1)
            of_weight = torch.cat([weight_gradient(of_q, asked), weight_gradient(of_kv, inner)])
            of_bias = torch.cat([of_q.sum(0), of_kv.sum(0)])
            of_inner = product(of_kv, weight[D:].T).index_add_(0, index, product(of_q, weight[:D].T))
        of_x, of_norm_weight, of_norm_bias = through_norm(of_inner, flat, mean, deviation, norm_weight, norm_bias)
        if index is None:
            of_x.add_(outer, alpha=alpha)
        else:
            of_x.index_add_(0, index, outer, alpha=alpha)
        of_norms = (of_norm_weight, of_norm_bias)
        of_qkv_bias = of_bias if ctx.has_bias else None
        return of_x.view(B, -1, D), None, None, *of_norms, of_weight, of_qkv_bias, of_proj_weight, of_proj_bias


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """q (B, H, M, D/H), k and v (B, H, N, D/H) -> what is heard (B, H, M, D/H), and what its gradient needs."""
    if is_compiled() and q.shape[3] + k.shape[2] <= SHORT:
        weights = torch.softmax((q @ k.transpose(2, 3)) * q.shape[3] ** -0.5, dim=-1)
        return weights @ v, weights
    return _attention(q, k, v)


def through_attention(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, heard: Tensor, memory: Tensor) -> Any:
    """Attention's gradients: q, k, v."""
    if memory.dim() == 3:
        return _attention_backward(gradient, q, k, v, heard, memory, 0.0, False)
    of_scores = memory * (gradient @ v.transpose(2, 3) - (gradient * heard).sum(-1, keepdim=True))
    of_scores = of_scores * q.shape[3] ** -0.5
    return of_scores @ k, of_scores.transpose(2, 3) @ q, memory.transpose(2, 3) @ gradient


def split_heads(x: Tensor, batch: int, parts: int, heads: int) -> tuple[Tensor, ...]:
    """(T, parts * D) -> parts of (B, H, N, D/H)"""
    return x.view(batch, x.shape[0] // batch, parts, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)


def flat_rows(rows: Tensor, tokens: int) -> Tensor:
    """Rows (B, M) of a (B, N, D) tensor as rows of its (B * N, D) view."""
    start = torch.arange(0, len(rows) * tokens, tokens, device=rows.device)
    return (rows + start[:, None]).flatten()


def attention_branch(x: Tensor, rows: Tensor | None, norm: Any, attn: Any, shortcut: Shortcut) -> Tensor:
    settings = (attn.num_heads, norm.eps, *shortcut.factors)
    return AttentionBranch.apply(
        x, rows, settings, norm.weight, norm.bias, attn.qkv.weight, attn.qkv.bias, attn.proj.weight, attn.proj.bias
    )


def mlp_branch(x: Tensor, norm: Any, mlp: Any, shortcut: Shortcut) -> Tensor:
    settings = (norm.eps, mlp.act.approximate, *shortcut.factors)
    fc1, fc2 = mlp.fc1, mlp.fc2
    flat = x.reshape(-1, x.shape[-1])
    return MlpBranch.apply(flat, settings, norm.weight, norm.bias, fc1.weight, fc1.bias, fc2.weight, fc2.bias).view(
        x.shape
    )
