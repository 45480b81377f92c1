"""The config of a run: frozen dataclasses with checked names, types and ranges, and their exact JSON.

No torch here. `None` means "chosen when the run starts": `resolve` chooses, and the run's config.json freezes it.
Progress, intervals and budgets are counted in samples seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from anechoic.choices import (
    Algorithm,
    Augmentation,
    Auto,
    LearningRateSchedule,
    PixelType,
    Precision,
    ShortcutForm,
    ShortcutVia,
    Stretch,
    WeightDecayOn,
)
from anechoic.config.checking import (
    BelowOne,
    Count,
    NotNegative,
    Options,
    Positive,
    Range,
    Section,
    SectionT,
    Share,
    Whole,
    checked,
    from_mapping,
    hints,
    parse_options,
)
from anechoic.errors import UserError

__all__ = [
    "EIGHT_BIT",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Algorithm",
    "Config",
    "Count",
    "DataConfig",
    "ModelConfig",
    "NotNegative",
    "ObjectiveConfig",
    "OptimConfig",
    "Options",
    "PixelConfig",
    "Positive",
    "Range",
    "SaveConfig",
    "Section",
    "Share",
    "ShortcutConfig",
    "ValidationConfig",
    "Whole",
    "adopt",
    "budget",
    "checked",
    "default_holdout",
    "default_workers",
    "differences",
    "from_json",
    "from_mapping",
    "hints",
    "parse_options",
    "resolve",
    "settings",
    "to_json",
]

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class PixelConfig(Section):
    type: PixelType = "8-bit"
    """8-bit: gray or RGB pictures; otherwise values and channels are those of the files, in this type"""
    select: tuple[str, ...] = ()
    """numbers or names of the channels that are read (default: all)"""
    clip_low: tuple[float, ...] = ()
    """lowest value per channel; smaller ones become it"""
    clip_high: tuple[float, ...] = ()
    """highest value per channel; larger ones become it"""
    stretch: Stretch = "linear"
    """log: log(1 + u), asinh: asinh(u), of u = (value - center) / spread"""
    center: tuple[float, ...] = ()
    """per channel, of log and asinh"""
    spread: tuple[float, ...] = ()
    """per channel, of log and asinh"""
    tile: Whole = 0
    """side in pixels of the tiles that images are cut into; 0: whole images"""
    overlap: Whole = 0
    """pixels that neighboring tiles share"""
    empty: NotNegative = 0.0
    """tiles with a standard deviation (mean over the channels) below this are skipped"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap >= max(1, self.tile):
            raise UserError(
                f"An overlap of {self.overlap} pixels does not fit tiles of {self.tile}: choose a smaller one."
            )
        if any(value <= 0 for value in self.spread) or any(
            low > high for low, high in zip(self.clip_low, self.clip_high, strict=True)
        ):
            raise UserError("spread must be positive, and clip_low at most clip_high.")
        if not self.stored and any(getattr(self, f.name) != f.default for f in fields(self)):
            raise UserError('Channels, tiles, clipping and stretches need the type of the stored values, not "8-bit".')

    @property
    def stored(self) -> bool:
        """Return whether pixels are read as the files have them."""
        return self.type != "8-bit"


EIGHT_BIT = PixelConfig()


@dataclass(frozen=True)
class DataConfig(Section):
    source: str = ""
    """where the images are: digits, scenes, emoji, a folder, list, zip, tar, parquet, npz, or hf:NAME"""
    image_size: Count = 224
    """image size (square) that the model gets"""
    channels: Count = 3
    """1 for gray, 3 for color"""
    mean: tuple[float, ...] | None = None
    """per channel, subtracted from values in 0..1 (default: ImageNet's for color, else 0.5)"""
    std: tuple[float, ...] | None = None
    """per channel, divided by (default: ImageNet's for color, else 0.5)"""
    augment: Augmentation = "crop"
    """random resized crop, center crop, or a plain resize"""
    scale: tuple[float, float] = (0.2, 1.0)
    """share of the image's area a random crop takes"""
    flip: bool = True
    """mirror half of the visits"""
    rotate: bool = False
    """turn by 0, 90, 180 or 270 degrees at random: for images without an up"""
    pixels: PixelConfig = field(default_factory=PixelConfig)
    """type, channels and normalization of pixels that are no 8-bit pictures"""
    labels: bool = False
    """read labels: never in pre-training"""
    holdout: Whole | None = None
    """samples never trained on, for validation (default: one in a hundred, at most 1024)"""
    workers: Whole | None = None
    """processes that decode images (default: none on a CPU with few cores)"""
    size: Count | None = None
    """number of training samples, read from the data"""
    fingerprint: str | None = None
    """checksum of the data: a run does not resume with other data"""


