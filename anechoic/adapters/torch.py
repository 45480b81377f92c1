"""torch.nn.TransformerEncoderLayer, pre-norm and post-norm, and the encoder made of it.

In evaluation torch may replace such a layer by one fused kernel; a decayed layer always computes its own sums.
"""

from __future__ import annotations

from torch import Tensor, nn

from anechoic.adapters.blocks import DecayedBlock, describe, pre_norm, prepare, refuse, replaces, stream_to
from anechoic.shortcut import Branch, Event, Read, Restart, Stream


@replaces("torch.nn.modules.transformer.TransformerEncoderLayer")
class EncoderLayer(DecayedBlock):
    parts = "self_attn linear1 dropout linear2 norm1 norm2 dropout1 dropout2 activation"

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
        attend, mix = self.self_attn.out_proj, self.linear2
        if self.norm_first:
            return pre_norm(self, (self.norm1, attend), (self.norm2, mix))
        # Post-norm: a branch reads the output of a norm, which no decay has scaled.
        return [
            Branch(self.shortcut1, Read(), attend),
            Restart(Read(norms=(self.norm1,))),
            Branch(self.shortcut2, Read(), mix),
            Restart(Read(norms=(self.norm2,))),
        ]


def encoder_stream(encoder: nn.TransformerEncoder) -> Stream:
    return stream_to(encoder.layers, encoder.norm)


def without_nested_tensors(encoder: nn.TransformerEncoder) -> None:
    """Only the fused kernel takes nested tensors, and it knows neither alpha nor one eps per norm."""
    encoder.use_nested_tensor = False


describe(nn.TransformerEncoder, encoder_stream)
prepare(nn.TransformerEncoder, without_nested_tensors)
refuse(nn.TransformerDecoderLayer, "it joins three branches, one of them fed from outside the stream")
