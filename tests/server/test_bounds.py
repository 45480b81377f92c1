"""What the live page's server refuses: too much, too slow, too often, no image, no path, no permission."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from serving import BOUNDARY, FORM, png, serving, wait_for

from anechoic.cli.main import main
from anechoic.errors import UserError
from anechoic.server.app import together
from anechoic.server.engine import Ended, Engine, TooLong
from anechoic.server.middleware import ImpatientProtocol, Limits, is_local
from anechoic.server.server import check_token, listen
from anechoic.server.worker import Busy, Worker

# ---- bounds


@pytest.mark.slow
def test_full_queue_asks_to_retry(run, pictures):
    image = (pictures / "00.jpg").read_bytes()
    with serving(run, limits=Limits(queue=1)) as client, ThreadPoolExecutor(8) as pool:
        gate = threading.Event()
        hold(client.served.worker, gate, pool)
        waiting = pool.submit(client.upload, "/embed", image)
        wait_for(client.served.worker.jobs.full)
        refused = client.upload("/embed", image)
        assert refused.status == 503
        assert int(refused.headers["retry-after"]) >= 1
        gate.set()
        assert waiting.result().status == 200
        assert client.upload("/embed", image).status == 200


def hold(worker, gate, pool):
    """Keep the worker busy until the gate opens; returns when it is."""
    holder = Holder(gate)
    pool.submit(lambda: asyncio.run(worker.run("hold", holder, None, seconds=300)))
    assert holder.started.wait(300)


class Holder:
    """A computation that waits for a gate, and signals that it has started."""

    def __init__(self, gate):
        self.gate, self.started = gate, threading.Event()

    def __call__(self, arguments):
        self.started.set()
        return [self.gate.wait(300) for _ in arguments]


def run_apart(coroutine):
    """In a thread without an event loop: the browser of other tests keeps one running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


@pytest.mark.slow
def test_requests_at_once_are_bounded(run):
    with serving(run, limits=Limits(requests=1, body_seconds=5)) as client, client.raw() as slow:
        slow.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\nabc")
        wait_for(lambda: client.served.app.active == 1)
        answer = client.get("/status")
        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
        slow.close()
        wait_for(lambda: client.get("/status").status == 200)


@pytest.mark.slow
def test_a_job_that_takes_too_long_is_given_up(run, pictures):
    with serving(run, limits=Limits(job_seconds=0.2)) as client, ThreadPoolExecutor(1) as pool:
        gate = threading.Event()
        hold(client.served.worker, gate, pool)
        assert client.upload("/embed", (pictures / "00.jpg").read_bytes()).status == 503
        gate.set()


@pytest.mark.slow
def test_job_that_takes_too_long_is_ended_and_named(run, pictures, monkeypatch):
    image = (pictures / "00.jpg").read_bytes()
    with serving(run) as client, monkeypatch.context() as patch:
        engine = client.served.engine
        assert client.upload("/embed", image).status == 200
        first, call = engine._process.pid, engine.call
        patch.setattr(engine, "call", lambda *given, **options: call(*given, **{**options, "seconds": 0}))
        ended = client.upload("/embed", image)
        assert (ended.status, "took more than 60 s and was ended" in ended.json["detail"]) == (504, True)
        patch.undo()
        assert client.upload("/embed", image).status == 200
        assert engine._process.pid != first
        os.kill(engine._process.pid, signal.SIGKILL)  # as the system does when memory is short
        lost = client.upload("/embed", image)
        assert (lost.status, "has ended (exit code -9)" in lost.json["detail"]) == (503, True)
        assert client.upload("/embed", image).status == 200


def test_job_that_takes_too_long_does_not_end_those_beside_it():
    def compute(arguments):
        if "slow" in arguments:
            raise TooLong
        return [word.upper() for word in arguments]

    found = together(compute, ["a", "slow", "b"])
    assert [found[0], found[2], type(found[1])] == ["A", "B", TooLong]


@pytest.mark.slow
def test_engine_ends_what_does_not_end_itself():
    engine = Engine(itertools.count)
    try:
        assert [engine.call(next, seconds=300) for _ in range(2)] == [0, 1]  # the state stays
        with pytest.raises(TypeError):
            engine.call(len, seconds=300)
        with pytest.raises(TooLong):
            engine.call(sum, seconds=0.5)
        assert engine.call(next, seconds=300) == 0  # of another process
    finally:
        engine.close()
    for _ in range(2):
        with pytest.raises(Ended):
            engine.call(next, seconds=300)