@dataclass(frozen=True)
class ModelConfig(Section):
    name: str = "mae_base_patch16"
    """a name that `anechoic list models` lists"""
    options: Options = field(default_factory=dict)
    """options of the model such as dim=48 depth=2; they add to the recipe's"""


@dataclass(frozen=True)
class ShortcutConfig(Section):
    alpha_min: Annotated[float, Range(1e-30, 1.0)] | Auto = 1.0
    """the last branch's alpha; 1 is a plain residual network, auto fits the depth"""
    schedule: str = "linear"
    """how alpha falls from 1 to alpha_min over the branches: linear, cosine or constant"""
    form: ShortcutForm = "identity"
    """what is scaled where two branches meet; identity is the method, the others its ablations"""
    via: ShortcutVia = "network"
    """network: decayed shortcuts; groups: the same as a learning-rate profile of the folded network, which is plain"""
    anneal: Share = 0.0
    """share of the training over which alpha falls from 1 to its value; 0 has it there from the start"""


@dataclass(frozen=True)
class ObjectiveConfig(Section):
    name: str = "masked_reconstruction"
    """what is minimized"""
    options: Options = field(default_factory=dict)
    """options of the objective; they add to the recipe's"""


@dataclass(frozen=True)
class OptimConfig(Section):
    algorithm: Algorithm = "adamw"
    """optimizer; muon: orthogonalized momentum for the matrices of blocks and skips, AdamW for the rest"""
    batch_size: Count = 1024
    """samples per update, over all ranks and micro-batches"""
    epochs: Positive | None = None
    """passes over the data (or give samples)"""
    samples: Count | None = None
    """the budget in samples seen (or give epochs)"""
    base_lr: NotNegative = 1.5e-4
    """learning rate per 256 samples of the batch"""
    lr: NotNegative | None = None
    """peak learning rate (default: base_lr * batch_size / 256)"""
    warmup: Share = 0.05
    """share of the budget over which the learning rate rises from 0"""
    schedule: LearningRateSchedule = "cosine"
    """the learning rate after the warm-up"""
    min_lr: NotNegative = 0.0
    """where the cosine ends"""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """of AdamW"""
    eps: NotNegative = 1e-8
    """of AdamW"""
    momentum: Share = 0.95
    """of Muon (Nesterov)"""
    weight_decay: NotNegative = 0.05
    """decoupled weight decay"""
    weight_decay_on: WeightDecayOn = "matrices"
    """weight decay on tensors of two or more dimensions, or on all parameters"""
    exempt: tuple[str, ...] = ()
    """names of parameters without weight decay"""
    layer_decay: Share = 1.0
    """factor of the learning rate from each block to the one below it (fine-tuning)"""
    clip: NotNegative = 0.0
    """largest norm of the gradient; 0 does not clip"""
    accumulate: Count = 1
    """micro-batches per update (gradient accumulation), to save memory"""
    ema: Share = 0.0
    """decay per update of the exponential moving average (EMA) of the weights; 0: no EMA"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.samples is not None and self.samples > self.batch_size:
            # Whole batches, so that the same command has the same budget when it resumes.
            object.__setattr__(self, "samples", self.samples // self.batch_size * self.batch_size)


@dataclass(frozen=True)
class ValidationConfig(Section):
    every: Count | None = None
    """samples between two validations on the held-out part (default: twenty, at least ten updates apart)"""
    knn: Whole = 0
    """training samples that vote in a k-NN validation, if the data has labels; 0: no k-NN"""
    report: Count | None = None
    """samples between two lines of metrics.jsonl (default: two hundred lines)"""
    tensorboard: bool = False
    """write TensorBoard files too, as --log tensorboard does"""


@dataclass(frozen=True)
class SaveConfig(Section):
    every: Count | None = None
    """samples between two checkpoints (default: twenty checkpoints, at least ten updates apart)"""
    keep_last: Count = 2
    """number of newest checkpoints to keep"""
    keep_every: Whole = 0
    """also keep the first checkpoint after each multiple of this number of samples; 0: none"""


@dataclass(frozen=True)
class Config(Section):
    recipe: str = ""
    """the recipe this came from"""
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    shortcut: ShortcutConfig = field(default_factory=ShortcutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    init_from: str = ""
    """a run, model or checkpoint directory whose weights this run starts from"""
    seed: Whole = 0
    """random seed of weights, order, crops, masks and noise"""
    devices: Count | None = None
    """number of ranks that share a batch (default: one per GPU, else one)"""
    fsdp: bool = False
    """shard weights, gradients and optimizer over the ranks (FSDP2) instead of replicating them"""
    threads: Count | None = None
    """threads per rank (default: all cores for one rank, one each for several)"""
    precision: Precision | None = None
    """of the matrix products (default: bfloat16 on a GPU, else float32)"""
    compile: bool = False
    """compile the model with torch.compile"""
    recompute: bool = False
    """activation checkpointing: keep only each block's input and recompute the rest; less memory, more time"""
    fused: bool = True
    """use fused blocks where they apply; off is slower, for comparison"""

    def __post_init__(self) -> None:
        super().__post_init__()
        optim = self.optim
        if optim.samples is not None and optim.samples < optim.batch_size:
            raise UserError(
                f"A budget of {optim.samples} samples is less than a batch of {optim.batch_size}: lower the batch size."
            )
        for values, name in ((self.data.mean, "mean"), (self.data.std, "std")):
            if values is not None and len(values) != self.data.channels:
                raise UserError(f"data.{name} needs one value for each of the {self.data.channels} channels.")
        pixels = self.data.pixels
        for name in ("select", "clip_low", "clip_high", "center", "spread"):
            if len(getattr(pixels, name)) not in (0, self.data.channels):
                raise UserError(f"data.pixels.{name} needs one value for each of the {self.data.channels} channels.")


