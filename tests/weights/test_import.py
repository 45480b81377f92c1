"""Other people's checkpoints as our networks: against the program they come from, or its forward pass written out."""

import argparse
import json
import os
import pickle
import zipfile

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from anechoic.adapters.transformers import to_timm
from anechoic.data.preprocess import Preprocess
from anechoic.errors import UserError
from anechoic.models.layers import sincos_positions
from anechoic.shortcut import linear
from anechoic.weights.importing import Choices, import_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
HF = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 96,
    "image_size": 32,
    "patch_size": 8,
}


OFFICIAL_LAYER = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")


def tensors_like(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def imported(path, **choices):
    return import_checkpoint(path, Choices(**choices))


# ---- import: transformers and timm are their own references


@pytest.fixture(scope="module")
def vit_mae(tmp_path_factory):
    """transformers' ViTMAE with the positions its checkpoints have, and its folder."""
    transformers = pytest.importorskip("transformers", reason="transformers is what this test is about")
    decoder = {f"decoder_{name}": HF[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size")}
    config = transformers.ViTMAEConfig(**HF, **decoder, decoder_num_hidden_layers=2, norm_pix_loss=True)
    torch.manual_seed(0)
    model = transformers.ViTMAEForPreTraining(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        table = F.pad(sincos_positions(48, (4, 4))[None], (0, 0, 1, 0))
        model.vit.embeddings.position_embeddings.copy_(table)
        model.decoder.decoder_pos_embed.copy_(table)
    folder = tmp_path_factory.mktemp("vit-mae")
    model.save_pretrained(folder)
    return model.eval(), folder


def test_a_masked_autoencoder_of_transformers(vit_mae):
    theirs, folder = vit_mae
    ours = imported(folder)
    assert ours.kind == "MAE"
    assert ours.left_out == ["pos_embed", "decoder_pos_embed"]
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, got = theirs(IMAGES, noise=noise), ours.network(IMAGES, noise)
    torch.testing.assert_close(got.loss, expected.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(got.prediction, expected.logits, atol=1e-4, rtol=1e-4)


def test_module_names_and_file_names_import_alike(vit_mae, tmp_path):
    theirs, folder = vit_mae
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again, first = imported(tmp_path).network.state_dict(), imported(folder).network.state_dict()
    assert all(torch.equal(again[name], value) for name, value in first.items())


def official(theirs):
    """Return the weights of transformers' ViTMAE under the names of the original MAE."""
    renamed = to_timm(theirs.state_dict())
    layers = [f"{blocks}.{i}" for blocks, depth in (("blocks", 3), ("decoder_blocks", 2)) for i in range(depth)]
    modules = [f"{layer}.{name}" for layer in layers for name in OFFICIAL_LAYER]
    modules += ["patch_embed.proj", "norm", "decoder_embed", "decoder_norm", "decoder_pred"]
    names = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    assert set(renamed) == names | {"cls_token", "pos_embed", "mask_token", "decoder_pos_embed"}
    return renamed


def test_the_original_masked_autoencoder_with_its_command_line(vit_mae, tmp_path):
    theirs, _ = vit_mae
    path = tmp_path / "checkpoint-799.pth"
    wrapped = {"model": official(theirs), "epoch": 799, "args": argparse.Namespace(batch_size=64, lr=1.5e-4)}
    torch.save(wrapped, path)
    ours = imported(path, num_heads=3, decoder_num_heads=3)
    assert (ours.kind, ours.wrapper) == ("MAE", "model")
    noise = torch.rand(3, 16)
    with torch.no_grad():
        expected = theirs(IMAGES, noise=noise).loss
        # Their eps is 1e-12 and the original's 1e-6: equal to float precision on these variances.
        torch.testing.assert_close(ours.network(IMAGES, noise).loss, expected, atol=1e-4, rtol=1e-4)


def test_the_released_encoder_alone_is_a_vit(vit_mae, tmp_path):
    theirs, _ = vit_mae
    encoder = {
        name: value for name, value in official(theirs).items() if not name.startswith(("decoder", "mask_token"))
    }
    torch.save({"model": encoder}, tmp_path / "mae_pretrain.pth")
    ours = imported(tmp_path / "mae_pretrain.pth", num_heads=3)
    assert ours.kind == "ViT"
    assert ours.network.config.positions == "sincos"
    theirs.config.mask_ratio = theirs.vit.config.mask_ratio = 0.0
    in_order = torch.arange(16).expand(3, 16) / 16
    with torch.no_grad():
        expected = theirs.vit(IMAGES, noise=in_order).last_hidden_state
        theirs.config.mask_ratio = theirs.vit.config.mask_ratio = 0.75
        torch.testing.assert_close(ours.network(IMAGES), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_classes": 7}, {"num_classes": 7, "global_pool": "avg"}])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_vit_of_timm(options, suffix, tmp_path):
    pytest.importorskip("timm", reason="timm is what this test is about")
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 0}
    theirs = VisionTransformer(**{**sizes, **options}).eval()
    path = tmp_path / f"vit{suffix}"
    if suffix == ".pth":
        torch.save({f"module.{name}": value for name, value in theirs.state_dict().items()}, path)
    else:
        save_file(theirs.state_dict(), path)
    ours = imported(path, num_heads=3)
    assert ours.network.config.positions == "learned"
    with torch.no_grad():
        expected = theirs(IMAGES) if options else theirs.forward_features(IMAGES)
        torch.testing.assert_close(ours.network(IMAGES), expected, atol=1e-5, rtol=1e-5)


def test_a_vit_of_transformers(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is what this test is about")
    torch.manual_seed(0)
    theirs = transformers.ViTModel(transformers.ViTConfig(**HF)).eval()
    theirs.save_pretrained(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.2] * 3}))
    ours = imported(tmp_path)
    assert ours.left_out == ["pooler.dense.bias", "pooler.dense.weight"]
    assert ours.preprocess == Preprocess((0.5,) * 3, (0.2,) * 3, 32, 3)
    with torch.no_grad():
        expected = theirs(IMAGES).last_hidden_state
        torch.testing.assert_close(ours.network(IMAGES), expected, atol=1e-5, rtol=1e-5)


# ---- import: the authors' networks, their forward pass written out from their names


def block_shapes(prefix, dim, *, norms=True):
    shapes = {
        "attn.qkv.weight": (3 * dim, dim),
        "attn.qkv.bias": (3 * dim,),
        "attn.proj.weight": (dim, dim),
        "attn.proj.bias": (dim,),
        "mlp.fc1.weight": (4 * dim, dim),
        "mlp.fc1.bias": (4 * dim,),
        "mlp.fc2.weight": (dim, 4 * dim),
        "mlp.fc2.bias": (dim,),
    }
    if norms:
        shapes |= {f"norm{i}.{kind}": (dim,) for i in (1, 2) for kind in ("weight", "bias")}
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def affine(t, name, x):
    return F.linear(x, t[f"{name}.weight"], t[f"{name}.bias"])


def normed(t, name, x):
    return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps=1e-6)


def attention(t, prefix, x, heads):
    B, N, D = x.shape
    q, k, v = affine(t, f"{prefix}.qkv", x).view(B, N, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
    weights = (q @ k.transpose(-1, -2) * (D // heads) ** -0.5).softmax(dim=-1)
    return affine(t, f"{prefix}.proj", (weights @ v).transpose(1, 2).reshape(B, N, D))


def mlp(t, prefix, x, approximate="none"):
    return affine(t, f"{prefix}.fc2", F.gelu(affine(t, f"{prefix}.fc1", x), approximate=approximate))


def pre_norm_block(t, prefix, x, heads, alphas=(1.0, 1.0)):
    x = alphas[0] * x + attention(t, f"{prefix}.attn", normed(t, f"{prefix}.norm1", x), heads)
    return alphas[1] * x + mlp(t, f"{prefix}.mlp", normed(t, f"{prefix}.norm2", x))


def decayed_mae(depth=4, decoder_depth=3, dim=48, width=32, patch=8):
    shapes = {
        "cls_token": (1, 1, dim),
        "patch_embed.proj.weight": (dim, 3, patch, patch),
        "patch_embed.proj.bias": (dim,),
        "decoder_cls_token": (1, 1, width),
        "decoder_embed.weight": (width, width),
        "decoder_embed.bias": (width,),
        "decoder_norm.weight": (width,),
        "decoder_norm.bias": (width,),
        "decoder_pred.weight": (patch * patch * 3, width),
        "decoder_pred.bias": (patch * patch * 3,),
    }
    for i in range(depth):
        shapes |= block_shapes(f"blocks.{i}", dim)
    for i in range(decoder_depth):
        shapes |= block_shapes(f"decoder_blocks.{i}", width)
    for i in range(depth // 2):
        shapes |= {f"skip.{i}.mask_token": (1, 1, dim)}
        shapes |= {f"skip.{i}.fc.0.weight": (width, dim + width), f"skip.{i}.fc.0.bias": (width,)}
        shapes |= {f"skip.{i}.fc.2.weight": (width, width), f"skip.{i}.fc.2.bias": (width,)}
    tensors = tensors_like(shapes)
    tensors["pos_embed"] = F.pad(sincos_positions(dim, (4, 4))[None], (0, 0, 1, 0))
    tensors["decoder_pos_embed"] = F.pad(sincos_positions(width, (4, 4))[None], (0, 0, 1, 0))
    return tensors


def run_decayed_mae(t, images, noise, alpha_min):
    """Loss of the authors' network: 4 encoder blocks, skips from blocks 3 and 1 into decoder blocks 0 and 1 of 3."""
    B = len(images)
    x = F.conv2d(images, t["patch_embed.proj.weight"], t["patch_embed.proj.bias"], stride=8).flatten(2).transpose(1, 2)
    x = x + t["pos_embed"][:, 1:]
    order = noise.argsort(dim=1)
    keep, restore = order[:, :4], order.argsort(dim=1)
    x = x.gather(1, keep[..., None].expand(-1, -1, 48))
    x = torch.cat([t["cls_token"].expand(B, -1, -1), x], dim=1)
    alphas = linear(8, alpha_min)
    sources = []
    for i in range(4):
        x = pre_norm_block(t, f"blocks.{i}", x, 3, alphas[2 * i : 2 * i + 2])
        if i % 2:
            sources.append(x)
    y = affine(t, "decoder_embed", torch.cat([t["decoder_cls_token"], t["decoder_pos_embed"][:, 1:]], dim=1))
    y = y.expand(B, -1, -1)
    for i in range(3):
        if sources:
            source = sources.pop()
            filled = torch.cat([source[:, 1:], t[f"skip.{i}.mask_token"].expand(B, 12, -1)], dim=1)
            filled = filled.gather(1, restore[..., None].expand(-1, -1, 48))
            heard = torch.cat([torch.cat([source[:, :1], filled], dim=1), y], dim=-1)
            y = y + affine(t, f"skip.{i}.fc.2", F.silu(affine(t, f"skip.{i}.fc.0", heard)))
        y = pre_norm_block(t, f"decoder_blocks.{i}", y, 2)
    prediction = affine(t, "decoder_pred", normed(t, "decoder_norm", y))[:, 1:]
    patches = images.reshape(B, 3, 4, 8, 4, 8).permute(0, 2, 4, 3, 5, 1).reshape(B, 16, 192)
    target = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    hidden = (restore >= 4).float()
    return ((prediction - target).square().mean(-1) * hidden).sum() / hidden.sum()


def test_the_authors_masked_autoencoder(tmp_path):
    tensors = decayed_mae()
    torch.save({"model": tensors, "epoch": 3}, tmp_path / "decayed.pth")
    ours = imported(tmp_path / "decayed.pth", alpha_min=0.6, num_heads=3, decoder_num_heads=2)
    assert ours.kind == "decayed MAE"
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = run_decayed_mae(tensors, IMAGES, noise, 0.6)
        torch.testing.assert_close(ours.network(IMAGES, noise).loss, expected, atol=1e-5, rtol=1e-5)
        assert not torch.allclose(run_decayed_mae(tensors, IMAGES, noise, 0.7), expected, rtol=1e-4)


def sit(decayed, dim=48, depth=4, classes=5):
    shapes = {
        "x_embedder.proj.weight": (dim, 4, 2, 2),
        "x_embedder.proj.bias": (dim,),
        "t_embedder.mlp.0.weight": (dim, 256),
        "t_embedder.mlp.0.bias": (dim,),
        "t_embedder.mlp.2.weight": (dim, dim),
        "t_embedder.mlp.2.bias": (dim,),
        "y_embedder.embedding_table.weight": (classes + 1, dim),
        "final_layer.linear.weight": (2 * 2 * 8, dim),
        "final_layer.linear.bias": (2 * 2 * 8,),
        "final_layer.adaLN_modulation.1.weight": (2 * dim, dim),
        "final_layer.adaLN_modulation.1.bias": (2 * dim,),
    }
    half = depth // 2
    names = [f"enc_blocks.{i}" for i in range(half)] + [f"dec_blocks.{i}" for i in range(half)]
    for name in names if decayed else [f"blocks.{i}" for i in range(depth)]:
        shapes |= block_shapes(name, dim, norms=False)
        shapes |= {f"{name}.adaLN_modulation.1.weight": (6 * dim, dim), f"{name}.adaLN_modulation.1.bias": (6 * dim,)}
        if name.startswith("dec_blocks"):
            shapes |= {f"{name}.skip.weight": (dim, dim), f"{name}.skip.bias": (dim,)}
    tensors = tensors_like(shapes)
    tensors["pos_embed"] = sincos_positions(dim, (4, 4))[None]
    return tensors


def run_sit(t, x, time, labels, alphas):
    """The velocity of SiT with 4 blocks, plain or, with enc_blocks and dec_blocks, the authors' decayed one."""
    B = len(x)
    frequencies = torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(128) / 128)
    angles = time[:, None] * frequencies
    c = F.silu(affine(t, "t_embedder.mlp.0", torch.cat([angles.cos(), angles.sin()], dim=1)))
    c = F.silu(affine(t, "t_embedder.mlp.2", c) + t["y_embedder.embedding_table.weight"][labels])
    h = F.conv2d(x, t["x_embedder.proj.weight"], t["x_embedder.proj.bias"], stride=2).flatten(2).transpose(1, 2)
    h = h + t["pos_embed"]
    decayed = "enc_blocks.0.attn.qkv.weight" in t
    names = (
        ["enc_blocks.0", "enc_blocks.1", "dec_blocks.0", "dec_blocks.1"]
        if decayed
        else [f"blocks.{i}" for i in range(4)]
    )
    taps = []
    for i, name in enumerate(names):
        if name.startswith("dec_blocks"):
            h = h + affine(t, f"{name}.skip", taps.pop())
        shift1, scale1, gate1, shift2, scale2, gate2 = affine(t, f"{name}.adaLN_modulation.1", c)[:, None].chunk(
            6, dim=-1
        )
        y = F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale1) + shift1
        h = alphas[2 * i] * h + gate1 * attention(t, f"{name}.attn", y, 3)
        y = F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale2) + shift2
        h = alphas[2 * i + 1] * h + gate2 * mlp(t, f"{name}.mlp", y, approximate="tanh")
        if name.startswith("enc_blocks"):
            taps.append(h)
    shift, scale = affine(t, "final_layer.adaLN_modulation.1", c)[:, None].chunk(2, dim=-1)
    y = affine(t, "final_layer.linear", F.layer_norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift)
    y = y.reshape(B, 4, 4, 2, 2, 8)
    return torch.einsum("nhwpqc->nchpwq", y).reshape(B, 8, 8, 8)[:, :4]


@pytest.mark.parametrize("decayed", [False, True])
def test_sit_and_the_authors_sit(decayed, tmp_path):
    tensors = sit(decayed)
    torch.save({"ema": tensors, "model": sit(decayed), "args": argparse.Namespace(num_classes=5)}, tmp_path / "sit.pt")
    chosen = {"alpha_min": 0.8} if decayed else {}
    ours = imported(tmp_path / "sit.pt", num_heads=3, **chosen)
    assert (ours.kind, ours.wrapper) == ("decayed SiT" if decayed else "SiT", "ema")
    x, time, labels = torch.randn(2, 4, 8, 8), torch.tensor([0.2, 0.7]), torch.tensor([1, 4])
    with torch.no_grad():
        expected = run_sit(tensors, x, time, labels, linear(8, 0.8 if decayed else 1.0))
        torch.testing.assert_close(ours.network(x, time, labels), expected, atol=1e-4, rtol=1e-4)


# ---- import: what does not fit


def test_a_decayed_file_needs_its_alpha(tmp_path):
    torch.save(decayed_mae(), tmp_path / "decayed.pth")
    with pytest.raises(UserError, match="does not state the alpha_min"):
        imported(tmp_path / "decayed.pth", num_heads=3)
    torch.save(sit(False), tmp_path / "sit.pth")
    with pytest.raises(UserError, match="trained with plain shortcuts"):
        imported(tmp_path / "sit.pth", num_heads=3, alpha_min=0.6, num_classes=5)


def test_a_file_that_unpacks_to_far_more_is_refused_before_it_does(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(100 << 20))
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was unpacked"))
    with pytest.raises(UserError, match="decompression bomb"):
        imported(tmp_path / "bomb.pth")


def test_misfitting_tensors_are_named(tmp_path):
    tensors = decayed_mae()
    del tensors["blocks.2.norm1.bias"]
    tensors["blocks.1.gamma"] = torch.ones(3)
    tensors["decoder_norm.weight"] = torch.ones(31)
    torch.save(tensors, tmp_path / "damaged.pth")
    with pytest.raises(UserError) as error:
        imported(tmp_path / "damaged.pth", alpha_min=0.6, num_heads=3, decoder_num_heads=2)
    message = str(error.value)
    assert "1 missing: encoder.blocks.2.norm1.bias" in message
    assert "1 unexpected: encoder.blocks.1.gamma" in message
    assert "1 of another shape: decoder_norm.weight (31,) instead of (32,)" in message


def test_other_architectures_and_other_positions_are_refused(tmp_path):
    torch.save({"layer1.0.conv1.weight": torch.ones(3)}, tmp_path / "resnet.pth")
    with pytest.raises(UserError, match=r"no known architecture.*layer1\.0\.conv1\.weight"):
        imported(tmp_path / "resnet.pth")
    tensors = decayed_mae()
    tensors["pos_embed"] += 0.1
    torch.save(tensors, tmp_path / "moved.pth")
    with pytest.raises(UserError, match="pos_embed of this masked autoencoder is not the fixed"):
        imported(tmp_path / "moved.pth", alpha_min=0.6, num_heads=3)


# ---- import: what the file itself states


def test_alpha_min_zero_is_not_taken_for_unset(tmp_path):
    torch.save(decayed_mae(), tmp_path / "decayed.pth")
    with pytest.raises(UserError, match=r"alpha must lie in \(0, 1\], not 0"):
        imported(tmp_path / "decayed.pth", alpha_min=0.0, num_heads=3, decoder_num_heads=2)


def test_training_checkpoint_of_the_authors_has_its_alpha_min(tmp_path):
    tensors, path = decayed_mae(), tmp_path / "checkpoint-399.pth"
    arguments = argparse.Namespace(min_decay=0.7, norm_pix_loss=False, mask_ratio=0.5, lr=1e-3)
    torch.save({"model": tensors, "epoch": 399, "args": arguments}, path)
    ours = imported(path, num_heads=3, decoder_num_heads=2)
    config = ours.network.config
    assert (config.alpha_min, config.norm_pix, config.mask_ratio) == (0.7, False, 0.5)
    assert ours.assumed == {}
    again = imported(path, num_heads=3, decoder_num_heads=2, alpha_min=0.7, norm_pix=False, mask_ratio=0.5)
    assert again.network.config == config
    for option, value, name in (("alpha_min", 0.6, "min_decay"), ("norm_pix", True, "norm_pix_loss")):
        with pytest.raises(UserError, match=rf"The file has {name} = .*, but --{option.replace('_', '-')} is {value}"):
            imported(path, num_heads=3, decoder_num_heads=2, **{option: value})
    with pytest.raises(UserError, match=r"The file has mask_ratio = 0\.5, but --mask-ratio is 0\.75"):
        imported(path, num_heads=3, decoder_num_heads=2, mask_ratio=0.75)


def test_unstated_values_are_reported_as_assumed(tmp_path):
    torch.save(decayed_mae(), tmp_path / "bare.pth")
    ours = imported(tmp_path / "bare.pth", alpha_min=0.6, num_heads=3, decoder_num_heads=2)
    assert ours.assumed == {"mask_ratio": 0.75, "norm_pix": True}
    chosen = imported(
        tmp_path / "bare.pth", alpha_min=0.6, num_heads=3, decoder_num_heads=2, mask_ratio=0.5, norm_pix=False
    )
    assert (chosen.network.config.mask_ratio, chosen.network.config.norm_pix) == (0.5, False)
    assert chosen.assumed == {}


def test_sit_has_its_decay_under_another_name(tmp_path):
    arguments = argparse.Namespace(min_sigma=0.9, num_classes=5)
    torch.save({"ema": sit(True), "args": arguments}, tmp_path / "sit.pt")
    assert imported(tmp_path / "sit.pt", num_heads=3).network.config.alpha_min == 0.9
    with pytest.raises(UserError, match=r"min_sigma = 0\.9, but --alpha-min is 0\.8"):
        imported(tmp_path / "sit.pt", num_heads=3, alpha_min=0.8)
    torch.save(sit(True), tmp_path / "bare.pt")
    with pytest.raises(UserError, match=r"authors' own is 0\.8"):
        imported(tmp_path / "bare.pt", num_heads=3, num_classes=5)


def test_arguments_of_the_wrong_kind_are_refused(tmp_path):
    for name, value in (("min_decay", "0.7"), ("min_decay", float("nan")), ("norm_pix_loss", 3), ("mask_ratio", True)):
        said = argparse.Namespace(**{"min_decay": 0.7, name: value})
        torch.save({"model": decayed_mae(), "args": said}, tmp_path / "odd.pth")
        with pytest.raises(UserError, match=f"The file has {name} = .* which is not"):
            imported(tmp_path / "odd.pth", num_heads=3, decoder_num_heads=2)


def test_options_that_cannot_be_honored_are_refused(vit_mae, tmp_path):
    torch.save(sit(False), tmp_path / "sit.pth")
    with pytest.raises(UserError, match="A SiT has no mask ratio: omit --mask-ratio"):
        imported(tmp_path / "sit.pth", num_heads=3, num_classes=5, mask_ratio=0.5)
    with pytest.raises(UserError, match="num_attention_heads = 3, but --num-heads is 6"):
        imported(vit_mae[1], num_heads=6)


@pytest.mark.parametrize(("null", "rows"), [(True, 6), (False, 5)])
def test_a_label_table_with_and_without_a_null_row(null, rows, tmp_path):
    torch.save(sit(False, classes=rows - 1), tmp_path / "sit.pth")
    ours = imported(tmp_path / "sit.pth", num_heads=3, num_classes=5).network
    assert (ours.config.num_classes, ours.config.label_dropout > 0) == (5, null)
    with pytest.raises(UserError, match=rf"{rows} rows, and the file does not state"):
        imported(tmp_path / "sit.pth", num_heads=3)
    with pytest.raises(UserError, match=f"{rows} rows, which is not 3 classes"):
        imported(tmp_path / "sit.pth", num_heads=3, num_classes=3)
    torch.save(sit(False, classes=999 + null), tmp_path / "imagenet.pth")
    config = imported(tmp_path / "imagenet.pth", num_heads=3).network.config
    assert (config.num_classes, config.label_dropout > 0) == (1000, null)


@pytest.mark.parametrize("kind", ["vit", "mae"])
def test_the_activation_of_transformers(kind, tmp_path):
    """gelu_new is computed, relu is refused: both were taken for gelu."""
    transformers = pytest.importorskip("transformers", reason="transformers is what this test is about")
    torch.manual_seed(0)
    if kind == "vit":
        theirs = transformers.ViTModel(transformers.ViTConfig(**HF, hidden_act="gelu_new")).eval()
    else:
        decoder = {f"decoder_{name}": HF[name] for name in ("hidden_size", "num_attention_heads", "intermediate_size")}
        config = transformers.ViTMAEConfig(**HF, **decoder, decoder_num_hidden_layers=2, hidden_act="gelu_new")
        theirs = transformers.ViTMAEForPreTraining(config).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
            if kind == "mae" and "pos" in name:
                parameter.copy_(F.pad(sincos_positions(48, (4, 4))[None], (0, 0, 1, 0)))
    theirs.save_pretrained(tmp_path)
    ours = imported(tmp_path).network
    noise = torch.rand(3, 16, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(IMAGES).last_hidden_state if kind == "vit" else theirs(IMAGES, noise=noise).logits
        got = ours(IMAGES) if kind == "vit" else ours(IMAGES, noise).prediction
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=2e-5)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "hidden_act": "relu"}))
    with pytest.raises(UserError, match="trained with the activation 'relu'"):
        imported(tmp_path)


