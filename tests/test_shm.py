"""The shared-memory link: the same results as arithmetic says, any size, and ranks that die."""
import os
import time

import pytest
import torch

from common import save, world
from kernels import why_not_native
from shift import Link, LostRank, connect

pytestmark = pytest.mark.skipif(bool(why_not_native()), reason=str(why_not_native()))


def mine(rank, count, dtype):
    """A tensor that every rank can compute for every other."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_sizes(link, group):
    """Small, middling and larger than a slot, float32 and bfloat16: added in rank order."""
    for dtype in (torch.float32, torch.bfloat16):
        for count in (0, 1, 1000, 30_001, 700_003):
            x = link.all_reduce(mine(link.rank, count, dtype), group, "test")
            want = torch.zeros(count)
            for rank in group.ranks:
                want += mine(rank, count, dtype).float()
            assert torch.equal(x, want.to(dtype)), (count, dtype)


def check_uneven(link, group):
    """Blocks of every size, empty to larger than a rank's share of a slot, in one exchange."""
    n, me = group.size, group.index
    for scale in (1, 997, 60_013):
        rows = lambda i, r: (i + 2 * r) % 3 * scale
        send, receive = [rows(me, r) for r in range(n)], [rows(i, me) for i in range(n)]
        x = torch.cat([mine(100 * me + r, send[r], torch.float32) for r in range(n)])
        out = link.all_to_all(x[:, None], send, receive, group, "test")[:, 0]
        want = torch.cat([mine(100 * i + me, receive[i], torch.float32) for i in range(n)])
        assert torch.equal(out, want), scale
    for size in (0, 1, 300_007, 1_300_007):                  # bytes, up to more than a slot has
        x = torch.full((size,), 7 + me, dtype=torch.uint8)
        group.carrier.broadcast(x)
        assert x.tolist() == [7] * size


def exact_world():
    rank = connect()
    link = Link("shm")
    pairs = link.group((rank // 2 * 2, rank // 2 * 2 + 1))
    halves = link.group(range(rank % 2, 8, 2))
    for group in (link.everyone, pairs, halves):
        check_sizes(link, group)
        check_uneven(link, group)
    long = link.broadcast({"text": "x" * 3_000_000} if rank == 0 else None)
    assert len(long["text"]) == 3_000_000
    assert not [name for name in os.listdir("/dev/shm") if "nanoshift" in name]


def test_exact_at_any_size():
    """Three groupings of eight ranks, sizes around every boundary; nothing in /dev/shm."""
    assert world(exact_world, 8) == 0


def dying_world(directory):
    rank = connect()
    link = Link("shm")
    link.barrier()
    if rank == 1:
        os._exit(0)                                          # to the launcher, all is well
    began = time.monotonic()
    with pytest.raises(LostRank) as error:
        while True:
            link.all_reduce(torch.ones(10), link.everyone, "test")
    save(directory, (time.monotonic() - began, str(error.value)))


def test_a_rank_that_dies_is_named_within_seconds(tmp_path):
    """The others end their wait by themselves, though nobody tells them, and say who has died."""
    assert world(dying_world, 3, tmp_path) == 0
    for rank in (0, 2):
        seconds, text = torch.load(tmp_path / f"{rank}.pt")
        assert seconds < 3 and "rank 1 has died" in text


def emulated_world(directory):
    rank = connect()
    for backend in ("gloo", "shm"):
        link = Link(backend, emulate=(0.08, 2000))           # 10 MB/s and 2 ms
        x = torch.ones(25_000)                               # 100 KB; a ring of two sends as much
        link.all_reduce(x, link.everyone, "test")
        start = time.monotonic()
        for _ in range(5):
            link.all_reduce(x, link.everyone, "test")
            link.broadcast(None if rank else {})
        seconds = (time.monotonic() - start) / 5
        assert 0.012 <= seconds < 0.05, seconds
        assert link.counts["all_reduce", "test"].seconds > 6 * 0.0119


def test_emulated_interconnect(tmp_path):
    """A collective takes at least latency + bytes/bandwidth, on either link; messages do not."""
    assert world(emulated_world, 2, tmp_path) == 0
