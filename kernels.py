"""kernels.py: the paged KV cache and the products with the weights, on one rank.

What it does: `attention` rotates queries and keys, puts the keys and values of this step's tokens
into their slots, and lets its queries attend over a request's pages, wherever in the pool they lie;
`matmul`, `rms_norm` and `silu_mul` are the rest of a layer. `TorchKernels` says what these mean, in
plain torch; `NativeKernels` does the same in C (kernels.c) for CPUs, and tests hold it to the
former. The same C library carries collectives through shared memory: `SharedMemory`, which shift.py
calls.

What it does not know: layers, models, requests. A caller under sequence parallelism and one under
tensor parallelism pass the same tensors: all T tokens of the step, this rank's heads only.

    pytest tests/test_kernels.py

Shapes (one legend in every file):
    T tokens in this step     P ranks = sp * tp      D hidden size      V vocabulary
    H query heads             K KV heads             Dh head size       F MLP width
    h = H/P, k = max(1, K/P), f = F/P   what ONE rank owns (one "block" of heads and MLP columns)
    N blocks in the pool      B tokens per block     R requests in this step
"""
import ctypes
import fcntl
import hashlib
import mmap
import os
import platform
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F


class TorchKernels:
    """The definition: every faster version must give what these functions give."""

    @staticmethod
    def matmul(x, w):
        """x (t, k), w (k, n) -> (t, n); w (sp, k, n) -> (sp, t, n), destination-major."""
        return x @ w

    @staticmethod
    def rms_norm(x, weight, eps):
        """x (t, D), weight (D,) -> (t, D)."""
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def silu_mul(gate_up):
        """(sp, t, 2f), for each block [gate; up] -> silu(gate) * up (t, sp*f)."""
        gate, up = gate_up.chunk(2, -1)
        return (F.silu(gate) * up).transpose(0, 1).flatten(1)

    @staticmethod
    def rotate(x, cos, sin):
        """Rotary embedding of x (T, heads, Dh), Hugging Face's pairing: column i with i + Dh/2.

        cos and sin (T, 1, Dh) come from `rope_tables`, which has the signs in sin.
        """
        return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)

    def attention(self, qkv, cos, sin, kv, slot_mapping, *batch):
        """Rotate queries and keys, write_kv, paged_attention: qkv (T, h + 2k, Dh) -> (T, h, Dh).

        cos, sin (T, 1, Dh); kv and `batch` as the two functions below have them.
        """
        k = kv.shape[2]
        qk, v = qkv.split([qkv.shape[1] - k, k], 1)
        q, key = self.rotate(qk, cos, sin).split([qk.shape[1] - k, k], 1)
        self.write_kv(kv, key, v, slot_mapping)
        return self.paged_attention(q, kv, *batch)

    @staticmethod
    def write_kv(kv, k, v, slot_mapping):
        """Write this step's keys and values to their slots, in place.

        kv            (2, N, k, B, Dh)   one layer's pool: [0] keys, [1] values. A page of one head
                                         is contiguous, so that attention reads it in one sweep; a
                                         page of keys is turned, (Dh, B), so that q @ page is too.
        k, v          (T, k, Dh)
        slot_mapping  (T,) int64         block * B + offset of a token; -1 is padding, not written
        """
        _, blocks, heads, block_size, head_dim = kv.shape
        assert k.shape == v.shape == (len(slot_mapping), heads, head_dim), (
            f"k {tuple(k.shape)} and v {tuple(v.shape)} must be (T={len(slot_mapping)}, k={heads}, "
            f"Dh={head_dim})")
        real = slot_mapping >= 0
        slots = slot_mapping[real]
        block, offset = slots // block_size, slots % block_size
        keys, values = turned(kv[0]), kv[1]
        keys[block, :, :, offset] = k[real].to(kv.dtype)          # index (T, :, :, T): (T, k, Dh)
        values[block, :, offset] = v[real].to(kv.dtype)

    @staticmethod
    def paged_attention(q, kv, block_tables, query_starts, context_lens, scale):
        """Causal attention of a mixed batch: prefill chunks and decodes are the same thing here.

        Request r brings the queries `query_starts[r] : query_starts[r+1]`. They are the LAST tokens
        of its context of `context_lens[r]` tokens, which lie, already written, in the pages
        `block_tables[r]`. One query is a decode; several are a prefill chunk or draft tokens.

        q             (T, h, Dh)            query head i reads KV head i // (h/k): grouped queries
        kv            (2, N, k, B, Dh)      h a multiple of k
        block_tables  (R, any) int32        entries past a request's last page are never read
        query_starts  (R+1,) int32
        context_lens  (R,) int32
        returns       (T, h, Dh) in q's dtype, accumulated in float32; rows that belong to no
                      request (padding) are zero

        Every row is bounded by its own position, and stale slots past the context are cut off
        before the softmax rather than masked after it: 0 * NaN would be NaN.
        """
        tokens, heads, head_dim = q.shape
        _, blocks, kv_heads, block_size, kv_dim = kv.shape
        assert head_dim == kv_dim and heads % kv_heads == 0, (
            f"q {tuple(q.shape)} does not fit the cache {tuple(kv.shape)}")
        starts, contexts = query_starts.tolist(), context_lens.tolist()
        assert starts[0] == 0 and starts[-1] <= tokens and len(starts) == len(contexts) + 1, (
            f"query_starts {starts} must rise from 0 to at most T={tokens}, one more than requests")
        out = torch.zeros_like(q)
        for r, context in enumerate(contexts):
            first, last = starts[r], starts[r + 1]
            n = last - first                                      # queries of this request
            if n == 0:
                continue
            assert 0 < n <= context <= block_tables.shape[1] * block_size, (
                f"request {r}: {n} queries, context {context}, "
                f"{block_tables.shape[1]} pages of {block_size}")
            pages = block_tables[r, :-(-context // block_size)].long()
            keys = turned(kv[0])[pages].float().permute(1, 0, 3, 2)          # (k, pages, B, Dh)
            values = kv[1, pages].float().transpose(0, 1)
            keys, values = (x.flatten(1, 2)[:, :context] for x in (keys, values))
            queries = q[first:last].float().reshape(n, kv_heads, heads // kv_heads, head_dim)
            scores = torch.einsum("nkgd,kcd->kgnc", queries, keys) * scale
            position = torch.arange(context - n, context, device=q.device)        # of each query
            future = torch.arange(context, device=q.device)[None, :] > position[:, None]
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)   # (k, h/k, n, context)
            attended = torch.einsum("kgnc,kcd->nkgd", weights, values)
            out[first:last] = attended.reshape(n, heads, head_dim).to(q.dtype)
        return out


def turned(keys):
    """The pages of keys (N, k, B, Dh) as they are stored: (N, k, Dh, B), a view."""
    return keys.view(*keys.shape[:2], keys.shape[3], keys.shape[2])


# --------------------------------------------------------------------------------------------------
# The same in C


class NativeKernels(TorchKernels):
    """kernels.c, for float32 tensors on a CPU."""
    MAX_DIM, ROWS = 256, 60            # kernels.c has the same

    def __init__(self, threads):
        self.c = native()
        self.c.set_threads(threads)

    def matmul(self, x, w):
        assert x.dtype == w.dtype == torch.float32 and w.is_contiguous()
        x, (*blocks, k, n) = x.contiguous(), w.shape
        y = x.new_empty(*blocks, x.shape[0], n)
        self.c.matmul(x.data_ptr(), w.data_ptr(), y.data_ptr(), *blocks or (1,), x.shape[0], n, k)
        return y

    def rms_norm(self, x, weight, eps):
        x = x.contiguous()
        y = torch.empty_like(x)
        self.c.rms_norm(x.data_ptr(), weight.data_ptr(), y.data_ptr(), *x.shape, eps)
        return y

    def silu_mul(self, gate_up):
        sp, t, columns = gate_up.shape
        y = gate_up.new_empty(t, sp * columns // 2)
        self.c.silu_mul(gate_up.data_ptr(), y.data_ptr(), sp, t, columns // 2)
        return y

    def attention(self, qkv, cos, sin, kv, slot_mapping, *batch):
        tokens, heads, dim = qkv.shape
        _, blocks, k, size, _ = kv.shape
        block_tables, query_starts, context_lens, scale = batch
        heads -= 2 * k
        fits = (kv.dtype == qkv.dtype == torch.float32 and dim == kv.shape[-1] <= self.MAX_DIM
                and heads % k == 0 and heads <= self.ROWS * k)
        qkv, q = qkv.contiguous(), qkv.new_empty(tokens, heads, dim)
        out = qkv.new_zeros(tokens, heads, dim)
        pointers = (x.data_ptr() for x in (qkv, cos, sin, q, kv, out, slot_mapping, block_tables,
                                           query_starts, context_lens))
        if fits and self.c.attention(Attention(*pointers, tokens, *block_tables.shape, heads, k,
                                               blocks, size, dim, scale)):
            return out
        return super().attention(qkv, cos, sin, kv, slot_mapping, *batch)     # odd or wrong sizes


class Attention(ctypes.Structure):     # kernels.c has the same
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "q", "kv", "out", "slots",
                                               "tables", "starts", "contexts")),
        *((name, ctypes.c_int64) for name in ("tokens", "requests", "pages", "heads", "kv_heads",
                                              "blocks", "size", "dim")),
        ("scale", ctypes.c_float)]


class SharedMemory:
    """The collectives of kernels.c for one group of ranks of one Linux host.

    The memory has no name: the first rank makes it (memfd) and the others open it through /proc, as
    only processes of the same user can. Nothing is left when the last of them has ended, however.
    """
    ROOM = 1 << 20                     # bytes of a rank's slot; what is larger goes in pieces

    def __init__(self, ranks, index, exchange, spins, patience):
        """exchange(value) -> the values of all ranks of the link, in order: all make a group now,
        and the first rank of each tells the others where its memory is."""
        self.c, self.ranks, self.index = native(), ranks, index
        size = self.c.group_bytes(len(ranks), self.ROOM)
        own = os.memfd_create("nanoshift") if index == 0 else None
        if own is not None:
            os.ftruncate(own, size)
        path = exchange(own is not None and f"/proc/{os.getpid()}/fd/{own}")[ranks[0]]
        fd = own if own is not None else os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(fd, size)
        exchange(None)                 # all have it open
        os.close(fd)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.group = self.c.group_open(address, index, len(ranks), self.ROOM, spins, patience)
        self.sizes = ctypes.c_int64 * len(ranks)

    def _met(self, result):
        if result:
            raise RuntimeError(f"rank {self.ranks[result - 1]} has died" if result > 0 else
                               "a rank did not come in time")

    def all_reduce(self, x):
        sums = x.float().contiguous()                # x itself, or wider: rounded once, at the end
        self._met(self.c.all_reduce(self.group, sums.data_ptr(), sums.numel()))
        x.copy_(sums)

    def all_to_all(self, out, x, receive, send):
        """Rows, as torch.distributed.all_to_all_single has them."""
        row = x[0].nbytes if len(x) else out[0].nbytes if len(out) else 0
        scaled = (self.sizes(*(n * row for n in counts)) for counts in (send, receive))
        self._met(self.c.all_to_all(self.group, x.data_ptr(), next(scaled), out.data_ptr(),
                                    next(scaled)))

    def all_gather(self, out, x, sizes):
        """x of sizes[index] bytes from every rank, one after the other into out: an all_to_all of
        as many copies as there are ranks."""
        own = sizes[self.index]
        copies = x.flatten().view(torch.uint8)[:own].repeat(len(sizes))
        self._met(self.c.all_to_all(self.group, copies.data_ptr(), self.sizes(*[own] * len(sizes)),
                                    out.data_ptr(), self.sizes(*sizes)))

    def broadcast(self, x):
        """The first rank's x to all."""
        self.all_gather(x, x, [x.nbytes] + [0] * (len(self.ranks) - 1))


def why_not_native():
    """None where the C library can be had; else the reason, in a few words."""
    try:
        native()
    except RuntimeError as e:
        return str(e)


@cache
def native():
    """kernels.c, compiled for this very CPU at the first call on this machine, then cached.

    Raises RuntimeError with the reason where that cannot be done (not Linux, no C compiler).
    """
    if sys.platform != "linux":
        raise RuntimeError("the C kernels are for Linux")
    source = Path(__file__).with_name("kernels.c")
    flags = "-O3 -march=native -std=gnu11 -shared -fPIC -pthread -fno-math-errno".split()
    cpu = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    cpu = [line for line in cpu.split("\n") if line.split(":")[0].strip() in ("flags", "Features")]
    mark = hashlib.blake2b(repr((source.read_bytes(), flags, cpu, platform.machine())).encode(),
                           digest_size=12).hexdigest()
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoshift"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        assert home.stat().st_uid == os.getuid() and os.access(home, os.W_OK)
    except (OSError, AssertionError):
        home = Path(tempfile.mkdtemp())                         # compiled again by each process
    library = home / f"kernels-{mark}.so"
    with open(home / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)                        # one rank compiles, the others wait
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            command = [os.environ.get("CC", "cc"), *flags, str(source), "-o", str(made)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            except (OSError, subprocess.TimeoutExpired) as e:
                raise RuntimeError(f"no C compiler ({e})") from None
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()[:200]}")
            made.rename(library)
    c = ctypes.CDLL(str(library))
    pointer, whole = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
            ("group_bytes", whole, [ctypes.c_int, whole]),
            ("group_open", pointer, [pointer, ctypes.c_int, ctypes.c_int, whole, ctypes.c_int,
                                     ctypes.c_double]),
            ("all_reduce", ctypes.c_int, [pointer, pointer, whole]),
            ("all_to_all", ctypes.c_int, [pointer] * 5),
            ("set_threads", None, [ctypes.c_int]),
            ("matmul", None, [pointer] * 3 + [whole] * 4),
            ("rms_norm", None, [pointer] * 3 + [whole] * 2 + [ctypes.c_float]),
            ("silu_mul", None, [pointer] * 2 + [whole] * 3),
            ("attention", ctypes.c_int, [ctypes.POINTER(Attention)])):
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments
    return c
