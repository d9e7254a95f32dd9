"""Several processes are refused before anything moves, in every trainer."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_two_processes_are_refused_with_a_sentence() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29617"]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "sft.py"), "2"],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
        timeout=300,
    )
    assert done.returncode != 0
    assert "trained in one process so far, and this run has 2" in done.stderr
