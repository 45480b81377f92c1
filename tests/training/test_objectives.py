"""Objectives against direct computation; whatever is random belongs to the sample, not to its batch."""

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import MODEL

from anechoic.errors import UserError
from anechoic.models import build_model
from anechoic.rng import SampleGenerator
from anechoic.training.objectives import OBJECTIVES, make_objective
from anechoic.training.validation import Samples

MAE = {name: value for name, value in MODEL.items() if name != "patch_size"} | {"image_size": 16}


@pytest.fixture
def mae():
    torch.manual_seed(0)
    return build_model("mae_tiny_patch4", **MAE, alpha_min=0.6, zero_init=False)


def draws_for(ids, *, seed=3, visit=0):
    ids = torch.as_tensor(ids)
    return SampleGenerator(seed, ids, torch.full_like(ids, visit))


def test_masked_reconstruction_is_the_model_under_the_samples_noise(mae):
    images = torch.randn(4, 3, 16, 16)
    generator = draws_for([5, 6, 7, 8])
    loss = make_objective("masked_reconstruction")(mae, Samples(images, None), generator)["loss"]
    assert torch.equal(loss, mae(images, generator.uniform("mask", 16)).loss)


def test_masks_belong_to_samples_not_to_batches(mae):
    """The mean over a batch equals the mean over its halves: every sample is masked as it would be alone."""
    images, ids = torch.randn(6, 3, 16, 16), torch.arange(40, 46)
    objective = make_objective("masked_reconstruction")
    whole = objective(mae, Samples(images, None), draws_for(ids))["loss"]
    parts = [objective(mae, Samples(images[i : i + 3], None), draws_for(ids[i : i + 3]))["loss"] for i in (0, 3)]
    torch.testing.assert_close(whole, torch.stack(parts).mean(), rtol=1e-6, atol=0)
    other_visit = objective(mae, Samples(images, None), draws_for(ids, visit=1))["loss"]
    assert not torch.equal(whole, other_visit)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_supervised_is_cross_entropy(label_smoothing):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))
    images, labels = torch.randn(7, 3, 2, 2), torch.tensor([0, 1, 2, 3, 4, 0, 1])
    objective = make_objective("supervised", label_smoothing=label_smoothing)
    found = objective(model, Samples(images, labels), draws_for(range(7)))
    logits = model(images)
    log_probabilities = logits.log_softmax(dim=1)
    target = F.one_hot(labels, 5) * (1 - label_smoothing) + label_smoothing / 5
    torch.testing.assert_close(found["loss"], -(target * log_probabilities).sum(dim=1).mean())
    assert found["accuracy"] == (logits.argmax(dim=1) == labels).float().mean()
    # Soft targets that are certain are the labels.
    soft = objective(model, Samples(images, F.one_hot(labels, 5).float()), draws_for(range(7)))
    torch.testing.assert_close(soft["loss"], found["loss"])
    assert soft["accuracy"] == found["accuracy"]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_can_be_made(name):
    needed = {"finetuning": {"num_classes": 10}}
    assert callable(make_objective(name, **needed.get(name, {})))


def test_misspelt_names_and_options_are_answered():
    with pytest.raises(UserError, match="did you mean supervised"):
        make_objective("supervized")
    with pytest.raises(UserError, match="did you mean label_smoothing"):
        make_objective("supervised", labelsmoothing=0.1)
    with pytest.raises(UserError, match="no option 'x'"):
        make_objective("masked_reconstruction", x=1)