def test_the_packed_network_computes_the_same_activation():
    from anechoic.models import build_model
    from anechoic.models.packed import FrozenTransformer

    torch.manual_seed(0)
    model = build_model("vit_tiny_patch8", image_size=32, dim=48, depth=2, num_heads=3, gelu="tanh").eval()
    kept = {}
    with torch.inference_mode():
        FrozenTransformer(model, deepest=3, class_only=False)(IMAGES, lambda x, layer: kept.update({layer: x.clone()}))
        torch.testing.assert_close(kept[3], model(IMAGES), atol=1e-6, rtol=1e-5)


# ---- import: U-ViT, its forward pass written out from its names


def uvit(rows, dim=48, half=2, conv=True):
    shapes = {
        "patch_embed.proj.weight": (dim, 3, 2, 2),
        "patch_embed.proj.bias": (dim,),
        "pos_embed": (1, (2 if rows else 1) + 16, dim),
        "norm.weight": (dim,),
        "norm.bias": (dim,),
        "decoder_pred.weight": (12, dim),
        "decoder_pred.bias": (12,),
    }
    if rows:
        shapes["label_emb.weight"] = (rows, dim)
    if conv:
        shapes |= {"final_layer.weight": (3, 3, 3, 3), "final_layer.bias": (3,)}
    for name in (*(f"in_blocks.{i}" for i in range(half)), "mid_block", *(f"out_blocks.{i}" for i in range(half))):
        shapes |= block_shapes(name, dim)
        del shapes[f"{name}.attn.qkv.bias"]
        if name.startswith("out"):
            shapes |= {f"{name}.skip_linear.weight": (dim, 2 * dim), f"{name}.skip_linear.bias": (dim,)}
    return tensors_like(shapes)


