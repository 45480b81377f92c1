"""Arguments and options that several commands share: one definition and one help text each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from anechoic.choices import AllLayers, Pooling, Scaling, SearchEngine, Tracker, Vector, Weights

PathLike = str | Path

Run = Annotated[
    PathLike,
    arg(metavar="RUN", help="a run, model or checkpoint directory, timm:NAME[:random] or transformers:FOLDER."),
]
RunDirectory = Annotated[PathLike, arg(metavar="RUN", help="a run, model or checkpoint directory.")]
Data = Annotated[
    PathLike,
    arg(metavar="DATA", help="images: a folder, list, zip, tar, parquet, npz, URL, digits, scenes, emoji or hf:NAME."),
]
Test = Annotated[
    PathLike | None,
    arg(metavar="DATA", help="labeled images to test on; without it, a part of DATA is held out.", name="test"),
]
Out = Annotated[PathLike, arg(aliases=["-o"], metavar="PATH", help="the file, folder or run directory to write.")]
OptionalOut = Annotated[
    PathLike | None, arg(aliases=["-o"], metavar="PATH", help="the file, folder or run directory to write.")
]
Device = Annotated[str, arg(help="cpu, cuda, mps or xpu; auto takes a GPU if there is one.")]
Devices = Annotated[int | None, arg(help="number of processes that share each batch; default: one per GPU.")]
Workers = Annotated[
    int | None, arg(help="number of processes that decode images; with 0, threads decode while the network computes.")
]
ImageSize = Annotated[
    int | None, arg(help="image size in pixels; default: the model's own, or chosen by the images for a new model.")
]
BatchSize = Annotated[int, arg(help="number of images computed at once.")]
Seed = Annotated[int, arg(help="random seed; the same seed repeats the result.")]
WeightsOption = Annotated[
    Weights | None,
    arg(help="raw weights or those of the EMA, from the newest checkpoint; default: the EMA if there is one."),
]
DryRun = Annotated[bool, arg(help="print what would be done and stop.")]
Log = Annotated[
    Sequence[Tracker],
    arg(help="trackers that get metrics, config and pictures too, offline unless your environment names a server."),
]
ValidationLabels = Annotated[
    PathLike | None,
    arg(metavar="DATA", help="labeled images, never trained on, whose k-NN and probe accuracy validations record."),
]
Layer = Annotated[int, arg(help="0 is the embedding, k the k-th block, -1 the encoder's output.")]
Layers = Annotated[
    Sequence[int] | AllLayers | None,
    arg(help="layers to evaluate, or all; 0 is the embedding, k the k-th block, -1 the encoder's output."),
]
OnePooling = Annotated[
    Pooling | None,
    arg(help="class token, mean of the patches, or mean of all tokens; default: the class token if there is one."),
]
ImageVector = Annotated[
    Vector,
    arg(
        help="all patches side by side (flat), the class token, the mean of the patches, or of all tokens; flat and "
        "standardized retrieved best, measured with labels."
    ),
]
VectorScaling = Annotated[
    Scaling,
    arg(help="raw; centered to mean 0; standardized, each channel to deviation 1 too; or whitened, all directions."),
]
Engine = Annotated[
    SearchEngine,
    arg(
        help="torch or faiss: exact; approximate: a memory-mapped index of faiss, with its recall measured; auto: "
        "exact up to 100,000 images. faiss is an extra package."
    ),
]
