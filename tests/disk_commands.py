"""Commands that write, on tiny data and models, for tests of full disks: each writes below the folder `out`."""

from __future__ import annotations

from pathlib import Path

from tiny_pages import picture
from tiny_runs import tiny_config, write_run
from zoo import tiny_vae

from anechoic.config import DataConfig, ModelConfig, ObjectiveConfig, SaveConfig, ValidationConfig
from anechoic.training.loop import fit

TINY = "--seed 3 --devices 1 --workers 0"
COMMANDS = {
    "embed npy": "embed RUN PHOTOS -o out/vectors.npy",
    "embed parquet": "embed RUN PHOTOS -o out/vectors.parquet",
    "embed parts": "embed RUN PHOTOS -o out/parts",
    "search": "search RUN PHOTOS 3 -o out/search.html",
    "explore": "explore RUN PHOTOS -o out/explore.html",
    "export": "export RUN --to timm -o out/exported",
    "import": "import EXPORTED -o out/imported",
    "shard": "tools shard PHOTOS -o out/shards",
    "encode-latents": "tools encode-latents PHOTOS --vae VAE --image-size 16 -o out/latents",
    "report": "report TRAINED --samples 60 -o out/report.html",
    "sample": "sample DENOISER --num 2 --steps 2 -o out/samples",
    "frechet": "frechet digits:test digits:train --extractor digits --num 300 --save-reference out/digits.npz",
    "evaluate": "evaluate TRAINED digits:test --limit 60 --metrics rank --figures out/figures",
    "train": "train pocket_mae_digits --out out/run --model.options dim=16 depth=2 num_heads=2 --optim.epochs None"
    " --optim.samples 256 --optim.batch-size 64 --save.every 128",
    "finetune": "finetune TRAINED digits:train --limit 128 --out out/run --epochs 2 --batch-size 32 --seed 3"
    " --devices 1",
    "sweep": "sweep pocket_mae_digits --out out/sweep --jobs 1 --fix model.options.depth 2"
    " --fix optim.samples 128 --fix optim.batch_size 64 --vary shortcut.alpha_min 0.6",
    "pretrain": f"pretrain PHOTOS --out out/run --model mae_tiny_patch4 --model-options dim=16 depth=2 num_heads=2"
    f" decoder_dim=16 decoder_depth=1 decoder_num_heads=2 --image-size 16 --epochs 2 --batch-size 4 --knn 0 {TINY}",
}
# What a killed or refused command leaves here is continued by the same command.
RESUMED = ("train", "pretrain", "finetune", "sweep", "embed parts")


def make_places(folder: Path) -> dict[str, str]:
    """Return what the words in capitals stand for."""
    (folder / "photos").mkdir(parents=True)
    for number in range(12):
        picture(number).save(folder / "photos" / f"{number:02d}.png")
    options = {"patch_size": 2, "dim": 16, "depth": 2, "num_heads": 2}
    quiet = {"validation": ValidationConfig(every=None, report=32), "save": SaveConfig(every=None), "steps": 1}
    fit(tiny_config(**quiet), folder / "trained")
    data = DataConfig(source="digits", image_size=8, channels=1, holdout=64)
    objective = ObjectiveConfig("noise_prediction")
    fit(
        tiny_config(model=ModelConfig("uvit_small", options), data=data, objective=objective, **quiet),
        folder / "denoiser",
    )
    tiny_vae(scaling_factor=0.5).save_pretrained(folder / "vae")
    run = write_run(folder / "run")
    from anechoic.cli.main import main

    assert main(["export", str(run), "--to", "timm", "-o", str(folder / "exported")]) == 0
    words = ("PHOTOS", "TRAINED", "DENOISER", "EXPORTED", "VAE", "RUN")
    return {word: str(folder / word.lower()) for word in words}


def words_of(command: str, places: dict[str, str]) -> list[str]:
    return [places.get(word, word) for word in COMMANDS[command].split()]


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
