"""shift.py: Shift Parallelism itself: who owns what, how ranks talk, and when to switch.

What it does: `Layout` says which heads, weight rows and tokens each rank owns; `Mode` is one of the
two ways to run a step over that layout; `Link` carries every collective, by name, and counts it;
`Switch` picks the mode for a step; `Trace` remembers what the last steps did. Nothing is hidden in
hooks or global state.

What it does not know: Llama, requests, HTTP.

    python shift.py --ranks 8 --sp 4 --tp 2 --heads 16 --kv-heads 4    a tour, on real processes

The idea ("Shift Parallelism", arXiv 2509.16495, section 3). A rank is a pair (s, t): it holds slice
s of the tokens and shard t of the weights, `rank = s * tp + t`. Cut every layer into P = sp * tp
equal blocks, each with h = H/P query heads, their KV heads, and f = F/P MLP columns. Then

    rank (s, t) computes attention for block  b = t * sp + s  in BOTH modes.

In base mode (Ulysses sequence parallel over sp, tensor parallel over tp) rank (s, t) multiplies its
slice of the tokens by the sp blocks of shard t, and an all_to_all over the sp group gives every
rank all tokens of its own block. In shift mode (tensor parallel over all P) it multiplies all
tokens by block b alone. Either way the keys and values of block b land on the same rank, so the KV
cache is valid in both modes, and block b is a contiguous slice of shard t, so the weights are too:
a switch moves nothing.
"""
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
from collections import defaultdict, deque, namedtuple
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import connection, get_context
from pathlib import Path

import torch
import torch.distributed as dist

from kernels import SharedMemory


STOPS = signal.SIGINT, signal.SIGTERM


class UserError(ValueError):
    """A mistake that the user can mend: the message carries the value and the remedy, in a line."""


class LostRank(RuntimeError):
    """A collective failed: another rank has gone, so this one cannot go on either."""


# --------------------------------------------------------------------------------------------------
# Who owns what


