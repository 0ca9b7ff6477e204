"""gpu.py, without a GPU: its own code, small; and what it says where there is none."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = [sys.executable, str(Path(__file__).with_name("gpu.py"))]


@pytest.mark.skipif(torch.cuda.device_count() > 0, reason="there is a GPU: run tests/gpu.py")
def test_without_a_gpu():
    done = subprocess.run(PROGRAM, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and not done.stdout
    assert len(done.stderr.splitlines()) == 1 and "--device cpu" in done.stderr


def test_its_own_code_on_a_cpu(tmp_path):
    """Every part but vLLM, on two ranks: all right, all in the file."""
    done = subprocess.run([*PROGRAM, "--device", "cpu", "--quick", "--nproc", "2", "--json",
                           str(tmp_path / "all.json")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["ranks"] == 2 and found["crossover"] and found["compare"]
    parts = {row["part"] for row in found["rows"]}
    assert parts == {"device", "kernels", "parity", "decode", "start", "layouts", "collectives"}
    assert all(row["right"] and row["case"] in done.stdout for row in found["rows"])
    for case in ("batch 4, graphs", "batch 4, eager", "sp 2 x tp 1: as sp 1 x tp 2"):
        assert [row["value"] > 0 for row in found["rows"] if row["case"] == case] == [True]
