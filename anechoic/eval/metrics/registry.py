"""The table of metrics: a metric is one function in a file of this package and one row here.

Commands, validation, sweeps and the report read this table and know no metric by name. Programs add rows with
`anechoic.register_metric`, installed packages with the entry point group `anechoic.metrics`. It loads no torch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

from anechoic.errors import UserError, nearest_name

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject

ENTRY_POINTS = "anechoic.metrics"
Need = Literal["labels", "train split", "styles", "classifier"]
KNN, RETRIEVAL, PROBE = "anechoic.eval.metrics.knn:", "anechoic.eval.metrics.retrieval:", "anechoic.eval.metrics.probe:"


@dataclass(frozen=True)
class Metric:
    """function: a callable of a Subject, or "module:name". What it returns depends on `per`:

    features: {(layer, pooling): {value: number}}; layer: {value: list with one number per layer};
    network: {value: number} of the whole network.
    """

    function: str | Callable[..., Any]
    description: str
    per: Literal["features", "layer", "network"] = "features"
    needs: tuple[Need, ...] = ()
    """a train split is held out of the data if none is given"""
    columns: Mapping[str, str] = field(default_factory=dict)
    """value -> column title, most important first; other values are in JSON only. Default: the metric's name"""
    share: bool | tuple[str, ...] = False
    """whether values, or these of them, are shares in 0 .. 1, which tables print in percent"""
    report: Literal["no", "table", "chart"] = "no"
    """whether `anechoic report` measures it, and whether it draws the first column over the layers"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """keyword arguments of the function"""

    def __call__(self, subject: Subject) -> Any:
        function = self.function
        if isinstance(function, str):
            module, _, name = function.partition(":")
            function = getattr(importlib.import_module(module), name)
        return function(subject, **self.options)


METRICS: dict[str, Metric] = {
    "knn": Metric(
        KNN + "knn_metric",
        "top-1 accuracy of a weighted vote of the nearest neighbors",
        needs=("labels", "train split"),
        columns={"knn": "k-NN"},
        share=True,
        report="chart",
    ),
    "knn_standardized": Metric(
        KNN + "knn_metric",
        "k-NN after each channel is scaled to deviation 1",
        needs=("labels", "train split"),
        columns={"knn_standardized": "k-NN, standardized"},
        share=True,
        options={"scaling": "standardized"},
    ),
    "knn_whitened": Metric(
        KNN + "knn_metric",
        "k-NN after all directions are scaled to the same variance; slow beyond a thousand channels",
        needs=("labels", "train split"),
        columns={"knn_whitened": "k-NN, whitened"},
        share=True,
        options={"scaling": "whitened"},
    ),
    "probe": Metric(
        PROBE + "probe_metric",
        "top-1 accuracy of a linear classifier (logistic, in100 or mae protocol)",
        needs=("labels", "train split"),
        columns={"probe": "probe"},
        share=True,
        report="chart",
    ),
    "rank": Metric(
        "anechoic.eval.metrics.rank:rank_metric",
        "effective rank: the number of directions that the features fill",
        columns={"rank_columns": "effective rank", "rank_rows": "rank, as in the paper", "entropy_rows": "entropy"},
        report="chart",
    ),
    "echo": Metric(
        "anechoic.eval.metrics.echo:echo_metric",
        "how much of the embedding (layer 0) a layer still holds: linear CKA and cosine",
        columns={"cka": "echo (CKA with layer 0)", "cosine": "cosine with layer 0"},
        report="chart",
    ),
    "norm": Metric("anechoic.eval.metrics.norm:norm_metric", "mean length of the feature vectors", report="table"),
    "silhouette": Metric(
        "anechoic.eval.metrics.silhouette:silhouette_metric",
        "how well classes separate, from -1 to 1, by cosine distance",
        needs=("labels",),
    ),
    "crops": Metric(
        "anechoic.eval.metrics.crop_retrieval:crops_metric",
        "share of crops whose nearest crop comes from the same image",
        columns={"crop_retrieval": "crop retrieval", "crop_error": "standard error"},
        share=True,
    ),
    "components": Metric(
        "anechoic.eval.metrics.components:components_metric",
        "share of the first principal components, and how much of them color and contrast explain",
        columns={
            "common_share": "mean",
            "first_share": "component 1",
            "three_share": "components 1-3",
            "look_share": "color and contrast",
        },
        share=True,
    ),
    "retrieval": Metric(
        RETRIEVAL + "retrieval_metric",
        "is the nearest drawing in another style the same object?",
        needs=("styles",),
        share=True,
    ),
    "retrieval_standardized": Metric(
        RETRIEVAL + "retrieval_metric",
        "retrieval across styles after each channel is scaled to deviation 1",
        needs=("styles",),
        share=True,
        options={"scaling": "standardized"},
    ),
    "retrieval_whitened": Metric(
        RETRIEVAL + "retrieval_metric",
        "retrieval across styles after all directions are scaled to the same variance",
        needs=("styles",),
        share=True,
        options={"scaling": "whitened"},
    ),
    "group_vote": Metric(
        RETRIEVAL + "group_metric",
        "k-NN vote on the kind of object by drawings of other objects in other styles",
        needs=("styles",),
        columns={"group_vote": "group"},
        share=True,
    ),
    "stream": Metric(
        "anechoic.eval.metrics.stream:stream_metric",
        "token norm, gain, share of the input on the identity path, and branch over shortcut",
        per="layer",
        columns={
            "input_share": "input share",
            "branch_ratio": "branch/shortcut",
            "gain": "gain",
            "token_norm": "token norm",
        },
        share=("input_share",),
        report="table",
    ),
    "statistics": Metric(
        "anechoic.eval.metrics.stream:statistics_metric",
        "rank and norm of every block and the strength of its branches, as validation records them",
        per="network",
    ),
    "branches": Metric(
        "anechoic.eval.metrics.branches:branches_metric",
        "effective rank of what each residual branch adds, and of the matrix that writes it",
        per="network",
        columns={"output_rank": "rank of branch outputs", "writer_rank": "rank of branch matrices"},
    ),
    "reconstruction": Metric(
        "anechoic.eval.metrics.reconstruction:reconstruction_metric",
        "loss of an autoencoder on hidden patches, beside that of the mean patch",
        per="network",
        columns={"masked_loss": "loss on hidden patches", "mean_patch_loss": "loss of the mean patch"},
    ),
    "accuracy": Metric(
        "anechoic.eval.metrics.accuracy:accuracy_metric",
        "top-1 accuracy of the network's own classification head",
        per="network",
        needs=("labels", "classifier"),
        share=True,
    ),
}


def register_metric(name: str, metric: Metric) -> None:
    """Add a metric to `evaluate` and, if it asks for it, to the report."""
    if name in METRICS:
        raise UserError(f"There is already a metric {name!r}: choose another name.")
    METRICS[name] = metric


@cache
def load_plugins() -> None:
    """Register the metrics of installed packages, once per process."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            register_metric(point.name, point.load())
        except Exception as problem:  # a broken plugin must not disable the others
            warnings.warn(f"The metric {point.name!r} ({point.value}) cannot be used: {problem}", stacklevel=2)


