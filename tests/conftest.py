"""What holds for every test: one thread in the parent, no network, and no process left behind."""
import multiprocessing as mp
import os

import pytest
import torch

os.environ["TOKENIZERS_PARALLELISM"] = "false"      # a pool of threads does not survive a fork
os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)                            # nor does OpenMP's, which forked ranks inherit


@pytest.fixture(autouse=True)
def nothing_left_behind():
    yield
    left = mp.active_children()
    for child in left:
        child.kill()
    assert not left, f"processes left behind: {left}"
