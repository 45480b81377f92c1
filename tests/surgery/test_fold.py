"""fold and decay on our own models: the same function in other weights, in double precision, for every form."""

import copy

import pytest
import torch
from zoo import ZOO, inputs, make, outputs

from anechoic import build_model, decay, fold, linear, shortcuts
from anechoic.models import build

FORMS = {
    "identity": {"alpha_min": 0.6},
    "cosine": {"alpha_min": 0.5, "schedule": "cosine"},
    "constant": {"alpha_min": 0.9, "schedule": "constant"},
    "branch": {"form": "branch"},
    "both": {"form": "both"},
    "attention": {"form": "attention", "alpha_min": 0.6},
    "mlp": {"form": "mlp", "alpha_min": 0.6},
    "learnable": {"form": "learnable", "alpha_min": 0.6},
    "plain": {"form": "plain"},
}
CASES = [(case, form) for case in ZOO for form in FORMS if not ("resnet" in case and form in ("attention", "mlp"))]


def double(case, **options):
    return make(case, **options).double()


def assert_same_function(model, other):
    """To 1e-10 relative, on every output; for an autoencoder also its encoder's unmasked tokens."""
    arguments = inputs(model, dtype=torch.float64)
    pairs = [(outputs(model, *arguments), outputs(other, *arguments))]
    if type(model).__name__ == "MaskedAutoencoder":
        pairs.append((model.encoder(arguments[0]), other.encoder(arguments[0])))
    for expected, actual in pairs:
        assert ((actual - expected).abs().max() / expected.abs().max()).item() < 1e-10


@pytest.mark.parametrize(("case", "form"), CASES)
def test_fold_keeps_the_function_and_returns_the_plain_class(case, form):
    model = double(case, **FORMS[form])
    folded = fold(model)
    assert_same_function(model, folded)
    assert type(folded) is type(model)
    assert all(info.alpha == 1 and info.beta == 1 for info in shortcuts(folded))
    plain = build(folded.config).double().eval()
    plain.load_state_dict(folded.state_dict(), strict=True)
    assert_same_function(model, plain)
    unmarked = build_model(ZOO[case][0], **ZOO[case][1])
    assert set(folded.state_dict()) == set(unmarked.state_dict())


@pytest.mark.parametrize(
    ("case", "only"),
    [(case, only) for case in ZOO for only in (None, "attention", "mlp") if not (only and "resnet" in case)],
)
def test_preserve_is_the_inverse_of_fold(case, only):
    plain = double(case)
    decayed = decay(plain, alpha_min=0.6, only=only, preserve=True)
    assert_same_function(plain, decayed)
    assert min(info.alpha for info in shortcuts(decayed)) < 0.7
    back = fold(decayed)
    assert_same_function(plain, back)
    for (name, value), expected in zip(back.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("case", ["resnet", "resnet-imagenet-stem"])
def test_resnets_fold_in_training_mode_too(case):
    model = double(case, alpha_min=0.6).train()
    folded = fold(model)
    assert folded.training
    images = inputs(model, dtype=torch.float64)[0]
    torch.testing.assert_close(folded(images), model(images), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", ["mae", "mae-without-skips"])
def test_autoencoders_fold_in_training_mode_too(case):
    model = double(case, alpha_min=0.6).train()
    arguments = inputs(model, dtype=torch.float64)
    torch.testing.assert_close(outputs(fold(model), *arguments), outputs(model, *arguments), rtol=1e-10, atol=1e-12)


def test_a_plain_decay_keeps_weights_and_changes_the_shortcuts():
    plain = make("vit-raw")
    decayed = decay(plain, alpha_min=0.6)
    assert [info.alpha for info in shortcuts(decayed)] == linear(8, 0.6)
    expected = make("vit-raw", alpha_min=0.6)
    images = inputs(plain)[0]
    assert torch.equal(decayed(images), expected(images))
    assert torch.equal(decay(plain, alpha_min=1)(images), plain(images))


def test_zero_init_zeroes_the_branch_outputs_only():
    decayed = decay(make("vit-raw"), alpha_min=0.6, zero_init=True)
    assert all(
        block.mlp.fc2.weight.abs().max() == 0 and block.attn.proj.weight.abs().max() == 0 for block in decayed.blocks
    )
    assert decayed.blocks[0].mlp.fc1.weight.abs().max() > 0


def test_the_last_norm_gets_the_eps_of_its_gain():
    """At depth 12 and alpha_min 0.6 the fold turns 1e-6 into 0.078: forgetting it is the classic error."""
    model = build_model("vit_tiny_patch4", dim=24, num_heads=2, depth=12, image_size=8, alpha_min=0.6, zero_init=True)
    folded = fold(model)
    assert folded.norm.eps == pytest.approx(0.078, rel=0.01)
    assert len(folded.config.norm_eps) == 25
    wrong = copy.deepcopy(folded)
    wrong.norm.eps = 1e-6
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(folded(images), model(images), rtol=1e-4, atol=1e-4)
    assert (wrong(images) - model(images)).abs().max() > 1e-2


def test_shortcuts_lists_names_kinds_alphas_and_gains():
    rows = shortcuts(make("mae", alpha_min=0.6))
    assert [row.name for row in rows[:2]] == ["encoder.blocks.0.shortcut1", "encoder.blocks.0.shortcut2"]
    assert [row.kind for row in rows[:2]] == ["attention", "mlp"]
    assert rows[-1].alpha == 0.6
    gain = 1.0
    for row in rows:
        gain *= row.alpha
        assert row.gain == pytest.approx(gain)


def test_surgery_leaves_its_input_the_random_state_and_the_mode_alone():
    model = make("mae", alpha_min=0.6)
    model.encoder.class_token.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    state = torch.random.get_rng_state()
    folded = fold(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    assert not folded.training
    assert not folded.encoder.class_token.requires_grad
    assert folded.encoder.patch_embed.proj.weight.requires_grad
    assert folded.train().training


def test_impossible_conversions_are_refused_with_a_reason():
    learned = make("vit", form="learnable", alpha_min=0.6)
    with torch.no_grad():
        learned.blocks[1].shortcut1.alpha.fill_(-0.2)
    with pytest.raises(ValueError, match="only positive alphas can be folded"):
        fold(learned)
    with pytest.raises(ValueError, match="not plain: fold it first"):
        decay(make("vit", alpha_min=0.6))
    with pytest.raises(ValueError, match="choose one"):
        decay(make("vit"), preserve=True, zero_init=True)
    with pytest.raises(ValueError, match="alpha must lie in"):
        decay(make("vit"), alpha_min=0)