# ---- JSON and differences


def to_json(config: Section) -> dict[str, Any]:
    """Return plain JSON values; `from_json` returns an equal Config."""
    plain: dict[str, Any] = {}
    for name in (f.name for f in fields(config)):
        value = getattr(config, name)
        plain[name] = (
            to_json(value) if isinstance(value, Section) else list(value) if isinstance(value, tuple) else value
        )
    return plain


# Names of settings in earlier versions, whose runs and records still load: section ("" is the top) -> old -> new.
RENAMED = {
    "": {"watch": "validation", "monitor": "validation", "plain": "unfused"},
    "shortcut": {"fade_in": "anneal"},
    "optim": {"decayed": "weight_decay_on"},
}

# Recipes on latents had this std in version 0.1, although latents were never divided by it.
OLD_LATENTS_STD = [1 / 255] * 4


def from_json(values: Mapping[str, Any]) -> Config:
    values = {RENAMED[""].get(name, name): value for name, value in values.items()}
    for section in RENAMED.keys() & values.keys():
        if isinstance(values[section], Mapping):
            values[section] = {RENAMED[section].get(name, name): value for name, value in values[section].items()}
    if "unfused" in values:
        values["fused"] = not values.pop("unfused")
    data = values.get("data")
    if isinstance(data, Mapping):
        values["data"] = data = dict(data)
        if data.get("augment") == "centre":  # legacy name
            data["augment"] = "center"
        if data.get("std") == OLD_LATENTS_STD:
            data["std"] = [1.0] * 4
    return from_mapping(Config, values)


def settings(config: Section, *, where: str = "") -> Iterator[tuple[str, Any]]:
    """("optim.lr", 6e-4), ...: every setting with its full name."""
    for f in fields(config):
        value = getattr(config, f.name)
        if isinstance(value, Section):
            yield from settings(value, where=f"{where}{f.name}.")
        else:
            yield where + f.name, value


