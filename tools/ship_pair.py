"""Convert the two runs of a trained pair and their records into the networks that come with the package.

python tools/ship_pair.py RESIDUAL_RUN RESIDUAL_RECORD.json DECAYED_RUN DECAYED_RECORD.json

Parameters are rounded to float16. record.json beside them is the trial's record with the command that repeats it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from anechoic.pages.demo import ARMS, PRETRAINED
from anechoic.runtime import checkpoint
from anechoic.storage.files import write_json
from anechoic.sweeps.trial import read_record

MAX_BYTES = 4_000_000


def ship(name: str, run: Path, record_file: Path) -> Path:
    """Write and return the model directory of a run, with the record that must be of its config."""
    record, model = read_record(record_file), checkpoint.load(run)
    assert record["metrics"]["diverged"] is False, f"{record_file} is of a run that diverged"
    assert record["config"]["shortcut"]["alpha_min"] == model.config.alpha_min == ARMS[name], f"{run} is not {name}"
    parameters = dict(model.named_parameters())
    tensors = {key: value.half() if key in parameters else value for key, value in model.state_dict().items()}
    assert all(torch.isfinite(value).all() for value in tensors.values()), "float16 cannot hold these weights"
    card = checkpoint.model_card(model, model.preprocess)
    target = checkpoint.write_model(checkpoint.PRETRAINED / PRETRAINED[name], tensors, card)
    command = f"anechoic reproduce --verify anechoic/pretrained/{target.name}/record.json"
    write_json(target / "record.json", {**record, "command": command, "weights": "parameters rounded to float16"})
    return target


def main(arguments: list[str]) -> None:
    if len(arguments) != 4:
        sys.exit(__doc__)
    paths = [Path(argument) for argument in arguments]
    written = [ship(name, run, record) for name, run, record in zip(ARMS, paths[::2], paths[1::2], strict=True)]
    size = sum(file.stat().st_size for folder in written for file in folder.iterdir())
    assert size < MAX_BYTES, f"the pair takes {size:,} bytes, more than {MAX_BYTES:,}"
    print(f"Wrote {' and '.join(map(str, written))}, {size:,} bytes.")


if __name__ == "__main__":
    main(sys.argv[1:])