def run_uvit(t, x, time, labels):
    B, heads = len(x), 3
    t = {**t, **{name.replace("weight", "bias"): torch.zeros(144) for name in t if name.endswith("qkv.weight")}}
    angles = time[:, None] * torch.exp(-torch.log(torch.tensor(10000.0)) * torch.arange(24) / 24)
    h = F.conv2d(x, t["patch_embed.proj.weight"], t["patch_embed.proj.bias"], stride=2).flatten(2).transpose(1, 2)
    h = torch.cat([torch.cat([angles.cos(), angles.sin()], dim=1)[:, None], h], dim=1)
    if labels is not None:
        h = torch.cat([t["label_emb.weight"][labels][:, None], h], dim=1)
    h = h + t["pos_embed"]

    def norm(name, x):
        return F.layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], eps=1e-5)

    def block(name, x):
        x = x + attention(t, f"{name}.attn", norm(f"{name}.norm1", x), heads)
        return x + mlp(t, f"{name}.mlp", norm(f"{name}.norm2", x))

    taps = []
    for i in range(2):
        h = block(f"in_blocks.{i}", h)
        taps.append(h)
    h = block("mid_block", h)
    for i in range(2):
        h = block(f"out_blocks.{i}", affine(t, f"out_blocks.{i}.skip_linear", torch.cat([h, taps.pop()], dim=-1)))
    y = affine(t, "decoder_pred", norm("norm", h))[:, -16:]
    y = y.reshape(B, 4, 4, 2, 2, 3).permute(0, 5, 1, 3, 2, 4).reshape(B, 3, 8, 8)
    return F.conv2d(y, t["final_layer.weight"], t["final_layer.bias"], padding=1) if "final_layer.weight" in t else y


