"""The masked autoencoder: its start, its first steps, its masking, and that skipping work changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from zoo import DECODER, TINY, inputs, make

from anechoic import build_model, effective_decay, linear
from anechoic.errors import UserError
from anechoic.models.layers import patchify
from anechoic.models.mae import mask_by_noise, normalize_patches, skip_sources


@pytest.mark.parametrize(
    ("depth", "decoder_depth", "sources"),
    [
        (12, 8, [11, 9, 7, 5, 3, 1]),
        (12, 4, [11, 8, 4, 1]),
        (24, 8, [23, 20, 17, 14, 10, 7, 4, 1]),
        (4, 2, [3, 1]),
        (6, 1, [5]),
        (2, 8, [1]),
    ],
)
def test_skip_sources_reach_down_to_the_shallow_blocks(depth, decoder_depth, sources):
    assert skip_sources(depth, decoder_depth) == sources


def test_masking_of_196_patches():
    noise = torch.rand(5, 196)
    masking = mask_by_noise(noise, 49)
    assert torch.equal(masking.mask.sum(dim=1), torch.full((5,), 147.0))
    # The 49 patches of smallest noise are kept, in the order of their noise.
    assert torch.equal(masking.ids_keep, noise.argsort(dim=1)[:, :49])
    assert torch.equal(masking.mask.gather(1, masking.ids_keep), torch.zeros(5, 49))
    # Un-shuffling puts every kept token back where it came from and the filler everywhere else.
    values = torch.arange(196.0).expand(5, 196)
    rows = torch.cat([torch.full((5, 1), -1.0), values.gather(1, masking.ids_keep), torch.full((5, 1), -2.0)], dim=1)
    restored = rows.gather(1, masking.ids_restore)
    assert torch.equal(restored[:, 0], torch.full((5,), -1.0))
    assert torch.equal(restored[:, 1:], torch.where(masking.mask == 0, values, -2.0))


def tiny(**options):
    torch.manual_seed(0)
    return build_model("mae_tiny_patch4", **{**TINY, **DECODER, **options})


@pytest.mark.parametrize("depth", [2, 4, 7])
@pytest.mark.parametrize("alpha_min", [1.0, 0.6])
def test_mae_starts_from_the_decayed_identity(depth, alpha_min):
    """At initialization: encoder output = effective decay * embedding, prediction 0, loss (n - 1) / n."""
    model = tiny(depth=depth, alpha_min=alpha_min).eval()
    images = torch.rand(3, 3, 16, 16)
    embedded = model.encoder.embed_tokens(patchify(images, 4), (4, 4))
    expected = effective_decay(linear(2 * depth, alpha_min)) * embedded
    torch.testing.assert_close(model.encoder(images), expected, rtol=1e-5, atol=1e-7)
    out = model(images)
    assert torch.equal(out.prediction, torch.zeros_like(out.prediction))
    assert out.loss.item() == pytest.approx(47 / 48, rel=1e-3)


@pytest.mark.parametrize("depth", [4, 6])
def test_first_steps_reach_the_layers_from_the_output_backwards(depth):
    model = tiny(depth=depth, alpha_min=0.6).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(4, 3, 16, 16)
    names = [name for name, _ in model.named_parameters()]
    outputs = {n for n in names if (".proj." in n or ".fc2." in n) and "patch_embed" not in n}
    predictor = {n for n in names if n.startswith("predictor")}
    decoder_outputs = {n for n in outputs if n.startswith(("decoder_blocks", "skips"))}
    second = predictor | decoder_outputs | {n for n in names if n.startswith(("decoder_embed", "decoder_norm"))}
    asleep_at_three = {n for n in names if n.startswith("encoder.blocks") and n not in outputs}
    expected = [predictor, second, set(names) - asleep_at_three, set(names)]
    for awake in expected:
        optimizer.zero_grad()
        model(images).loss.backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0} == awake
        optimizer.step()


@pytest.mark.parametrize("skips", [True, False])
def test_training_predicts_only_hidden_patches_with_the_same_result(skips):
    model = make("mae", skips=skips, alpha_min=0.6)
    images, noise = inputs(model)
    model.eval()
    whole = model(images, noise)
    whole.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.train()
    part = model(images, noise)
    part.loss.backward()
    torch.testing.assert_close(part.loss, whole.loss)
    hidden = noise.argsort(dim=1)[:, model.config.num_kept :]
    torch.testing.assert_close(part.prediction, whole.prediction.gather(1, hidden[..., None].expand(-1, -1, 48)))
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("skips", [True, False])
def test_predicting_a_part_omits_the_other_masked_patches(skips):
    """Asked for all of them, the decoder of chosen tokens is the whole one; asked for fewer, it knows no other."""
    model = make("mae", skips=skips, alpha_min=0.6).train()
    images, noise = inputs(model)
    masking = mask_by_noise(noise, model.config.num_kept)
    taps = model.encode(patchify(images, 4), model.config.grid_size, masking.ids_keep)
    whole = model.decode(taps, masking.ids_restore, model.config.grid_size, rows=masking.ids_masked + 1)
    tokens, heard, rows, patches = masking.first_masked(1.0)
    assert torch.equal(patches, masking.ids_masked)
    every = model.decode(taps, heard, model.config.grid_size, rows=rows, tokens=tokens)
    torch.testing.assert_close(every, whole)

    part = make("mae", skips=skips, alpha_min=0.6, predicted=0.25).train()
    out = part(images, noise)
    assert out.prediction.shape == (len(images), 3, 48)
    others = torch.zeros_like(noise).scatter(1, masking.ids_masked[:, 3:], 1) > 0
    reordered = part(images, torch.where(others, 9 - noise, noise))
    assert torch.equal(out.prediction, reordered.prediction)
    target = normalize_patches(patchify(images, 4)).gather(1, masking.ids_masked[:, :3, None].expand(-1, -1, 48))
    torch.testing.assert_close(out.loss, F.mse_loss(out.prediction, target))
    assert part.eval()(images, noise).prediction.shape == (len(images), 16, 48)


def test_embedding_only_visible_patches_equals_embedding_all():
    model = make("mae", alpha_min=0.6)
    images, noise = inputs(model)
    masking = mask_by_noise(noise, model.config.num_kept)
    encoder, patches = model.encoder, patchify(images, 4)
    whole = encoder.embed_tokens(patches, (4, 4))
    part = encoder.embed_tokens(patches, (4, 4), masking.ids_keep)
    torch.testing.assert_close(part[:, 1:], whole[:, 1:].gather(1, masking.ids_keep[..., None].expand(-1, -1, 48)))
    torch.testing.assert_close(part[:, 0], whole[:, 0])


def test_a_skip_layer_is_the_concatenation_it_stands_for():
    model = make("mae")
    skip = model.skips[0]
    x, encoded = torch.randn(2, 17, 32), torch.randn(2, 5, 48)
    masking = mask_by_noise(torch.rand(2, 16), 4)
    filled = torch.cat([encoded, skip.mask_token.expand(2, -1, -1)], dim=1).gather(
        1, masking.ids_restore[..., None].expand(-1, -1, 48)
    )
    expected = x + skip.fc2(F.silu(skip.fc1(torch.cat([filled, x], dim=-1))))
    torch.testing.assert_close(skip(x, encoded, masking.ids_restore), expected)


def test_the_loss_is_the_mean_over_hidden_patches_of_normalized_pixels():
    for norm_pix in (True, False):
        model = make("mae", norm_pix=norm_pix)
        images, noise = inputs(model)
        out = model(images, noise)
        target = patchify(images, 4)
        if norm_pix:
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        per_patch = (out.prediction - target).square().mean(-1)
        torch.testing.assert_close(out.loss, (per_patch * out.mask).sum() / out.mask.sum())


def test_defaults_follow_the_skips_and_the_decay():
    def chosen(**options):
        config = tiny(**options).config
        return config.zero_init, config.encoder_norm

    assert chosen(skips=True, alpha_min=1) == (True, False)
    assert chosen(skips=True, alpha_min=0.6) == (True, False)
    assert chosen(skips=False, alpha_min=1) == (False, True)
    assert chosen(skips=False, alpha_min=0.6) == (True, True)


def test_the_mask_is_drawn_when_no_noise_is_given():
    model = make("mae")
    images, _ = inputs(model)
    torch.manual_seed(0)
    first = model(images).mask
    second = model(images).mask
    assert first.sum() == second.sum() == 3 * 12
    assert not torch.equal(first, second)


@pytest.mark.parametrize("mask_ratio", [0, 0.0])
def test_a_mask_that_hides_nothing_is_refused(mask_ratio):
    with pytest.raises(UserError, match="hides no patch of 16"):
        build_model("mae_tiny_patch4", image_size=16, mask_ratio=mask_ratio)
    assert build_model("mae_tiny_patch4", image_size=16, mask_ratio=0.01).config.num_kept == 15
