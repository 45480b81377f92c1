"""The verbs that evaluate frozen features: embed, knn, probe.

Each opens an encoder and data, chooses what the evaluator measures, and words the result. RUN may be a run, model or
checkpoint directory, timm:NAME (timm:NAME:random for fresh weights) or hf:FOLDER.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.eval.encoders import Encoder
    from anechoic.eval.eval_data import EvalData
    from anechoic.eval.evaluator import EvalSpec, Evaluation

Pooling = Literal["class", "mean", "all"]
Layers = tuple[int, ...] | Literal["all"]
Output = Annotated[Path, tyro.conf.arg(aliases=["-o"])]


def embed(
    run: str,
    data: str | None = None,
    /,
    *,
    output: Output,
    model: str | None = None,
    layer: int = -1,
    pooling: Pooling | None = None,
    image_size: int | None = None,
    device: str = "auto",
    workers: int = 0,
) -> Outcome:
    """Write one feature vector per image, with the images' names, to a .npz, .parquet or .csv file.

    Example: anechoic embed runs/mine photos/ -o vectors.npz

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER (with --model, the data).
        data: the images: a folder, list, zip, tar, parquet, npz, digits, scenes, emoji or hf:NAME.
        output: where to write; the ending chooses the format.
        model: timm:NAME or hf:FOLDER instead of a run.
        layer: 0 is the embedding, k the k-th block, -1 the encoder's output.
        pooling: class token, mean of the patches, or mean of all tokens (default: class token if there is one).
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        workers: processes that decode ahead; with 0, images are decoded while others are computed.
    """
    started = time.perf_counter()
    from anechoic.data import open_source
    from anechoic.eval.export_features import check_format, embed_source

    check_format(output)
    if workers < 0:
        raise UserError(f"--workers counts processes, 0 or more, not {workers}.")
    encoder, where = encoder_and_data(run, data, model, image_size)
    source = open_source(where, channels=encoder.channels)
    about = {"encoder": str(model or run)}
    metrics = embed_source(
        encoder, source, output, layer=layer, pooling=pooling, device=device, workers=workers, about=about
    )
    text = "Wrote {vectors} vectors of {dim} channels (layer {layer}, {pooling}) to ".format(**metrics) + f"{output}."
    return outcome(metrics, text + skipped_text(metrics["skipped"]), started)


def knn(
    run: str | None = None,
    /,
    *,
    train: str | None = None,
    test: str | None = None,
    holdout: float = 0.2,
    model: str | None = None,
    k: tuple[int, ...] = (),
    temperature: float = 0.07,
    layers: Layers = (-1,),
    pooling: tuple[Pooling, ...] = (),
    scaling: Literal["raw", "standardized", "whitened"] = "raw",
    baselines: bool = True,
    image_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Evaluate frozen features by a weighted vote of nearest neighbors (DINO's protocol), beside three baselines.

    Example: anechoic knn runs/mine --train photos/train --test photos/val

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER.
        train: labeled images that vote; a sub-folder's name, the column or array `label` is the label.
        test: labeled images to classify; without it, a part of train is held out.
        holdout: share of train to test on when there is no test data.
        model: timm:NAME or hf:FOLDER instead of a run.
        k: numbers of neighbors; by default those of 10, 20, 100 and 200 that there are train samples for.
        temperature: a neighbor's vote is exp(similarity / temperature).
        layers: layers to evaluate, or all.
        pooling: class, mean (of patches) or all (tokens); by default each that the model has.
        scaling: raw, as the protocol has it; standardized, each channel to deviation 1 over the train images; or
            whitened, all directions (raw pixels have too many of them and are left out).
        baselines: also evaluate the untrained network, raw pixels and a constant.
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the held-out part and of the untrained network.
    """
    started = time.perf_counter()
    from anechoic.eval.evaluator import EvalSpec
    from anechoic.pages.tables import percent, text_table

    encoder = the_encoder(run, model, image_size)
    eval_data = open_parts(encoder, train, test, holdout, seed)
    ks = neighbors(k, len(eval_data.train or ()))
    metric = "knn" if scaling == "raw" else f"knn_{scaling}"
    spec = EvalSpec(
        (metric,), layers=layers, poolings=pooling, neighbors=ks, temperature=temperature, holdout=holdout, seed=seed
    )
    left_out = ("raw pixels",) if scaling == "whitened" else ()
    found = compared(encoder, eval_data, spec, baselines=baselines, left_out=left_out, device=device)
    rows = [
        {**names_of(row), "accuracy": {str(k): value for k, value in row[f"{metric}_by_k"].items()}}
        for row in found.rows
    ]
    cells = [[*names_of(row).values(), *(percent(value) for value in row["accuracy"].values())] for row in rows]
    features = "features" if scaling == "raw" else f"{scaling} features"
    text = f"k-NN top-1 of {features} in per cent, {sizes(found.counts)}\n"
    text += text_table(["encoder", "layer", "pooling", *map(str, ks)], cells)
    own = [max(row["accuracy"].values()) for row in rows if row["encoder"] == encoder.name]
    metrics = {"accuracy": max(own), "rows": rows, **found.counts, "skipped": listed(found.skipped)}
    return outcome(metrics, text + skipped_text(metrics["skipped"]), started, seed, k=list(ks))


