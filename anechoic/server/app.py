"""The application: a live page, and a JSON API whose description is /openapi.json. Every answer is bounded.

Errors are sentences: status 400 for mistakes, 409 for a run that is being trained, 503 for a full queue, 504 for a job
that took too long.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from fastapi import FastAPI, File, Form, Query, Request, UploadFile
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from pydantic import BaseModel, Field

from anechoic import __version__
from anechoic.choices import Pooling, VerdictWord
from anechoic.errors import UserError
from anechoic.pages.runs import open_run
from anechoic.server.control import Control, State
from anechoic.server.engine import Ended, Engine, TooLong
from anechoic.server.inference import Gallery, Studio
from anechoic.server.middleware import Guard, Limits, Refusal
from anechoic.server.page import live_page, status_of
from anechoic.server.worker import Busy, Worker

Upload = Annotated[UploadFile, File(description="an image file: JPEG, PNG, WebP, GIF, BMP or TIFF")]
# Later than this a report is not waited for.
REPORT_SECONDS = 600.0


class Problem(BaseModel):
    detail: str


class Embedding(BaseModel):
    """One vector, and which layer, pooling and weights it comes from."""

    vector: list[float]
    layer: int
    pooling: Pooling
    dim: int
    weights: str


class Neighbor(BaseModel):
    name: str
    similarity: float
    picture: str = Field(description="a data URI")


class Found(BaseModel):
    searched: int
    neighbors: list[Neighbor]


class Reconstruction(BaseModel):
    """hidden: numbers of the hidden patches, row by row; error: mean squared error there, of pixels in 0 .. 1."""

    rows: int
    columns: int
    hidden: list[int]
    error: float
    image: str
    reconstruction: str


class PatchMap(BaseModel):
    image: str
    patches: str


class Made(BaseModel):
    picture: str
    label: int | None


class Samples(BaseModel):
    images: list[Made]
    evaluations: int


class SampleRequest(BaseModel):
    num: int = Field(4, ge=1, le=16)
    steps: int = Field(25, ge=1, le=100)
    seed: int = Field(0, ge=0, le=2**31 - 1)
    guidance: float | None = Field(None, ge=0, le=20, allow_inf_nan=False)
    classes: list[Annotated[int, Field(ge=0, le=1_000_000)]] = Field(default_factory=list, max_length=16)


class Status(BaseModel):
    """charts: the curves so far, as HTML; searchable: the images are embedded; problem: why a training that was resumed
    here has ended early, or the images cannot be embedded."""

    state: State
    name: str
    seen: int
    samples: int
    images_per_second: float | None
    seconds_left: float | None
    loss: float | None
    summary: str
    charts: str
    searchable: bool
    problem: str
    resume_command: str


class VerdictAnswer(BaseModel):
    """html: the same for the page."""

    word: VerdictWord
    reasons: list[str]
    advice: list[str]
    html: str


class Done(BaseModel):
    state: State


PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": description}
    for status, description in {
        400: "A mistake, in a sentence",
        401: "The token is missing or wrong",
        403: "Asked for by another page",
        408: "The request came too slowly",
        409: "Not possible in the state the run is in",
        413: "The request is too large",
        421: "Another host was asked for",
        503: "The queue is full: retry after the seconds in Retry-After",
        504: "The job took too long and was ended",
    }.items()
}


class Served(NamedTuple):
    """app: what answers, its guard around it; the rest is what it answers with."""

    app: Guard
    gallery: Gallery
    engine: Engine
    worker: Worker
    control: Control


def create_app(
    path: Path,
    *,
    data: str | None = None,
    device: str = "auto",
    limits: Limits | None = None,
    token: str | None = None,
    local: bool = True,
) -> Served:
    """The application for one run directory."""
    limits = limits or Limits()
    gallery = Gallery(path, data=data, device=device)
    engine = Engine(partial(Studio, path, data=data, device=device, pixels=limits.pixels))
    control = Control(path)
    worker = Worker(waiting=limits.queue)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.close()
        worker.close()
        control.close()

    app = FastAPI(
        title="anechoic",
        version=__version__,
        description=f"The run {path.name}.",
        docs_url=None,  # these pages would fetch scripts from elsewhere
        redoc_url=None,
        lifespan=lifespan,
        responses=PROBLEMS,
    )

    def called(function: Any, *arguments: Any, seconds: float = limits.job_seconds, **options: Any) -> Any:
        """The result of a method of the Studio."""
        return engine.call(function, *arguments, seconds=seconds, **options)

    async def once(function: Any, *arguments: Any, seconds: float = limits.job_seconds, **options: Any) -> Any:
        """The same in a job of its own kind."""
        job = partial(called, function, *arguments, seconds=seconds, **options)
        return await worker.run(object(), partial(alone, job), None, seconds=seconds)

    def ready() -> None:
        if control.state == "running":
            raise Refusal(409, "The run is being trained: stop it, or wait until it has ended.")

    # ---- mistakes in a sentence

    @app.exception_handler(UserError)
    async def mistake(request: Request, problem: UserError) -> JSONResponse:
        return JSONResponse({"detail": str(problem)}, status_code=400)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, problem: RequestValidationError) -> JSONResponse:
        # The values themselves are not echoed: NaN is no JSON.
        errors = [{name: error[name] for name in ("loc", "msg", "type")} for error in problem.errors()]
        return JSONResponse({"detail": errors}, status_code=422)

    @app.exception_handler(Refusal)
    async def refusal(request: Request, problem: Refusal) -> JSONResponse:
        return JSONResponse({"detail": problem.sentence}, status_code=problem.status, headers=problem.headers)

    @app.exception_handler(Busy)
    async def busy(request: Request, problem: Busy) -> JSONResponse:
        sentence = "The queue is full: retry in a moment."
        return JSONResponse({"detail": sentence}, status_code=503, headers={"retry-after": "1"})

    @app.exception_handler(TooLong)
    async def too_long(request: Request, problem: TooLong) -> JSONResponse:
        sentence = (
            f"The job took more than {limits.job_seconds:g} s and was ended: ask for less, or send a smaller image."
        )
        return JSONResponse({"detail": sentence}, status_code=504)

    @app.exception_handler(Ended)
    async def ended(request: Request, problem: Ended) -> JSONResponse:
        sentence = (
            f"The process that computes has ended ({problem}), and another one is started: ask for less, or retry."
        )
        return JSONResponse({"detail": sentence}, status_code=503, headers={"retry-after": "1"})

    # ---- the page

    @app.get("/", response_class=HTMLResponse, summary="The live page")
    async def live() -> str:
        return live_page(open_run(path), control.state)

    @app.get("/report", response_class=HTMLResponse, summary="The whole report on the run as it stands")
    async def report() -> str:
        ready()
        return await once(Studio.report, seconds=REPORT_SECONDS)

    @app.get("/status", summary="How far the run is")
    async def status() -> Status:
        run, state, problem, searchable = open_run(path), control.state, control.problem, False
        if state != "running" and run.seen:
            try:
                searchable = gallery.collection is not None
            except UserError as mistake:
                problem = str(mistake)
        found = status_of(run, state=state, resume_command=shlex.join(control.command))
        return Status(**found, problem=problem, searchable=searchable)

    @app.get("/verdict", summary="Whether training worked, measured without labels")
    async def verdict() -> VerdictAnswer:
        ready()
        return VerdictAnswer(**await once(Studio.verdict))

    @app.post("/stop", summary="Ask the training to save and end")
    async def stop() -> Done:
        control.stop()
        return Done(state=control.state)

    @app.post("/resume", summary="Resume a stopped training as a subprocess of this server")
    async def resume() -> Done:
        control.resume()
        return Done(state=control.state)

    # ---- the network

    @app.post("/embed", summary="The feature vector of an image, as anechoic embed writes it")
    async def embed(
        image: Upload, layer: Annotated[int, Query(ge=-1000, le=1000)] = -1, pooling: Pooling | None = None
    ) -> Embedding:
        ready()
        function = partial(called, Studio.embed, layer=layer, pooling=pooling)
        kind, content = ("embed", layer, pooling), await image.read()
        return Embedding(**await worker.run(kind, partial(together, function), content, seconds=limits.job_seconds))

    @app.post("/search", summary="The images nearest to an image")
    async def search(image: Upload, k: Annotated[int, Query(ge=1, le=48)] = 12) -> Found:
        ready()
        collection = gallery.collection
        if collection is None:
            raise Refusal(503, "The images are still being embedded.", **{"retry-after": "2"})
        content = await image.read()

        def job() -> list[dict[str, Any]]:
            return gallery.nearest(*called(Studio.query, content, vector=collection.vector), k=k)

        found = await worker.run(object(), partial(alone, job), None, seconds=limits.job_seconds)
        return Found(searched=len(collection), neighbors=[Neighbor(**one) for one in found])

    @app.post("/reconstruct", summary="What the autoencoder makes of an image with patches hidden")
    async def reconstruct(
        image: Upload,
        hidden: Annotated[
            str | None,
            Form(max_length=20_000, description="numbers of patches, row by row, as 3,17; or none; omit to draw"),
        ] = None,
        ratio: Annotated[float, Form(ge=0, le=1)] = 0.75,
        seed: Annotated[int, Form(ge=0, le=2**31 - 1)] = 0,
    ) -> Reconstruction:
        ready()
        places = None if hidden is None else numbers(hidden)
        content = await image.read()
        return Reconstruction(**await once(Studio.reconstruct, content, hidden=places, ratio=ratio, seed=seed))

    @app.post("/patches", summary="The patch tokens of an image as colors")
    async def patches(image: Upload) -> PatchMap:
        ready()
        return PatchMap(**await once(Studio.patches, await image.read()))

    @app.post("/sample", summary="Images that a denoiser makes")
    async def sample(asked: SampleRequest) -> Samples:
        ready()
        choices = asked.model_dump() | {"classes": tuple(asked.classes)}
        return Samples(**await once(Studio.sample, **choices))

    return Served(Guard(app, limits=limits, token=token, local=local), gallery, engine, worker, control)


def alone(function: Any, arguments: Sequence[Any]) -> list[Any]:
    """A job that is computed by itself, as the worker calls it."""
    return [function() for _ in arguments]


def together(function: Any, arguments: Sequence[Any]) -> Sequence[Any]:
    """Jobs that are computed in one call; if that takes too long, each by itself, so that one cannot end the others."""
    try:
        return function(arguments)
    except TooLong as problem:
        if len(arguments) == 1:
            return [problem]
        return [found for argument in arguments for found in together(function, [argument])]


def numbers(text: str) -> list[int]:
    """ "3, 17" -> [3, 17]; an empty form field counts as absent, so `none` stands for no patch."""
    if text.strip() == "none":
        return []
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isascii() and word.isdecimal() and len(word) < 8 for word in words):
        raise UserError("Hidden patches are given as numbers with commas between them.")
    return [int(word) for word in words]
