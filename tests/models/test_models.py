"""Every model: published parameter counts, shapes, what PyTorch can do with it, and what it refuses."""

import copy
import io
import json
import pickle

import pytest
import torch
from torch import nn
from zoo import DECODER, TINY, ZOO, inputs, make, outputs

from anechoic import Shortcut, build_model, listing
from anechoic.models import MODELS, build, from_json, to_json
from anechoic.models.layers import Block, patchify, unpatchify
from anechoic.models.sit import ModulatedBlock

LATENT = {"in_channels": 4}


@pytest.mark.parametrize(
    ("name", "options", "trainable", "positions"),
    [
        ("mae_base_patch16", {"skips": False, "alpha_min": 1}, 111_655_680, 0),
        ("mae_base_patch16", {"alpha_min": 0.6}, 117_038_848, 0),
        ("mae_base_patch16", {"alpha_min": 1}, 117_038_848, 0),
        ("mae_small_patch16", {"skips": False}, 47_401_728, 0),
        ("mae_small_patch16", {"alpha_min": 0.6}, 51_800_320, 0),
        ("uvit_small", {}, 44_255_328, 0),
        ("uvit_mid", {"image_size": 64, "patch_size": 4, "num_classes": 1000}, 130_940_292, 0),
        ("uvit_mid", LATENT, 130_122_404, 0),
        ("uvit_mid", {**LATENT, "num_classes": 100, "label_dropout": 0.15}, 130_200_740, 0),
        ("uvit_large", {**LATENT, "num_classes": 1000, "label_dropout": 0.15}, 286_763_172, 0),
        ("uvit_huge", {**LATENT, "num_classes": 1000, "label_dropout": 0.1}, 500_832_016, 0),
        ("sit_xl_patch2", {}, 675_129_632 - 256 * 1152, 256 * 1152),
        ("sit_xl_patch2", {"skips": True, "alpha_min": 0.8}, 693_725_216 - 256 * 1152, 256 * 1152),
        ("resnet18", {}, 11_689_512, 0),
    ],
)
def test_parameter_counts(name, options, trainable, positions):
    with torch.device("meta"):
        model = build_model(name, **options)
    assert sum(p.numel() for p in model.parameters()) == trainable
    if positions:
        assert model.positions.numel() == positions


def test_the_listing_counts_without_allocating():
    listed = listing("models").metrics["trainable"]
    assert list(listed) == list(MODELS)
    assert listed["mae_base_patch16"] == 117_038_848
    assert listed["uvit_small"] == 44_255_328
    assert set(listing("models", filter="sit_").metrics["trainable"]) == {n for n in MODELS if "sit_" in n}


@pytest.mark.parametrize("case", ZOO)
def test_the_config_is_plain_json_and_rebuilds_the_model(case):
    model = make(case, alpha_min="auto")
    again = build(from_json(json.loads(json.dumps(to_json(model.config)))))
    assert again.config == model.config
    again.load_state_dict(model.state_dict(), strict=True)
    again.eval()
    assert torch.equal(outputs(again, *inputs(model)), outputs(model, *inputs(model)))


@pytest.mark.parametrize("case", ZOO)
def test_copies_pickles_and_saved_weights_compute_the_same(case, tmp_path):
    model = make(case, alpha_min=0.6)
    arguments = inputs(model)
    expected = outputs(model, *arguments)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        next(copied.parameters()).zero_()
    assert torch.equal(outputs(model, *arguments), expected), "a copy shares weights with its original"
    assert torch.equal(outputs(pickle.loads(pickle.dumps(model)), *arguments), expected)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    fresh = build(model.config).eval()
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(outputs(fresh, *arguments), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", ["vit-raw-learned", "mae", "mae-without-skips", "uvit-conditional", "sit-with-skips", "resnet"]
)
def test_compile_and_export(case):
    model = make(case, alpha_min=0.6)
    arguments = inputs(model)
    expected = outputs(model, *arguments)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(outputs(compiled, *arguments), expected, rtol=1e-5, atol=1e-5)
    exported = torch.export.export(model, arguments)
    torch.testing.assert_close(outputs(exported.module(), *arguments), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compile_trains_with_the_default_backend():
    """The real code generator, once, on the model that matters most; forward and gradients."""
    model = make("mae", alpha_min=0.6).train()
    images, noise = inputs(model)
    model(images, noise).loss.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    torch.compile(model)(images, noise).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ZOO)
