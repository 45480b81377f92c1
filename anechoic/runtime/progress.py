"""Progress of a run: a bar on a terminal, a line per validation elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from tqdm.auto import tqdm

from anechoic.outcome import rough_duration
from anechoic.runtime.run import VALIDATION


class Progress:
    """Show samples seen, images per second, the time left, the latest loss and accuracy on labeled images."""

    def __init__(self, *, samples: int, seen: int, shown: bool) -> None:
        # disable=None: no bar where there is no terminal.
        hidden = None if shown else True
        self.bar = tqdm(total=samples, initial=seen, unit="img", unit_scale=True, disable=hidden, dynamic_ncols=True)
        self.samples, self.shown = samples, shown
        self.seen, self.clock = seen, time.monotonic()
        self.accuracy: dict[str, str] = {}

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def advance(self, samples: int, *, loss: float) -> None:
        self.bar.set_postfix(loss=f"{loss:.4f}", **self.accuracy, refresh=False)
        self.bar.update(samples)

    def record(self, record: dict[str, Any]) -> None:
        """Print a validation where there is no bar."""
        self.accuracy = {name: f"{value:.3f}" for name, value in record.items() if name.startswith("labels_")}
        if record["kind"] in VALIDATION and self.shown and self.bar.disable:
            said = f"{record['seen']:>12,} of {self.samples:,} samples{self.left(record['seen'])}  {summary(record)}"
            print(said, file=sys.stderr, flush=True)

    def left(self, seen: int) -> str:
        """Return the time left at the pace since the last line, in which a machine that others use may have changed."""
        since, now = seen - self.seen, time.monotonic()
        pace = (now - self.clock) / since if since > 0 else 0.0
        self.seen, self.clock = seen, now
        return f"  about {rough_duration(pace * (self.samples - seen))} left" if pace and seen < self.samples else ""

    def close(self) -> None:
        self.bar.close()


def summary(record: dict[str, Any]) -> str:
    parts = [f"{name} {value:.4f}" for name, value in record.items() if isinstance(value, float)]
    if "rank_columns" in record:
        parts.append(f"effective rank of the last block {record['rank_columns'][-1]:.1f}")
    return "  ".join(parts)
