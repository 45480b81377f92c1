"""Conversion of a network's shortcuts: the residual stream, its algebra, and one file per foreign library."""

from anechoic.adapters.blocks import Twin, describe, keep_plain, prepare, refuse, register, through
from anechoic.surgery.conversion import decay, fold, fold_along, shortcuts, weight_factors

__all__ = [
    "Twin",
    "decay",
    "describe",
    "fold",
    "fold_along",
    "keep_plain",
    "prepare",
    "refuse",
    "register",
    "shortcuts",
    "through",
    "weight_factors",
]
