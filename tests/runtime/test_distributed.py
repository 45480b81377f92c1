"""Ranks of one launcher: collectives, and how the failure of a rank is reported."""

import os
import signal
from dataclasses import replace

import pytest
import torch
from tiny_runs import tiny_config

from anechoic.config import to_json
from anechoic.data import Loader, open_source
from anechoic.errors import UserError
from anechoic.runtime.devices import check_devices, current_device, own_device, pick_device
from anechoic.runtime.distributed import (
    RankFailedError,
    World,
    all_reduce_sum,
    broadcast,
    cores_and_processes,
    join,
    launch,
    parallel,
)
from anechoic.runtime.run import Run
from anechoic.training.loop import fit
from anechoic.training.run_state import resolve_config


@pytest.mark.slow
def test_ranks_of_any_number_see_the_same_samples_in_the_same_order():
    """Interrupted after four updates on two ranks, resumed on one, two or three."""

    def ids(start, world_size):
        source = open_source("digits", channels=1)
        how = {"image_size": 8, "batch_size": 24, "seed": 7, "shuffle": True, "drop_last": True, "start": start}
        ranks = [iter(Loader(source, **how, rank=rank, world_size=world_size)) for rank in range(world_size)]
        return [torch.cat([next(rank).ids for rank in ranks]).tolist() for _ in range(80)]

    straight = ids(0, 1)
    assert ids(0, 2) == straight
    for world_size in (1, 2, 3):
        assert ids(4 * 24, world_size)[:76] == straight[4:]


@pytest.mark.slow
def test_a_number_of_processes_that_cannot_share_the_batch_does_not_go_on(tmp_path):
    config = tiny_config(steps=2)
    fit(config, tmp_path)
    with Run(tmp_path) as run, pytest.raises(UserError, match="cannot be shared by 5 devices"):
        resolve_config(config, run, open_source("digits", channels=1), World(0, 5, torch.device("cpu")))


def fail_in_the_first():
    with join() as world:
        broadcast(world, refuse)


def refuse():
    raise UserError("The first process does not like this.")


def crash():
    with join() as world:
        if world.rank == 1:
            raise RuntimeError("a defect in one process")
        all_reduce_sum(world, torch.zeros(1))


@pytest.mark.slow
def test_a_mistake_found_by_the_first_process_is_one_sentence():
    with pytest.raises(UserError, match=r"^The first process does not like this\.$"):
        launch(fail_in_the_first, devices=2)


@pytest.mark.slow
def test_a_crash_of_one_process_ends_all():
    """The other one waits for it in vain, and is ended; the traceback is the defect's, once."""
    with pytest.raises(RankFailedError, match="a defect in one process") as error:
        launch(crash, devices=2)
    assert str(error.value).count("Traceback") == 1


def kill_one():
    with join() as world:
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        all_reduce_sum(world, torch.zeros(1))


@pytest.mark.slow
def test_killed_rank_is_reported_in_one_sentence(capfd):
    with pytest.raises(UserError, match=r"^Rank 1 of 2 was ended by SIGKILL .*same command again"):
        launch(kill_one, devices=2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_one_process_needs_no_group():
    world = World(0, 1, torch.device("cpu"))
    module = torch.nn.Linear(2, 2)
    assert parallel(world, module) is module
    assert broadcast(world, lambda: 5) == 5
    assert all_reduce_sum(world, torch.ones(3)).tolist() == [1, 1, 1]


@pytest.mark.slow
def test_devices_must_divide_the_batch(tmp_path):
    with pytest.raises(UserError, match="cannot be shared by 3 devices"):
        fit(tiny_config(devices=3), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "4"}, (32, 4)),
        ({"WORLD_SIZE": "4"}, (32, 4)),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "32"}, (32, 1)),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "32"}, (32, 4)),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "8"}, (32, 4)),
    ],
    ids=["torchrun", "srun", "cores of each task", "torchrun in a job", "cores of all tasks"],
)
def test_cores_are_those_of_the_machine_or_of_the_task(monkeypatch, variables, expected):
    """Whatever number of threads the launcher leaves to a process."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS", "SLURM_CPUS_PER_TASK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(32)), raising=False)
    assert cores_and_processes() == expected


@pytest.mark.slow
def test_a_launched_run_has_workers_for_its_cores_and_may_change_them(tmp_path, monkeypatch, caplog):
    """Under a launcher a rank has one thread, whatever its cores."""
    config, source, world = tiny_config(steps=2), open_source("digits", channels=1), World(0, 1, torch.device("cpu"))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    with Run(tmp_path) as run:
        frozen = resolve_config(config, run, source, world)
        assert frozen.data.workers == 6
        run.start(to_json(frozen))
        assert resolve_config(config, run, source, world) == frozen
        fewer = replace(config, threads=2, data=replace(config.data, workers=2))
        asked = resolve_config(fewer, run, source, world)
    assert asked == replace(frozen, threads=2, data=replace(frozen.data, workers=2))
    assert "2 threads instead of 1" in caplog.text


@pytest.mark.slow
def test_torch_built_for_gpus_computes_without_them(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert current_device() == own_device(1) == pick_device("auto") == torch.device("cpu")
    check_devices(8)


@pytest.mark.slow
def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    check_devices(2)
    with pytest.raises(UserError, match="This machine has 2 GPUs, so devices cannot be 3"):
        check_devices(3)


@pytest.mark.slow
@pytest.mark.parametrize(("in_sight", "number", "chosen"), [(4, 3, 3), (1, 3, 0)])
def test_a_process_takes_the_device_of_its_number_or_the_only_one_in_sight(monkeypatch, in_sight, number, chosen):
    taken = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: in_sight)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "set_device_index", taken.append)
    assert own_device(number) == torch.device("cuda", chosen)
    assert taken == [chosen]
