"""Did training work? Signals of a run that need no label, and a verdict in words.

Collapsed, too short, worse than raw pixels, plateaued or learning, with the reasons and what to try. How far each
signal can be trusted was measured on labeled data (docs/report.md); the verdict rests on those that predicted k-NN
there. It opens no run and draws nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from anechoic.choices import VerdictWord as Word
from anechoic.data import Source
from anechoic.errors import NotFiniteError
from anechoic.eval.encoders import Encoder, RawPixels, seeded
from anechoic.eval.eval_data import EvalData
from anechoic.eval.evaluator import EvalSpec, Evaluation, Evaluator

# Maximum number of images that are measured.
SAMPLES = 512
# Collapsed: the features fill fewer directions than this, and find an image no more often than its pixels do. Above it
# rank decides nothing: whether it predicts anything depends on the data.
LEAST_RANK = 1.5
# Too short: features of so few directions, or so little skill, while the loss still falls. Fewer directions than this
# are a collapse all the same, unless the untrained network had few itself.
COLLAPSED_RANK = 1.2
# Plateaued: the last third of the training brought less than this share of all that the loss fell, or hidden patches
# are guessed less than this share better than by the mean patch.
LEAST_LATE_GAIN, LEAST_SKILL = 0.02, 0.05
# A difference of two shares counts if it is larger than this number of standard errors.
ERRORS = 2.0


@dataclass(frozen=True)
class Signals:
    """None where a signal does not exist: no autoencoder, no untrained network, no pixels, too short a curve.

    late_gain: of all that the held-out loss fell, the share that fell in the last third of the training so far;
    late_fall: how much it fell there, as a share of the loss before; fall: how much it fell in all, as a share.
    """

    images: int
    masked_loss: float | None = None
    mean_patch_loss: float | None = None
    rank: float | None = None
    untrained_rank: float | None = None
    crop_retrieval: float | None = None
    crop_error: float | None = None
    pixel_crop_retrieval: float | None = None
    pixel_crop_error: float | None = None
    untrained_crop_retrieval: float | None = None
    late_gain: float | None = None
    late_fall: float | None = None
    fall: float | None = None

    @property
    def skill(self) -> float | None:
        """1 - loss / loss of the mean patch: 0 is no better than that, 1 is perfect."""
        if self.masked_loss is None or not self.mean_patch_loss:
            return None
        return 1 - self.masked_loss / self.mean_patch_loss

    @property
    def rank_share(self) -> float | None:
        """The features' effective rank over that of the untrained network."""
        if self.rank is None or not self.untrained_rank:
            return None
        return self.rank / self.untrained_rank

    @property
    def crop_lead(self) -> float | None:
        """Crop retrieval minus that of raw pixels."""
        if self.crop_retrieval is None or self.pixel_crop_retrieval is None:
            return None
        return self.crop_retrieval - self.pixel_crop_retrieval

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "skill": self.skill, "rank_share": self.rank_share, "crop_lead": self.crop_lead}


@dataclass(frozen=True)
class Verdict:
    """word: the answer; reasons: what was measured; advice: what to try."""

    word: Word
    reasons: list[str]
    advice: list[str]
    signals: Signals = field(repr=False)

    @property
    def text(self) -> str:
        lines = [f"Verdict: {self.word}.", *(f"  - {reason}" for reason in self.reasons)]
        return "\n".join([*lines, *(f"  {advice}" for advice in self.advice)])

    def to_json(self) -> dict[str, Any]:
        return {
            "word": self.word,
            "reasons": self.reasons,
            "advice": self.advice,
            "signals": self.signals.to_json(),
        }


# ---- measuring


