"""Other people's checkpoints as our networks: against the program they come from, or its forward pass written out."""

import argparse
import json
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from anechoic.errors import UserError
from anechoic.exchange.importing import Choices, import_checkpoint
from anechoic.models.layers import sincos_positions
from anechoic.models.preprocess import Preprocess
from anechoic.shortcut import linear

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


def test_names_of_modules_are_as_good_as_names_of_files(vit_mae, tmp_path):
    theirs, folder = vit_mae
    torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    again, first = imported(tmp_path).network.state_dict(), imported(folder).network.state_dict()
    assert all(torch.equal(again[name], value) for name, value in first.items())


def official(theirs):
    """The weights of transformers' ViTMAE under the names of the original MAE."""
    state = theirs.state_dict()

    def layer(ours, place):
        parts = {}
        for kind in ("weight", "bias"):
            parts[f"attn.qkv.{kind}"] = torch.cat([state[f"{place}.attention.{x}_proj.{kind}"] for x in "qkv"])
        names = {"norm1": "layernorm_before", "norm2": "layernorm_after", "attn.proj": "attention.o_proj"}
        for mine, name in {**names, "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}.items():
            parts |= {f"{mine}.{kind}": state[f"{place}.{name}.{kind}"] for kind in ("weight", "bias")}
        return {f"{ours}.{name}": value for name, value in parts.items()}

    renamed = {
        "cls_token": state["vit.embeddings.cls_token"],
        "pos_embed": state["vit.embeddings.position_embeddings"],
        "mask_token": state["decoder.mask_token"],
        "decoder_pos_embed": state["decoder.decoder_pos_embed"],
    }
    modules = {
        "patch_embed.proj": "vit.embeddings.patch_embeddings.projection",
        "norm": "vit.layernorm",
        "decoder_embed": "decoder.decoder_embed",
        "decoder_norm": "decoder.decoder_norm",
        "decoder_pred": "decoder.decoder_pred",
    }
    for ours, name in modules.items():
        renamed |= {f"{ours}.{kind}": state[f"{name}.{kind}"] for kind in ("weight", "bias")}
    for i in range(3):
        renamed |= layer(f"blocks.{i}", f"vit.layers.{i}")
    for i in range(2):
        renamed |= layer(f"decoder_blocks.{i}", f"decoder.decoder_layers.{i}")
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
    torch.save({"ema": tensors, "model": sit(decayed), "args": argparse.Namespace()}, tmp_path / "sit.pt")
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
    with pytest.raises(UserError, match="does not say with which alpha_min"):
        imported(tmp_path / "decayed.pth", num_heads=3)
    torch.save(sit(False), tmp_path / "sit.pth")
    with pytest.raises(UserError, match="trained with plain shortcuts"):
        imported(tmp_path / "sit.pth", num_heads=3, alpha_min=0.6)


def test_what_does_not_fit_is_named(tmp_path):
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
