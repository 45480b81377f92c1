"""transformers' ViT, ViTMAE, DeiT, DINOv2 and BEiT (pre-norm), and BERT (post-norm).

The decoder of ViTMAE stays plain. A post-norm sum is renormalized at once, so in BERT the decay weighs a branch against
its own input only, and no echo of the embedding fades with depth.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.beit import modeling_beit as beit
from transformers.models.bert import modeling_bert as bert
from transformers.models.deit import modeling_deit as deit
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as registers
from transformers.models.vit import modeling_vit as vit
from transformers.models.vit_mae import modeling_vit_mae as vit_mae

from anechoic.adapters.blocks import Twin, describe, keep_plain, register, through
from anechoic.shortcut import Branch, Event, Read, Restart, Shortcut, Stream


class _Layer(Twin):
    """layernorm_before, attention, layernorm_after, mlp, and one dropout for both branches."""

    parts = "attention layernorm_before layernorm_after mlp dropout"
    shortcut1: Shortcut
    shortcut2: Shortcut
    attention: Any
    layernorm_before: Any
    layernorm_after: Any
    mlp: Any
    dropout: Any

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attended, _ = self.attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        x = self.shortcut1(hidden_states, self.dropout(attended))
        return self.shortcut2(x, self.dropout(self.mlp(self.layernorm_after(x))))

    def branches(self) -> list[Event]:
        return [
            Branch(self.shortcut1, Read(norms=(self.layernorm_before,)), self.attention.o_proj),
            Branch(self.shortcut2, Read(norms=(self.layernorm_after,)), self.mlp.fc2),
        ]


@register
class DecayedViTLayer(_Layer, vit.ViTLayer):
    pass


@register
class DecayedDeiTLayer(_Layer, deit.DeiTLayer):
    pass


@register
class DecayedViTMAELayer(_Layer, vit_mae.ViTMAELayer):
    pass


@register
class DecayedBeitLayer(_Layer, beit.BeitLayer):
    parts = "attention layernorm_before layernorm_after mlp dropout drop_path lambda_1 lambda_2 relative_position_bias"
    patch_size: Any

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if self.relative_position_bias is not None:
            assert resolution is not None, "the model passes the size of its images"
            window = (resolution[0] // self.patch_size, resolution[1] // self.patch_size)
            bias = self.relative_position_bias(window, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
            attention_mask = bias if attention_mask is None else bias + attention_mask
        normed = self.layernorm_before(hidden_states)
        attended, _ = self.attention(normed, attention_mask=attention_mask, **kwargs)
        x = self.shortcut1(hidden_states, self.drop_path(self.lambda_1 * self.dropout(attended)))
        mixed = self.dropout(self.mlp(self.layernorm_after(x)))
        return self.shortcut2(x, self.drop_path(self.lambda_2 * mixed))


class _Dino(Twin):
    """norm, attention or mlp, layer scale, drop path."""

    parts = "norm1 attention layer_scale1 drop_path norm2 mlp layer_scale2"
    shortcut1: Shortcut
    shortcut2: Shortcut
    attention: Any
    layer_scale1: Any
    layer_scale2: Any
    drop_path: Any
    norm1: Any
    norm2: Any
    mlp: Any

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attended, _ = self.attention(self.norm1(hidden_states), attention_mask=attention_mask, **kwargs)
        x = self.shortcut1(hidden_states, self.drop_path(self.layer_scale1(attended)))
        return self.shortcut2(x, self.drop_path(self.layer_scale2(self.mlp(self.norm2(x)))))

    def branches(self) -> list[Event]:
        gated = isinstance(self.mlp, dinov2.Dinov2SwiGLUFFN | registers.Dinov2WithRegistersSwiGLUFFN)
        return [
            Branch(self.shortcut1, Read(norms=(self.norm1,)), self.attention.o_proj),
            Branch(self.shortcut2, Read(norms=(self.norm2,)), self.mlp.down_proj if gated else self.mlp.fc2),
        ]


@register
class DecayedDinov2Layer(_Dino, dinov2.Dinov2Layer):
    pass


@register
class DecayedDinov2WithRegistersLayer(_Dino, registers.Dinov2WithRegistersLayer):
    pass


class _PostNorm(Twin):
    """LayerNorm(x + dense(h)): the last map of a branch and the sum, in a module of their own."""

    parts = "dense LayerNorm dropout"
    shortcut1: Shortcut
    dense: Any
    LayerNorm: Any
    dropout: Any

    def forward(self, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
        return self.LayerNorm(self.shortcut1(input_tensor, self.dropout(self.dense(hidden_states))))

    def branches(self) -> list[Event]:
        return [Branch(self.shortcut1, Read(), self.dense), Restart(Read(norms=(self.LayerNorm,)))]


@register
class DecayedBertSelfOutput(_PostNorm, bert.BertSelfOutput):
    kinds = ("attention",)


@register
class DecayedBertOutput(_PostNorm, bert.BertOutput):
    kinds = ("mlp",)


# ---- streams


def final_norm_stream(model: Any) -> Stream:
    return Stream((*through(model.layers), Read(norms=(model.layernorm,))), ends_raw=False)


def dinov2_stream(model: Any) -> Stream:
    return Stream((*through(model.encoder.layer), Read(norms=(model.layernorm,))), ends_raw=False)


def beit_stream(model: Any) -> Stream:
    """The final norm, or the one behind the mean of the patches."""
    pooled = None if model.pooler is None else model.pooler.layernorm
    norm = pooled if isinstance(model.layernorm, nn.Identity) else model.layernorm
    events = through(model.layers)
    if norm is None:
        return Stream(tuple(events), ends_raw=True)
    return Stream((*events, Read(norms=(norm,))), ends_raw=False)


def between_layers(model: Any) -> Stream:
    """Heads that read hidden states between layers see the stream itself: what is inside cannot be rescaled."""
    return Stream(tuple(through(model.beit.layers)), ends_raw=True)


describe(vit.ViTModel, final_norm_stream)
describe(deit.DeiTModel, final_norm_stream)
describe(vit_mae.ViTMAEModel, final_norm_stream)
describe(dinov2.Dinov2Model, dinov2_stream)
describe(registers.Dinov2WithRegistersModel, dinov2_stream)
describe(beit.BeitModel, beit_stream)
describe(beit.BeitForSemanticSegmentation, between_layers)
keep_plain(vit_mae.ViTMAEDecoder)
