"""Conversion of a network's shortcuts: the residual stream, its algebra, and one file per foreign library."""

from anechoic.adapters.blocks import Twin, describe, keep_plain, prepare, refuse, register, through
from anechoic.surgery.conversion import decay, fold, fold_along, shortcuts, weight_factors
from anechoic.surgery.param_groups import clip_grad_norm, decay_factors, param_groups, split_skips

__all__ = [
    "Twin",
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
