"""Listening: an address that is safe to listen on, and the server that answers there until it is stopped."""

from __future__ import annotations

import logging
import socket
import string
import sys
from dataclasses import replace
from pathlib import Path

import uvicorn

from anechoic.errors import UserError
from anechoic.pages.runs import open_run
from anechoic.server.app import create_app
from anechoic.server.middleware import ImpatientProtocol, Limits, is_local

# A token that can be guessed is none.
SHORTEST_TOKEN = 8
TOKEN_SIGNS = {*string.ascii_letters, *string.digits, *"-._~"}


def run_server(
    run: Path, *, data: str | None, host: str, port: int, token: str | None, device: str, upload_mb: int, queue: int
) -> None:
    if upload_mb < 1 or queue < 1:
        raise UserError("--upload-mb and --queue must be at least 1.")
    local = is_local(host)
    check_token(token, host=host, local=local)
    open_run(run)  # report a mistake before anything listens
    limits = replace(Limits(), upload=upload_mb << 20, queue=queue)
    served = create_app(run, data=data, device=device, limits=limits, token=token, local=local and token is None)
    listener = listen(host, port)
    where = f"http://{'[' + host + ']' if ':' in host else host}:{listener.getsockname()[1]}/"
    print(f"{run} at {where}{'?token=...' if token else ''} (Ctrl-C ends it)", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        served.app,
        http=ImpatientProtocol,
        ws="none",
        log_level=logging.WARNING,
        access_log=False,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=3,
        server_header=False,
    )
    uvicorn.Server(config).run(sockets=[listener])


def check_token(token: str | None, *, host: str, local: bool) -> None:
    if not local and not token:
        raise UserError(
            f"{host} can be reached from other machines, so a token is needed: give --token, or listen on 127.0.0.1."
        )
    if token and (len(token) < SHORTEST_TOKEN or not set(token) <= TOKEN_SIGNS):
        raise UserError(
            f"A token has at least {SHORTEST_TOKEN} letters, digits or signs of -._~, since it is part of an address."
        )


def listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"A port lies between 0 and 65535, not at {port}.")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=128)
    except OSError as problem:
        raise UserError(
            f"Nobody can listen on {host}:{port} ({problem.strerror or problem}): choose another --port or --host."
        ) from problem
