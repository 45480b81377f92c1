"""A step of training a masked autoencoder beside transformers' ViTMAE, and beside the machine's own GEMM rate.

The same architecture (the original MAE), batch, mask ratio and precision; a step is forward, backward and AdamW. The
peer gets one or two threads, whichever is faster; ours one process of two threads or two of one that average
gradients, at the small sizes also compiled, and the row names which. The limit is a product of large matrices in the
same arrangement of processes and threads.
"""

from __future__ import annotations

import math
import os
import statistics
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anechoic.config import Algorithm
from anechoic.errors import UserError
from anechoic_lab.bench.contest import Entry, Step, contest, fastest
from anechoic_lab.bench.timing import GEMM_SIDE, Options, Timing, row

if TYPE_CHECKING:
    from anechoic.runtime.distributed import World

PEERS = ("transformers", "torch")
PAIRS = 300  # turns of the decayed and of the residual network, for a ratio to 1 %
MUON_PAIRS = 60


@dataclass(frozen=True)
class Work:
    """A masked autoencoder and its batch."""

    name: str
    dim: int
    heads: int
    decoder_dim: int
    decoder_heads: int
    batch: int
    depth: int = 12
    decoder_depth: int = 4
    patch: int = 4
    image: int = 32
    peer_on_one_thread: bool = True
    compiled: bool = False  # ours runs compiled too: where products do not fill the step

    def model_options(self, **others: Any) -> dict[str, Any]:
        """As build_model takes them."""
        return {
            "image_size": self.image,
            "patch_size": self.patch,
            "dim": self.dim,
            "depth": self.depth,
            "num_heads": self.heads,
            "decoder_dim": self.decoder_dim,
            "decoder_depth": self.decoder_depth,
            "decoder_num_heads": self.decoder_heads,
            **others,
        }

    def __str__(self) -> str:
        return (
            f"{self.name}: width {self.dim} x {self.depth}, patch {self.patch}, {self.image} px, "
            f"decoder {self.decoder_dim} x {self.decoder_depth}, batch {self.batch}"
        )


SMALLEST = Work("smallest", dim=96, heads=3, decoder_dim=48, decoder_heads=3, batch=64, compiled=True)
POCKET = Work("pocket", dim=192, heads=3, decoder_dim=96, decoder_heads=3, batch=128, compiled=True)
LARGE: dict[str, Any] = {"decoder_dim": 512, "decoder_heads": 16, "decoder_depth": 8, "patch": 16, "image": 224}
SMALL = Work("ViT-S/16", dim=384, heads=6, batch=16, **LARGE)
BASE = Work("ViT-B/16", dim=768, heads=12, batch=8, peer_on_one_thread=False, **LARGE)  # hopeless and long there
WORKS = (SMALLEST, POCKET, SMALL, BASE)
# The autoencoder of the recipe pocket_mae_emoji.
DRAWINGS = Work(
    "drawings", dim=96, heads=3, decoder_dim=48, decoder_heads=3, batch=128, depth=6, decoder_depth=3, patch=8, image=48
)


def run(options: Options) -> list[dict[str, Any]]:
    """A row for each size, then the decayed network against the residual one, then Muon against AdamW."""
    try:
        import transformers  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise UserError('This benchmark needs an extra package: pip install "anechoic[bench]".') from error
    rows = [against_peer(work, rounds=options.rounds, fused=options.fused) for work in WORKS]
    return [
        *rows,
        decayed_against_residual(replace(POCKET, batch=32), pairs=PAIRS, fused=options.fused),
        muon_against_adamw(DRAWINGS, pairs=MUON_PAIRS, fused=options.fused),
    ]


# ---- the steps, each made in the contestant's own process


def ours(
    world: World,
    work: Work,
    options: dict[str, Any],
    fused: bool,
    compiled: bool = False,
    algorithm: Algorithm = "adamw",
) -> Step:
    """What the engine does between two batches, with the parts it is made of."""
    import torch

    from anechoic.config import OptimConfig
    from anechoic.models import build_model
    from anechoic.models.layers import set_block_options
    from anechoic.runtime.determinism import freeze_garbage, keep_freed_memory
    from anechoic.runtime.distributed import average_gradients, parallel
    from anechoic.training.build import make_optimizer

    if fused:
        keep_freed_memory()
    torch.manual_seed(0)
    model = build_model("mae_tiny_patch4", **work.model_options(**options)).train()
    set_block_options(model, fused=fused)
    optimizer = make_optimizer(model, OptimConfig(algorithm=algorithm, batch_size=work.batch))
    called: Any = torch.compile(model) if compiled else model
    trained = parallel(world, called)
    images = torch.randn(work.batch // world.size, 3, work.image, work.image)

    def step() -> None:
        trained(images).loss.backward()
        average_gradients(trained)
        optimizer.step()
        optimizer.zero_grad()

    if fused:
        step()
        freeze_garbage()
    return step


def peer_network(work: Work) -> Any:
    """transformers' masked autoencoder of these sizes, about to be trained."""
    import transformers

    return transformers.ViTMAEForPreTraining(
        transformers.ViTMAEConfig(
            hidden_size=work.dim,
            num_hidden_layers=work.depth,
            num_attention_heads=work.heads,
            intermediate_size=4 * work.dim,
            image_size=work.image,
            patch_size=work.patch,
            decoder_num_attention_heads=work.decoder_heads,
            decoder_hidden_size=work.decoder_dim,
            decoder_num_hidden_layers=work.decoder_depth,
            decoder_intermediate_size=4 * work.decoder_dim,
            mask_ratio=0.75,
            norm_pix_loss=True,
        )
    ).train()


def theirs(world: World, work: Work) -> Step:
    """The peer's step, with AdamW at its best: one fused kernel."""
    import torch

    torch.manual_seed(0)
    model = peer_network(work)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    images = torch.randn(work.batch, 3, work.image, work.image)

    def step() -> None:
        model(pixel_values=images).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def product(world: World) -> Step:
    """The limit: one product of large square matrices."""
    import torch

    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE).unbind(0)
    return lambda: a @ b