@pytest.mark.slow
def test_jobs_of_a_kind_are_computed_together():
    worker, gate, groups = Worker(waiting=10), threading.Event(), []

    def count(arguments):
        groups.append(len(arguments))
        return [x * x if x != 3 else UserError("three") for x in arguments]

    async def several():
        holder = Holder(gate)
        jobs = [asyncio.create_task(worker.run("hold", holder, None, seconds=300))]
        await asyncio.to_thread(holder.started.wait)
        jobs += [asyncio.create_task(worker.run("square", count, x, seconds=300)) for x in (1, 2, 3, 4)]
        while worker.jobs.qsize() < 4:
            await asyncio.sleep(0.01)
        gate.set()
        return await asyncio.gather(*jobs, return_exceptions=True)

    _, one, two, three, four = run_apart(several())
    assert (one, two, four) == (1, 4, 16)
    assert isinstance(three, UserError)
    assert groups == [4]
    worker.close()
    assert not worker.thread.is_alive()


@pytest.mark.slow
def test_a_full_worker_is_busy():
    worker, gate = Worker(waiting=1), threading.Event()

    async def crowd():
        holder = Holder(gate)
        jobs = [asyncio.create_task(worker.run("first", holder, None, seconds=300))]
        await asyncio.to_thread(holder.started.wait)
        jobs.append(asyncio.create_task(worker.run("second", holder, None, seconds=300)))
        while not worker.jobs.full():
            await asyncio.sleep(0.01)
        with pytest.raises(Busy):
            await worker.run("more", list, None, seconds=1)
        gate.set()
        await asyncio.gather(*jobs)

    run_apart(crowd())
    worker.close()


# ---- hostile requests


SMALL = Limits(upload=200_000, body_seconds=0.7, pixels=1 << 20)


class HastyProtocol(ImpatientProtocol):
    headers_seconds = 0.5
    reading_seconds = 0.5

    def connection_made(self, transport):
        # The system would keep megabytes for a client that does not read.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        super().connection_made(transport)


@pytest.fixture(scope="module")
def strict(run):
    with serving(run, limits=SMALL, protocol=HastyProtocol) as found:
        yield found


def first_line(connection):
    return connection.makefile("rb").readline().decode()


@pytest.mark.slow
def test_upload_with_a_too_large_length_is_refused_unread(strict):
    with strict.raw() as connection:
        connection.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n")
        assert " 413 " in first_line(connection)


@pytest.mark.slow
@pytest.mark.parametrize("length", ["-1", "1e3", "x", "10, 20"])
def test_nonsense_lengths_are_refused(strict, length):
    with strict.raw() as connection:
        connection.sendall(f"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode())
        assert " 4" in first_line(connection)[:13]


@pytest.mark.slow
def test_an_upload_in_pieces_without_a_length_is_cut(strict):
    """A gigabyte is offered; after the bound it is refused, and the rest never read."""
    sent = 0
    with strict.raw() as connection:
        connection.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
        try:
            while sent < 1 << 30:
                connection.sendall(piece)
                sent += 65536
        except OSError:
            pass  # the server has closed
    assert sent < 64 << 20  # what buffers on the way hold
    assert strict.get("/status").status == 200


@pytest.mark.slow
def test_an_upload_that_never_ends_is_dropped(strict):
    """It claims a length and sends less."""
    with strict.raw() as connection:
        connection.sendall(b"POST /embed HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nabc")
        assert " 408 " in first_line(connection)


@pytest.mark.slow
def test_a_client_that_sends_its_headers_slowly_is_dropped(strict):
    started = time.monotonic()
    with strict.raw() as connection:
        try:
            for letter in b"GET /status HTTP/1.1\r\nHost: localhost":
                connection.sendall(bytes([letter]))
                time.sleep(0.5)
            assert connection.recv(1) == b""
        except OSError:
            pass
    assert time.monotonic() - started < 10  # the whole would take twice as long


@pytest.mark.slow
def test_a_client_that_does_not_read_is_dropped(strict):
    with strict.raw() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with pytest.raises(OSError, match=r"reset|Broken pipe|timed out"):
            ask_without_reading(connection, seconds=90)
    assert strict.get("/status").status == 200


def ask_without_reading(connection, *, seconds):
    """Until the server has had enough."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        time.sleep(0.01)


def bomb(width, height):
    """A PNG of a few bytes that claims any size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 100)) + chunk(b"IEND", b"")
    )


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/embed", "/search", "/reconstruct", "/patches"])
@pytest.mark.parametrize("kind", ["nothing", "text", "bomb", "larger", "cut"])
def test_what_is_no_image_is_a_mistake(strict, path, kind):
    data = {
        "nothing": b"",
        "text": b"no image",
        "bomb": bomb(60_000, 60_000),
        "larger": bomb(2000, 2000),
        "cut": png(np.random.default_rng(0).integers(0, 255, (90, 90, 3), np.uint8))[:400],
    }[kind]
    wait_for(lambda: strict.served.gallery.collection is not None)
    answer = strict.upload(path, data)
    assert answer.status == 400, answer.body
    assert answer.json["detail"].endswith(".")


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/..%2f..%2f..%2fetc%2fpasswd",
        "/report/../../config.json",
        "//etc/passwd",
        "/static/config.json",
        "/%00",
    ],
)
def test_paths_lead_nowhere(strict, path):
    with strict.raw() as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = connection.makefile("rb").read()
    assert b" 404 " in answer.splitlines()[0]
    assert b"root:" not in answer


