"""Device-agnostic code without a GPU: everything that computes runs on the `meta` device.

There a CPU tensor mixed in raises. A read of values (`.item()`, `bool`, `nonzero`, a copy to the CPU) is answered by a
constant and must come from a function that docs/training.md lists as one that waits for the GPU on purpose.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from zoo import ZOO

from anechoic import build_model
from anechoic.config import OptimConfig
from anechoic.data.preprocess import Preprocess
from anechoic.diffusion.process import PROCESSES
from anechoic.diffusion.samplers import SAMPLERS, Guidance, sample_batch
from anechoic.errors import NotFiniteError, UserError
from anechoic.eval import features, frechet, projections
from anechoic.eval.metrics import echo, knn, logistic, probe_heads, rank
from anechoic.rng import SampleGenerator
from anechoic.runtime.distributed import World
from anechoic.runtime.signals import Stop
from anechoic.training import finetuning, loop
from anechoic.training.build import make_optimizer
from anechoic.training.ema import EMA
from anechoic.training.objectives import make_objective
from anechoic.training.optim import gradient_norm, set_learning_rate

ROOT = Path(__file__).parents[1]
PACKAGE = str(ROOT / "anechoic")
META = torch.device("meta")
B = 4


def listed() -> set[str]:
    """Functions that docs/training.md lists, as `package.module.function`."""
    text = (
        (ROOT / "docs" / "training.md")
        .read_text()
        .partition("## Synchronization with the GPU")[2]
        .partition("\n## ")[0]
    )
    return set(re.findall(r"^\| `([\w.]+)` \|", text, flags=re.M))


class Reads(TorchDispatchMode):
    """Answer reads of meta tensors by a constant and note which function of the package read."""

    def __init__(self, *, truth: bool = True) -> None:
        super().__init__()
        self.truth, self.places = truth, set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        source = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if source is not None and source.device == META:
            if name in ("_local_scalar_dense", "item", "is_nonzero", "equal"):
                self.note()
                return (
                    self.truth
                    if name in ("equal", "is_nonzero") or source.dtype == torch.bool
                    else 1.0
                    if source.is_floating_point()
                    else 1
                )
            if name == "nonzero":
                self.note()
                return torch.empty(0, source.ndim, dtype=torch.int64, device=META)
            if name == "_to_copy" and torch.device(kwargs.get("device") or META).type == "cpu":
                self.note()
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
        return func(*args, **kwargs)

    def note(self) -> None:
        frame = sys._getframe(1)
        while frame and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back
        assert frame is not None, "read by the test itself"
        module = Path(frame.f_code.co_filename).relative_to(PACKAGE).with_suffix("")
        function = frame.f_code.co_qualname.partition(".<locals>")[0].rpartition(".")[2]
        self.places.add(".".join([*module.parts, function]))


@pytest.fixture(params=[True, False], ids=["true", "false"])
def reads(request: pytest.FixtureRequest) -> Any:
    """Both answers to every question, so that both branches run; a check may refuse the values."""
    with Reads(truth=request.param) as mode:
        yield mode
    assert mode.places <= listed(), "read values of a device tensor: avoid it or list it in docs/training.md"


def generator() -> SampleGenerator:
    ids = torch.arange(B, device=META)
    return SampleGenerator(0, ids, torch.zeros_like(ids))


def network(case: str, **options: Any) -> Any:
    name, tiny = ZOO[case]
    with META:
        return build_model(name, **{**tiny, **options, "alpha_min": 0.7})


def images_for(model: Any) -> torch.Tensor:
    return torch.empty(B, model.config.in_channels, *model.config.size, device=META)


def features_of(columns: int = 12) -> torch.Tensor:
    return torch.empty(40, columns, device=META)


def test_list_names_functions_that_exist() -> None:
    assert listed()
    for name in listed():
        module, _, function = name.rpartition(".")
        found = import_module(f"anechoic.{module}")
        owners = [found, *(value for value in vars(found).values() if isinstance(value, type))]
        assert any(hasattr(owner, function) for owner in owners), name


def test_a_hidden_read_is_found() -> None:
    with Reads() as mode:
        echo.mean_cosine(features_of(), features_of())
    assert "eval.metrics.echo.mean_cosine" in mode.places


# ---- training

OBJECTIVES = [
    ("masked_reconstruction", "mae", {}),
    ("masked_reconstruction", "mae-without-skips", {}),
    ("supervised", "vit-class-head", {}),
    ("supervised", "resnet", {"label_smoothing": 0.1}),
    ("finetuning", "vit-class-head", {"num_classes": 7, "magnitude": 0.0}),
    ("finetuning", "vit-mean-head", {"num_classes": 7}),
    ("noise_prediction", "uvit", {"process": "vp"}),
    ("noise_prediction", "uvit-conditional", {"process": "discrete"}),
    ("flow_matching", "sit-with-skips", {}),
]


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
@pytest.mark.parametrize(
    ("name", "case", "options"), OBJECTIVES, ids=[f"{name}-{case}" for name, case, _ in OBJECTIVES]
)
def test_training_step(reads: Reads, name: str, case: str, options: dict[str, Any], algorithm: str) -> None:
    if algorithm == "muon" and case == "resnet":
        pytest.skip("Muon updates the matrices of transformer blocks")
    model = network(case).train()
    channels = model.config.in_channels
    preprocess = Preprocess((0.5,) * channels, (0.5,) * channels, 16, channels)
    task = loop.Task(model, make_objective(name, preprocess=preprocess, **options), seed=0)
    optimizer = make_optimizer(model, replace(OptimConfig(), algorithm=algorithm))
    ema = EMA(model, decay=0.9)
    pixels = torch.empty(B, channels, *model.config.size, dtype=torch.uint8, device=META)
    labels = torch.zeros(B, dtype=torch.int64, device=META)
    numbers = generator()
    set_learning_rate(optimizer, 1e-3)
    losses = task(preprocess.apply(pixels), numbers.ids, numbers.visits, labels)
    losses["loss"].backward()
    losses["gradient_norm"] = gradient_norm(model.named_parameters(), clip=1.0, factors={})
    loop.agree(World(0, 1, META), {key: value.detach() for key, value in losses.items()}, Stop())
    optimizer.step()
    optimizer.zero_grad()
    ema.update(model)


@pytest.mark.parametrize("operation", finetuning.OPERATIONS, ids=lambda operation: operation.__name__)
def test_every_augmentation(reads: Reads, operation: Any) -> None:
    x, strength = torch.empty(B, 3, 16, 16, device=META), torch.empty(B, device=META)
    assert operation(x, strength).shape == x.shape


# ---- sampling


@pytest.mark.parametrize(
    ("sampler", "process"),
    [(name, kind.name) for name, kinds in SAMPLERS.items() for kind in kinds if name != "dopri5"],
)
def test_sampler_step(reads: Reads, sampler: str, process: str) -> None:
    model = network("sit" if process == "flow" else "uvit-conditional").eval()
    x, evaluations = sample_batch(
        model,
        torch.arange(B, device=META),
        shape=(model.config.in_channels, 16, 16),
        process=PROCESSES[process],
        sampler=sampler,
        steps=3,
        seed=0,
        labels=torch.zeros(B, dtype=torch.int64, device=META),
        guidance=Guidance(0.5),
        null=5,
    )
    assert (x.shape[2:], x.device) == ((16, 16), META)
    assert evaluations >= 2


# ---- features and metrics


@pytest.mark.parametrize("case", ["vit", "mae", "resnet", "uvit"])
def test_feature_extraction(reads: Reads, case: str) -> None:
    model = network(case)
    images = images_for(model)
    forward = None if case != "uvit" else lambda x: model(x, torch.zeros(B, device=META))
    batches = features.extract_batches(
        model, [images], layers="all", poolings=features.poolings_of(model), forward=forward
    )
    if not reads.truth:  # then the features are not finite
        with pytest.raises(NotFiniteError):
            next(batches)
        return
    (found,) = batches
    assert all(value.device == META and len(value) == B for value in found.values())


def test_block_statistics(reads: Reads) -> None:
    model = network("mae")
    try:
        # In inference mode a meta tensor refuses to be read before a dispatch mode sees it.
        features.block_statistics.__wrapped__(model, images_for(model))
        features.block_ratios.__wrapped__(model, images_for(model))
    except UserError:
        assert not reads.truth


def labels_of(classes: int = 3) -> torch.Tensor:
    return torch.empty(40, dtype=torch.int64, device=META) % classes


METRICS = {
    "effective rank": lambda: rank.effective_rank(features_of()),
    "CKA": lambda: echo.linear_cka(features_of(), features_of(9)),
    "cosine": lambda: echo.mean_cosine(features_of(), features_of()),
    "colors": lambda: projections.eigenvector_colors(torch.empty(2, 4, 4, 12, device=META)),
    "neighbors": lambda: knn.nearest(features_of(), features_of(), k=5),
    "vote": lambda: knn.vote(
        knn.Neighbors(features_of(5), torch.zeros(40, 5, dtype=torch.int64, device=META)),
        labels_of(),
        k=5,
        num_classes=3,
    ),
    "coverage": lambda: frechet.coverage(features_of(), features_of(), neighbors=3),
    "logistic": lambda: logistic.Problem(
        features_of(), labels_of(), 3, torch.ones(12, device=META), torch.ones(2, device=META)
    ).evaluate(torch.zeros(2, 12, 3, device=META), torch.arange(2, device=META)),
}  # fmt: skip


@pytest.mark.parametrize("name", METRICS)
def test_metric(reads: Reads, name: str) -> None:
    try:
        METRICS[name]()
    except UserError:
        assert not reads.truth, "only a check of the values may refuse them"


@pytest.mark.parametrize("norm", [False, True])
def test_probe_step(reads: Reads, norm: bool) -> None:
    settings = [probe_heads.Setting(0.1, 0.0), probe_heads.Setting(0.01, 1e-4)]
    with META:
        heads = probe_heads.Heads(2, 12, 3, settings, norm=norm)
    optimizer = probe_heads.LARS(probe_heads.param_groups(heads, settings), lr=0.1)
    x = torch.empty(2, 40, 12, device=META)
    heads.loss(x, labels_of()).backward()
    optimizer.step()
    assert heads.correct(x, labels_of()).shape == (2, 2)