@pytest.mark.parametrize(("rows", "conv"), [(0, True), (5, True), (6, False)])
def test_u_vit(rows, conv, tmp_path):
    tensors = uvit(rows, conv=conv)
    torch.save(tensors, tmp_path / "nnet_ema.pth")
    ours = imported(tmp_path / "nnet_ema.pth", num_heads=3, **({"num_classes": 5} if rows else {}))
    config = ours.network.config
    assert ours.kind == "U-ViT"
    assert (config.num_classes, config.label_dropout > 0) == (5 if rows else None, rows == 6)
    assert ours.preprocess.mean == (0.5,) * 3
    x, time = torch.randn(2, 3, 8, 8), torch.tensor([3.0, 700.0])
    labels = torch.tensor([1, 4]) if rows else None
    with torch.no_grad():
        expected = run_uvit(tensors, x, time, labels)
        torch.testing.assert_close(ours.network(x, time, labels), expected, atol=1e-4, rtol=1e-4)


def test_other_u_vits_are_refused_by_name(tmp_path):
    tensors = uvit(0)
    for name, what in (("time_embed.0.weight", "an MLP behind its time token"), ("context_embed.weight", "text")):
        torch.save({**tensors, name: torch.ones(4, 4)}, tmp_path / "other.pth")
        with pytest.raises(UserError, match=what):
            imported(tmp_path / "other.pth", num_heads=3)
    del tensors["out_blocks.1.norm1.weight"]
    torch.save({n: v for n, v in tensors.items() if not n.startswith("out_blocks.1")}, tmp_path / "cut.pth")
    with pytest.raises(UserError, match="2 blocks before its middle one and 1 behind"):
        imported(tmp_path / "cut.pth", num_heads=3)


