"""Names of earlier versions and what replaced them: each is answered with one sentence."""

from __future__ import annotations

COMMANDS_BEFORE = {
    "knn": "anechoic evaluate RUN DATA --test DATA --metrics knn.",
    "probe": "anechoic evaluate RUN DATA --test DATA --metrics probe.",
    "analyze": "anechoic evaluate RUN DATA --metrics rank echo silhouette knn stream.",
    "segment": "anechoic evaluate RUN DATA --metrics segment.",
    "models": "anechoic list models.",
    "recipes": "anechoic list recipes.",
    "import-weights": "anechoic import CHECKPOINT --out FOLDER.",
    "plan": "anechoic tools plan RECIPE.",
    "doctor": "anechoic tools doctor.",
    "shard": "anechoic tools shard DATA --out FOLDER.",
    "encode-latents": "anechoic tools encode-latents DATA --out FOLDER.",
    "slurm": "anechoic tools slurm -- COMMAND.",
}

OPTIONS_BEFORE = {
    "--model": "give timm:NAME or transformers:FOLDER in the place of RUN.",
    "--output": "it is now --out.",
    "--train": "give the labeled images as DATA, after RUN or RECIPE.",
    "--data": "the folder that has the data sets is now --data-root.",
    "--listed": "it is now --image-list.",
    "--folder": "it is now --out.",
    "--batch": "it is now --batch-size.",
}