# ---- the rows


def arrangements(batch: int) -> list[tuple[int, int]]:
    """(processes, threads each) that use all cores, at most two: the peer's own limit here."""
    cores = min(2, os.cpu_count() or 1)
    return [(1, cores), *([(cores, 1)] if cores > 1 and batch % cores == 0 else [])]


def named(processes: int, threads: int) -> str:
    return f"{processes} x {threads} threads"


def against_peer(work: Work, *, rounds: int, fused: bool = True) -> dict[str, Any]:
    """ours beside the peer and beside the machine, each at its best arrangement."""
    from anechoic.models import model_config
    from anechoic.training.cost import step_flops

    options = {"skips": False}
    entries = {}
    for processes, threads in arrangements(work.batch):
        entries[f"ours, {named(processes, threads)}"] = Entry(ours, (work, options, fused), processes, threads)
        if work.compiled and processes > 1:
            entries[f"ours compiled, {named(processes, threads)}"] = Entry(
                ours, (work, options, fused, True), processes, threads
            )
        entries[f"limit, {named(processes, threads)}"] = Entry(product, (), processes, threads)
    for threads in {1, arrangements(work.batch)[0][1]} if work.peer_on_one_thread else {arrangements(work.batch)[0][1]}:
        entries[f"transformers, {named(1, threads)}"] = Entry(theirs, (work,), 1, threads)
    timing, memory = contest(entries, rounds=rounds)
    best = fastest(timing, [name for name in entries if name.startswith("ours")])
    peer = fastest(timing, [name for name in entries if name.startswith("transformers")])
    limit = best.replace("ours compiled", "ours").replace("ours", "limit")
    gemm = 2.0 * GEMM_SIDE**3 * entries[limit].processes / min(timing.seconds[limit])
    config: Any = model_config("mae_tiny_patch4", **work.model_options(**options))
    line = row(
        f"{work}{'' if fused else ', module by module'}",
        timing,
        ours=best,
        peer=peer,
        items=work.batch,
        flops=step_flops(config, work.batch),
        gemm=gemm,
        memory_mb=memory[best],
    )
    everyone = {name: {"seconds": timing.median(name), "memory_mb": memory[name]} for name in entries}
    return line | {"ours_name": best, "gemm_flops": gemm, "contestants": everyone}


def decayed_against_residual(work: Work, *, pairs: int, fused: bool = True) -> dict[str, Any]:
    """The network with decayed shortcuts beside the same one with plain shortcuts."""
    arguments = {
        name: (work, {"skips": True, "alpha_min": alpha_min}, fused)
        for name, alpha_min in (("decayed", 0.6), ("residual", 1.0))
    }
    name = f"decayed (alpha_min 0.6) beside residual, with skips, {work}"
    return against_baseline(name, arguments, arrangements(work.batch)[-1], pairs=pairs, batch=work.batch)


def muon_against_adamw(work: Work, *, pairs: int, fused: bool = True) -> dict[str, Any]:
    """A step with orthogonalized updates beside a step of AdamW, in one process of one thread."""
    options = {"skips": True, "alpha_min": 0.6}
    arguments = {name: (work, options, fused, False, name.lower()) for name in ("Muon", "AdamW")}
    return against_baseline(f"Muon beside AdamW, with skips, {work}", arguments, (1, 1), pairs=pairs, batch=work.batch)


def against_baseline(
    name: str, arguments: dict[str, tuple[Any, ...]], arrangement: tuple[int, int], *, pairs: int, batch: int
) -> dict[str, Any]:
    """Two steps of ours taking turns, the first one beside the second; low and high are the 95 % interval of the median
    ratio, not the range."""
    processes, threads = arrangement
    mine, other = arguments
    entries = {key: Entry(ours, values, processes, threads) for key, values in arguments.items()}
    timing, memory = contest(entries, rounds=pairs, turn=0.0)
    median, low, high = median_ratio(timing, other, ours=mine)
    line = row(name, timing, ours=mine, peer=other, items=batch, memory_mb=memory[mine])
    everyone = {key: {"seconds": timing.median(key), "memory_mb": memory[key]} for key in entries}
    return line | {
        "ratio": median,
        "low": low,
        "high": high,
        "interval": "95 % of the median ratio",
        "pairs": pairs,
        "ours_name": f"{mine}, {named(processes, threads)}",
        "contestants": everyone,
    }


def median_ratio(timing: Timing, peer: str, *, ours: str) -> tuple[float, float, float]:
    """The median of the rounds' ratios and its 95 % interval: two of the sorted ratios, with no law of their errors
    assumed (a shared machine's have long tails)."""
    ratios = sorted(b / a for a, b in zip(timing.seconds[ours], timing.seconds[peer], strict=True))
    beyond = max(0, math.floor((len(ratios) - 1 - 1.96 * math.sqrt(len(ratios))) / 2))
    return statistics.median(ratios), ratios[beyond], ratios[-1 - beyond]
