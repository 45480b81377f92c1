"""Two processes with half the batch each are one process with the whole batch."""

import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from test_engine import BATCH, tiny_config, train_records

from anechoic.config import SaveConfig
from anechoic.data import Augment, Loader, Subset, open_source
from anechoic.data.split import hold_out
from anechoic.errors import UserError
from anechoic.runtime import checkpoint
from anechoic.runtime.distributed import (
    RankFailedError,
    World,
    average_gradients,
    from_first,
    join,
    launch,
    parallel,
    total,
    without_averaging,
)
from anechoic.runtime.run import Run
from anechoic.train.build import make_model, preprocess_of
from anechoic.train.engine import Task, fit, resolve_config, split
from anechoic.train.objectives import make_objective

pytestmark = pytest.mark.xdist_group("processes")


def gradients(accumulate):
    """Runs in each process: the averaged gradient of one batch at fixed weights, and which samples this process saw."""
    config = tiny_config(shortcut=replace(tiny_config().shortcut, alpha_min=0.6))
    config = replace(
        config,
        data=replace(config.data, mean=(0.5,), std=(0.5,)),
        model=replace(config.model, options={**config.model.options, "zero_init": False}),
    )
    with join() as world:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = make_model(config)
        source = open_source("digits", channels=1)
        loader = Loader(
            Subset(source, hold_out(len(source), 64)[0]),
            image_size=8,
            batch_size=BATCH,
            seed=7,
            augment=Augment("crop"),
            shuffle=True,
            drop_last=True,
            start=40 * BATCH,
            rank=world.rank,
            world_size=world.size,
        )
        task = parallel(world, Task(model, make_objective("masked_reconstruction"), seed=7))
        prepare = preprocess_of(config).apply
        batch = next(iter(loader))
        losses = []
        parts = split(batch, accumulate)
        for i, (images, ids, visits, labels) in enumerate(parts):
            with without_averaging(task, active=i + 1 < accumulate):
                loss = task(prepare(images), ids, visits, labels)["loss"] / accumulate
                loss.backward()
            losses.append(loss.detach())
        average_gradients(task)
        loss = total(world, torch.stack(losses).sum() / world.size).item()
        seen = torch.zeros(world.size, BATCH // world.size, dtype=torch.int64)
        seen[world.rank] = batch.ids
        seen = total(world, seen).flatten().tolist()
        return loss, seen, {name: p.grad.clone() for name, p in model.named_parameters()}


def test_equal_samples_and_gradients():
    """Each process computes its half in two parts; the losses below are of undivided halves."""
    alone = gradients(1)
    loss, seen, together = launch(gradients, 2, devices=2)
    assert seen == alone[1]
    assert len(set(seen)) == BATCH
    assert loss == pytest.approx(alone[0], rel=1e-6)
    whole = torch.cat([value.flatten() for value in alone[2].values()])
    halves = torch.cat([together[name].flatten() for name in alone[2]])
    assert (whole - halves).norm() <= 1e-6 * whole.norm()


@pytest.mark.parametrize("algorithm", ["adamw", "muon"])
def test_equal_losses_over_thirty_updates(tmp_path, algorithm):
    config = tiny_config(steps=30)
    config = replace(config, optim=replace(config.optim, algorithm=algorithm))
    fit(config, tmp_path / "one")
    fit(replace(config, devices=2), tmp_path / "two")
    one, two = train_records(tmp_path / "one"), train_records(tmp_path / "two")
    assert len(one) == len(two) == 30
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)


def test_under_torchrun(tmp_path):
    """Processes that somebody else started find each other; devices then is their number."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(__file__).rsplit('/', 1)[0]!r})\n"
        "from anechoic.train.engine import fit\n"
        "from test_engine import tiny_config\n"
        "fit(tiny_config(steps=4), sys.argv[1])\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run([*command, str(tmp_path / "run")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fit(tiny_config(steps=4), tmp_path / "one")
    losses = [[r["loss"] for r in train_records(tmp_path / name)] for name in ("one", "run")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_ranks_of_any_number_see_the_same_samples_in_the_same_order():
    """Stopped after four updates on two processes, gone on with one, two or three."""

    def ids(start, world_size):
        source = open_source("digits", channels=1)
        how = {"image_size": 8, "batch_size": 24, "seed": 7, "shuffle": True, "drop_last": True, "start": start}
        ranks = [iter(Loader(source, **how, rank=rank, world_size=world_size)) for rank in range(world_size)]
        return [torch.cat([next(rank).ids for rank in ranks]).tolist() for _ in range(80)]

    straight = ids(0, 1)
    assert ids(0, 2) == straight
    for world_size in (1, 2, 3):
        assert ids(4 * 24, world_size)[:76] == straight[4:]


def test_the_number_of_processes_may_change_on_the_way(tmp_path):
    """Begun by one, gone on with by two from the first checkpoint: the same losses to rounding."""
    config = tiny_config(steps=8, save=SaveConfig(every=4 * BATCH, keep_last=9))
    fit(config, tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    shutil.rmtree(tmp_path / "two" / "model")
    (tmp_path / "two" / "results.json").unlink()
    shutil.rmtree(checkpoint.checkpoints(tmp_path / "two" / "checkpoints")[-1])
    with Run(tmp_path / "two") as run, pytest.raises(UserError, match="cannot be shared by 5 devices"):
        resolve_config(config, run, open_source("digits", channels=1), World(0, 5, torch.device("cpu")))
    fit(replace(config, devices=2), tmp_path / "two")
    one, two = train_records(tmp_path / "one"), train_records(tmp_path / "two")
    assert [r["seen"] for r in two] == [r["seen"] for r in one]
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    # Told that it is over, by any number of processes.
    assert fit(config, tmp_path / "two")["metrics"]["loss"] == two[-1]["loss"]


def fail_in_the_first():
    with join() as world:
        from_first(world, refuse)


def refuse():
    raise UserError("The first process does not like this.")


def crash():
    with join() as world:
        if world.rank == 1:
            raise RuntimeError("a defect in one process")
        total(world, torch.zeros(1))


def test_a_mistake_found_by_the_first_process_is_one_sentence():
    with pytest.raises(UserError, match=r"^The first process does not like this\.$"):
        launch(fail_in_the_first, devices=2)


def test_a_crash_of_one_process_ends_all():
    """The other one waits for it in vain, and is ended; the traceback is the defect's, once."""
    with pytest.raises(RankFailedError, match="a defect in one process") as error:
        launch(crash, devices=2)
    assert str(error.value).count("Traceback") == 1


def kill_one():
    with join() as world:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        total(world, torch.zeros(1))


def test_of_a_killed_process_one_sentence_is_told(capfd):
    with pytest.raises(UserError, match=r"^Process 1 of the 2 that trained was ended by SIGKILL .*same command again"):
        launch(kill_one, devices=2)
    assert capfd.readouterr() == ("", "")


def test_one_process_needs_no_group():
    world = World(0, 1, torch.device("cpu"))
    module = torch.nn.Linear(2, 2)
    assert parallel(world, module) is module
    assert from_first(world, lambda: 5) == 5
    assert total(world, torch.ones(3)).tolist() == [1, 1, 1]


def test_devices_must_divide_the_batch(tmp_path):
    with pytest.raises(UserError, match="cannot be shared by 3 devices"):
        fit(tiny_config(devices=3), tmp_path)
