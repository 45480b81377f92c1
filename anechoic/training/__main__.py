"""python -m anechoic.training CONFIG.json RUN_DIR: one training in a process of its own, as the demo starts them."""

from __future__ import annotations

import sys
from pathlib import Path

from anechoic.errors import UserError
from anechoic.runtime.subprocesses import exit_when_parent_exits


def main(arguments: list[str]) -> int:
    exit_when_parent_exits()  # before torch is imported, which takes seconds
    from anechoic.config import from_json
    from anechoic.storage.files import read_json
    from anechoic.training.loop import fit

    config_file, run_dir = map(Path, arguments)
    try:
        fit(from_json(read_json(config_file)), run_dir)
    except UserError as error:
        print(f"anechoic: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
