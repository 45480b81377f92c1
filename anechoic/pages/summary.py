"""The numbers of a report: each run by itself, layer by layer, and several runs compared over their seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anechoic.config import Config, settings
from anechoic.errors import UserError
from anechoic.eval.encoders import Encoder
from anechoic.eval.evaluator import EvalSpec, Evaluator, Subject, usable_metrics
from anechoic.eval.metrics.registry import columns, report_metrics, shares, titles
from anechoic.eval.verdict import Verdict
from anechoic.pages.estimates import Estimate, estimate
from anechoic.pages.runs import RunOnDisk, curves, encoder_of, facts, images_for, verdict_on, weights_of

# Settings in which runs of one arm may differ: they change no distribution that anybody asks about.
NOT_THE_ARM = ("seed", "devices", "threads", "data.workers", "compile", "recompute", "fused", "recipe")

# Accuracies on labeled images, which validations record with --validation-labels.
ONLINE = {"labels_knn": "k-NN on labeled images (%)", "labels_probe": "probe on labeled images (%)"}


def measures() -> dict[str, str]:
    """Return what arms are compared by: name -> title. Beside loss and crop retrieval, each metric with a chart."""
    found = {"held_out_loss": "held-out loss", "crop_retrieval": "crop retrieval (%)", **ONLINE}
    for name in report_metrics(charts=True):
        found[name] = next(iter(titles([name]).values()))
    return found


@dataclass(frozen=True)
class Summary:
    """A run and what was measured of it. layers: a row per layer of the mean token; subject: its images' features, for
    pictures. missing: what could not be measured, and why."""

    run: RunOnDisk
    name: str
    facts: dict[str, Any]
    curves: dict[str, Any]
    verdict: Verdict | None
    layers: list[dict[str, Any]]
    subject: Subject | None
    missing: list[str]

    def measure(self, name: str) -> float | None:
        """Return one of `measures()`, of the last layer and the end of the training so far."""
        if name == "held_out_loss":
            return self.last_recorded(name)
        if name in ONLINE:
            value, share = self.last_recorded(name), True
        elif name == "crop_retrieval":
            value, share = self.verdict.signals.crop_retrieval if self.verdict else None, True
        else:
            key = next(iter(columns([name])))
            value, share = self.layers[-1].get(key) if self.layers else None, key in shares([name])
        return 100 * value if share and value is not None else value

    def last_recorded(self, name: str) -> float | None:
        """Return the newest value that a validation recorded."""
        return next((x for x in reversed(self.curves["validation"].get(name, [])) if x is not None), None)

    def to_json(self) -> dict[str, Any]:
        return {
            "run": str(self.run.path),
            "name": self.name,
            "facts": self.facts,
            "verdict": self.verdict.to_json() if self.verdict else None,
            "layers": self.layers,
            "curves": self.curves,
            "measures": {name: self.measure(name) for name in measures()},
            "missing": self.missing,
        }


def summarize(
    run: RunOnDisk, *, name: str, data: str | None = None, samples: int = 2000, device: str = "auto", seed: int = 0
) -> Summary:
    """Measure a run; what cannot be measured without weights, images or labels is listed as missing."""
    missing: list[str] = []
    rows: list[dict[str, Any]] = []
    verdict, subject, weights = None, None, None
    try:
        encoder = encoder_of(run, device=device, seed=seed)
        weights = weights_of(run)
    except UserError as problem:
        return Summary(run, name, facts(run), curves(run), None, [], None, [str(problem)])
    try:
        verdict = verdict_on(run, encoder, data=data, device=device, seed=seed)
    except UserError as problem:
        missing.append(f"There is no verdict: {problem}")
    try:
        rows, subject = layers_of(run, encoder, data=data, samples=samples, device=device, seed=seed)
    except UserError as problem:
        missing.append(f"The layers were not measured: {problem}")
    return Summary(run, name, facts(run, weights=weights), curves(run), verdict, rows, subject, missing)


def layers_of(
    run: RunOnDisk, encoder: Encoder, *, data: str | None, samples: int, device: str, seed: int
) -> tuple[list[dict[str, Any]], Subject]:
    """Return a row per layer, of the mean token: the metrics that the registry marks for the report and that the data
    allows."""
    eval_data = images_for(run, data)
    metrics = usable_metrics(report_metrics(), encoder, eval_data)
    spec = EvalSpec(metrics, layers="all", poolings=("mean",), max_test=samples, seed=seed)
    subject = Evaluator(spec, device=device).extract(encoder, eval_data)
    found = Evaluator(spec, device=device).measure(subject)
    shown = {"layer", *columns(metrics)}
    return [{name: value for name, value in row.items() if name in shown} for row in found.table(metrics)], subject


# ---- several runs


def unique_names(runs: Sequence[RunOnDisk]) -> list[str]:
    """Folder names, with their parents' where two are equal."""
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.path.resolve().parent.name}/{run.name}" for run in runs]
    return [name if names.index(name) == i else f"{name} ({i + 1})" for i, name in enumerate(names)]


def arm_of(config: Config) -> dict[str, Any]:
    """The settings that make a run comparable with others."""
    return {name: value for name, value in settings(config) if name not in NOT_THE_ARM}


def arms(summaries: Sequence[Summary]) -> dict[str, list[Summary]]:
    """Runs by the settings in which they differ, in words; runs that differ in their seed alone stand together."""
    every = [arm_of(summary.run.config) for summary in summaries]
    differing = [name for name in every[0] if any(arm[name] != every[0][name] for arm in every)]
    found: dict[str, list[Summary]] = {}
    for arm, summary in zip(every, summaries, strict=True):
        words = ", ".join(f"{name.rpartition('.')[2]} {worded(arm[name])}" for name in differing)
        found.setdefault(words or "all runs", []).append(summary)
    return found


def worded(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def comparison(summaries: Sequence[Summary]) -> list[dict[str, Any]]:
    """A row per arm and measure: mean over seeds with its 95 % interval, and paired difference from the first arm."""
    by_arm = arms(summaries)
    first = next(iter(by_arm))
    rows = []
    for arm, members in by_arm.items():
        for measure, title in measures().items():
            values = values_by_seed(members, measure)
            if not values:
                continue
            base = values_by_seed(by_arm[first], measure)
            shared = sorted(values.keys() & base.keys())
            paired = estimate(values[seed] - base[seed] for seed in shared) if arm != first and shared else None
            rows.append(
                {"arm": arm, "measure": measure, "title": title, "seeds": len(values)}
                | {"mean": plain(estimate(values.values())), "difference": plain(paired)}
            )
    return rows


def values_by_seed(members: Sequence[Summary], measure: str) -> dict[int, float]:
    found = {member.run.config.seed: member.measure(measure) for member in members}
    return {seed: value for seed, value in found.items() if value is not None}


def plain(found: Estimate | None) -> Mapping[str, Any] | None:
    return None if found is None else {"mean": found.mean, "half": found.half, "n": found.n}
