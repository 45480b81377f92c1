"""Who may ask, how much and for how long: what stands between the network and the application.

`Guard` is ASGI middleware: hosts, token, foreign pages, the size of a body and the time it may take, and the number of
requests at once. `ImpatientProtocol` drops clients that send their headers, or read their answers, too slowly.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

COOKIE = "anechoic_token"
# No other page may show this one inside itself, where its buttons could be overlaid, or take an answer for a script.
SAFETY = ((b"x-frame-options", b"DENY"), (b"x-content-type-options", b"nosniff"))


@dataclass(frozen=True)
class Limits:
    """upload: bytes of a body; body_seconds: until it must be there; requests: at once; queue: jobs that wait for the
    network; job_seconds: until a job must be done; pixels: of an image."""

    upload: int = 20 << 20
    body_seconds: float = 20.0
    requests: int = 64
    queue: int = 32
    job_seconds: float = 60.0
    pixels: int = 1 << 25


class Refusal(Exception):
    """An answer instead of the application's."""

    def __init__(self, status: int, sentence: str, **headers: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, headers


class Guard:
    """token: None lets everybody in who can reach the address. local: only names of this machine are answered to, so
    that a page elsewhere cannot get in by renaming itself."""

    def __init__(self, app: Any, *, limits: Limits, token: str | None, local: bool) -> None:
        self.app, self.limits, self.token, self.local = app, limits, token, local
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send = with_headers(send, *SAFETY)
        try:
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            fresh = self.admit(scope, headers)
            if self.active >= self.limits.requests:
                raise Refusal(503, "Too many requests at once.", **{"retry-after": "1"})
            self.active += 1
            try:
                body = await self.read_body(headers, receive)
                if fresh:  # the browser shall remember the token for this address
                    cookie = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                    send = with_headers(send, (b"set-cookie", cookie.encode()))
                await self.app(scope, replay(body, receive), send)
            finally:
                self.active -= 1
        except Refusal as refusal:
            await answer(send, refusal)

    # ---- who

    def admit(self, scope: Scope, headers: dict[str, str]) -> bool:
        """Whether the token came with the address, so that a cookie shall remember it; Refusal for strangers."""
        host = headers.get("host", "")
        if self.local and not is_local(host_name(host)):
            raise Refusal(421, "This address answers to 127.0.0.1 and localhost only.")
        fresh = self.check_token(scope, headers)
        if asked_by_another_page(scope, headers):
            raise Refusal(403, "Another page may not ask for this.")
        return fresh

    def check_token(self, scope: Scope, headers: dict[str, str]) -> bool:
        if self.token is None:
            return False
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        asked = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        given = bearer if scheme.lower() == "bearer" else asked or cookie(headers.get("cookie", ""))
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            raise Refusal(401, "The token is missing or wrong.", **{"www-authenticate": "Bearer"})
        return given == asked

    # ---- how much, and how long

    async def read_body(self, headers: dict[str, str], receive: Receive) -> bytes:
        """All of it, cut off as soon as it is too long or too late, whatever its header claims."""
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.limits.upload:
            raise self.too_much()
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refusal(400, "The request was not sent whole.")
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > self.limits.upload:
                        raise self.too_much()
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            raise Refusal(408, "The request came too slowly.") from None

    def too_much(self) -> Refusal:
        return Refusal(413, f"A request may have {self.limits.upload >> 20} MB at most.")


def cookie(header: str) -> str:
    try:
        morsel = SimpleCookie(header).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""


def replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message; afterwards whatever comes, which is the end of the connection."""
    waiting = [body]

    async def next_message() -> Message:
        if waiting:
            return {"type": "http.request", "body": waiting.pop(), "more_body": False}
        return await receive()

    return next_message


def with_headers(send: Send, *pairs: tuple[bytes, bytes]) -> Send:
    """Every answer has these headers too."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", []), *pairs]}
        await send(message)

    return sending


def asked_by_another_page(scope: Scope, headers: Mapping[str, str]) -> bool:
    """For anything but the live page itself, which it may link to. Browsers say so; other programs are no pages."""
    elsewhere = headers.get("sec-fetch-site") == "cross-site"
    if scope["method"] in ("GET", "HEAD"):
        linked = scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
        return elsewhere and not linked
    origin = headers.get("origin")
    return elsewhere or (origin is not None and origin.partition("://")[2] != headers.get("host", ""))


def host_name(header: str) -> str:
    """Of a Host header, without its port; nothing where it is none."""
    try:
        return urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether it is a name of this machine that no other can have."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def answer(send: Send, refusal: Refusal) -> None:
    body = json.dumps({"detail": refusal.sentence}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
    pairs = [(name.encode(), value.encode()) for name, value in (headers | refusal.headers).items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


class ImpatientProtocol(H11Protocol):
    """HTTP/1.1 that closes a connection whose headers are not complete in time or whose answer is not read."""

    headers_seconds = 10.0
    reading_seconds = 20.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._headers_due: asyncio.TimerHandle | None = None
        self._reading_due: asyncio.TimerHandle | None = None
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect_headers()

    def _expect_headers(self) -> None:
        waiting = self.conn.their_state is h11.IDLE
        if waiting and self._headers_due is None:
            self._headers_due = self.loop.call_later(self.headers_seconds, self._drop_if_waiting)
        elif not waiting and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def _drop_if_waiting(self) -> None:
        self._headers_due = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reading_due = self.loop.call_later(self.reading_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reading_due is not None:
            self._reading_due.cancel()

    def connection_lost(self, problem: Exception | None) -> None:
        for due in (self._headers_due, self._reading_due):
            if due is not None:
                due.cancel()
        super().connection_lost(problem)
