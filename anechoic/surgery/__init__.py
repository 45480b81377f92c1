"""Conversion of a network's shortcuts: decay, fold, and how other libraries' networks are described for it."""

from anechoic.adapters.blocks import DecayedBlock, describe, keep_plain, prepare, refuse, register, through
from anechoic.surgery.decay import decay
from anechoic.surgery.fold import fold, fold_along
from anechoic.surgery.param_groups import clip_grad_norm, decay_factors, param_groups, split_skips
from anechoic.surgery.streams import shortcuts, weight_factors

__all__ = [
    "DecayedBlock",
    "clip_grad_norm",
    "decay",
    "decay_factors",
    "describe",
    "fold",
    "fold_along",
    "keep_plain",
    "param_groups",
    "prepare",
    "refuse",
    "register",
    "shortcuts",
    "split_skips",
    "through",
    "weight_factors",
]
