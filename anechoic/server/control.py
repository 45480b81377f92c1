"""Stop and resume the training of a run directory. The process to stop is the one that holds its lock."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from anechoic.choices import RunState as State
from anechoic.errors import UserError
from anechoic.pages.runs import is_own, open_run
from anechoic.runtime.run import LOG, holder, refuse_links
from anechoic.runtime.subprocesses import Subprocesses


class Control:
    """Controls the training of one run. A training resumed here saves and exits with this process."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.children = Subprocesses()
        self.resumed: subprocess.Popen | None = None

    @property
    def state(self) -> State:
        if self.starting or holder(self.run) is not None:
            return "running"
        return "finished" if (self.run / "results.json").exists() else "stopped"

    @property
    def starting(self) -> bool:
        """Whether a training resumed here has not exited yet; it takes its lock shortly after it starts."""
        return self.resumed is not None and self.resumed.poll() is None

    @property
    def command(self) -> list[str]:
        """The command that resumes the run."""
        return [sys.executable, "-m", "anechoic.training", str(self.run / "config.json"), str(self.run)]

    @property
    def problem(self) -> str:
        """The last line that a training resumed here printed before it failed."""
        if self.resumed is None or self.resumed.poll() in (None, 0, 128 + signal.SIGTERM):
            return ""
        return "".join((self.run / LOG).read_text(errors="replace").strip().splitlines()[-1:])

    def stop(self) -> None:
        """Ask the training process to save and exit."""
        process = holder(self.run)
        if process is None:
            raise UserError(f"No process on this machine is training {self.run} now.")
        if process == os.getpid():
            raise UserError("The training runs inside this process: stop that.")
        try:
            os.kill(process, signal.SIGTERM)
        except ProcessLookupError:
            raise UserError("The training has just exited.") from None
        except PermissionError:
            raise UserError("The training belongs to another user, who has to stop it.") from None

    def resume(self) -> None:
        if not self.run.is_dir():
            raise UserError(f"{self.run} was deleted, so there is nothing to resume.")
        if self.state != "stopped":
            raise UserError(f"{self.run} is {self.state}, so there is nothing to resume.")
        run = open_run(self.run)
        if not is_own(run):
            raise UserError(
                f"{self.run} bears no mark of a start by you on this machine, and resuming opens its data, "
                f"{run.config.data.source:.200}: resume it in a terminal if you trust it."
            )
        refuse_links(self.run)
        with open(self.run / LOG, "w") as log:
            self.resumed = self.children.start(self.command, stdout=log, stderr=log)

    def close(self) -> None:
        """Let the training that was resumed here save and exit, however long the save takes."""
        if self.resumed is not None and self.resumed.poll() is None:
            print(f"Waiting until the training of {self.run} has saved.", file=sys.stderr, flush=True)
            self.resumed.terminate()
            self.resumed.wait()
