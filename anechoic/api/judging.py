"""The verbs that judge and explain frozen features: embed, knn, probe, analyze.

Each opens an encoder and data, calls rooms of `anechoic.evals`, and words the result. RUN may be a run, model or
checkpoint directory, timm:NAME (timm:NAME:random for fresh weights) or hf:FOLDER.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from anechoic.errors import UserError
from anechoic.outcome import Outcome

if TYPE_CHECKING:
    from anechoic.data import Source
    from anechoic.evals.encoders import Encoder
    from anechoic.evals.labelled import Labelled, LabelledFeatures

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
        data: the images: a folder, list, zip, tar, parquet, npz, digits, scenes or hf:NAME.
        output: where to write; the ending chooses the format.
        model: timm:NAME or hf:FOLDER instead of a run.
        layer: 0 is the embedding, k the k-th block, -1 the encoder's output.
        pooling: class token, mean of the patches, or mean of all tokens (default: class token if there is one).
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        workers: processes that decode ahead; with 0, images are decoded while others are computed.
    """
    from anechoic.data import open_source
    from anechoic.report.tables import check_format

    started = time.perf_counter()
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
    if source.skipped:
        text += f"\n{len(source.skipped)} images could not be read; the first is {source.skipped[0][0]}."
    return outcome({"run": run, "data": where, "output": str(output)}, metrics, text, started)