def probe(
    run: str | None = None,
    /,
    *,
    train: str | None = None,
    test: str | None = None,
    holdout: float = 0.2,
    protocol: Literal["logistic", "in100", "mae"] = "logistic",
    model: str | None = None,
    layers: Layers | None = None,
    pooling: tuple[Pooling, ...] = (),
    noise: tuple[float, ...] = (),
    epochs: int | None = None,
    batch_size: int | None = None,
    baselines: bool = True,
    image_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Evaluate frozen features by a linear classifier: converged logistic regression, or the published protocols.

    Example: anechoic probe runs/mine --train photos/train --test photos/val --layers all

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER.
        train: labeled images to fit; a sub-folder's name, the column or array `label` is the label.
        test: labeled images to classify; without it, a part of train is held out.
        holdout: share of train to test on when there is no test data.
        protocol: logistic (its regularizer chosen on held-out train data), in100 (the paper's ImageNet-100 probe), mae
            (MAE's ImageNet-1K probe: augmented, so every epoch runs the encoder).
        model: timm:NAME or hf:FOLDER instead of a run.
        layers: layers to evaluate, or all; default the last, with --noise all.
        pooling: class, mean (of patches) or all (tokens). Default: in100 all, mae class, logistic each.
        noise: for a denoiser (U-ViT, SiT): noise levels from 0 to 1; every layer is probed at every level, and which
            of them counts is chosen on held-out train data.
        epochs: of in100 (200) and mae (90).
        batch_size: of in100 (1024) and mae (16384); never more than there are samples.
        baselines: also evaluate the untrained network, raw pixels and a constant (not with mae).
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the held-out parts, of the heads' weights and order, and of the untrained network.
    """
    started = time.perf_counter()
    from anechoic.eval.evaluator import EvalSpec
    from anechoic.pages.tables import percent, text_table

    settings: dict[str, Any] = {"protocol": protocol, "epochs": epochs, "batch_size": batch_size, "seed": seed}
    if noise:
        refuse_with_noise(run=run, model=model, pooling=pooling, image_size=image_size)
        spec = EvalSpec(("probe",), layers=layers or "all", noise=noise, select=True, **settings)
        found = noisy_evaluation(str(run), train, test, holdout, spec, device=device)
        metrics, text = noisy_outcome(found)
        return outcome(metrics, text + skipped_text(metrics["skipped"]), started, seed)
    encoder = the_encoder(run, model, image_size)
    eval_data = open_parts(encoder, train, test, holdout, seed)
    if not pooling:
        by_protocol: dict[str, tuple[Pooling, ...]] = {"in100": ("all",), "mae": ("class",), "logistic": ()}
        pooling = by_protocol[protocol] if "class" in encoder.poolings else ("mean",)
    spec = EvalSpec(("probe",), layers=layers or (-1,), poolings=pooling, **settings)
    found = compared(encoder, eval_data, spec, baselines=baselines and protocol != "mae", device=device)
    rows = [{**names_of(row), "accuracy": row["probe"], **without(row, "probe")} for row in found.rows]
    extra = [key for key in rows[0] if key not in ("encoder", "layer", "pooling", "accuracy", "curve", "held_out")]
    cells = [[*names_of(row).values(), percent(row["accuracy"]), *(row[key] for key in extra)] for row in rows]
    text = f"{protocol} probe, top-1 in per cent, {sizes(found.counts)}\n"
    text += text_table(["encoder", "layer", "pooling", "top-1", *extra], cells)
    own = [row["accuracy"] for row in rows if row["encoder"] == encoder.name]
    metrics = {"accuracy": max(own), "rows": rows, **found.counts, "skipped": listed(found.skipped)}
    return outcome(metrics, text + skipped_text(metrics["skipped"]), started, seed)


def refuse_with_noise(*, run: str | None, model: str | None, pooling: tuple, image_size: int | None) -> None:
    """What a denoiser's features cannot honor."""
    if run is None or model is not None:
        raise UserError("--noise is for denoisers trained here: name a run directory, and no --model.")
    if pooling not in ((), ("mean",)):
        raise UserError("A denoiser's features are the mean of its patches: leave --pooling out with --noise.")
    if image_size is not None:
        raise UserError("A denoiser takes images of the size it was trained on: leave --image-size out with --noise.")


def noisy_evaluation(
    run: str, train: str | None, test: str | None, holdout: float, spec: EvalSpec, *, device: str
) -> Evaluation:
    from anechoic.eval.denoisers import open_noisy
    from anechoic.eval.eval_data import open_eval_data
    from anechoic.eval.evaluator import Evaluator
    from anechoic.runtime.devices import pick_device

    denoiser = open_noisy(run, device=pick_device(device))
    eval_data = open_eval_data(train, test, holdout=holdout, seed=spec.seed, channels=denoiser.channels)
    return Evaluator(spec, device=device).run(denoiser, eval_data)


def noisy_outcome(found: Evaluation) -> tuple[dict[str, Any], str]:
    """All rows; chosen is best on held-out training data, the test-selected maximum stands beside it and says so."""
    from anechoic.pages.tables import percent, text_table

    rows = [
        {"noise": row["noise"], "layer": row["layer"], "held_out": row["selection"]["probe"], "accuracy": row["probe"]}
        for row in found.rows
    ]
    chosen = max(rows, key=lambda row: row["held_out"])
    best = max(rows, key=lambda row: row["accuracy"])
    levels, layers = (list(dict.fromkeys(row[name] for row in rows)) for name in ("noise", "layer"))
    cells = {
        (row["layer"], row["noise"]): f"{percent(row['accuracy']):.2f}{'*' if row is chosen else ' '}" for row in rows
    }
    text = [
        f"Linear probe of layers x noise levels, test top-1 in per cent, {sizes(found.counts)}",
        text_table(
            ["layer", *(f"t={level:g}" for level in levels)],
            [[layer, *(cells[layer, level] for level in levels)] for layer in layers],
        ),
        f"* chosen on held-out training data: layer {chosen['layer']} at noise {chosen['noise']:g}, "
        f"test {percent(chosen['accuracy']):.2f}",
        f"test-selected maximum (optimistic): layer {best['layer']} at noise {best['noise']:g}, "
        f"test {percent(best['accuracy']):.2f}",
    ]
    metrics = {"accuracy": chosen["accuracy"], "chosen": chosen, "test_selected_maximum": best, "rows": rows}
    return {**metrics, **found.counts, "skipped": listed(found.skipped)}, "\n".join(text)


# ---- what the verbs share


def the_encoder(run: str | None, model: str | None, image_size: int | None) -> Encoder:
    from anechoic.eval.encoders import open_encoder

    if (run is None) == (model is None):
        raise UserError("Name one encoder: a run directory, or --model timm:NAME or hf:FOLDER.")
    return open_encoder(str(run or model), image_size=image_size)


def encoder_and_data(run: str, data: str | None, model: str | None, image_size: int | None) -> tuple[Encoder, str]:
    """With --model the only positional argument is the data."""
    if model is None:
        if data is None:
            raise UserError("Data is missing: name the images after the run.")
        refuse_swapped(run, data)
        return the_encoder(run, None, image_size), data
    if data is not None:
        raise UserError("Name one encoder: a run directory, or --model timm:NAME or hf:FOLDER, not both.")
    return the_encoder(None, model, image_size), run


def refuse_swapped(run: str, data: str) -> None:
    from anechoic.runtime.checkpoint import is_model

    if is_model(data) and not is_model(run) and not run.startswith(("timm:", "hf:")):
        raise UserError(f"{data} is a model and {run} is not: give the model first, then the images.")


def open_parts(encoder: Encoder, train: str | None, test: str | None, holdout: float, seed: int) -> EvalData:
    from anechoic.eval.eval_data import open_eval_data

    return open_eval_data(train, test, holdout=holdout, seed=seed, channels=encoder.channels)


def compared(
    encoder: Encoder,
    eval_data: EvalData,
    spec: EvalSpec,
    *,
    baselines: bool,
    device: str,
    left_out: tuple[str, ...] = (),
) -> Evaluation:
    """The encoder as asked for, then the output of each baseline but those left out; rows carry the name."""
    from anechoic.eval.encoders import baselines as baselines_of
    from anechoic.eval.evaluator import evaluate_all

    others = baselines_of(encoder, seed=spec.seed) if baselines else []
    of_output = [
        (other, replace(spec, layers=(-1,), poolings=usable_poolings(other, spec.poolings)))
        for other in others
        if other.name not in left_out
    ]
    return evaluate_all([(encoder, spec), *of_output], eval_data, device=device)


def usable_poolings(encoder: Encoder, asked: tuple[Pooling, ...]) -> tuple[Pooling, ...]:
    """Those of a baseline that were asked for; it may lack a class token."""
    return tuple(pooling for pooling in asked if pooling in encoder.poolings)


def neighbors(asked: tuple[int, ...], samples: int) -> tuple[int, ...]:
    """As asked for, if there are as many; else the usual ones that there are."""
    from anechoic.eval.metrics.knn import KS

    if asked and max(asked) > samples:
        raise UserError(f"k = {max(asked)} is more than the {samples} train samples; choose smaller --k.")
    return asked or tuple(k for k in KS if k <= samples) or (samples,)


def names_of(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("encoder", "layer", "pooling")}


def without(row: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


def sizes(counts: Mapping[str, int]) -> str:
    return "{train_samples} train and {test_samples} test samples of {classes} classes.".format(**counts)


def listed(skipped: tuple[tuple[str, str], ...]) -> list[dict[str, str]]:
    return [{"name": name, "reason": reason} for name, reason in skipped]


def skipped_text(skipped: list[dict[str, str]]) -> str:
    if not skipped:
        return ""
    first = skipped[0]
    return f"\n{len(skipped)} images could not be read; the first is {first['name']} ({first['reason']})."


def outcome(metrics: dict, text: str, started: float, seed: int | None = None, **chosen: Any) -> Outcome:
    """chosen: arguments that were left open and what they came to."""
    return Outcome(config=chosen, metrics=metrics, seed=seed, seconds=time.perf_counter() - started, text=text)
