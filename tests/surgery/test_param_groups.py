"""param_groups: a plain network trained with its groups follows the decayed network, whatever the optimizer."""

import copy

import pytest
import torch
import torch.nn.functional as F

import anechoic
from anechoic.errors import UserError
from anechoic.surgery.param_groups import clip_grad_norm, decay_factors, param_groups, split_skips
from anechoic.training import muon
from anechoic.training.muon import Muon

IMAGES = torch.randn(8, 3, 32, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8) % 5
NOISE = torch.rand(8, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
TIMES = torch.linspace(0.1, 0.9, 8, dtype=torch.float64)
SMALL = {"image_size": 32, "patch_size": 8, "dim": 48, "depth": 4, "num_heads": 3}
LR = {"adamw": 1e-3, "sgd": 1e-2, "muon": 2e-3}


def classified(model):
    return F.cross_entropy(getattr(output := model(IMAGES), "logits", output), LABELS)


def reconstructed(model):
    return model(IMAGES, noise=NOISE).loss


def denoised(model):
    return (model(IMAGES, TIMES) - IMAGES).square().mean()


def transformers_vit():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 3, "intermediate_size": 96}
    return ViTForImageClassification(ViTConfig(image_size=32, patch_size=8, num_labels=5, **sizes))


def timm_vit():
    import timm

    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 3}
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **sizes)


def mae(**options):
    return anechoic.build_model(
        "mae_tiny_patch4", **SMALL, decoder_dim=48, decoder_depth=2, decoder_num_heads=3, **options
    )


def sit(**options):
    return anechoic.build_model("sit_s_patch2", in_channels=3, num_classes=None, **SMALL, **options)


def uvit():
    return anechoic.build_model("uvit_small", in_channels=3, num_classes=None, **SMALL)


def resnet():
    return anechoic.build_model("resnet18", num_classes=5)


# Name -> model, loss. Matrices of a long skip are split where the network has them.
NETWORKS = {
    "transformers ViT": (transformers_vit, classified),
    "timm ViT": (timm_vit, classified),
    "MAE with skips": (lambda: mae(skips=True), reconstructed),
    "original MAE": (lambda: mae(skips=False), reconstructed),
    "SiT with skips": (lambda: sit(skips=True), denoised),
    "U-ViT": (uvit, denoised),
    "ResNet": (resnet, classified),
}


def losses(model, groups, loss_of, *, steps):
    """Losses of a training in which gradients are clipped."""
    algorithm = "muon" if "algorithm" in groups[0] else "adamw" if "eps" in groups[0] else "sgd"
    make = {"muon": Muon, "adamw": torch.optim.AdamW, "sgd": lambda groups: torch.optim.SGD(groups, momentum=0.9)}
    optimizer, found = make[algorithm](groups), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        clip_grad_norm(optimizer.param_groups, 1.0)
        optimizer.step()
        found.append(loss.item())
    return torch.tensor(found, dtype=torch.float64)


def ordinary_groups(model, algorithm):
    """The groups of a decayed network: the same settings for every tensor."""
    lr, names = LR[algorithm], dict(model.named_parameters())
    plain = anechoic.fold(model)
    by_name = {id(parameter): name for name, parameter in plain.named_parameters()}
    groups = param_groups(plain, 1.0, lr=lr, weight_decay=0.05, algorithm=algorithm)
    return [{**group, "params": [names[by_name[id(p)]] for p in group["params"]]} for group in groups]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["adamw", "sgd", "muon"])
@pytest.mark.parametrize("name", NETWORKS)
def test_param_groups_follow_the_decayed_network(name, algorithm, monkeypatch):
    """Muon divides by a norm plus its own eps, and branches that start at zero have gradients below it: without it."""
    monkeypatch.setattr(muon, "EPS", 1e-30)
    make, loss_of = NETWORKS[name]
    torch.manual_seed(0)
    network = make().double()
    has_split_skips = name in ("MAE with skips", "U-ViT")
    if algorithm == "muon" and name == "ResNet":
        pytest.skip("a ResNet has no matrices for Muon")
    decayed = anechoic.decay(network, 0.7, preserve=True)
    plain = split_skips(network) if has_split_skips else copy.deepcopy(network)
    groups = param_groups(plain, 0.7, lr=LR[algorithm], weight_decay=0.05, algorithm=algorithm)
    steps = 6 if name == "ResNet" else 50
    followed = losses(decayed, ordinary_groups(decayed, algorithm), loss_of, steps=steps)
    found = losses(plain, groups, loss_of, steps=steps)
    assert found[-1] < found[0]
    assert (found - followed).abs().max() < 1e-9


def test_zero_init_needs_no_preserve():
    """Branch outputs that start at zero, and a norm's eps that is negligible: the initial weights are the same too."""
    torch.manual_seed(0)
    network = anechoic.build_model("vit_tiny_patch4", **SMALL, num_classes=5, norm=True, norm_eps=1e-16).double()
    decayed = anechoic.decay(network, 0.7, zero_init=True)
    plain = anechoic.fold(decayed)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), decayed.parameters(), strict=True))
    found = losses(plain, param_groups(plain, 0.7, lr=1e-3, weight_decay=0.05), classified, steps=30)
    followed = losses(decayed, ordinary_groups(decayed, "adamw"), classified, steps=30)
    assert (found - followed).abs().max() < 1e-9


