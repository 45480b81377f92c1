"""Our networks equal transformers' randomly initialized ViTMAE and ViT in every hidden state and the loss."""

import pytest
import torch

from anechoic.adapters.checkpoint_metadata import CheckpointMetadata, Choices
from anechoic.adapters.transformers import recognize
from anechoic.models import build
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


def imported(theirs):
    """Return our network with their weights."""
    _, tensors, convert = recognize(theirs.state_dict())
    config, weights, _ = convert(tensors, CheckpointMetadata(Choices(), {}, theirs.config.to_dict()))
    ours = build(config).eval()
    ours.load_state_dict(weights, strict=True)
    return ours


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
    ours = imported(theirs)
    assert (ours.config.norm_eps, ours.config.norm_pix, ours.config.skips) == (eps, norm_pix, False)
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
    ours = imported(theirs)
    images = torch.randn(3, 3, size, size)
    with torch.no_grad():
        reference = theirs(images, output_hidden_states=True)
        states = hidden_states(ours, ours.embed_tokens(patchify(images, patch), ours.config.grid_size))
    torch.testing.assert_close(ours(images), reference.last_hidden_state, rtol=1e-5, atol=1e-5)
    for mine, their in zip(states[:-1], reference.hidden_states[:-1], strict=True):
        torch.testing.assert_close(mine, their, rtol=1e-5, atol=1e-5)
