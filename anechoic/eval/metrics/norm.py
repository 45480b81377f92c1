"""Mean length of the feature vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from anechoic.eval.features import Rows

if TYPE_CHECKING:
    from anechoic.eval.evaluator import Subject


def norm_metric(subject: Subject) -> Rows:
    return {key: {"norm": float(torch.tensor(x).norm(dim=1).mean())} for key, x in subject.sets.items()}
