"""diffusers' DiT: blocks modulated by time and label (adaLN-zero). Other uses of the same block class are refused."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anechoic.adapters.blocks import DecayedBlock, describe, pre_norm, prepare, replaces, stream_to
from anechoic.errors import UserError
from anechoic.shortcut import Event, Stream

BLOCK = "diffusers.models.attention.BasicTransformerBlock"


@replaces(BLOCK)
class DiTBlock(DecayedBlock):
    parts = "norm1 attn1 norm3 ff"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        timestep: Tensor | None = None,
        cross_attention_kwargs: dict[str, Any] | None = None,
        class_labels: Tensor | None = None,
        added_cond_kwargs: dict[str, Tensor] | None = None,
    ) -> Tensor:
        """The two encoder arguments and added_cond_kwargs belong to the block's other uses and are not read."""
        modulated, gate1, shift, scale, gate2 = self.norm1(
            hidden_states, timestep, class_labels, hidden_dtype=hidden_states.dtype
        )
        attended = self.attn1(modulated, attention_mask=attention_mask, **(cross_attention_kwargs or {}))
        x = self.shortcut1(hidden_states, gate1.unsqueeze(1) * attended)
        modulated = self.norm3(x) * (1 + scale[:, None]) + shift[:, None]
        return self.shortcut2(x, gate2.unsqueeze(1) * self.ff(modulated))

    def branches(self) -> list[Event]:
        """The gates are functions of the condition, so a branch's factor scales the map before its gate."""
        return pre_norm(self, (self.norm1.norm, self.attn1.to_out[0]), (self.norm3, self.ff.net[2]))


def check_use(block: Any) -> None:
    if block.norm_type != "ada_norm_zero" or block.pos_embed is not None or block.only_cross_attention:
        raise UserError(
            f"This BasicTransformerBlock is used with {block.norm_type!r}; only DiT's 'ada_norm_zero' blocks are known."
        )
    if block._chunk_size is not None:
        raise UserError("This BasicTransformerBlock runs in chunks: switch that off with set_chunk_feed_forward(None).")


def dit_stream(model: Any) -> Stream:
    return stream_to(model.transformer_blocks, model.norm_out)


prepare(BLOCK, check_use)
describe("diffusers.models.transformers.dit_transformer_2d.DiTTransformer2DModel", dit_stream)
