"""The verbs. Each is one typed function that returns an Outcome; `anechoic.VERB` and the command line are made of it.

The modules here import nothing heavy at the top, so that `anechoic --help` never loads torch.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from anechoic.cli.arguments import record_arguments

# The verb as it is typed on the command line -> the module of this package that holds the function.
VERBS = {
    "demo": "demo",
    "models": "list",
    "recipes": "list",
    "pretrain": "training",
    "train": "training",
    "finetune": "finetune",
    "embed": "evaluating",
    "search": "finding",
    "explore": "finding",
    "knn": "evaluating",
    "probe": "evaluating",
    "analyze": "explaining",
    "report": "reporting",
    "serve": "reporting",
    "segment": "segmenting",
    "sample": "generating",
    "frechet": "generating",
    "encode-latents": "generating",
    "shard": "packing",
    "plan": "planning",
    "doctor": "planning",
    "slurm": "submitting",
    "export": "shipping",
    "import-weights": "shipping",
    "sweep": "reproducing",
    "reproduce": "reproducing",
    "bench": "anechoic_lab.bench.command",
}


# Their outcome's config is that of the run they trained, complete in itself.
TRAINING = ("pretrain", "train", "finetune")


def verb(name: str) -> Callable:
    """The function behind a verb (`encode-latents` is `encode_latents`), its arguments in the outcome it returns."""
    function = getattr(
        import_module(VERBS[name] if "." in VERBS[name] else f"anechoic.cli.{VERBS[name]}"), name.replace("-", "_")
    )
    return function if name in TRAINING else record_arguments(function)
