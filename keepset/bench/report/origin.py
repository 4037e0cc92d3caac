"""The origin of a report: the command, the date, the machine and the versions."""

import os
import platform
import shlex
import sys
from datetime import datetime
from pathlib import Path

import keepset


def origin() -> dict[str, str]:
    """Return the origin by names that people understand."""
    import torch  # not above: commands without figures need not wait for it

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "Command": shlex.join(["keepset", *sys.argv[1:]]),
        "Date": datetime.now().astimezone().isoformat(" ", "minutes"),
        "Machine": ", ".join([f"{_processor()}, {cores} cores", *gpus]),
        "Threads": str(torch.get_num_threads()),
        "Versions": f"keepset {keepset.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