def test_factors_span_what_the_algebra_predicts():
    model = anechoic.build_model("vit_base_patch16")
    factors = decay_factors(model, 0.6)
    assert min(factors.values()) >= 1
    assert max(factors.values()) == pytest.approx(1 / anechoic.effective_decay(anechoic.linear(24, 0.6)))
    encoder_factors = decay_factors(split_skips(mae(skips=True)), 0.6)
    assert min(encoder_factors.values()) == pytest.approx(anechoic.effective_decay(anechoic.linear(8, 0.6)))


def test_groups_hold_every_trainable_parameter_once():
    model = transformers_vit()
    model.classifier.requires_grad_(False)
    groups = param_groups(model, 0.6, lr=1e-3, weight_decay=0.1, algorithm="lion")
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    for group in groups:
        assert group["lr"] == pytest.approx(1e-3 * group["decay_factor"])
        decays = group["params"][0].ndim >= 2
        assert group["weight_decay"] * group["lr"] == pytest.approx(1e-4 if decays else 0)
        assert "eps" not in group


def test_split_skips_keeps_outputs_and_state_dict():
    for model, loss_of in ((uvit().double(), denoised), (mae(skips=True).double(), reconstructed)):
        split = split_skips(model)
        assert loss_of(split).item() == pytest.approx(loss_of(model).item(), abs=1e-12)
        assert split.state_dict().keys() == model.state_dict().keys()
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(0.01)
        split.load_state_dict(other.state_dict())
        assert loss_of(split).item() == pytest.approx(loss_of(other).item(), abs=1e-12)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (uvit, {}, "split_skips"),
        (lambda: anechoic.decay(timm_vit(), 0.6), {}, "shortcuts are not plain"),
        (timm_vit, {"algorithm": "adam"}, "did you mean adamw"),
        (lambda: "vit_tiny", {}, "takes a network"),
        (lambda: timm_vit().requires_grad_(False), {}, "no parameter to train"),
    ],
)
def test_param_groups_refuses_what_it_cannot_express(make, options, message):
    with pytest.raises(UserError, match=message):
        param_groups(make(), 0.6, lr=1e-3, **options)


# ---- recipes with the real libraries, as docs/what-decay-is.md shows them


@pytest.mark.slow
def test_transformers_trainer_takes_the_groups(tmp_path):
    from transformers import Trainer, TrainingArguments, ViTMAEConfig, ViTMAEForPreTraining

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96}
    decoder = {"decoder_hidden_size": 48, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 3}
    config = ViTMAEConfig(image_size=32, patch_size=8, decoder_intermediate_size=96, **sizes, **decoder)
    model = ViTMAEForPreTraining(config)
    before = copy.deepcopy(model.state_dict())

    optimizer = torch.optim.AdamW(param_groups(model, alpha_min=0.6, lr=1e-3, weight_decay=0.05))
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=4, max_grad_norm=0, report_to=[], use_cpu=True
    )
    data = [{"pixel_values": image.float()} for image in IMAGES]
    Trainer(model, arguments, train_dataset=data, optimizers=(optimizer, None)).train()
    # The scheduler multiplies every group's own learning rate.
    lrs = {group["lr"] / group["decay_factor"] for group in optimizer.param_groups}
    assert max(lrs) == pytest.approx(min(lrs), abs=1e-12)
    assert any(not torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_timm_optimizers_and_schedulers_take_the_groups():
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    model = timm_vit()
    optimizer = create_optimizer_v2(
        param_groups(model, alpha_min=0.6, lr=1e-3, weight_decay=0.05), opt="adamw", lr=1e-3
    )
    schedule = CosineLRScheduler(optimizer, t_initial=10)
    schedule.step(5)
    factors = {group["lr"] / group["decay_factor"] for group in optimizer.param_groups}
    assert max(factors) == pytest.approx(min(factors))
    assert max(factors) == pytest.approx(5e-4, rel=0.1)


def test_torch_muon_takes_the_groups():
    model = transformers_vit()
    groups = param_groups(model, alpha_min=0.6, lr=2e-3, algorithm="muon")
    optimizers = [
        torch.optim.Muon([group for group in groups if group["algorithm"] == "muon"]),
        torch.optim.AdamW([group for group in groups if group["algorithm"] == "adamw"]),
    ]
    first = F.cross_entropy(model(IMAGES.float()).logits, LABELS)
    for _ in range(5):
        loss = F.cross_entropy(model(IMAGES.float()).logits, LABELS)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss < first


def test_diffusers_dit_takes_the_groups():
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_attention_heads": 3, "attention_head_dim": 16, "num_layers": 2, "sample_size": 8, "patch_size": 2}
    model = DiTTransformer2DModel(in_channels=3, out_channels=3, num_embeds_ada_norm=10, norm_num_groups=3, **sizes)
    optimizer = torch.optim.AdamW(param_groups(model, alpha_min=0.7, lr=1e-3))
    x = torch.randn(4, 3, 8, 8)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        output = model(x, timestep=torch.tensor([1, 2, 3, 4]), class_labels=torch.zeros(4, dtype=torch.long)).sample
        loss = (output - x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < found[0]