def test_gradients_reach_every_parameter(case):
    model = make(case, alpha_min=0.6, **({"form": "learnable"} if "resnet" not in case else {})).train()
    out = model(*inputs(model))
    (out.loss if isinstance(out, tuple) else out.square().mean()).backward()
    for name, parameter in model.named_parameters():
        if case == "mae-without-norm-pix" and name.startswith("encoder.norm."):
            continue  # with skips, a final encoder norm is read by probes only
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("size", [16, (8, 24)])
@pytest.mark.parametrize("channels", [1, 3, 6])
def test_any_image_size_and_channels(size, channels):
    height, width = size if isinstance(size, tuple) else (size, size)
    for name, options in (
        ("vit_tiny_patch4", {}),
        ("mae_tiny_patch4", DECODER),
        ("uvit_small", {}),
        ("sit_s_patch2", {}),
    ):
        model = build_model(
            name, **{**TINY, **options, "image_size": size, "in_channels": channels, "alpha_min": 0.6}
        ).eval()
        x = torch.randn(2, channels, height, width)
        if name.startswith("vit"):
            assert model(x).shape == (2, 1 + height * width // 16, 48)
        elif name.startswith("mae"):
            assert model(x).prediction.shape == (2, height * width // 16, 16 * channels)
        else:
            assert model(x, torch.rand(2)).shape == x.shape


def test_positions_are_regenerated_for_other_grids():
    """A network built for one size and given another equals the network built for the other."""
    for case in ("vit", "mae", "sit"):
        model = make(case, alpha_min=0.6)
        other = build(type(model.config)(**{**vars(model.config), "image_size": (8, 32)})).eval()
        other.load_state_dict(model.state_dict())
        arguments = inputs(other)
        assert torch.equal(outputs(model, *arguments), outputs(other, *arguments))
    learned = make("vit-learned")
    assert learned(torch.randn(1, 3, 8, 32)).shape == (1, 17, 48)


def test_patchify_orders_row_column_channel_and_inverts():
    images = torch.arange(2 * 3 * 8 * 12.0).view(2, 3, 8, 12)
    patches = patchify(images, 4)
    assert patches.shape == (2, 6, 48)
    # Patch 4 is in row 1, column 1; its vector starts with the three channels of its first pixel.
    assert torch.equal(patches[0, 4, :3], images[0, :, 4, 4])
    assert torch.equal(patches[0, 4, 3:6], images[0, :, 4, 5])
    assert torch.equal(unpatchify(patches, 4, (2, 3)), images)


def test_plain_block_is_a_residual_block():
    """Bit for bit without gradients; the fused functions of training multiply with another library."""
    block = Block(48, 3)
    x = torch.randn(2, 9, 48)
    with torch.no_grad():
        expected = x + block.attn(block.norm1(x))
        expected = expected + block.mlp(block.norm2(expected))
        assert torch.equal(block(x), expected)
    torch.testing.assert_close(block(x).detach(), expected)


@pytest.mark.parametrize("alpha_min", [0.6, 0.9])
def test_decayed_stack_is_the_written_out_recurrence(alpha_min):
    model = make("vit-raw", alpha_min=alpha_min)
    images = inputs(model)[0]
    x = model.embed_tokens(patchify(images, 4), (4, 4))
    k = 0
    for block in model.blocks:
        for branch in (lambda x, b=block: b.attn(b.norm1(x)), lambda x, b=block: b.mlp(b.norm2(x))):
            x = (1 - (1 - alpha_min) * k / 7) * x + branch(x)
            k += 1
    torch.testing.assert_close(model(images), x, rtol=1e-5, atol=1e-5)


def test_uvit_is_the_written_out_network():
    model = make("uvit-conditional", alpha_min=0.6)
    x, t, labels = inputs(model)
    half = torch.arange(24.0)
    angles = t[:, None] * 10000 ** (-half / 24)
    time = torch.cat([angles.cos(), angles.sin()], dim=1)[:, None]
    patches = nn.functional.conv2d(x, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=2)
    tokens = (
        torch.cat([model.label_embed.weight[labels][:, None], time, patches.flatten(2).mT], dim=1) + model.positions
    )
    taps = []
    for i, block in enumerate(model.blocks):
        if i > 2:
            tokens = block.skip_linear(torch.cat([tokens, taps.pop()], dim=-1))
        tokens = (1 - 0.4 * (2 * i) / 9) * tokens + block.attn(block.norm1(tokens))
        tokens = (1 - 0.4 * (2 * i + 1) / 9) * tokens + block.mlp(block.norm2(tokens))
        if i < 2:
            taps.append(tokens)
    out = model.predictor(model.norm(tokens)[:, 2:]).view(3, 8, 8, 2, 2, 3)
    torch.testing.assert_close(
        model(x, t, labels), out.permute(0, 5, 1, 3, 2, 4).reshape(3, 3, 16, 16), rtol=1e-5, atol=1e-5
    )


def test_sit_is_the_written_out_network():
    model = make("sit-with-skips", alpha_min=0.6)
    x, t, labels = inputs(model)
    angles = t[:, None] * 10000 ** (-torch.arange(128.0) / 128)
    c = model.time_embed(torch.cat([angles.cos(), angles.sin()], dim=1)) + model.label_embed.weight[labels]
    h = nn.functional.conv2d(x, model.patch_embed.proj.weight, model.patch_embed.proj.bias, stride=2).flatten(2).mT
    h = h + model.positions
    taps = []
    for i, block in enumerate(model.blocks):
        b1, s1, g1, b2, s2, g2 = block.modulation(nn.functional.silu(c))[:, None].chunk(6, dim=-1)
        if i >= 2:
            h = h + model.skips[i - 2](taps.pop())
        h = (1 - 0.4 * (2 * i) / 7) * h + g1 * block.attn(block.norm1(h) * (1 + s1) + b1)
        h = (1 - 0.4 * (2 * i + 1) / 7) * h + g2 * block.mlp(block.norm2(h) * (1 + s2) + b2)
        if i < 2:
            taps.append(h)
    shift, scale = model.modulation(nn.functional.silu(c))[:, None].chunk(2, dim=-1)
    out = model.predictor(model.norm(h) * (1 + scale) + shift).view(3, 8, 8, 2, 2, 8)
    expected = out.permute(0, 5, 1, 3, 2, 4).reshape(3, 8, 16, 16)[:, :4]
    torch.testing.assert_close(model(x, t, labels), expected, rtol=1e-5, atol=1e-5)


def test_sit_starts_as_the_decayed_identity_with_zero_output():
    model = build_model("sit_s_patch2", **TINY, alpha_min=0.6, skips=False)
    x, t = torch.randn(2, 4, 16, 16), torch.rand(2)
    assert torch.equal(model(x, t), torch.zeros_like(x))
    h = torch.randn(2, 64, 48)
    assert torch.allclose(model.blocks[0](h, torch.randn(2, 48)), model.blocks[0].shortcut2.alpha * h)


def test_null_label_is_the_row_behind_the_classes():
    for case in ("uvit-conditional", "sit"):
        model = make(case)
        x, t, _ = inputs(model)
        assert torch.equal(model(x, t), model(x, t, torch.full((3,), 5)))


@pytest.mark.parametrize("num_blocks", [8, 9, 16])
def test_resnet_depth_grows_in_the_third_stage(num_blocks):
    model = build_model("resnet18", image_size=32, width=8, num_blocks=num_blocks, alpha_min=0.5)
    assert [len(getattr(model, f"layer{i}")) for i in (1, 2, 3, 4)] == [2, 2, num_blocks - 6, 2]
    assert len(model.blocks) == num_blocks
    assert [block.shortcut.alpha for block in model.blocks][-1] == 0.5
    assert model.conv1.stride == (1, 1)


def test_resnet_equals_torchvision():
    torchvision = pytest.importorskip("torchvision", reason="torchvision is the reference")
    reference = torchvision.models.resnet18(num_classes=10).eval()
    model = build_model("resnet18", image_size=64, stem="imagenet", num_classes=10).eval()
    model.load_state_dict(reference.state_dict(), strict=True)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), reference(images), rtol=1e-4, atol=1e-5)