# ---- import: relatives, said for what they are


def plain_vit(**extra):
    shapes = {"cls_token": (1, 1, 48), "pos_embed": (1, 17, 48), "norm.weight": (48,), "norm.bias": (48,)}
    shapes |= {"patch_embed.proj.weight": (48, 3, 8, 8), "patch_embed.proj.bias": (48,)}
    for i in range(2):
        shapes |= block_shapes(f"blocks.{i}", 48)
    return tensors_like(shapes | extra)


@pytest.mark.parametrize(
    ("extra", "cause"),
    [
        ({"head.0.running_mean": (48,), "head.1.weight": (7, 48)}, "linear-probe checkpoint"),
        ({"dist_token": (1, 1, 48), "pos_embed": (1, 18, 48)}, "a distillation token"),
        ({"head_dist.weight": (7, 48)}, "a distillation token"),
        ({"reg_token": (1, 4, 48)}, "register tokens"),
        ({"embeddings.register_tokens": (1, 4, 48)}, "register tokens"),
    ],
)
def test_related_networks_are_refused_by_name(extra, cause, tmp_path):
    torch.save(plain_vit(), tmp_path / "plain.pth")
    assert imported(tmp_path / "plain.pth", num_heads=3).kind == "ViT"
    torch.save(plain_vit(**extra), tmp_path / "vit.pth")
    with pytest.raises(UserError, match=cause):
        imported(tmp_path / "vit.pth", num_heads=3)


