"""The command `serve`: a run in the browser."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from anechoic.cli._command import command
from anechoic.cli.options import Device, PathLike, RunDirectory
from anechoic.errors import UserError
from anechoic.outcome import Outcome


@command
def serve(
    run: RunDirectory,
    /,
    *,
    data: PathLike | None = None,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    device: Device = "auto",
    upload_mb: int = 20,
    queue: int = 32,
) -> Outcome:
    """Show a run live in the browser: its training, stop and resume; then neighbors and reconstructions of any image.

    The same is a JSON API, described in /openapi.json: /embed, /search, /reconstruct, /patches, /sample. It needs the
    packages of the extra web. Ctrl-C ends it; a training that was resumed on the page is saved and ends too.

    Example: anechoic serve runs/photos

    Args:
        data: the images that are searched; by default the run's own, which are opened only if you started the run on
            this machine: another person's config may name any path or server.
        host: the address to listen on; others than this machine's own need a token.
        port: the port; 0 takes any that is free.
        token: the password: the page's address ends in ?token=TOKEN, programs send Authorization: Bearer TOKEN. The
            environment variable ANECHOIC_TOKEN does the same and is not visible to other users.
        upload_mb: the largest request, in MB.
        queue: maximum number of requests that wait for the network; further ones are asked to retry.
    """
    if any(find_spec(name) is None for name in ("fastapi", "uvicorn", "python_multipart")):
        raise UserError('A live page needs more packages: pip install "anechoic[web]".')
    from anechoic.server.server import run_server

    run_server(
        Path(run),
        data=None if data is None else str(data),
        host=host,
        port=port,
        token=token or os.environ.get("ANECHOIC_TOKEN"),
        device=device,
        upload_mb=upload_mb,
        queue=queue,
    )
    return Outcome({}, {}, text="")
