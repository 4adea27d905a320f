"""``piper profile``: measure how long the parts of a strategy take on this machine."""

import os
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from piper.cli.plan import make_program
from piper.devices.links import LinkTimes, between_processes, between_threads
from piper.runtime.optimizer import OptimizerSpec
from piper.runtime.profiling import measure_profile
from piper.training.config import load_config
from piper.training.model import make_skeleton


def profile(path: Path, console: Console, output: Path, *, repeats: int) -> None:
    """Write the profile of the configuration at *path* to *output*. Each device runs by itself, with as many
    threads as one worker will have.
    """
    config = load_config(path)
    plan = make_program(config, make_skeleton(config)).plan
    before = torch.get_num_threads()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.num_devices))
    try:
        links = _links(config.train.backend)
        with console.status("") as status:
            found = measure_profile(
                plan,
                OptimizerSpec(config.optimizer.build),
                links,
                repeats=repeats,
                on_device=lambda device: status.update(f"running device {device} by itself"),
            )
    finally:
        torch.set_num_threads(before)
    found.save(output)
    total = sum(found.chunks.values())
    console.print(
        Text(
            f"{len(found.chunks)} chunks, {total * 1e3:.3g} ms in all; messages {found.latency * 1e6:.3g} µs and "
            f"{found.bandwidth / 1e6:.4g} MB/s; written to {output}"
        ),
        soft_wrap=True,
    )


def _links(backend: str) -> LinkTimes:
    return between_threads() if backend == "inprocess" else between_processes()