def measure(
    encoder: Encoder,
    source: Source,
    records: Sequence[Mapping[str, Any]] = (),
    *,
    device: str = "auto",
    seed: int = 0,
) -> Signals:
    """The signals of an encoder on images it was not trained on; records: its metrics, for the curve."""
    spec = EvalSpec(("rank", "crops", "reconstruction"), poolings=("mean",), max_test=SAMPLES, seed=seed)
    late = {"late_gain": late_gain(records), "late_fall": late_fall(records), "fall": fall(records)}
    try:
        own = evaluate(encoder, source, spec, device)
    except NotFiniteError:
        return Signals(0, rank=0.0, **late)
    pixels = Encoder("raw pixels", RawPixels(), encoder.preprocess)
    of_pixels = evaluate(pixels, source, replace(spec, metrics=("crops",)), device)
    untrained: Mapping[str, Any] = {}
    if encoder.untrained is not None:
        fresh = replace(encoder, name="untrained", model=seeded(encoder.untrained, seed=seed), untrained=None)
        untrained = last(evaluate(fresh, source, replace(spec, metrics=("rank", "crops")), device))
    return Signals(
        own.counts["test_samples"],
        masked_loss=own.network.get("masked_loss"),
        mean_patch_loss=own.network.get("mean_patch_loss"),
        rank=last(own)["rank_columns"],
        untrained_rank=untrained.get("rank_columns"),
        crop_retrieval=last(own).get("crop_retrieval"),
        crop_error=last(own).get("crop_error"),
        pixel_crop_retrieval=last(of_pixels).get("crop_retrieval"),
        pixel_crop_error=last(of_pixels).get("crop_error"),
        untrained_crop_retrieval=untrained.get("crop_retrieval"),
        **late,
    )


def evaluate(encoder: Encoder, source: Source, spec: EvalSpec, device: str) -> Evaluation:
    return Evaluator(spec, device=device, cached=False).run(encoder, EvalData(None, source, None, None))


def last(found: Evaluation) -> Mapping[str, Any]:
    return found.rows[-1] if found.rows else {}


def late_gain(records: Sequence[Mapping[str, Any]]) -> float | None:
    """Of all that the loss fell, the share that fell in the last third; of held-out loss if it was measured.

    None if there are too few points or the loss did not fall at all.
    """
    first, middle, final = thirds(records)
    fallen = first - final
    return (middle - final) / fallen if fallen > 0 else None


def late_fall(records: Sequence[Mapping[str, Any]]) -> float | None:
    """How much the same loss fell in the last third, as a share of what it was before; None if that is not positive."""
    _, middle, final = thirds(records)
    return (middle - final) / middle if middle > 0 else None


def fall(records: Sequence[Mapping[str, Any]]) -> float | None:
    """How much the loss fell in all, as a share of what it was at first; None if there is one point only."""
    curve = curve_of(records)
    return 1 - curve[-1][1] / curve[0][1] if len(curve) > 1 and curve[0][1] > 0 else None


def thirds(records: Sequence[Mapping[str, Any]]) -> tuple[float, float, float]:
    """The loss at the start, after two thirds and at the end; not a number if there are too few points."""
    curve = curve_of(records)
    if len(curve) < 4:
        return math.nan, math.nan, math.nan
    (_, first), (end, final) = curve[0], curve[-1]
    return first, [loss for seen, loss in curve if seen <= 2 / 3 * end][-1], final