@dataclass(frozen=True)
class Layout:
    """Which rank owns which heads, MLP columns and tokens: arithmetic, no tensors, no processes.

    sp, tp      sequence-parallel and tensor-parallel degrees of base mode; P = sp * tp ranks
    heads       H, query heads           kv_heads  K, key/value heads           ffn  F, MLP width
    """
    sp: int
    tp: int
    heads: int
    kv_heads: int
    ffn: int

    def __post_init__(self):
        if min(self.sp, self.tp, self.heads, self.kv_heads, self.ffn) < 1:
            raise UserError(f"{self}: every size must be at least 1")
        fits = [p for p in range(1, self.heads + 1) if self.heads % p == self.ffn % p == 0
                and (self.kv_heads % p == 0 or p % self.kv_heads == 0)]
        if self.ranks not in fits:
            raise UserError(
                f"{self.ranks} ranks (sp {self.sp} x tp {self.tp}) cannot share {self.heads} "
                f"heads, {self.kv_heads} KV heads and MLP width {self.ffn} equally; "
                f"these rank counts can: {', '.join(map(str, fits))}")

    @property
    def ranks(self):
        return self.sp * self.tp

    @property
    def h(self):                       # query heads of one block
        return self.heads // self.ranks

    @property
    def k(self):                       # KV heads of one block
        return max(1, self.kv_heads // self.ranks)

    @property
    def f(self):                       # MLP columns of one block
        return self.ffn // self.ranks

    @property
    def shift(self):
        """Shift mode is the base mode of this layout: tensor-parallel over all P ranks."""
        return replace(self, sp=1, tp=self.ranks)

    def coordinates(self, rank):
        return divmod(rank, self.tp)                                       # (s, t)

    def block(self, rank):
        """The block whose heads this rank attends with and caches, in both modes: invariance."""
        s, t = self.coordinates(rank)
        return t * self.sp + s

    def shard(self, rank):
        """The blocks whose weights this rank stores, in order. Its own is number s of them."""
        _, t = self.coordinates(rank)
        return range(t * self.sp, (t + 1) * self.sp)

    def q_heads(self, block):
        return range(block * self.h, (block + 1) * self.h)

    def kv_heads_of(self, block):
        """K >= P: k heads of its own. K < P: one head, which P/K neighbouring blocks replicate."""
        first = block * self.kv_heads // self.ranks
        return range(first, first + self.k)

    def sp_ranks(self, rank):
        """The ranks that hold the same weights and the other tokens, ordered by slice s."""
        _, t = self.coordinates(rank)
        return [s * self.tp + t for s in range(self.sp)]

    def tp_ranks(self, rank):
        """The ranks that hold the same tokens and the other weights, ordered by shard t."""
        s, _ = self.coordinates(rank)
        return [s * self.tp + t for t in range(self.tp)]


def token_slices(tokens, sp):
    """Tokens of each slice: slice s is [T*s//sp, T*(s+1)//sp). Uneven and empty ones are fine."""
    return [tokens * (s + 1) // sp - tokens * s // sp for s in range(sp)]


def split_ranks(ranks, sp=None, tp=None):
    """(sp, tp) with sp * tp = ranks, from what the user fixed; all sequence-parallel by default."""
    if min(degree for degree in (ranks, sp, tp) if degree is not None) < 1:
        raise UserError(f"ranks {ranks}, sp {sp}, tp {tp}: each must be at least 1")
    asked = " x ".join(f"{name} {n}" for name, n in (("sp", sp), ("tp", tp)) if n)
    sp, tp = sp or ranks // (tp or 1), tp or ranks // (sp or ranks)
    if sp * tp != ranks:
        raise UserError(f"{asked} is not {ranks} ranks: give one that divides {ranks}, or two "
                        f"whose product it is")
    return sp, tp


@dataclass(frozen=True)
class Mode:
    """One way to run a step. The forward pass reads these six values and nothing else.

    Base mode is (sp, tp) of the layout; shift mode is (1, P) over the same ranks.
    """
    name: str                          # "base" or "shift"
    sp: int
    tp: int
    s: int                             # this rank's token slice, 0 <= s < sp
    sp_group: "Group"
    tp_group: "Group"


def both_modes(layout, link):
    """(base, shift) for this rank. Every rank of the link must call this, at the same point."""
    return [Mode(name, way.sp, way.tp, way.coordinates(link.rank)[0],
                 link.group(way.sp_ranks(link.rank)), link.group(way.tp_ranks(link.rank)))
            for name, way in (("base", layout), ("shift", layout.shift))]


# --------------------------------------------------------------------------------------------------
# How ranks talk


@dataclass(frozen=True)
class Group:
    """Some ranks of a link, in the order in which splits and sums count them."""
    ranks: tuple
    index: int                         # this rank's place in `ranks`
    carrier: object                    # TorchGroup, SharedMemory, or Alone

    @property
    def size(self):
        return len(self.ranks)


class Alone:
    """Collectives of a group of one: nothing to do. (A TorchGroup would count: see there.)"""

    def all_reduce(self, x):
        pass

    broadcast = all_reduce

    def all_to_all(self, out, x, receive, send):
        out.copy_(x)

    def gather(self, value):
        return [value]


class TorchGroup:
    """Collectives by torch.distributed (gloo or nccl), over ranks of the world.

    Only members call, so that engines on other ranks need not join in. (torch counts each rank's
    groups in their names: ranks that made different numbers of them cannot make one together.)
    """

    def __init__(self, world_ranks, backend):
        self.handle = dist.new_group(world_ranks, backend=backend, use_local_synchronization=True)

    def all_reduce(self, x):
        dist.all_reduce(x, group=self.handle)

    def all_to_all(self, out, x, receive, send):
        dist.all_to_all_single(out, x, receive, send, group=self.handle)

    def broadcast(self, x):
        dist.broadcast(x, group=self.handle, group_src=0)

    def gather(self, value):
        values = [None] * dist.get_world_size(self.handle)
        dist.all_gather_object(values, value, group=self.handle)
        return values


Call = namedtuple("Call", "op what group before after bytes start seconds")   # one collective


@dataclass
class Count:
    calls: int = 0
    bytes: int = 0                     # sent by this rank to other ranks
    seconds: float = 0.0               # spent in the call, waiting included


class Link:
    """The collectives, over the ranks of one engine. Each call is explicit, named and counted.

    backend   "gloo" (anywhere), "nccl" (GPUs) or "shm" (CPU ranks of one Linux host: shared memory,
              some hundred times faster than gloo's sockets), for the tensors of the forward pass
    ranks     the world ranks that take part, default all: several engines can share one world
              (data parallelism, or a small P inside a large test). `rank` counts within them.
    emulate   (gigabits a second, microseconds): make every collective of the forward pass last at
              least its latency plus bytes/bandwidth, to see a slower interconnect's trade-offs

    `counts[op, what]` sums calls, bytes sent to other ranks, and seconds. A ring all_reduce of n
    ranks counts 2(n-1)/n of its tensor, the others exactly what leaves this rank. On a GPU the
    seconds are those of the launch; the work is asynchronous. `log` has the last calls, each with
    the fields of Call (as a plain tuple: all are written, few are read). While `silent` is set
    nothing is sent, and what is received is whatever was in memory: to see what a step needs.
    """
    HEADER, PACKET = 8, 4096          # bytes: a message's length; what one broadcast carries

    def __init__(self, backend="gloo", ranks=None, device="cpu", emulate=None):
        self.world_ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
        assert self.world_ranks == sorted(self.world_ranks), "torch orders groups by world rank"
        self.rank = self.world_ranks.index(dist.get_rank())
        self.size = len(self.world_ranks)
        self.backend, self.device, self.emulate = backend, torch.device(device), emulate
        self.counts, self.log = defaultdict(Count), deque(maxlen=4096)
        self._groups, self.silent, self.marked = {}, False, False
        self._gloo = TorchGroup(self.world_ranks, "gloo") if self.size > 1 else Alone()
        self.everyone = self.group(range(self.size))
        # Messages between the schedulers are for CPUs: shared memory if there is, else gloo.
        self._control = self.everyone.carrier if backend == "shm" else self._gloo

    def group(self, ranks):
        """The group of these ranks (counted within the link), made at the first call. All ranks of
        the link call it at the same point, each with the group it belongs to."""
        ranks = tuple(ranks)
        if ranks not in self._groups:
            index, carrier = ranks.index(self.rank), Alone()
            if self.backend == "shm" and self.size > 1:
                crowded = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > cores()
                carrier = SharedMemory(ranks, index, self.gather, spins=0 if crowded else 2000)
            elif len(ranks) > 1:
                carrier = TorchGroup([self.world_ranks[r] for r in ranks], self.backend)
                if self.backend == "nccl":     # it connects at the first call: no graph can hold it
                    carrier.all_reduce(torch.zeros(1, device=self.device))
            self._groups[ranks] = Group(ranks, index, carrier)
        return self._groups[ranks]

    def _call(self, op, what, nbytes, function, *args, shapes=()):
        """Every collective goes through here: to be timed, counted, and logged for who traces.
        shapes: (ranks, shape before, shape after); without them it is not logged."""
        start = time.perf_counter()
        try:
            result = None if self.silent else function(*args)
        except RuntimeError as e:
            cause = str(e).split("] ", 1)[-1].split(". ")[0]     # without source file and advice
            raise LostRank(f"another rank is gone ({what} {op}: {cause})") from e
        seconds = time.perf_counter() - start
        if self.emulate and what != "control":
            gigabits, microseconds = self.emulate
            least = microseconds * 1e-6 + nbytes * 8e-9 / gigabits
            time.sleep(least)          # from the last rank's arrival, as data would travel
            seconds += least
        count = self.counts[op, what]
        count.calls += 1
        count.bytes += nbytes
        count.seconds += seconds
        if shapes:
            self.log.append((op, what, *shapes, nbytes, start, seconds))
        return result

    def mark(self, what):
        """A point in time between the calls of `log`, where a layer begins; if `marked` is set."""
        if self.marked:
            self.log.append(("mark", what, (), (), (), 0, time.perf_counter(), 0))

    def repeat(self, calls):
        """Count and log these Calls again, which a CUDA graph makes unseen, at some later time."""
        for call in calls:
            self._call(call.op, call.what, call.bytes, lambda: None, shapes=call[2:5])

    def all_reduce(self, x, group, what):
        """Sum x over the group, in place, and return it."""
        nbytes = 2 * (group.size - 1) * x.nbytes // group.size
        self._call("all_reduce", what, nbytes, group.carrier.all_reduce, x,
                   shapes=(group.ranks, x.shape, x.shape))
        return x

    def all_to_all(self, x, send, receive, group, what):
        """Rows of x to their destinations: the first send[0] to the group's rank 0, and so on.

        x (sum(send), ...) contiguous -> (sum(receive), ...), in the order of the senders. Counts
        may differ and may be zero; send[i] here must be receive[index here] on rank i.
        """
        assert x.is_contiguous() and x.shape[0] == sum(send), f"{tuple(x.shape)} is not {send} rows"
        out = x.new_empty(sum(receive), *x.shape[1:])
        nbytes = x.nbytes - x[:send[group.index]].nbytes
        self._call("all_to_all", what, nbytes, group.carrier.all_to_all, out, x, list(receive),
                   list(send), shapes=(group.ranks, x.shape, out.shape))
        return out

    def broadcast(self, message=None):
        """Rank 0's message (anything JSON can say) to all ranks; the others wait here while idle.

        One broadcast of a fixed buffer, the length in front; a second one only if it does not fit.
        Rank 0 too gets what JSON makes of it, so that all ranks act on the very same thing.
        """
        text = json.dumps(message).encode() if self.rank == 0 else b""
        sent = bytearray(len(text).to_bytes(self.HEADER, "little") + text).ljust(self.PACKET)
        packet, rest = sent[:self.PACKET], sent[self.PACKET:]
        self._broadcast(packet)
        length = int.from_bytes(packet[:self.HEADER], "little")
        if self.HEADER + length > self.PACKET:
            rest = rest or bytearray(self.HEADER + length - self.PACKET)
            self._broadcast(rest)
        return json.loads((packet + rest)[self.HEADER:])          # spaces at the end do no harm

    def _broadcast(self, buffer):
        sent = len(buffer) * (self.rank == 0 and self.size > 1)
        self._call("broadcast", "control", sent, self._control.broadcast,
                   torch.frombuffer(buffer, dtype=torch.uint8))

    def gather(self, value):
        """Every rank's value (any Python object), in rank order, on every rank. Slow: not for a
        step."""
        return self._call("all_gather", "control", 0, self._gloo.gather, value)

    def barrier(self):
        """Returns when every rank has come here: a real exchange, so it proves that all live."""
        self._call("all_reduce", "control", 0, self._control.all_reduce, torch.zeros(1))

    @contextmanager
    def together(self):
        """A piece of start-up that may fail on some ranks only: if it does, every rank raises.

        Without this, the ranks for whom all went well would wait for those that left.
        """
        error = None
        try:
            yield
        except torch.OutOfMemoryError:
            error = UserError(f"out of memory on {self.device}: raise --tp, or lower "
                              f"--max-step-tokens, --max-seqs, --kv-blocks or --gpu-memory")
        except Exception as e:                       # whatever it is, the others must know
            error = e
        told = self.gather(None if error is None else str(error) or repr(error))
        if error is not None:
            raise error
        for rank, text in enumerate(told):
            if text:
                raise UserError(f"rank {rank}: {text}")


def cores():
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def connect():
    """Join the ranks that torchrun or `launch` started (or be a world of one); returns the rank.

    If the launcher dies, by kill -9 too, this process ends within a second: no rank is left behind.
    """
    one_host = os.environ.get("LOCAL_WORLD_SIZE", "1") == os.environ.get("WORLD_SIZE", "1")
    if one_host and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")      # talk where no other host can listen
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        launcher = int(os.environ.get("LAUNCHER_PID", os.getppid()))
        threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
        try:
            dist.init_process_group("gloo")                    # waits for at most 30 minutes
        except RuntimeError as e:
            raise LostRank(f"cannot meet the other ranks ({str(e).splitlines()[0]})") from e
    return dist.get_rank()


def _end_with(launcher):
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


def launch(function, ranks, *args):
    """Run function(*args) in `ranks` new processes that can `connect`; returns the exit code.

    The code is the first one that is not 0; the other ranks are then ended. On Linux the processes
    are forked, so that torch is imported once and not once per rank: eight ranks start in a second.
    The signals SIGINT and SIGTERM are passed on to rank 0, which decides what they mean.
    """
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, ranks))
    port = listener.getsockname()[1]
    children = [context.Process(target=_child, args=(rank, ranks, port, os.getpid(), function,
                                                     args)) for rank in range(ranks)]
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)          # until there is a rank to pass them to
    for child in children:
        child.start()
    # Only now: the store has a thread, and a fork beside it can inherit a lock that stays shut.
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False,
                          master_listen_fd=listener.detach())
    pass_on = lambda number, frame: children[0].is_alive() and os.kill(children[0].pid, number)
    before = {number: signal.signal(number, pass_on) for number in STOPS}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    try:
        waiting, code = {child.sentinel: child for child in children}, 0
        while waiting and not code:
            for sentinel in connection.wait(list(waiting)):
                child = waiting.pop(sentinel)
                child.join()
                code = code or child.exitcode
                if child.exitcode < 0 and -child.exitcode not in STOPS:
                    print(f"rank {children.index(child)} was ended by "
                          f"{signal.Signals(-child.exitcode).name}", file=sys.stderr, flush=True)
        # After an error the others end themselves, and rank 0 tells its clients first.
        patience = time.monotonic() + 3 * (-code not in (0, *STOPS))
        for child in waiting.values():
            child.join(max(0, patience - time.monotonic()))
            child.kill()
            child.join()
        return code if code >= 0 else 128 - code     # ended by a signal: as shells count it
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _child(rank, ranks, port, launcher, function, args):
    os.setpgid(0, 0)                                 # Ctrl-C goes to the launcher, once
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                      LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                      TORCHELASTIC_USE_AGENT_STORE="True",         # the store is the launcher's
                      LAUNCHER_PID=str(launcher))
    sys.exit(function(*args))


