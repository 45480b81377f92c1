"""torch.nn.TransformerEncoderLayer, pre-norm and post-norm, and the encoder made of it.

In evaluation torch may replace such a layer by one fused kernel; a decayed layer always runs its own sums.
"""

from __future__ import annotations

from torch import Tensor, nn

from anechoic.adapters.blocks import Twin, describe, prepare, refuse, register, through
from anechoic.shortcut import Branch, Event, Read, Restart, Shortcut, Stream


@register
class DecayedEncoderLayer(Twin, nn.TransformerEncoderLayer):
    parts = "self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2 activation"
    shortcut1: Shortcut
    shortcut2: Shortcut

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        if self.norm_first:
            x = self.shortcut1(src, self._sa_block(self.norm1(src), src_mask, src_key_padding_mask, is_causal))
            return self.shortcut2(x, self._ff_block(self.norm2(x)))
        x = self.norm1(self.shortcut1(src, self._sa_block(src, src_mask, src_key_padding_mask, is_causal)))
        return self.norm2(self.shortcut2(x, self._ff_block(x)))

    def branches(self) -> list[Event]:
        writers = (self.self_attn.out_proj, self.linear2)
        joints = zip((self.shortcut1, self.shortcut2), (self.norm1, self.norm2), writers, strict=True)
        if self.norm_first:
            return [Branch(shortcut, Read(norms=(norm,)), writer) for shortcut, norm, writer in joints]
        # Post-norm: a branch reads what a norm has just put out, which no decay has scaled.
        return [
            event
            for shortcut, norm, writer in joints
            for event in (Branch(shortcut, Read(), writer), Restart(Read(norms=(norm,))))
        ]


def encoder_stream(encoder: nn.TransformerEncoder) -> Stream:
    events = through(encoder.layers)
    if encoder.norm is None:
        return Stream(tuple(events), ends_raw=True)
    return Stream((*events, Read(norms=(encoder.norm,))), ends_raw=False)


def without_nested_tensors(encoder: nn.TransformerEncoder) -> None:
    """Only the fused kernel takes nested tensors, and it knows neither alpha nor one eps per norm."""
    encoder.use_nested_tensor = False


describe(nn.TransformerEncoder, encoder_stream)
prepare(nn.TransformerEncoder, without_nested_tensors)
refuse(nn.TransformerDecoderLayer, "it joins three branches, one of them fed from outside the stream")