# ---- what is refused


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mae_bse_patch16", {}, "did you mean mae_base_patch16"),
        ("resnet1000", {}, "There is no model 'resnet1000'"),
        ("vit_tiny_patch4", {"widht": 3}, "no option 'widht'"),
        ("vit_tiny_patch4", {"alpha_min": 0}, r"alpha must lie in \(0, 1\]"),
        ("vit_tiny_patch4", {"alpha_min": 1.01}, r"alpha must lie in \(0, 1\]"),
        ("vit_tiny_patch4", {"depth": 0}, "depth must be at least 1"),
        ("vit_tiny_patch4", {"image_size": 30}, "multiples of 4"),
        ("vit_tiny_patch4", {"image_size": (32, 30)}, "multiples of 4"),
        ("vit_tiny_patch4", {"in_channels": 0}, "in_channels must be at least 1"),
        ("vit_tiny_patch4", {"num_heads": 7}, "cannot be split into 7 heads"),
        ("vit_tiny_patch4", {"dim": 18, "num_heads": 3}, "divisible by 4"),
        ("vit_tiny_patch4", {"norm_eps": (1e-6, 1e-6)}, "2 numbers for 25 norms"),
        ("vit_tiny_patch4", {"positions": "none"}, "positions must be"),
        ("vit_tiny_patch4", {"pool": "max"}, "pool must be"),
        ("mae_tiny_patch4", {"mask_ratio": 1.0}, "leaves no patch"),
        ("mae_tiny_patch4", {"depth": 1}, "Skips need an encoder of at least 2 blocks"),
        ("mae_tiny_patch4", {"decoder_num_heads": 7}, "cannot be split into 7 heads"),
        ("uvit_small", {"depth": 3}, "even depth"),
        ("uvit_small", {"num_classes": 0}, "num_classes must be positive"),
        ("sit_s_patch2", {"depth": 3, "skips": True}, "even depth"),
        ("sit_s_patch2", {"zero_init": False}, "gates start at zero"),
        ("resnet18", {"num_blocks": 17}, "8 to 16"),
        ("resnet18", {"stem": "big"}, "stem must be"),
        ("resnet18", {"form": "mlp", "alpha_min": 0.6}, "no mlp branches"),
    ],
)
def test_impossible_models_are_refused_in_one_sentence(name, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        build_model(name, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["vit", "mae", "uvit", "sit", "resnet"])
def test_wrong_channels_are_refused(case):
    model = make(case)
    images, *rest = inputs(model)
    with pytest.raises(ValueError, match="Expected images of shape"):
        model(images[:, :1], *rest)


def test_sizes_a_network_cannot_take_are_refused():
    with pytest.raises(ValueError, match="multiples of 4"):
        make("vit")(torch.randn(1, 3, 15, 16))
    with pytest.raises(ValueError, match="Expected images of shape"):
        make("uvit")(torch.randn(1, 4, 32, 32), torch.rand(1))


def test_labels_and_conditioning_must_agree():
    x, t = inputs(make("uvit"))
    with pytest.raises(ValueError, match="unconditional"):
        make("uvit")(x, t, torch.tensor([0, 1, 2]))
    model = build_model("uvit_small", **TINY, num_classes=5)
    with pytest.raises(ValueError, match="without a null label"):
        model(torch.randn(1, 3, 16, 16), torch.rand(1))


@pytest.mark.parametrize("case", ["vit", "mae", "uvit", "sit", "resnet"])
def test_weights_of_other_shortcuts_are_refused_before_anything_is_written(case):
    plain, decayed, other = make(case), make(case, alpha_min=0.6), make(case, alpha_min=0.8)
    before = copy.deepcopy(plain.state_dict())
    with pytest.raises(ValueError, match="this network's are plain"):
        plain.load_state_dict(decayed.state_dict())
    for key, value in plain.state_dict().items():
        assert torch.equal(value, before[key])
    with pytest.raises(ValueError, match="belong to plain shortcuts"):
        decayed.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match=r"1 to 0\.8 over"):
        decayed.load_state_dict(other.state_dict())
    # Half precision rounds the marks, and the weights still belong.
    decayed.load_state_dict({k: v.bfloat16() for k, v in decayed.state_dict().items()})


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["autocast", "weights that arrive rounded"])
@pytest.mark.parametrize("case", ["vit-learned", "mae", "mae-without-skips", "uvit", "sit"])
def test_branches_are_summed_in_float32_under_rounded_products(case, weights):
    """Weights outside of blocks are rounded for the forward pass, as FSDP does on GPUs.

    On a CPU a norm needs weights as precise as its input.
    """
    model = make(case)
    for name, parameter in model.named_parameters():
        if not any(part in name for part in ("blocks", "mid_block", "norm")):
            parameter.data = parameter.data.to(weights)
    seen = []
    for block in (module for module in model.modules() if isinstance(module, Block | ModulatedBlock)):
        block.register_forward_hook(lambda block, given, out: seen.extend((given[0].dtype, out.dtype)))
    given = inputs(model)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model(*given)
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("case", ["vit-learned", "mae", "uvit", "sit"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_in_another_precision_stays_in_it(case, dtype):
    model = make(case).to(dtype)
    (block, *_) = (module for module in model.modules() if isinstance(module, Block | ModulatedBlock))
    seen = []
    block.register_forward_hook(lambda block, given, out: seen.append(out.dtype))
    with torch.no_grad():
        outputs(model, *inputs(model, dtype=dtype))
    assert seen == [dtype]


def test_every_sum_of_branches_is_a_shortcut():
    for case, count in (("vit", 8), ("mae", 12), ("uvit", 10), ("sit", 8), ("resnet", 9)):
        assert sum(isinstance(module, Shortcut) for module in make(case).modules()) == count
