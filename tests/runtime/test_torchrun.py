"""Two torchrun agents as two nodes: one is killed and started again, and the run ends as if nothing had happened."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from processes import PATIENCE, alive, descendants, wait_until
from tiny_runs import BATCH, tiny_config

from anechoic.config import SaveConfig, to_json
from anechoic.runtime import checkpoint
from anechoic.training.loop import fit


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def agent(port, config, run, log, *, host):
    """One node: torchrun with one process, of which the host keeps the meeting point."""
    signs = "keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=300"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "training"]
    command += ["--rdzv-conf", f"is_host={host},{signs}", "--max-restarts", "3", "--local-addr", "127.0.0.1"]
    # A surviving agent of torch 2.13 does not tell a new one the address it remembers, unless it is asked each time.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(log, "ab") as output:
        return subprocess.Popen(
            [*command, "-m", "anechoic.training", str(config), str(run)],
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )


@pytest.mark.slow
def test_a_killed_node_comes_back_and_the_run_goes_on(tmp_path):
    config = tiny_config(steps=160, save=SaveConfig(every=20 * BATCH))
    config = replace(config, validation=replace(config.validation, every=80 * BATCH, report=20 * BATCH))
    path, run, port = tmp_path / "config.json", tmp_path / "run", free_port()
    path.write_text(json.dumps(to_json(config)))
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    nodes = [agent(port, path, run, logs[0], host=True)]
    try:
        nodes.append(agent(port, path, run, logs[1], host=False))
        wait_until(lambda: checkpoint.checkpoints(run / "checkpoints"), "the run has a checkpoint")
        doomed = descendants(nodes[1].pid)
        nodes[1].send_signal(signal.SIGKILL)
        nodes[1].wait()
        wait_until(lambda: not any(map(alive, doomed)), "the processes of the killed node are gone")
        assert not (run / "results.json").exists(), "it was faster than the kill"
        nodes[1] = agent(port, path, run, logs[1], host=False)
        deadline = time.monotonic() + PATIENCE
        while any(node.poll() is None for node in nodes) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [node.poll() for node in nodes] == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    starts = json.loads((run / "env.json").read_text())["starts"]
    assert len(starts) == 2
    fit(replace(config, devices=2), tmp_path / "undisturbed")
    weights = [folder / "model" / "model.safetensors" for folder in (run, tmp_path / "undisturbed")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