def embed_source(
    encoder: Encoder,
    source: Source,
    output: Path,
    *,
    layer: int = -1,
    pooling: Pooling | None = None,
    device: str = "auto",
    workers: int = 0,
    about: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Embed every image of an open source in one pass, decoding, computing and writing at the same time."""
    from anechoic.evals.bank import features_of
    from anechoic.report.tables import write_vectors

    chosen = pooling or encoder.poolings[0]
    features = features_of(
        encoder, source, layers=(layer,), poolings=(chosen,), device=device, workers=workers, keep_pixels=False
    )
    (((number, _), vectors),) = features.sets.items()
    names = [source.name(int(i)) for i in features.ids]
    about = {**(about or {}), "layer": str(number), "pooling": chosen, "weights": encoder.fingerprint}
    write_vectors(output, vectors, names=names, about=about)
    return {"vectors": len(names), "dim": vectors.shape[1], "skipped": len(source.skipped), **about}


def knn(
    run: str | None = None,
    /,
    *,
    train: str | None = None,
    test: str | None = None,
    holdout: float = 0.2,
    model: str | None = None,
    k: tuple[int, ...] = (10, 20, 100, 200),
    temperature: float = 0.07,
    layers: Layers = (-1,),
    pooling: tuple[Pooling, ...] = (),
    baselines: bool = True,
    image_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Judge frozen features by a weighted vote of their nearest neighbours (DINO's protocol), beside three baselines.

    Example: anechoic knn runs/mine --train photos/train --test photos/val

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER.
        train: labelled images that vote; a sub-folder's name, the column or array `label` is the label.
        test: labelled images to classify; without it, a part of train is held out.
        holdout: share of train to test on when there is no test data.
        model: timm:NAME or hf:FOLDER instead of a run.
        k: numbers of neighbours.
        temperature: a neighbour's vote is exp(similarity / temperature).
        layers: layers to judge, or all.
        pooling: class, mean (of patches) or all (tokens); by default each that the model has.
        baselines: also judge the untrained network, raw pixels and a constant.
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the held-out part and of the untrained network.
    """
    from anechoic.evals.analysis import as_tensor
    from anechoic.evals.bank import pick_device
    from anechoic.evals.knn import knn_accuracy
    from anechoic.report.tables import percent, text_table

    started = time.perf_counter()
    encoder = the_encoder(run, model, image_size)
    labelled = open_parts(encoder, train, test, holdout, seed)
    if max(k) > len(labelled.train):
        raise UserError(f"k = {max(k)} is more than the {len(labelled.train)} train samples; choose smaller --k.")
    rows: list[dict[str, Any]] = []
    where = pick_device(device)
    for name, features in judged(encoder, labelled, layers, pooling, baselines, device, seed):
        for (layer, pool), vectors in features.train.items():
            found = knn_accuracy(
                as_tensor(vectors).to(where),
                features.train_labels,
                as_tensor(features.test[layer, pool]).to(where),
                features.test_labels,
                ks=k,
                temperature=temperature,
            )
            accuracy = {str(count): value for count, value in found.items()}
            rows.append({"encoder": name, "layer": layer, "pooling": pool, "accuracy": accuracy})
    cells = [[r["encoder"], r["layer"], r["pooling"], *(percent(v) for v in r["accuracy"].values())] for r in rows]
    text = f"k-NN top-1 in per cent, {sizes(labelled)}\n" + text_table(
        ["encoder", "layer", "pooling", *map(str, k)], cells
    )
    own = [row for row in rows if row["encoder"] == encoder.name]
    best = max(own, key=lambda row: max(row["accuracy"].values()))
    metrics = {"accuracy": max(best["accuracy"].values()), "rows": rows, **counts(labelled)}
    config = {"run": run, "model": model, "train": train, "test": test, "holdout": holdout, "temperature": temperature}
    return outcome(config, metrics, text, started, seed)


def probe(
    run: str | None = None,
    /,
    *,
    train: str | None = None,
    test: str | None = None,
    holdout: float = 0.2,
    protocol: Literal["logistic", "in100", "mae"] = "logistic",
    model: str | None = None,
    layers: Layers = (-1,),
    pooling: tuple[Pooling, ...] = (),
    noise: tuple[float, ...] = (),
    epochs: int | None = None,
    batch_size: int | None = None,
    baselines: bool = True,
    image_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Judge frozen features by a linear classifier: converged logistic regression, or the published protocols.

    Example: anechoic probe runs/mine --train photos/train --test photos/val --layers all

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER.
        train: labelled images to fit; a sub-folder's name, the column or array `label` is the label.
        test: labelled images to classify; without it, a part of train is held out.
        holdout: share of train to test on when there is no test data.
        protocol: logistic (its regulariser chosen on held-out train data), in100 (the paper's ImageNet-100 probe), mae
            (MAE's ImageNet-1K probe: augmented, so every epoch runs the encoder).
        model: timm:NAME or hf:FOLDER instead of a run.
        layers: layers to judge, or all.
        pooling: class, mean (of patches) or all (tokens). Default: in100 all, mae class, logistic each.
        noise: for a denoiser (U-ViT, SiT): noise levels from 0 to 1; every layer is probed at every level, and which
            of them counts is chosen on held-out train data.
        epochs: of in100 (200) and mae (90).
        batch_size: of in100 (1024) and mae (16384); never more than there are samples.
        baselines: also judge the untrained network, raw pixels and a constant (not with mae).
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the held-out parts, of the heads' weights and order, and of the untrained network.
    """
    from anechoic.evals.protocols import in100_rows, logistic_rows, mae_rows
    from anechoic.report.tables import percent, text_table

    started = time.perf_counter()
    config = {"run": run, "model": model, "train": train, "test": test, "holdout": holdout, "protocol": protocol}
    if noise:
        from anechoic.evals.noisy_probe import probe_noise

        if run is None:
            raise UserError("--noise is for denoisers trained here: name a run directory.")
        probed = probe_noise(
            run,
            train=train,
            test=test,
            levels=noise,
            layers="all" if layers == (-1,) else layers,
            protocol=protocol,
            holdout=holdout,
            epochs=epochs or 200,
            batch_size=batch_size or 1024,
            device=device,
            seed=seed,
        )
        return outcome({**config, "noise": list(noise)}, probed.metrics(), probed.text(), started, seed)
    encoder = the_encoder(run, model, image_size)
    labelled = open_parts(encoder, train, test, holdout, seed)
    has_class = "class" in encoder.poolings
    if not pooling:
        by_protocol: dict[str, tuple[Pooling, ...]] = {"in100": ("all",), "mae": ("class",), "logistic": ()}
        pooling = by_protocol[protocol] if has_class else ("mean",)
    rows: list[dict[str, Any]] = []
    if protocol == "mae":
        rows += mae_rows(
            encoder,
            labelled,
            layers=layers,
            poolings=pooling,
            epochs=epochs or 90,
            batch_size=batch_size or 16384,
            device=device,
            seed=seed,
        )
    else:
        for name, features in judged(encoder, labelled, layers, pooling, baselines, device, seed):
            found = (
                logistic_rows(features, device=device, seed=seed)
                if protocol == "logistic"
                else in100_rows(features, epochs=epochs or 200, batch_size=batch_size or 1024, device=device, seed=seed)
            )
            rows += [{"encoder": name, **row} for row in found]
    extra = [key for key in rows[0] if key not in ("encoder", "layer", "pooling", "accuracy", "curve", "held_out")]
    cells = [
        [row["encoder"], row["layer"], row["pooling"], percent(row["accuracy"]), *(row[key] for key in extra)]
        for row in rows
    ]
    text = f"{protocol} probe, top-1 in per cent, {sizes(labelled)}\n"
    text += text_table(["encoder", "layer", "pooling", "top-1", *extra], cells)
    own = [row["accuracy"] for row in rows if row["encoder"] == encoder.name]
    return outcome(config, {"accuracy": max(own), "rows": rows, **counts(labelled)}, text, started, seed)


def analyze(
    run: str,
    data: str | None = None,
    /,
    *,
    model: str | None = None,
    runs: tuple[str, ...] = (),
    test: str | None = None,
    samples: int = 5000,
    layers: Layers = "all",
    pooling: tuple[Pooling, ...] = (),
    baselines: bool = True,
    figures: Path | None = None,
    image_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
) -> Outcome:
    """Explain an encoder layer by layer: effective rank, the echo of its input, and how well classes separate.

    Example: anechoic analyze runs/mine photos/val --figures pictures/

    Args:
        run: run, model or checkpoint directory, timm:NAME or hf:FOLDER (with --model, the data).
        data: the images; with labels, silhouette and k-NN are measured too.
        model: timm:NAME or hf:FOLDER instead of a run.
        runs: more runs that differ in alpha_min: rank and accuracy at every checkpoint of all of them, and how the two
            correlate (training dynamics; needs labels).
        test: data to test the accuracies of --runs on; without it, a fifth of data is held out.
        samples: use at most so many images, evenly spaced.
        layers: layers to explain, or all; 0 is the embedding.
        pooling: class, mean (of patches) or all (tokens); by default class and mean.
        baselines: also show the last layer of the untrained network, raw pixels and a constant.
        figures: a folder to draw pictures into, as PNG and SVG.
        image_size: side of the images, if other than the model's own.
        device: cpu, cuda, mps; auto takes an accelerator if there is one.
        seed: of the held-out part and of the untrained network.
    """
    from anechoic.evals.analyses import analyse, dynamics_text, layer_text

    started = time.perf_counter()
    config = {"run": run, "data": data, "model": model, "runs": list(runs), "samples": samples}
    encoder, where = encoder_and_data(run, data, model, image_size)
    if runs:
        from anechoic.evals.dynamics import dynamics
        from anechoic.report.figures import draw_dynamics

        pool = pooling[0] if pooling else encoder.poolings[0]
        found = dynamics([run, *runs], train=where, test=test, seed=seed, pooling=pool, device=device)
        if figures is not None:
            draw_dynamics(found, figures / "dynamics")
        return outcome(config, found, dynamics_text(found), started, seed)
    metrics = analyse(
        encoder,
        where,
        samples=samples,
        layers=layers,
        poolings=pooling,
        with_baselines=baselines,
        figures=figures,
        device=device,
        seed=seed,
    )
    return outcome(config, metrics, layer_text(metrics), started, seed)


# ---- what the verbs share


def the_encoder(run: str | None, model: str | None, image_size: int | None) -> Encoder:
    from anechoic.evals.encoders import open_encoder

    if (run is None) == (model is None):
        raise UserError("Name one encoder: a run directory, or --model timm:NAME or hf:FOLDER.")
    return open_encoder(str(run or model), image_size=image_size)


def encoder_and_data(run: str, data: str | None, model: str | None, image_size: int | None) -> tuple[Encoder, str]:
    """With --model the only positional argument is the data."""
    if model is None:
        if data is None:
            raise UserError("Data is missing: name the images after the run.")
        return the_encoder(run, None, image_size), data
    if data is not None:
        raise UserError("Name one encoder: a run directory, or --model timm:NAME or hf:FOLDER, not both.")
    return the_encoder(None, model, image_size), run


def open_parts(encoder: Encoder, train: str | None, test: str | None, holdout: float, seed: int) -> Labelled:
    from anechoic.evals.labelled import open_labelled

    return open_labelled(train, test, holdout=holdout, seed=seed, channels=encoder.channels)


def judged(
    encoder: Encoder,
    labelled: Labelled,
    layers: Layers,
    pooling: tuple[Pooling, ...],
    with_baselines: bool,
    device: str,
    seed: int,
) -> Any:
    """(name, LabelledFeatures) of the encoder as asked for, then of each baseline's output."""
    from anechoic.evals.encoders import baselines
    from anechoic.evals.labelled import labelled_features

    features: LabelledFeatures = labelled_features(
        encoder, labelled, layers=layers, poolings=pooling or None, device=device
    )
    yield encoder.name, features
    for baseline in baselines(encoder, seed=seed) if with_baselines else []:
        usable = tuple(p for p in pooling if p in baseline.poolings) or None
        yield baseline.name, labelled_features(baseline, labelled, poolings=usable, device=device)


def counts(labelled: Labelled) -> dict[str, int]:
    return {
        "train_samples": len(labelled.train),
        "test_samples": len(labelled.test),
        "classes": len(labelled.classes) if labelled.classes else int(labelled.train_labels.max()) + 1,
    }


def sizes(labelled: Labelled) -> str:
    found = counts(labelled)
    return f"{found['train_samples']} train and {found['test_samples']} test samples of {found['classes']} classes."


def outcome(config: dict, metrics: dict, text: str, started: float, seed: int | None = None) -> Outcome:
    return Outcome(config=config, metrics=metrics, seed=seed, seconds=time.perf_counter() - started, text=text)