def curve_of(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(seen, loss): held-out, or of training if nothing was held out."""
    for name in ("held_out_loss", "loss"):
        found = [(record["seen"], record[name]) for record in records if record.get(name) is not None]
        if found:
            return found
    return []


# ---- wording


def verdict_of(signals: Signals, *, alpha_min: float | None = None) -> Verdict:
    """The first that holds of: collapsed, too short, worse than raw pixels, plateaued, learning."""
    reasons = reasons_of(signals)
    word: Word = "learning"
    if collapsed(signals):
        word = "collapsed"
    elif too_short(signals):
        word = "too short"
    elif worse_than_pixels(signals):
        word = "worse than raw pixels"
    elif plateaued(signals):
        word = "plateaued"
    return Verdict(word, reasons, advice_of(word, signals, alpha_min), signals)


def collapsed(signals: Signals) -> bool:
    return few_directions(signals) and not (falling(signals) and not fell_to_one(signals))


def too_short(signals: Signals) -> bool:
    return falling(signals) and (few_directions(signals) or no_skill(signals))


def few_directions(signals: Signals) -> bool:
    """Whether rank is close to 1, and features find an image no more often than its pixels do."""
    few = signals.rank is not None and signals.rank < LEAST_RANK
    return few and not (signals.crop_lead is not None and signals.crop_lead > chance(signals))


def fell_to_one(signals: Signals) -> bool:
    """Whether the features became constant or nearly so, and did not start like that."""
    assert signals.rank is not None
    started_low = signals.untrained_rank is not None and signals.untrained_rank < LEAST_RANK
    return signals.rank == 0 or (signals.rank < COLLAPSED_RANK and not started_low)


def no_skill(signals: Signals) -> bool:
    return signals.skill is not None and signals.skill < LEAST_SKILL


def plateaued(signals: Signals) -> bool:
    return no_skill(signals) or (signals.late_gain is not None and signals.late_gain < LEAST_LATE_GAIN)


def worse_than_pixels(signals: Signals) -> bool:
    """By more than chance."""
    return signals.crop_lead is not None and signals.crop_lead < -chance(signals)


def chance(signals: Signals) -> float:
    """A lead in crop retrieval that may be chance."""
    return ERRORS * math.hypot(signals.crop_error or 0.0, signals.pixel_crop_error or 0.0)


def reasons_of(signals: Signals) -> list[str]:
    found = []
    if signals.skill is not None:
        loss, mean = f"{signals.masked_loss:.3f}", f"{signals.mean_patch_loss:.3f}"
        found.append(
            f"Hidden patches are guessed with a loss of {loss}, {100 * signals.skill:.0f} % below the {mean} of always "
            "guessing the mean patch."
            if signals.skill > 0
            else f"Hidden patches are guessed no better (loss {loss}) than by always guessing the mean patch ({mean})."
        )
    if signals.crop_retrieval is not None and signals.pixel_crop_retrieval is not None:
        beside = [f"{100 * signals.pixel_crop_retrieval:.0f} % by raw pixels"]
        if signals.untrained_crop_retrieval is not None:
            beside.append(f"{100 * signals.untrained_crop_retrieval:.0f} % by the untrained network")
        found.append(
            f"An image is found again by another crop of it among {signals.images} in "
            f"{100 * signals.crop_retrieval:.0f} % of tries ({', '.join(beside)})."
        )
    # Above the limit rank decides nothing, and the report shows that of every layer.
    if signals.rank is not None and signals.rank < LEAST_RANK:
        found.append(f"The features fill {signals.rank:.1f} directions (effective rank): images look alike to it.")
    if signals.late_fall is not None:
        percent = f"{100 * abs(signals.late_fall):.{0 if abs(signals.late_fall) >= 0.01 else 1}f} %"
        still = "still " if falling(signals) else ""
        found.append(
            f"The loss {still}fell by {percent} in the last third of the training."
            if signals.late_fall > 0
            else f"The loss rose by {percent} in the last third of the training."
        )
    return found


def advice_of(word: Word, signals: Signals, alpha_min: float | None) -> list[str]:
    decayed = alpha_min is not None and alpha_min < 1
    if word == "collapsed":
        other = "a larger --alpha-min" if decayed else "a longer run"
        return [f"Try a lower peak learning rate (--lr), {other}, or other data."]
    if word == "worse than raw pixels":
        return [
            "Try more epochs, more images or a smaller patch. Until then a pretrained encoder (timm:NAME, "
            "transformers:FOLDER) is the better start."
        ]
    if word == "plateaued":
        return ["Try more images, a larger model or a higher peak learning rate. More epochs alone will change little."]
    if word == "too short":
        return ["Train longer (--epochs): the loss still falls, and a network starts with poor features."]
    return ["Train longer (--epochs)."] if falling(signals) else []


def falling(signals: Signals) -> bool:
    """Whether the loss was still falling at the end; of a curve too short for thirds, whether it fell."""
    if signals.late_gain is None:
        return signals.fall is not None and signals.fall > 0
    return signals.late_gain > 2 * LEAST_LATE_GAIN