# --------------------------------------------------------------------------------------------------
# When to switch


class Switch:
    """Which mode a step of T tokens runs in: a list, one entry for every possible T.

    The list is the same on every rank: ranks that decided differently would wait for each other
    for ever. `shift[T]` is True for shift mode; `why` says in words where the list came from.
    """

    def __init__(self, shift, why, threshold=None):
        self.shift, self.why, self.threshold = shift, why, threshold

    def __call__(self, tokens):
        return "shift" if self.shift[tokens] else "base"

    def __str__(self):
        most = len(self.shift) - 1
        ends = [tokens for tokens in range(1, most) if self.shift[tokens] != self.shift[tokens + 1]]
        runs = [f"{self(tokens)} up to {tokens} tokens" for tokens in ends]
        last = f"from {ends[-1] + 1} up" if ends else "always"
        return ", ".join([*runs, f"{self(most)} {last}"])

    @classmethod
    def at(cls, threshold, max_tokens, why=None):
        """The paper's rule: at most `threshold` tokens in the step -> shift mode, else base."""
        return cls([tokens <= threshold for tokens in range(max_tokens + 1)],
                   why or f"threshold {threshold}", None if why else threshold)

    @classmethod
    def measured(cls, step_seconds, max_tokens, link, budget=6.0):
        """Time both modes instead of guessing, at powers of two, for about `budget` seconds.

        step_seconds(name, tokens) runs one step and times it; every rank calls it alike. A step is
        as slow as its slowest rank (MAX), a measurement as good as its least disturbed try (MIN).
        Between two sizes the difference of the modes is interpolated; above the largest size that
        the budget allowed, the winner there stands. Rank 0 decides, and broadcasts.
        """
        began, seconds, sizes = time.perf_counter(), defaultdict(list), []
        for size in [2 ** i for i in range(max_tokens.bit_length())]:
            start = time.perf_counter()
            for name in ("base", "shift") * 3:
                seconds[name, size].append(step_seconds(name, size))
            now = time.perf_counter()
            sizes.append(size)
            if not link.broadcast(now - began + 2 * (now - start) < budget):
                break                                                  # the next size costs double
        tries = link.gather(dict(seconds))
        best = {key: min(map(max, zip(*(rank[key] for rank in tries)))) for key in seconds}
        gain = [best["base", size] - best["shift", size] for size in sizes]
        for i in range(1, len(sizes)):               # within 5 %, which is noise: as one size below
            if abs(gain[i]) < 0.05 * best["base", sizes[i]]:
                gain[i] = 1e-9 * gain[i - 1]
        gain.append(gain[-1])
        table = []
        for tokens in range(max_tokens + 1):
            i = min(max(tokens, 1).bit_length() - 1, len(sizes) - 1)
            weight = tokens / sizes[i] - 1
            table.append((1 - weight) * gain[i] + weight * gain[i + 1] >= 0)
        return cls(link.broadcast(table), f"measured up to {sizes[-1]} tokens")


# --------------------------------------------------------------------------------------------------
# What happened


def collectives_of(calls):
    """The Calls among what `Link.log` had of a step: all but the marks."""
    return [Call(*call) for call in calls if call[0] != "mark"]


class Step(namedtuple("Step", "number tokens prefill decode mode start end calls")):
    """One step of this rank: start and end in seconds, calls as `Link.log` had them."""
    __slots__ = ()

    @property
    def collectives(self):
        return collectives_of(self.calls)

    @property
    def milliseconds(self):
        return (self.end - self.start) * 1e3


class Trace(deque):
    """The last steps of this rank, for the page. (`--explain` and the file that `--trace` writes,
    assets/trace_file.py, are told of each step as it ends.)"""

    def collectives(self, number):
        """The Calls of a step, for JSON; None if it is no longer kept."""
        for step in self:
            if step.number == number:
                return [{**call._asdict(), "start": round((call.start - step.start) * 1e6),
                         "us": round(call.seconds * 1e6)} for call in step.collectives]


# --------------------------------------------------------------------------------------------------
# python shift.py: the guided tour


if __name__ == "__main__":             # real ranks walk one attention layer in both modes
    runpy.run_path(str(Path(__file__).parent / "assets" / "tour.py"), run_name="__main__")