def test_more_skips_than_decoder_blocks(tmp_path):
    torch.save(decayed_mae(depth=6, decoder_depth=2), tmp_path / "deep.pth")
    with pytest.raises(UserError, match="3 skip layers and 2 decoder blocks, so its shallowest skips were never used"):
        imported(tmp_path / "deep.pth", alpha_min=0.6, num_heads=3, decoder_num_heads=2)


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("cls_token", torch.zeros(0, 1, 48), "cls_token has the shape"),
        ("cls_token", torch.zeros(1, 1, 1).expand(1, 1, 10**9), "claims tensors of"),
        ("pos_embed", torch.zeros(1, 17, 40), "a width of 48"),
        ("patch_embed.proj.weight", torch.zeros(48, 3, 8, 4), "are square"),
        ("blocks.0.mlp.fc1.weight", torch.zeros(3), "mlp.fc1.weight has the shape"),
        ("blocks.900000000.norm1.weight", torch.zeros(48), "blocks.2 is missing"),
        ("norm.weight", torch.zeros(48, dtype=torch.int64), "int64 where weights belong"),
    ],
)
def test_tensors_of_impossible_shapes_are_refused(name, value, complaint, tmp_path):
    torch.save({**plain_vit(), name: value}, tmp_path / "odd.pth")
    with pytest.raises(UserError, match=complaint):
        imported(tmp_path / "odd.pth", num_heads=3)


