"""Who owns what, the collectives and their counts, the switch, and starting ranks."""
import multiprocessing as mp
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shift
from common import deadline, factorizations, load, save, world
from shift import Layout, Link, Switch, UserError, both_modes, connect, launch, token_slices

# (H, K): K above, at and below P, multi-query, multi-head, and a P that is no power of two
LAYOUTS = [(P, H, K) for P in (1, 2, 3, 4, 6, 8) for H, K in
           ((8, 8), (8, 2), (8, 1), (64, 8), (16, 4), (12, 12), (12, 3), (24, 24), (24, 2), (24, 1))
           if H % P == 0 and (K % P == 0 or P % K == 0)]


# --------------------------------------------------------------------------------------------------
# Layout: arithmetic


@pytest.mark.parametrize("P, H, K", LAYOUTS)
def test_blocks_share_out_all_heads(P, H, K):
    """Every query head is one rank's, with the KV head it reads; MLP columns are shared equally."""
    for sp, tp in factorizations(P):
        layout = Layout(sp, tp, H, K, ffn=H * 3)
        assert (layout.ranks, layout.h, layout.f) == (P, H // P, H * 3 // P)
        blocks = [layout.block(rank) for rank in range(P)]
        assert sorted(blocks) == list(range(P))
        assert sorted(head for b in blocks for head in layout.q_heads(b)) == list(range(H))
        held = [list(layout.kv_heads_of(b)) for b in range(P)]
        assert all(len(heads) == layout.k for heads in held)
        assert sum(held, []) == [head for head in range(K) for _ in range(max(1, P // K))]
        for b in range(P):
            for i, head in enumerate(layout.q_heads(b)):
                local = i // (layout.h // layout.k)              # as paged_attention pairs them
                assert layout.kv_heads_of(b)[local] == head // (H // K)


@pytest.mark.parametrize("P", [1, 2, 3, 4, 6, 8])
def test_a_ranks_block_is_in_its_shard_and_groups_are_rows_and_columns(P):
    """rank = s*tp + t owns block t*sp + s, number s of the sp blocks of its shard t."""
    for sp, tp in factorizations(P):
        layout = Layout(sp, tp, 24, 24, 24)
        for rank in range(P):
            s, t = layout.coordinates(rank)
            assert rank == s * tp + t and 0 <= s < sp and 0 <= t < tp
            assert layout.block(rank) == t * sp + s
            assert list(layout.shard(rank)) == [t * sp + i for i in range(sp)]
            assert layout.shard(rank)[s] == layout.block(rank)
            assert layout.sp_ranks(rank) == [r for r in range(P) if layout.coordinates(r)[1] == t]
            assert layout.tp_ranks(rank) == [r for r in range(P) if layout.coordinates(r)[0] == s]
            assert [layout.block(r) for r in layout.sp_ranks(rank)] == list(layout.shard(rank))


@pytest.mark.parametrize("sp, tp, H, K, F, works", [
    (3, 1, 8, 8, 24, "1, 2, 4, 8"), (4, 2, 12, 4, 96, "1, 2, 4, 12"), (8, 1, 64, 8, 36, "1, 2, 4"),
    (1, 16, 8, 8, 64, "1, 2, 4, 8"), (2, 2, 12, 6, 24, "1, 2, 3, 6, 12"), (5, 1, 7, 7, 7, "1, 7")])
def test_a_layout_that_does_not_fit_names_those_that_do(sp, tp, H, K, F, works):
    """The error carries the values and every rank count that works; one line."""
    with pytest.raises(UserError) as error:
        Layout(sp, tp, H, K, F)
    text = str(error.value)
    assert "\n" not in text and text.endswith(f"these rank counts can: {works}")
    for value in (f"{sp * tp} ranks", f"sp {sp} x tp {tp}", f"{H} heads", f"{K} KV", f"width {F}"):
        assert value in text
    for ranks in map(int, works.split(", ")):
        Layout(ranks, 1, H, K, F)


def test_sizes_below_one_are_refused():
    """No layout of nothing."""
    for sizes in ((0, 1, 8, 8, 8), (1, -1, 8, 8, 8), (1, 1, 0, 8, 8), (1, 1, 8, 0, 8),
                  (1, 1, 8, 8, 0)):
        with pytest.raises(UserError, match="at least 1"):
            Layout(*sizes)


def test_token_slices():
    """Slices sum to T, differ by at most one, and lie at [T*s//sp, T*(s+1)//sp)."""
    for sp in range(1, 10):
        for tokens in range(41):
            slices = token_slices(tokens, sp)
            assert len(slices) == sp and sum(slices) == tokens
            assert max(slices) - min(slices) <= 1
            assert [sum(slices[:s]) for s in range(sp)] == [tokens * s // sp for s in range(sp)]


# --------------------------------------------------------------------------------------------------
# Link: one world of eight, links over all of it and over parts of it


def check_collectives(link):
    """Every collective on the whole link, and on groups within it; counts are what was passed."""
    me, n = link.rank, link.size
    parts = [range(n)] + [range(me % 2, n, 2), range(me // 2 * 2, me // 2 * 2 + 2)] * (n in (4, 8))
    for i, ranks in enumerate(map(tuple, parts)):
        group = link.group(ranks)
        assert group is link.group(list(ranks)), "a group is made once"
        assert (group.ranks, group.size, group.ranks[group.index]) == (ranks, len(ranks), me)
        check_all_reduce(link, group, f"test {i}")
        check_all_to_all(link, group, f"test {i}")
    check_control(link)


def check_all_reduce(link, group, what):
    x = torch.arange(7 * 8.0).view(7, 8) + 1000 * link.rank
    want = sum(torch.arange(7 * 8.0).view(7, 8) + 1000 * r for r in group.ranks)
    assert link.all_reduce(x, group, what) is x and torch.equal(x, want)
    empty = link.all_reduce(torch.zeros(0, 5), group, what)           # ranks with no token at all
    assert empty.shape == (0, 5)
    count, n = link.counts["all_reduce", what], group.size
    assert (count.calls, count.bytes) == (2, 2 * (n - 1) * 7 * 8 * 4 // n) and count.seconds > 0


def check_all_to_all(link, group, what):
    """Row j of what i sends to r is [i, r, j]; the number of rows is different for every pair."""
    for rows in (lambda i, r: (3 * i + 5 * r) % 4, lambda i, r: 0, lambda i, r: 2 * (r == 0)):
        before = link.counts["all_to_all", what].bytes
        me, n = group.index, group.size
        send, receive = [rows(me, r) for r in range(n)], [rows(i, me) for i in range(n)]
        table = lambda cells: torch.tensor(cells, dtype=torch.int64).reshape(-1, 3)
        x = table([[me, r, j] for r in range(n) for j in range(send[r])])
        out = link.all_to_all(x, send, receive, group, what)
        assert torch.equal(out, table([[i, me, j] for i in range(n) for j in range(receive[i])]))
        left = sum(count for r, count in enumerate(send) if r != me)
        assert link.counts["all_to_all", what].bytes - before == left * 3 * 8
    assert link.counts["all_to_all", what].calls == 3


def check_control(link):
    """Messages short and long, and of just the size that one packet holds; and what they count."""
    room, sent = Link.PACKET - Link.HEADER, 0
    for size in (2, 300, room - 1, room, room + 1, 3 * Link.PACKET):
        message = {"ids": [1, 2], "none": None, "text": "é\n\"", "pad": "x" * size}
        message["pad"] = "x" * max(0, size - len(shift.json.dumps({**message, "pad": ""})))
        got = link.broadcast(message if link.rank == 0 else None)
        assert got == message, f"a message of {size} bytes"
        sent += 1 + (size > room)
    assert link.broadcast(("a", 1) if link.rank == 0 else None) == ["a", 1], "JSON, on rank 0 too"
    assert link.broadcast(0 if link.rank == 0 else "not mine") == 0
    if link.size > 1:
        count = link.counts["broadcast", "control"]
        assert count.calls == sent + 2
        assert (count.bytes >= (sent + 1) * Link.PACKET) == (link.rank == 0)
        assert count.bytes == 0 or link.rank == 0
    assert link.gather((link.rank, b"any object")) == [(r, b"any object") for r in range(link.size)]
    time.sleep(0.02 * link.rank)
    came = time.monotonic()
    link.barrier()
    left = time.monotonic()
    assert max(link.gather(came)) <= min(link.gather(left)), "someone left before all had come"


def check_together(link):
    """If one rank fails, all raise: it its own error, the others one that names it."""
    with link.together():
        pass
    for failing, error in ((link.size - 1, KeyError("lost")), (0, RuntimeError())):
        text = str(error) or repr(error)
        try:
            with link.together():
                if link.rank == failing:
                    raise error
        except Exception as e:
            caught = e
        if link.rank == failing:
            assert caught is error
        else:
            assert isinstance(caught, UserError) and str(caught) == f"rank {failing}: {text}"
    assert link.gather(link.rank) == list(range(link.size)), "the link is still in step"


def check_both_modes(link):
    """Base mode's groups are the layout's; shift mode is one rank by all ranks."""
    for sp, tp in factorizations(link.size):
        layout = Layout(sp, tp, *[2 * link.size] * 3)
        base, shifted = both_modes(layout, link)
        s, t = divmod(link.rank, tp)
        assert (base.name, base.sp, base.tp, base.s) == ("base", sp, tp, s)
        assert base.sp_group.ranks == tuple(range(t, link.size, tp)) and base.sp_group.index == s
        assert base.tp_group.ranks == tuple(range(s * tp, s * tp + tp)) and base.tp_group.index == t
        assert (shifted.name, shifted.sp, shifted.tp, shifted.s) == ("shift", 1, link.size, 0)
        assert shifted.sp_group.ranks == (link.rank,)
        assert shifted.tp_group.ranks == tuple(range(link.size))


def collectives_world():
    rank, odd_ones = connect(), (1, 2, 4, 6, 7)
    four, two = (range(rank // n * n, rank // n * n + n) for n in (4, 2))
    parts = [range(8), four, two, odd_ones if rank in odd_ones else (0, 3, 5)]
    for ranks in parts:
        link = Link(ranks=ranks)
        assert (link.size, link.world_ranks[link.rank]) == (len(ranks), rank)
        assert not link.counts, "nothing is counted before the first call"
        check_collectives(link)
        check_together(link)
        check_both_modes(link)


def test_collectives():
    """Links on all of an 8-rank world and on parts: right results, and counts of what was sent."""
    assert world(collectives_world, 8) == 0


def alone_world():
    link = Link(ranks=[connect()])
    x = torch.full((3, 2), 1.0 + dist.get_rank())
    assert torch.equal(link.all_to_all(x, [3], [3], link.everyone, "test"), x)
    assert torch.equal(link.all_reduce(x.clone(), link.everyone, "test"), x)
    assert link.broadcast({"a": 1}) == {"a": 1} and link.gather(5) == [5]
    link.barrier()
    check_together(link)
    assert sum(count.bytes for count in link.counts.values()) == 0


def test_a_link_of_one_rank_in_a_larger_world():
    """Alone means alone: its collectives change nothing and reach nobody."""
    assert world(alone_world, 4) == 0


def unordered_world():
    connect()
    try:
        link = Link(ranks=[3, 1, 0, 2])
    except (AssertionError, UserError):
        return                                          # refused: as good
    x = torch.tensor([[10 * link.rank + r] for r in range(4)])
    out = link.all_to_all(x, [1] * 4, [1] * 4, link.everyone, "test")
    assert out.flatten().tolist() == [10 * r + link.rank for r in range(4)]


def test_a_links_order_of_ranks_is_the_order_of_its_collectives():
    """Link(ranks=[3, 1, 0, 2]): splits count in that order, or the order is refused."""
    assert world(unordered_world, 4) == 0


def first_process_world():
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        del os.environ[name]
    assert connect() == 0 and dist.get_world_size() == 1
    link = Link()
    assert link.broadcast([1]) == [1] and link.gather("a") == ["a"]


def test_without_a_launcher_there_is_a_world_of_one():
    """connect() in a process that nobody launched."""
    assert world(first_process_world, 1) == 0


# --------------------------------------------------------------------------------------------------
# launch: exit codes, and no rank left behind


def ends_with(codes):
    rank = connect()
    if codes[rank] == "raise":
        raise RuntimeError("meant to fail")
    if codes[rank] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if codes[rank] == "wait":
        Link().barrier()                                  # for ranks that never come
    return codes[rank]


@pytest.mark.parametrize("codes, code", [
    ([0, 0], 0), ([0, 3], 3), (["wait", "raise"], 1), ([4, "wait"], 4), (["wait", 5], 5),
    (["wait", "kill"], 137)])
def test_launch_returns_the_first_code_that_is_not_zero(codes, code):
    """A rank's code, 1 for an exception, 128 + signal; ranks that wait for it are ended."""
    assert world(ends_with, 2, codes, seconds=30) == code


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_ranks_are_forked_before_the_launcher_has_threads():
    """A rank forked while a thread of its launcher holds a lock of the C library waits for ever.

    So it was, once in some hundred launches: the store's thread was in getnameinfo.
    """
    threads = lambda: len(os.listdir("/proc/self/task"))
    before, at_fork = threads(), []
    os.register_at_fork(before=lambda: at_fork.append(threads()))
    assert world(ends_with, 4, [0] * 4) == 0
    assert len(at_fork) == 4 and max(at_fork) <= before, (before, at_fork)


def sleeper(directory):
    rank = connect()
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(7))
    (directory / f"{rank}.part").write_text(str(os.getpid()))
    os.rename(directory / f"{rank}.part", directory / f"{rank}.pid")
    time.sleep(60)


def launcher(directory):
    sys.exit(launch(sleeper, 2, directory))


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number, code", [(signal.SIGKILL, -9), (signal.SIGTERM, 7)])
def test_no_rank_outlives_its_launcher(tmp_path, number, code):
    """kill -9 of the launcher: the ranks notice. SIGTERM: rank 0 is told, its code is returned."""
    process, pids = mp.get_context("fork").Process(target=launcher, args=(tmp_path,)), []
    try:
        with deadline(30):
            process.start()
            while len(pids) < 2:
                time.sleep(0.02)
                pids = [int(file.read_text()) for file in sorted(tmp_path.glob("*.pid"))]
            os.kill(process.pid, number)
            process.join()
            assert process.exitcode == code
            while any(lives(pid) for pid in pids):
                time.sleep(0.02)
    finally:
        for pid in filter(lives, pids):
            os.kill(pid, signal.SIGKILL)


# --------------------------------------------------------------------------------------------------
# Switch


def test_switch_at_a_threshold():
    """The paper's rule: at most N tokens -> shift mode."""
    for threshold in (0, 1, 256, 999, 1000, 5000):
        switch = Switch.at(threshold, 1000)
        for tokens in range(1, 1001):
            assert switch(tokens) == ("shift" if tokens <= threshold else "base")
    assert str(Switch.at(0, 1000)) == "base always"
    assert str(Switch.at(1000, 1000)) == str(Switch.at(5000, 1000)) == "shift always"
    assert str(Switch.at(256, 1000)) == "shift up to 256 tokens, base from 257 up"
    assert str(Switch([True, False, False, True, False], "")) == (
        "base up to 2 tokens, shift up to 3 tokens, base from 4 up")
    assert "256" in Switch.at(256, 1000).why


def measured_world(directory):
    rank, link = connect(), Link()
    asked = []

    def step_seconds(name, tokens):
        """Base costs 10 + 0.01 T, shift 1 + 0.1 T: even at T = 100. Only one rank is that slow, the
        others would decide otherwise; and of the three tries of each, two are disturbed."""
        asked.append((name, tokens))
        attempt = (len(asked) - 1) // 2 % 3
        honest = {"base": 10 + 0.01 * tokens, "shift": 1 + 0.1 * tokens}[name]
        slow = {"base": 3, "shift": 6}[name]
        disturbed = [50.0 * (name == "base") * (rank == 1), 0.0, 70.0 * (name == "shift")][attempt]
        return honest * (1 if rank == slow else {"base": 0.1, "shift": 0.6}[name]) + disturbed

    one_size = lambda name, tokens: {"base": 1.0, "shift": 2.0}[name] * (1 if tokens == 1 else -1)
    tables = {"whole": Switch.measured(step_seconds, 200, link),
              "stopped": Switch.measured(one_size, 64, link, budget=0.0)}
    save(directory, {"asked": asked, **{name: (switch.shift, str(switch), switch.why)
                                        for name, switch in tables.items()}})


def test_switch_measured(tmp_path):
    """The slowest rank and the least disturbed try decide, alike on all ranks, within one token."""
    assert world(measured_world, 8, tmp_path) == 0
    ranks = load(tmp_path, 8)
    sizes = [1, 2, 4, 8, 16, 32, 64, 128]
    for rank in ranks:
        assert rank["whole"] == ranks[0]["whole"] and rank["stopped"] == ranks[0]["stopped"]
        assert rank["asked"] == [(name, size) for size in sizes for name in ("base", "shift") * 3]
    table, text, why = ranks[0]["whole"]
    assert len(table) == 201
    crossover = sum(table[1:])
    assert abs(crossover - 100) <= 1 and table[1:] == [T <= crossover for T in range(1, 201)]
    assert text == f"shift up to {crossover} tokens, base from {crossover + 1} up" and "128" in why
    table, text, why = ranks[0]["stopped"]             # budget spent after T = 1, where base wins
    assert table == [False] * 65 and text == "base always" and why == "measured up to 1 tokens"