def find_metric(name: str) -> Metric:
    if name not in METRICS:
        load_plugins()
    if name not in METRICS:
        raise UserError(f"There is no metric {name!r}; {nearest_name(name, METRICS)}")
    return METRICS[name]


def metric_table() -> list[dict[str, str]]:
    """Return a row per metric for `--metrics help`: name, per, needs, description."""
    load_plugins()
    return [
        {"name": name, "per": metric.per, "needs": ", ".join(metric.needs), "description": metric.description}
        for name, metric in METRICS.items()
    ]


def columns(names: Mapping[str, Any] | tuple[str, ...] | list[str]) -> dict[str, str]:
    """Return value -> title of the columns of these metrics, in the order of the table."""
    return {
        value: title
        for name in names
        for value, title in (find_metric(name).columns or {name: name.replace("_", " ")}).items()
    }


def shares(names: Mapping[str, Any] | tuple[str, ...] | list[str]) -> set[str]:
    """Return the values of these metrics that are shares in 0 .. 1."""

    def of(metric: Metric, name: str) -> Iterable[str]:
        return metric.share if isinstance(metric.share, tuple) else columns([name]) if metric.share else ()

    return {value for name in names for value in of(find_metric(name), name)}


def titles(names: Mapping[str, Any] | tuple[str, ...] | list[str]) -> dict[str, str]:
    """Return value -> title with its unit."""
    percent = shares(names)
    return {value: f"{title} (%)" if value in percent else title for value, title in columns(names).items()}


def report_metrics(*, charts: bool = False) -> list[str]:
    """Return the metrics that the report measures, or those that it draws over the layers."""
    load_plugins()
    return [name for name, row in METRICS.items() if row.report == "chart" or (row.report == "table" and not charts)]
