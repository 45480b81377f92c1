"""anechoic: generative representation learners whose identity shortcuts decay with depth.

import anechoic
model = anechoic.decay(model, alpha_min=0.6)       # decay the shortcuts of your own network
anechoic.pretrain("photos", out="runs/photos")     # every command is a function of the same name
vectors = anechoic.embed("runs/photos", "photos")   # with .names and .skipped
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from anechoic.cli.demo import demo as demo
    from anechoic.cli.embed import embed as embed
    from anechoic.cli.evaluate import evaluate as evaluate
    from anechoic.cli.explore import explore as explore
    from anechoic.cli.export import export as export
    from anechoic.cli.finetune import finetune as finetune
    from anechoic.cli.frechet import frechet as frechet
    from anechoic.cli.import_ import import_weights as import_weights
    from anechoic.cli.list import listing as listing
    from anechoic.cli.pretrain import pretrain as pretrain
    from anechoic.cli.report import report as report
    from anechoic.cli.sample import sample as sample
    from anechoic.cli.search import search as search
    from anechoic.cli.serve import serve as serve
    from anechoic.cli.sweep import sweep as sweep
    from anechoic.cli.tools.cache import cache as cache
    from anechoic.cli.tools.doctor import doctor as doctor
    from anechoic.cli.tools.encode_latents import encode_latents as encode_latents
    from anechoic.cli.tools.plan import plan as plan
    from anechoic.cli.tools.shard import shard as shard
    from anechoic.cli.tools.slurm import slurm as slurm
    from anechoic.cli.train import train as train
    from anechoic.data import register_source as register_source
    from anechoic.errors import UserError as UserError
    from anechoic.eval.embedding import load as load
    from anechoic.eval.metrics.rank import effective_rank as effective_rank
    from anechoic.eval.metrics.registry import Metric as Metric
    from anechoic.eval.metrics.registry import register_metric as register_metric
    from anechoic.models import build_model as build_model
    from anechoic.outcome import Outcome as Outcome
    from anechoic.shortcut import Shortcut as Shortcut
    from anechoic.shortcut import alpha_min_for as alpha_min_for
    from anechoic.shortcut import constant as constant
    from anechoic.shortcut import cosine as cosine
    from anechoic.shortcut import effective_decay as effective_decay
    from anechoic.shortcut import linear as linear
    from anechoic.surgery import clip_grad_norm as clip_grad_norm
    from anechoic.surgery import decay as decay
    from anechoic.surgery import fold as fold
    from anechoic.surgery import param_groups as param_groups
    from anechoic.surgery import shortcuts as shortcuts
else:
    # The module of each name, which is imported on first use, so that `import anechoic` does not load torch. A test
    # compares this with the imports above, which type checkers read.
    _MODULES = {
        "cli.demo": ["demo"],
        "cli.embed": ["embed"],
        "cli.evaluate": ["evaluate"],
        "cli.explore": ["explore"],
        "cli.export": ["export"],
        "cli.finetune": ["finetune"],
        "cli.frechet": ["frechet"],
        "cli.import_": ["import_weights"],
        "cli.list": ["listing"],
        "cli.pretrain": ["pretrain"],
        "cli.report": ["report"],
        "cli.sample": ["sample"],
        "cli.search": ["search"],
        "cli.serve": ["serve"],
        "cli.sweep": ["sweep"],
        "cli.tools.cache": ["cache"],
        "cli.tools.doctor": ["doctor"],
        "cli.tools.encode_latents": ["encode_latents"],
        "cli.tools.plan": ["plan"],
        "cli.tools.shard": ["shard"],
        "cli.tools.slurm": ["slurm"],
        "cli.train": ["train"],
        "data": ["register_source"],
        "errors": ["UserError"],
        "eval.embedding": ["load"],
        "eval.metrics.rank": ["effective_rank"],
        "eval.metrics.registry": ["Metric", "register_metric"],
        "models": ["build_model"],
        "outcome": ["Outcome"],
        "shortcut": [
            "Shortcut",
            "alpha_min_for",
            "constant",
            "cosine",
            "effective_decay",
            "linear",
        ],
        "surgery": ["clip_grad_norm", "decay", "fold", "param_groups", "shortcuts"],
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
    __all__ = ["__version__", *_MODULE_OF]

    def __getattr__(name):
        if name not in _MODULE_OF:
            raise AttributeError(f"module 'anechoic' has no attribute {name!r}")
        return getattr(import_module(f"anechoic.{_MODULE_OF[name]}"), name)

    def __dir__():
        return sorted(__all__)