@pytest.mark.slow
def test_a_file_name_is_never_a_path(strict, pictures, run):
    before = sorted(run.rglob("*"))
    answer = strict.upload("/embed", (pictures / "00.jpg").read_bytes(), filename="../../../etc/passwd")
    assert answer.status == 200
    # The path as the field itself, and no file.
    body = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="image"\r\n\r\n/etc/passwd\r\n--{BOUNDARY}--\r\n'
    refused = strict.post("/embed", body.encode(), content_type=FORM)
    assert refused.status in (400, 422)
    assert b"root:" not in refused.body
    assert sorted(run.rglob("*")) == before


# ---- who may


@pytest.mark.slow
def test_only_names_of_this_machine_are_answered_to(client):
    assert client.get("/status", Host="evil.example").status == 421
    assert client.get("/status", Host="[").status == 421
    for name in ("localhost:1234", "127.0.0.2", "[::1]:80"):
        assert client.get("/status", Host=name).status == 200


@pytest.mark.slow
def test_other_pages_may_not_stop_a_training(client):
    answer = client.post("/stop", Origin="http://evil.example")
    assert answer.status == 403
    assert client.post("/stop", Origin=f"http://127.0.0.1:{client.port}").status == 400  # there is none to stop


@pytest.mark.slow
def test_other_pages_may_link_to_this_one_and_neither_show_nor_use_it(client):
    elsewhere = {"Sec_Fetch_Site": "cross-site"}
    followed = client.get("/", **elsewhere, Sec_Fetch_Mode="navigate")
    assert (followed.status, followed.headers["x-frame-options"]) == (200, "DENY")
    assert followed.headers["x-content-type-options"] == "nosniff"
    for path, mode in (("/", "no-cors"), ("/report", "navigate"), ("/report", "no-cors")):
        refused = client.get(path, **elsewhere, Sec_Fetch_Mode=mode)
        assert (refused.status, refused.headers["x-frame-options"]) == (403, "DENY")
    assert client.get("/status", Sec_Fetch_Site="same-origin").status == 200
    assert client.post("/stop", **elsewhere).status == 403


@pytest.mark.slow
def test_a_token_is_asked_for(run):
    token = "a-long-enough-token"
    with serving(run, token=token, local=False) as client:
        for path in ("/", "/status", "/openapi.json", f"/status?token={token}x", "/status?token="):
            assert client.get(path).status == 401
        assert client.get("/status", Authorization="Bearer wrong").status == 401
        assert client.get("/status", Authorization=f"Bearer {token}").status == 200
        answer = client.get(f"/?token={token}")
        assert answer.status == 200
        assert "HttpOnly" in answer.headers["set-cookie"]
        cookie = answer.headers["set-cookie"].split(";")[0]
        assert client.get("/status", Cookie=cookie).status == 200
        assert client.get("/status", Cookie='anechoic_token="\x80').status == 401
        assert client.get("/status", Authorization=f"Bearer {token}", Host="its.own.name").status == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "a token is needed"),
        (["--host", "0.0.0.0", "--token", "short"], "at least 8"),
        (["--host", "0.0.0.0", "--token", "a+b/c=defgh"], "part of an address"),
        (["--port", "70000"], "between 0 and 65535"),
        (["--queue", "0"], "at least 1"),
    ],
)
def test_mistakes(capsys, run, arguments, words):
    assert main(["serve", str(run), *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.slow
def test_a_port_in_use_and_no_run(capsys, run, tmp_path):
    with listen("127.0.0.1", 0) as taken, pytest.raises(UserError, match="choose another --port"):
        listen("127.0.0.1", taken.getsockname()[1])
    assert main(["serve", str(tmp_path)]) == 2
    assert "is no run directory" in capsys.readouterr().err
    assert [is_local(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [True] * 3 + [
        False
    ] * 2
    check_token(None, host="127.0.0.1", local=True)


@pytest.mark.slow
def test_without_its_packages_it_names_the_extra(capsys, run, monkeypatch):
    from anechoic.cli import serve

    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert main(["serve", str(run)]) == 2
    assert "anechoic[web]" in capsys.readouterr().err
