"""Progress of a run: a bar on a terminal, a line per validation elsewhere, TensorBoard on request."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from anechoic.errors import UserError
from anechoic.runtime.run import VALIDATION


class Progress:
    """Show samples seen, images per second, the time left and the latest loss."""

    def __init__(self, *, samples: int, seen: int, shown: bool, tensorboard: Path | None = None) -> None:
        # disable=None: no bar where there is no terminal.
        hidden = None if shown else True
        self.bar = tqdm(total=samples, initial=seen, unit="img", unit_scale=True, disable=hidden, dynamic_ncols=True)
        self.samples, self.shown = samples, shown
        self.writer = tensorboard_writer(tensorboard) if tensorboard else None

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def advance(self, samples: int, *, loss: float) -> None:
        self.bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
        self.bar.update(samples)

    def record(self, record: dict[str, Any]) -> None:
        """Send a line of metrics.jsonl to TensorBoard; without a bar, print validations."""
        if self.writer is not None:
            for name, value in scalars(record).items():
                self.writer.add_scalar(name, value, record["seen"])
        if record["kind"] in VALIDATION and self.shown and self.bar.disable:
            print(f"{record['seen']:>12,} of {self.samples:,} samples  {summary(record)}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.bar.close()
        if self.writer is not None:
            self.writer.close()


def scalars(record: dict[str, Any]) -> dict[str, float]:
    """{"validation/loss": 0.7, "validation/rank/3": 12.5, ...}: a list becomes one curve per index."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, list):
            flat.update({f"{record['kind']}/{name}/{i}": item for i, item in enumerate(value)})
        elif isinstance(value, int | float) and name != "seen":
            flat[f"{record['kind']}/{name}"] = value
    return flat


def summary(record: dict[str, Any]) -> str:
    parts = [f"{name} {value:.4f}" for name, value in record.items() if isinstance(value, float)]
    if "rank_columns" in record:
        parts.append(f"effective rank of the last block {record['rank_columns'][-1]:.1f}")
    return "  ".join(parts)


def tensorboard_writer(path: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as problem:
        raise UserError('TensorBoard files need its package: pip install "anechoic[tensorboard]".') from problem
    return SummaryWriter(str(path))
