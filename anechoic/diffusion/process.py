"""Forward processes from data to noise, and the objectives that train a network to predict them.

A process defines the amounts of data and noise at each time, the network's target, and how a prediction is read;
samplers.py solves it backward. Sections on U-ViT and SiT of the paper's generative experiments; Ho et al. 2020, Song
et al. 2021 (VP), Lipman et al. 2023 and Ma et al. 2024 (flow).

B batch, C channels, H height, W width. Every process writes x_t = alpha(t) * data + sigma(t) * noise.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from anechoic.errors import UserError
from anechoic.rng import SampleGenerator


def per_sample(values: Tensor, x: Tensor) -> Tensor:
    """Scalars (B,) or () shaped to multiply x (B, ...), in x's precision."""
    return values.to(x).view(-1, *[1] * (x.ndim - 1)) if values.ndim else values.to(x)


class Process(ABC):
    """x_t = alpha(t) * data + sigma(t) * noise, with the process's own unit of time."""

    name: ClassVar[str]
    noisiest: ClassVar[float]
    """The time at which a sample is pure noise and from which samplers start."""

    def __repr__(self) -> str:
        """Return class and settings, and no address: the feature cache is keyed by it."""
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"

    @abstractmethod
    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha(t) and sigma(t), of t's shape."""

    @abstractmethod
    def half_log_snr(self, t: Tensor) -> Tensor:
        """lambda(t) = log(alpha / sigma)."""

    @abstractmethod
    def time_at(self, half_log_snr: Tensor) -> Tensor:
        """The inverse of `half_log_snr`."""

    @abstractmethod
    def time_of_noise(self, level: Tensor) -> Tensor:
        """The time of a noise level, from 0 (the image itself) to 1 (pure noise)."""

    @abstractmethod
    def draw_time(self, generator: SampleGenerator) -> Tensor:
        """(B,) times to train at, one for each sample."""

    @abstractmethod
    def network_time(self, t: Tensor) -> Tensor:
        """The value of t the network is given."""

    @abstractmethod
    def target(self, data: Tensor, noise: Tensor) -> Tensor:
        """What the network is trained to predict from x_t."""

    @abstractmethod
    def estimates(self, x: Tensor, t: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
        """(data, noise) that a prediction of the network at (x, t) stands for."""

    def mix(self, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t (B, ...) = alpha(t) * data + sigma(t) * noise."""
        alpha, sigma = self.coefficients(t)
        return per_sample(alpha, data) * data + per_sample(sigma, data) * noise

    def score(self, x: Tensor, t: Tensor, prediction: Tensor) -> Tensor:
        """grad log p_t(x) = -noise / sigma(t)."""
        _, sigma = self.coefficients(t)
        return -self.estimates(x, t, prediction)[1] / per_sample(sigma, x)


class NoisePredicting(Process):
    """Variance preserving, alpha^2 + sigma^2 = 1, and the network predicts the noise."""

    @abstractmethod
    def log_alpha(self, t: Tensor) -> Tensor:
        """Half the logarithm of what is usually written alpha-bar."""

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        log_alpha = self.log_alpha(t)
        return log_alpha.exp(), torch.sqrt(-torch.expm1(2 * log_alpha))

    def half_log_snr(self, t: Tensor) -> Tensor:
        log_alpha = self.log_alpha(t)
        return log_alpha - 0.5 * torch.log(-torch.expm1(2 * log_alpha))

    def target(self, data: Tensor, noise: Tensor) -> Tensor:
        return noise

    def estimates(self, x: Tensor, t: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
        alpha, sigma = self.coefficients(t)
        return (x - per_sample(sigma, x) * prediction) / per_sample(alpha, x), prediction


@final
class ContinuousVP(NoisePredicting):
    """beta(t) = 0.1 + 19.9 t for t from 0 to 1: log alpha-bar = -(0.1 t + 9.95 t^2)."""

    name = "vp"
    noisiest = 1.0
    beta_min, beta_slope = 0.1, 19.9

    def beta(self, t: Tensor) -> Tensor:
        return self.beta_min + self.beta_slope * t

    def log_alpha(self, t: Tensor) -> Tensor:
        return -0.5 * (self.beta_min * t + 0.5 * self.beta_slope * t**2)

    def time_at(self, half_log_snr: Tensor) -> Tensor:
        # The positive root of slope/2 t^2 + min t = -log alpha-bar, in the form that does not cancel near 0.
        decay = F.softplus(-2 * half_log_snr)
        return 2 * decay / (self.beta_min + torch.sqrt(self.beta_min**2 + 2 * self.beta_slope * decay))

    def time_of_noise(self, level: Tensor) -> Tensor:
        return level

    def draw_time(self, generator: SampleGenerator) -> Tensor:
        return generator.uniform("time")

    def network_time(self, t: Tensor) -> Tensor:
        return 999 * t


@final
class DiscreteLatent(NoisePredicting):
    """1,000 steps with sqrt(beta) linear, as Stable Diffusion's; t is the step n, 1 to 1,000, fractional in between.

    Between two steps log alpha is linear in n.
    """

    name = "discrete"
    num_steps = 1000
    noisiest = 1000.0
    first_beta, last_beta = 0.00085, 0.0120

    @staticmethod
    @cache
    def table() -> Tensor:
        """(1000,) log alpha at n = 1 .. 1000, in double precision."""
        ends = DiscreteLatent.first_beta**0.5, DiscreteLatent.last_beta**0.5
        beta = torch.linspace(*ends, DiscreteLatent.num_steps, dtype=torch.float64) ** 2
        return 0.5 * torch.log1p(-beta).cumsum(0)

    def log_alpha(self, t: Tensor) -> Tensor:
        below = t.floor().clamp(1, self.num_steps - 1)
        table = self.table().to(t)
        left = table[below.long() - 1]
        return left + (t - below) * (table[below.long()] - left)

    def time_at(self, half_log_snr: Tensor) -> Tensor:
        value = -0.5 * F.softplus(-2 * half_log_snr)
        table = self.table().to(value)
        # The table falls with n; searchsorted wants it to rise.
        above = torch.searchsorted(-table, -value).clamp(1, self.num_steps - 1)
        left, right = table[above - 1], table[above]
        return above + (value - left) / (right - left)

    def time_of_noise(self, level: Tensor) -> Tensor:
        return self.num_steps * level

    def draw_time(self, generator: SampleGenerator) -> Tensor:
        return (generator.integers("time", self.num_steps) + 1).to(torch.float32)

    def network_time(self, t: Tensor) -> Tensor:
        return t


@final
class LinearFlow(Process):
    """x_t = t * data + (1 - t) * noise for t from 0 (noise) to 1 (data); the network predicts data - noise."""

    name = "flow"
    noisiest = 0.0

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return t, 1 - t

    def half_log_snr(self, t: Tensor) -> Tensor:
        return torch.logit(t)

    def time_at(self, half_log_snr: Tensor) -> Tensor:
        return torch.sigmoid(half_log_snr)

    def time_of_noise(self, level: Tensor) -> Tensor:
        return 1 - level

    def draw_time(self, generator: SampleGenerator) -> Tensor:
        return generator.uniform("time")

    def network_time(self, t: Tensor) -> Tensor:
        return t

    def target(self, data: Tensor, noise: Tensor) -> Tensor:
        return data - noise

    def estimates(self, x: Tensor, t: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
        t = per_sample(t, x)
        return x + (1 - t) * prediction, x - t * prediction


PROCESSES: dict[str, Process] = {process.name: process for process in (ContinuousVP(), DiscreteLatent(), LinearFlow())}


def process_named(name: str) -> Process:
    if name not in PROCESSES:
        raise UserError(f"there is no forward process {name!r:.60}; choose one of {', '.join(PROCESSES)}.")
    return PROCESSES[name]


# ---- objectives -----------------------------------------------------------------------------------------------------

# (model, batch with images and labels, generator) -> {"loss": scalar}
Objective = Callable[[Any, Any, SampleGenerator], dict[str, Tensor]]


def drop_labels(labels: Tensor, generator: SampleGenerator, *, probability: float, null: int) -> Tensor:
    """(B,) labels, each replaced by the null class with the given probability."""
    return torch.where(generator.uniform("label-drop") < probability, null, labels)


def training_labels(config: Any, labels: Tensor | None, generator: SampleGenerator) -> Tensor | None:
    """Return the labels for a network of this config: None, the labels, or the labels with some dropped."""
    if config.num_classes is None:
        return None
    if labels is None:
        raise UserError(
            "A class-conditional network is trained on labels: set data.labels to true, on data that has them."
        )
    if config.label_dropout == 0:
        return labels
    return drop_labels(labels, generator, probability=config.label_dropout, null=config.num_classes)


def denoising(process: Process) -> Objective:
    """Mean over all elements of (prediction - target)^2 at a drawn time, without weights.

    Time, noise and label drop of a sample are functions of (seed, sample, visit).
    """

    def loss(model: Any, batch: Any, generator: SampleGenerator) -> dict[str, Tensor]:
        images = batch.images
        labels = training_labels(model.config, batch.labels, generator)
        noise = generator.normal("noise", *images.shape[1:]).to(images)
        t = process.draw_time(generator)
        prediction = model(process.mix(images, noise, t), process.network_time(t), labels)
        return {"loss": F.mse_loss(prediction.float(), process.target(images, noise).float())}

    return loss


def noise_prediction(*, process: str = "vp") -> Objective:
    """Predict the noise of the continuous VP process ("vp") or of the discrete latent schedule ("discrete")."""
    chosen = process_named(process)
    if not isinstance(chosen, NoisePredicting):
        raise UserError(f"The {process!r} process predicts no noise; use the objective flow_matching.")
    return denoising(chosen)


def flow_matching() -> Objective:
    """Predict the velocity data - noise of the straight path from noise to data."""
    return denoising(LinearFlow())


def process_of(objective: str, options: Mapping[str, Any]) -> Process | None:
    """Return the process that an objective trains on; None if it trains no denoiser."""
    if objective == "noise_prediction":
        return process_named(options.get("process", "vp"))
    return LinearFlow() if objective == "flow_matching" else None


# ---- a denoiser as an encoder ---------------------------------------------------------------------------------------


def encode(model: nn.Module, x: Tensor, *, process: Process, level: float) -> Tensor:
    """Run the network without a label on x (B, C, H, W), which has noise of this level (0: none)."""
    t = process.time_of_noise(torch.full((len(x),), level, device=x.device))
    return model(x, process.network_time(t), None)
