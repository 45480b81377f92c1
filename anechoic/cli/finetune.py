"""The command `finetune`: a pre-trained encoder and a new head on labels."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anechoic.cli._command import training_command
from anechoic.cli.options import Data, Devices, DryRun, ImageSize, Log, Out, RunDirectory, Seed, Test
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.config import Config
    from anechoic.data import Source


@training_command
def finetune(
    run: RunDirectory,
    data: Data,
    /,
    *,
    out: Out,
    test: Test = None,
    epochs: float = 100,
    batch_size: int | None = None,
    base_lr: float = 5e-4,
    layer_decay: float = 0.65,
    drop_path: float = 0.1,
    mixup: float = 0.8,
    cutmix: float = 1.0,
    smoothing: float = 0.1,
    magnitude: float = 9.0,
    erase: float = 0.25,
    image_size: ImageSize = None,
    seed: Seed = 0,
    devices: Devices = None,
    log: Log = (),
    dry_run: DryRun = False,
) -> Outcome:
    """Train a pre-trained encoder and a new head on labels: MAE's recipe, all weights are trained.

    RUN is a masked autoencoder or vision transformer. DATA needs labels: a sub-folder's name, the column or array
    `label`. The same command resumes.

    Example: anechoic finetune runs/mine photos/train --test photos/val --out runs/mine-labels --epochs 50

    Args:
        epochs: passes over the data.
        batch_size: samples per update; by default up to 1024, fewer for little data.
        base_lr: learning rate per 256 samples of the batch.
        layer_decay: factor of the learning rate from each block to the one below it.
        drop_path: probability of dropping the last block's branches; earlier blocks proportionally less.
        mixup: mixes pairs of images with a share from Beta(mixup, mixup); 0 is off.
        cutmix: pastes boxes with a share from Beta(cutmix, cutmix); 0 is off.
        smoothing: share of the label spread over all classes.
        magnitude: strength of RandAugment, up to 10; 0 is off. Images with stored values are only moved.
        erase: probability of replacing a box of an image by noise.
    """
    import json

    from anechoic.config import to_json
    from anechoic.training.loop import fit

    started = time.perf_counter()
    knobs = {
        "mixup": mixup,
        "cutmix": cutmix,
        "smoothing": smoothing,
        "magnitude": magnitude,
        "erase": erase,
    }
    out, train = Path(out), str(data)
    config, source = finetune_config(
        str(run),
        train,
        image_size=image_size,
        optim={"epochs": epochs, "batch_size": batch_size, "base_lr": base_lr, "layer_decay": layer_decay},
        drop_path=drop_path,
        knobs=knobs,
        seed=seed,
        devices=devices,
    )
    if dry_run:
        return Outcome(to_json(config), {}, seed=seed, text=json.dumps(to_json(config), indent=2))
    # The size of scenes depends on the config, so they are drawn again.
    opened = None if train.startswith("scenes") else source
    results = fit(config, out, verbose=True, source=opened, log_to=log)
    metrics: dict[str, Any] = dict(results["metrics"])
    text = f"{out} is fine-tuned: {metrics['seen']:,} samples seen"
    if test is not None:
        metrics["accuracy"] = accuracy_on(out, opened or train, str(test))
        text += f", top-1 on {test}: {100 * metrics['accuracy']:.2f} %"
    elif "held_out_accuracy" in metrics:
        metrics["accuracy"] = metrics["held_out_accuracy"]
        text += f", top-1 on held-out samples: {100 * metrics['accuracy']:.2f} %"
    return Outcome(results["config"], metrics, seed=seed, seconds=time.perf_counter() - started, text=text + ".")


def finetune_config(
    run: str,
    train: str,
    *,
    image_size: int | None,
    optim: dict[str, Any],
    drop_path: float,
    knobs: dict[str, float],
    seed: int,
    devices: int | None,
) -> tuple[Config, Source]:
    """Return the recipe with the encoder's sizes, shortcuts and weights for these classes, and the opened data."""
    from dataclasses import replace

    from anechoic.config import ModelConfig, ObjectiveConfig, ShortcutConfig
    from anechoic.data import open_source
    from anechoic.data.source import labels_of
    from anechoic.errors import UserError
    from anechoic.models.mae import MAEConfig
    from anechoic.models.vit import ViTConfig
    from anechoic.recipes.transfer import finetune_base_in1k
    from anechoic.runtime.checkpoint import model_directory, read_card
    from anechoic.runtime.model_card import check_preprocess, config_of
    from anechoic.storage.safe_io import of_kind

    path = model_directory(run)
    card = read_card(path)
    network = config_of(card, where=str(run))
    encoder = network.encoder if isinstance(network, MAEConfig) else network
    if not isinstance(encoder, ViTConfig):
        raise UserError(
            f"{run} is a {card['family']}; fine-tuning starts from a masked autoencoder or vision transformer."
        )
    prepare = check_preprocess(of_kind(card, "preprocess", dict, where=str(path)), network, where=str(path))
    source = open_source(train, labels=True, channels=prepare.channels, pixels=prepare.pixels)
    num_classes = int(labels_of(source).max()) + 1
    if num_classes < 2:
        raise UserError("The train data has one class only, so there is nothing to learn; give at least two classes.")
    # A twentieth of the data as a power of two, so that little data still makes many updates.
    batch = optim["batch_size"] or min(1024, max(16, 2 ** ((len(source) // 20).bit_length() - 1)))
    name, sizes = named_size(encoder)
    # A schedule of listed alphas is an option of the model; a named one is a setting of the shortcut.
    named = isinstance(encoder.schedule, str)
    base = finetune_base_in1k()
    options = {
        **base.model.options,
        **sizes,
        **({} if named else {"schedule": list(encoder.schedule)}),
        "num_classes": num_classes,
        "drop_path": drop_path,
    }
    mixing = {"num_classes": num_classes, **knobs}
    config = replace(
        base,
        recipe="",
        data=replace(
            base.data,
            source=str(train),
            image_size=image_size or prepare.image_size,
            channels=prepare.channels,
            mean=prepare.mean,
            std=prepare.std,
        ),
        model=ModelConfig(name, options),
        shortcut=ShortcutConfig(
            alpha_min=float(encoder.alpha_min),
            schedule=encoder.schedule if isinstance(encoder.schedule, str) else "linear",
            form=encoder.form,
        ),
        objective=ObjectiveConfig("finetuning", mixing),
        optim=replace(
            base.optim,
            epochs=float(optim["epochs"]),
            batch_size=batch,
            base_lr=optim["base_lr"],
            layer_decay=optim["layer_decay"],
        ),
        init_from=str(run),
        seed=seed,
        devices=devices,
    )
    return config, source


def named_size(encoder: Any) -> tuple[str, dict[str, Any]]:
    """Return the name of the vision transformer that is nearest to the encoder, and the options in which it differs.

    Nearest: fewest options that make up the size differ, then by the smallest change of width.
    """
    from dataclasses import asdict, fields

    from anechoic.models import MODELS
    from anechoic.models.vit import ViTConfig

    kept = ("in_channels", "patch_size", "dim", "depth", "num_heads", "mlp_ratio", "norm_eps", "qkv_bias", "gelu")
    own = {name: value for name, value in asdict(encoder).items() if name in kept}

    def distance(size: dict[str, Any]) -> tuple[int, float]:
        return sum(own[name] != value for name, value in size.items()), abs(math.log(size["dim"] / own["dim"]))

    name, size = min(
        ((name, size) for name, (family, size) in MODELS.items() if family == "vit"), key=lambda row: distance(row[1])
    )
    usual = {field.name: field.default for field in fields(ViTConfig)} | size
    return name, {option: value for option, value in own.items() if value != usual[option]}


def accuracy_on(run: Path, train: str | Source, test: str) -> float:
    """Return the top-1 accuracy on center crops of the test images; classes are matched by name if they have one."""
    from anechoic.eval.encoders import run_encoder
    from anechoic.eval.eval_data import open_eval_data
    from anechoic.eval.evaluator import EvalSpec, Evaluator

    encoder = run_encoder(run)
    eval_data = open_eval_data(train, test, channels=encoder.channels, pixels=encoder.pixels)
    return Evaluator(EvalSpec(("accuracy",))).run(encoder, eval_data).network["accuracy"]
