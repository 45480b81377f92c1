"""A real server on a real port for tests of the live page, and a client without any library."""

from __future__ import annotations

import http.client
import io
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from PIL import Image

from anechoic.config import Config, DataConfig, ModelConfig, OptimConfig, SaveConfig, ValidationConfig, to_json
from anechoic.data import open_source
from anechoic.server.app import Served, create_app
from anechoic.server.middleware import ImpatientProtocol
from anechoic.storage.files import write_json

BOUNDARY = "b0undary"
FORM = f"multipart/form-data; boundary={BOUNDARY}"


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    def __init__(self, port: int, served: Served) -> None:
        self.port, self.served = port, served

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, named)
            answer = connection.getresponse()
            return Answer(answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, body: bytes = b"", **headers: str) -> Answer:
        return self.ask("POST", path, body, **headers)

    def upload(self, path: str, data: bytes, *, filename: str = "picture.jpg", **fields: str) -> Answer:
        return self.post(
            path, multipart(data, filename, fields), content_type=f"multipart/form-data; boundary={BOUNDARY}"
        )

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=120)


def multipart(data: bytes, filename: str, fields: dict[str, str]) -> bytes:
    parts = [f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n' for k, v in fields.items()]
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"; filename="{filename}"\r\n\r\n'
    return "".join(parts).encode() + head.encode() + data + f"\r\n--{BOUNDARY}--\r\n".encode()


@contextmanager
def serving(run: Any, *, protocol: Any = ImpatientProtocol, **options: Any) -> Any:
    """Yield a client of a server that runs in a thread of this process on its own port."""
    served = create_app(run, **options)
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    config = uvicorn.Config(
        served.app, http=protocol, ws="none", log_level=logging.WARNING, access_log=False, timeout_graceful_shutdown=2
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield Client(listener.getsockname()[1], served)
    finally:
        server.should_exit = True
        thread.join(timeout=120)
        assert not thread.is_alive()


def jpeg(pixels: np.ndarray, *, quality: int = 90) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


# ---- runs to serve

MODEL = {
    "patch_size": 4,
    "dim": 32,
    "depth": 2,
    "num_heads": 2,
    "decoder_dim": 16,
    "decoder_depth": 1,
    "decoder_num_heads": 2,
}


def small_config(**changes: Any) -> Config:
    """Return a masked autoencoder on the drawings of one style; it trains for a second."""
    base = Config(
        data=DataConfig(source="emoji:style=noto", image_size=16, holdout=64),
        model=ModelConfig("mae_tiny_patch4", MODEL),
        optim=OptimConfig(batch_size=32, samples=32 * 10, lr=2e-3),
        validation=ValidationConfig(every=32 * 5, report=32),
        save=SaveConfig(every=32 * 5),
        threads=1,
    )
    return replace(base, **changes)


def make_pictures(folder: Path) -> Path:
    """Forty JPEGs of several sizes."""
    source = open_source("emoji:test:style=twemoji")
    for i in range(40):
        pixels = source.read(i).permute(1, 2, 0).numpy().repeat(1 + i % 7, axis=0).repeat(1 + i % 5, axis=1)
        (folder / f"{i:02d}.jpg").write_bytes(jpeg(pixels))
    return folder


def wait_for(condition: Callable[[], Any], seconds: float = 300, *, every: float = 0.05) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} seconds"
        time.sleep(every)


def start_training(config: Config, run: Path) -> subprocess.Popen:
    """Start a training process as the demo does, from a config beside the run."""
    path = run.with_suffix(".json")
    write_json(path, to_json(config))
    return subprocess.Popen([sys.executable, "-m", "anechoic.training", str(path), str(run)], stderr=subprocess.DEVNULL)
