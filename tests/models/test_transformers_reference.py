"""Against transformers: its randomly initialized ViTMAE and ViT, loaded into ours, give equal states and loss."""

import pytest
import torch

from anechoic import build_model
from anechoic.models.layers import patchify
from anechoic.models.mae import mask_by_noise

transformers = pytest.importorskip("transformers", reason="transformers is the reference")


def shake(model):
    """Move every trained parameter away from zeros and ones."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "pos" not in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model.eval()


def set_positions(mae):
    """The library leaves the fixed positions of a model that was not loaded at zero; have it fill them."""
    num_patches = (mae.config.image_size // mae.config.patch_size) ** 2
    for part in (*mae.modules(), *mae.parameters()):
        part._is_hf_initialized = False
    mae.vit.embeddings.initialize_weights()
    mae.decoder.initialize_weights(num_patches)
    assert mae.vit.embeddings.position_embeddings[0, 1].norm() > 1
    assert mae.decoder.decoder_pos_embed[0, 1].norm() > 1


def block_weights(layer, prefix):
    attention = [getattr(layer.attention, f"{part}_proj") for part in "qkv"]
    weights = {
        "attn.qkv.weight": torch.cat([part.weight for part in attention]),
        "attn.qkv.bias": torch.cat([part.bias for part in attention]),
    }
    for ours, theirs in (
        ("attn.proj", layer.attention.o_proj),
        ("norm1", layer.layernorm_before),
        ("norm2", layer.layernorm_after),
        ("mlp.fc1", layer.mlp.fc1),
        ("mlp.fc2", layer.mlp.fc2),
    ):
        weights |= {f"{ours}.weight": theirs.weight, f"{ours}.bias": theirs.bias}
    return {f"{prefix}{name}": value for name, value in weights.items()}


def encoder_weights(vit):
    projection = vit.embeddings.patch_embeddings.projection
    weights = {
        "class_token": vit.embeddings.cls_token,
        "patch_embed.proj.weight": projection.weight,
        "patch_embed.proj.bias": projection.bias,
        "norm.weight": vit.layernorm.weight,
        "norm.bias": vit.layernorm.bias,
    }
    for i, layer in enumerate(vit.layers):
        weights |= block_weights(layer, f"blocks.{i}.")
    return weights


def hidden_states(encoder, x):
    states = [x]
    for block in encoder.blocks:
        states.append(block(states[-1]))
    return states


@pytest.mark.parametrize("norm_pix", [True, False])
@pytest.mark.parametrize(
    ("dim", "depth", "heads", "patch", "size", "eps"),
    [(48, 3, 3, 4, 16, 1e-6), (64, 2, 4, 8, 32, 1e-12), (32, 4, 2, 16, 64, 1e-3)],
)
def test_masked_autoencoder(dim, depth, heads, patch, size, eps, norm_pix):
    torch.manual_seed(depth)
    theirs = shake(
        transformers.ViTMAEForPreTraining(
            transformers.ViTMAEConfig(
                hidden_size=dim, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=4 * dim,
                image_size=size, patch_size=patch, layer_norm_eps=eps, norm_pix_loss=norm_pix, mask_ratio=0.75,
                decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=2,
                decoder_intermediate_size=128,
            )
        )
    )  # fmt: skip
    set_positions(theirs)
    shake(theirs)
    ours = build_model(
        "mae_tiny_patch4", patch_size=patch, dim=dim, depth=depth, num_heads=heads, image_size=size, norm_eps=eps,
        decoder_norm_eps=eps, norm_pix=norm_pix, skips=False, decoder_dim=32, decoder_depth=2, decoder_num_heads=2,
    ).eval()  # fmt: skip
    decoder = theirs.decoder
    weights = {f"encoder.{name}": value for name, value in encoder_weights(theirs.vit).items()}
    weights["mask_token"] = decoder.mask_token
    for mine, part in (
        ("decoder_embed", decoder.decoder_embed),
        ("decoder_norm", decoder.decoder_norm),
        ("predictor", decoder.decoder_pred),
    ):
        weights |= {f"{mine}.weight": part.weight, f"{mine}.bias": part.bias}
    for i, layer in enumerate(decoder.decoder_layers):
        weights |= block_weights(layer, f"decoder_blocks.{i}.")
    ours.load_state_dict(weights, strict=True)

    images, noise = torch.randn(3, 3, size, size), torch.rand(3, (size // patch) ** 2)
    with torch.no_grad():
        reference = theirs(images, noise=noise, output_hidden_states=True)
        out = ours(images, noise)
        masking = mask_by_noise(noise, ours.config.num_kept)
        grid = ours.config.grid_size
        states = hidden_states(ours.encoder, ours.encoder.embed_tokens(patchify(images, patch), grid, masking.ids_keep))
    assert torch.equal(out.mask, reference.mask)
    torch.testing.assert_close(out.loss, reference.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(out.prediction, reference.logits, rtol=1e-5, atol=1e-5)
    encoder_states = reference.hidden_states[: depth + 1]
    assert len(encoder_states) == depth + 1
    for mine, their in zip(states[:-1], encoder_states[:-1], strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("dim", "depth", "heads", "patch", "size", "eps"), [(48, 3, 3, 4, 16, 1e-12), (64, 2, 4, 8, 32, 1e-6)]
)
def test_vision_transformer(dim, depth, heads, patch, size, eps):
    torch.manual_seed(depth)
    config = transformers.ViTConfig(
        hidden_size=dim, num_hidden_layers=depth, num_attention_heads=heads, intermediate_size=4 * dim, image_size=size,
        patch_size=patch, layer_norm_eps=eps,
    )  # fmt: skip
    theirs = shake(transformers.ViTModel(config, add_pooling_layer=False))
    ours = build_model(
        f"vit_tiny_patch{patch}",
        dim=dim,
        depth=depth,
        num_heads=heads,
        image_size=size,
        norm_eps=eps,
        positions="learned",
    ).eval()
    weights = encoder_weights(theirs)
    weights["positions"] = theirs.embeddings.position_embeddings
    ours.load_state_dict(weights, strict=True)
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        reference = theirs(images, output_hidden_states=True)
        states = hidden_states(ours, ours.embed_tokens(patchify(images, patch), ours.config.grid_size))
    torch.testing.assert_close(ours(images), reference.last_hidden_state, rtol=1e-5, atol=1e-5)
    for mine, their in zip(states[:-1], reference.hidden_states[:-1], strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-5)
