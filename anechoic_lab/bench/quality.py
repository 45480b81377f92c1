"""Time to quality: seconds until a network is as good as transformers' ViTMAE is at the end of a fixed budget.

The peer trains the original masked autoencoder with AdamW at the best of five peak learning rates, found first by
the loss on held-out images with a seed of its own. Ours trains as the pocket recipe does (skips, Muon), with residual
shortcuts, which the rule of `pretrain` chooses at this length. Both read the same images, crops and batches, on one
thread each, one after the other, and are measured alike: the loss on held-out images with fixed masks, and a linear
probe of the frozen mean token. Ours tries ever longer trainings, each with a schedule of its own. The result is
the time of the shortest that is at least as good on average over the seeds and is followed by another such length.
Time is CPU time, which on one thread equals wall time on a quiet machine.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from anechoic.errors import UserError
from anechoic_lab.bench.timing import Options, Timing, row
from anechoic_lab.bench.train import DRAWINGS, Work, peer_network

if TYPE_CHECKING:
    from anechoic.config import Config

PEERS = ("transformers", "torch")
SAMPLES = 96_000
PEER_LRS = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
SEARCH_SEED = 100
SHARES = (1 / 12, 1 / 8, 1 / 6, 1 / 5, 1 / 4, 1 / 3, 1 / 2, 1.0)  # of the peer's samples
MAX_TRAIN, MAX_TEST = 10_000, 5_000  # images of a probe
GOALS = {"loss": "held-out loss", "probe": "linear probe"}


@dataclass(frozen=True)
class Trained:
    """The result of a training: CPU seconds, loss on held-out images, accuracy of the probe."""

    samples: int
    seconds: float
    loss: float
    probe: float


def run(options: Options) -> list[dict[str, Any]]:
    """Return a row for the loss and one for the probe; both list every training."""
    try:
        import transformers  # noqa: F401 (only whether it is there)
    except ImportError as error:
        raise UserError('This benchmark needs an extra package: pip install "anechoic[bench]".') from error
    with tempfile.TemporaryDirectory() as folder:
        race = Race(options.small, Path(folder))
        searched = {lr: race.peer(SEARCH_SEED, lr) for lr in PEER_LRS}
        lr = min(searched, key=lambda lr: searched[lr].loss)
        peers = [race.peer(seed, lr) for seed in range(options.rounds)]
        ours = race.until_good(peers)
    search = {f"{lr:g}": asdict(found) for lr, found in searched.items()}
    return [goal_row(goal, race.work, peers, ours) | {"peer_rate": lr, "peer_rates": search} for goal in GOALS]


def goal_row(goal: str, work: Work, peers: list[Trained], ours: list[list[Trained]]) -> dict[str, Any]:
    """Of our trainings, one list of seeds for every length, the first length that counts; the last where none does."""
    found = first_good(goal, peers, ours)
    chosen = ours[-1 if found is None else found]
    timing = Timing({"ours": [own.seconds for own in chosen], "transformers": [peer.seconds for peer in peers]})
    name = f"until the {GOALS[goal]} that transformers with AdamW has after {SAMPLES:,} samples, {work}"
    return row(name, timing, ours="ours", peer="transformers") | {
        "reached": found is not None,
        "samples_ratio": peers[0].samples / chosen[0].samples,
        "peers": [asdict(peer) for peer in peers],
        "lengths": [[asdict(own) for own in length] for length in ours],
    }


def first_good(goal: str, peers: list[Trained], ours: list[list[Trained]]) -> int | None:
    """Which length is the first of two in a row at which ours is as good; the longest there is may stand alone."""
    good = [is_as_good(goal, length, peers) for length in ours]
    pairs = zip(good, [*good[1:], len(ours) == len(SHARES)], strict=True)
    return next((i for i, pair in enumerate(pairs) if all(pair)), None)


def is_as_good(goal: str, ours: list[Trained], peers: list[Trained]) -> bool:
    """On average over the seeds."""
    own, other = (mean(getattr(trained, goal) for trained in trainings) for trainings in (ours, peers))
    return own <= other if goal == "loss" else own >= other


class Race:
    """The data of all trainings, where their files go, and how each is started and measured."""

    def __init__(self, small: str, folder: Path) -> None:
        from anechoic.config import resolve
        from anechoic.recipes import recipe
        from anechoic.training.build import open_data

        config = recipe("pocket_mae_emoji")
        if small:
            config = replace(config, data=replace(config.data, source=small, image_size=32, scale=(0.2, 1.0)))
        self.work = replace(DRAWINGS, name=small or DRAWINGS.name, image=config.data.image_size)
        config = replace(
            config,
            shortcut=replace(config.shortcut, alpha_min=1.0),
            validation=replace(config.validation, report=SAMPLES // 10, every=SAMPLES),
            save=replace(config.save, every=SAMPLES),
            threads=1,
            devices=1,
        )
        source = open_data(config)
        self.config = resolve(config, size=len(source), fingerprint=source.fingerprint, gpus=0, cores=1)
        self.eval_data = (small, None) if small else ("emoji:train", "emoji:test")
        self.folder = folder
        self.count = 0

    def until_good(self, peers: list[Trained]) -> list[list[Trained]]:
        """Our trainings, longer and longer until both goals are reached for good; every length with every seed."""
        ours: list[list[Trained]] = []
        for share in SHARES:
            ours.append([self.ours(seed, share) for seed in range(len(peers))])
            if all(first_good(goal, peers, ours) is not None for goal in GOALS):
                break
        return ours

    def peer(self, seed: int, lr: float) -> Trained:
        from anechoic.weights.importing import Choices, import_checkpoint

        config = replace(self.config, seed=seed)
        folder = self.next_folder()
        seconds = in_a_process(train_peer, config, self.work, lr, folder)
        network = import_checkpoint(folder, Choices()).network
        return self.measured(network, config, SAMPLES, seconds)

    def ours(self, seed: int, share: float) -> Trained:
        from anechoic.runtime.checkpoint import load

        samples = int(SAMPLES * share) // self.work.batch * self.work.batch
        config = replace(self.config, seed=seed, optim=replace(self.config.optim, samples=samples))
        folder = self.next_folder()
        seconds = in_a_process(train_ours, config, folder)
        return self.measured(load(folder), config, samples, seconds)

    def next_folder(self) -> Path:
        self.count += 1
        return self.folder / str(self.count)

    def measured(self, network: Any, config: Config, samples: int, seconds: float) -> Trained:
        import torch

        from anechoic.data.split import hold_out
        from anechoic.eval.encoders import Encoder
        from anechoic.eval.eval_data import open_eval_data
        from anechoic.eval.evaluator import EvalSpec, Evaluator
        from anechoic.training.build import open_data, preprocess_of
        from anechoic.training.objectives import make_objective
        from anechoic.training.validation import make_validator

        preprocess, source = preprocess_of(config), open_data(config)
        objective = make_objective(config.objective.name, preprocess=preprocess, **config.objective.options)
        parts = hold_out(len(source), config.data.holdout or 0)
        validation = make_validator(replace(config, seed=0), objective, source, *parts, preprocess=preprocess)
        loss = validation.losses(network, torch.device("cpu"))["loss"]
        eval_data = open_eval_data(*self.eval_data, channels=preprocess.channels)
        spec = EvalSpec(("probe",), poolings=("mean",), max_train=MAX_TRAIN, max_test=MAX_TEST)
        probe = Evaluator(spec, cached=False).run(Encoder("network", network, preprocess), eval_data)
        return Trained(samples, seconds, loss, 100 * probe.value("probe", pooling="mean"))


# ---- the trainings, each in a process of its own that has imported everything when its clock starts


def in_a_process(train: Any, *arguments: Any) -> float:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(train, *arguments).result()


def train_ours(config: Config, folder: Path) -> float:
    """All that `anechoic train` does, saving included."""
    from anechoic.training.loop import fit

    start = time.process_time()
    fit(config, folder)
    return time.process_time() - start


def train_peer(config: Config, work: Work, peak_lr: float, folder: Path) -> float:
    """transformers' network under AdamW, with our images, warm-up and cosine, and no decay of biases and norms."""
    import torch

    from anechoic.data.split import hold_out
    from anechoic.models.layers import sincos_positions
    from anechoic.training.build import make_loader, open_data, preprocess_of
    from anechoic.training.optim import learning_rate, set_learning_rate

    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    optim = config.optim
    network = peer_network(work)
    # Built from a config, transformers 5.22 leaves both tables of positions at zero; the original's are fixed ones.
    grid = (work.image // work.patch,) * 2
    for table in (network.vit.embeddings.position_embeddings, network.decoder.decoder_pos_embed):
        table.data[0, 1:] = sincos_positions(table.shape[-1], grid)
    start = time.process_time()
    source = open_data(config)
    batches = iter(make_loader(config, source, hold_out(len(source), config.data.holdout or 0)[0]))
    prepare = preprocess_of(config).apply
    groups = [
        {
            "params": [p for p in network.parameters() if p.requires_grad and (p.ndim > 1) == is_matrix],
            "weight_decay": decay,
            "lr_scale": 1.0,
        }
        for is_matrix, decay in ((True, 0.05), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak_lr, betas=(0.9, 0.95), fused=True)
    for seen in range(0, SAMPLES, optim.batch_size):
        lr = learning_rate(seen, samples=SAMPLES, lr=peak_lr, warmup=optim.warmup, schedule=optim.schedule)
        set_learning_rate(optimizer, lr)
        network(pixel_values=prepare(next(batches).images)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.process_time() - start
    network.save_pretrained(folder)
    return seconds