class Malicious:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("protocol", [2, 4])
def test_code_in_a_checkpoint_never_runs(tmp_path, protocol):
    trap = tmp_path / "sprung"
    payload = {"model": {"cls_token": torch.zeros(1, 1, 4)}, "args": Malicious(str(trap))}
    torch.save(payload, tmp_path / "new.pth", pickle_protocol=protocol)
    (tmp_path / "old.pth").write_bytes(pickle.dumps(payload, protocol=protocol))
    for name in ("new.pth", "old.pth"):
        with pytest.raises(UserError, match="loading it could run code"):
            imported(tmp_path / name)
    assert not trap.exists()
    pickle.loads(pickle.dumps(payload))
    assert trap.exists(), "the trap works where it is allowed to"


def test_truncated_and_foreign_files_are_refused(tmp_path):
    save_file(decayed_mae(), tmp_path / "whole.safetensors")
    whole = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "half.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="not a complete safetensors file"):
        imported(tmp_path / "half.safetensors")
    torch.save(decayed_mae(), tmp_path / "whole.pth")
    (tmp_path / "half.pth").write_bytes((tmp_path / "whole.pth").read_bytes()[:50_000])
    with pytest.raises(UserError, match="cannot be read as a checkpoint"):
        imported(tmp_path / "half.pth")
    torch.save([1, 2, 3], tmp_path / "list.pth")
    with pytest.raises(UserError, match="holds a list, not a dictionary"):
        imported(tmp_path / "list.pth")
    torch.save({"model": {"epoch": 3}}, tmp_path / "empty.pth")
    with pytest.raises(UserError, match="holds no tensors"):
        imported(tmp_path / "empty.pth")
    with pytest.raises(UserError, match="There is no checkpoint"):
        imported(tmp_path / "absent.pth")
    with pytest.raises(UserError, match="holds none of model"):
        imported(tmp_path)