def differences(old: Config, new: Config) -> list[str]:
    """Return a text per setting that differs: "optim.lr: 0.0006 in the run, 0.001 asked for"."""
    before, after = dict(settings(old)), dict(settings(new))
    return [
        f"{name}: {before[name]} in the run, {after[name]} asked for" for name in after if before[name] != after[name]
    ]


def adopt(config: SectionT, frozen: SectionT) -> SectionT:
    """Return the config with open settings (None) taken from the frozen one."""
    changes: dict[str, Any] = {}
    for f in fields(config):
        value, chosen = getattr(config, f.name), getattr(frozen, f.name)
        if isinstance(value, Section):
            changes[f.name] = adopt(value, chosen)
        elif value is None:
            changes[f.name] = chosen
    return replace(config, **changes)


# ---- automatic choices


def default_holdout(size: int) -> int:
    """Return one in a hundred, at least 64 where that is no more than a tenth of the data, at most 1024."""
    return min(max(size // 100, min(64, size // 10)), 1024)


def default_workers(cores: int, processes: int) -> int:
    """Return the workers per rank for ranks that share these cores; none where there are few cores."""
    return 0 if cores <= 2 else min(8, cores // processes)


def resolve(
    config: Config, *, size: int, fingerprint: str, gpus: int, cores: int, workers: int | None = None
) -> Config:
    """Choose every None. size: samples in the source; gpus and cores: of this machine.

    workers: per rank, under a launcher, which sets one thread per rank.
    """
    data, optim = config.data, config.optim
    holdout = default_holdout(size) if data.holdout is None else data.holdout
    if size - holdout < optim.batch_size:
        raise UserError(
            f"The data has {size} samples, {holdout} of them held out, less than a batch of {optim.batch_size}: "
            "lower optim.batch_size or data.holdout."
        )
    if data.pixels.stored and None in (data.mean, data.std):
        raise UserError("Stored pixels need data.mean and data.std: anechoic pretrain measures them.")
    color = data.channels == 3
    devices = config.devices or max(1, gpus)
    check_shares(optim, devices)
    if workers is None:
        workers = default_workers(cores, devices)
    samples = budget(optim, size - holdout)
    return replace(
        config,
        data=replace(
            data,
            mean=data.mean or (IMAGENET_MEAN if color else (0.5,) * data.channels),
            std=data.std or (IMAGENET_STD if color else (0.5,) * data.channels),
            holdout=holdout,
            workers=workers if data.workers is None else data.workers,
            size=size - holdout,
            fingerprint=fingerprint,
        ),
        optim=replace(
            optim,
            samples=samples,
            lr=optim.base_lr * optim.batch_size / 256 if optim.lr is None else optim.lr,
        ),
        validation=replace(
            config.validation,
            every=config.validation.every or max(10 * optim.batch_size, samples // 20),
            report=config.validation.report or max(optim.batch_size, samples // 200),
        ),
        save=replace(config.save, every=config.save.every or max(10 * optim.batch_size, samples // 20)),
        devices=devices,
        threads=config.threads or (1 if devices > 1 and not gpus else cores),
        precision=config.precision or ("bfloat16" if gpus else "float32"),
    )


def check_shares(optim: OptimConfig, devices: int) -> None:
    if optim.batch_size % (devices * optim.accumulate):
        raise UserError(
            f"A batch of {optim.batch_size} cannot be shared by {devices} devices in {optim.accumulate} micro-batches: "
            "choose optim.batch_size as a multiple of both."
        )


def budget(optim: OptimConfig, size: int) -> int:
    """Return the budget in samples, whole batches only; an epoch is the whole batches that `size` samples fill."""
    if optim.samples is None and optim.epochs is None:
        raise UserError("The budget is missing: give optim.epochs or optim.samples.")
    by_epochs = max(1, round((optim.epochs or 0) * (size // optim.batch_size))) * optim.batch_size
    if optim.samples is None:
        return by_epochs
    if optim.epochs is not None and optim.samples != by_epochs:
        raise UserError(
            f"optim.epochs asks for {by_epochs} samples and optim.samples for {optim.samples}: set one of them to None."
        )
    return optim.samples
