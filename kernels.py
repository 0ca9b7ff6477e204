"""kernels.py: the paged KV cache and the products with the weights, on one rank.

What it does: `attention` rotates queries and keys, puts the keys and values of this step's tokens
into their slots, and lets its queries attend over a request's pages, wherever in the pool they lie;
`matmul`, `rms_norm` and `silu_mul` are the rest of a layer. `TorchKernels` says what these mean, in
plain torch; for GPUs, `TritonKernels` has the cache's part in Triton; for CPUs, `NativeKernels` has
all of it in C (kernels.c); tests hold both to the first. The same C library carries collectives
through shared memory: `SharedMemory`, which shift.py calls.

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
        _, _, heads, block_size, head_dim = kv.shape
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
        _, _, kv_heads, block_size, kv_dim = kv.shape
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
# The same on GPUs


class TritonKernels(TorchKernels):
    """The cache's part in Triton, for CUDA tensors.

    Nothing waits for the GPU, and what is launched depends on the shapes of the tensors alone, so a
    CUDA graph can be replayed after their contents have changed. A step may be padded: tokens after
    the last request's, slots of -1, requests without queries.
    """
    MAX_SPLITS = 64

    def __init__(self, processors=None):
        """processors: how many the GPU has; if not given, this process's current device's."""
        self.processors = processors or torch.cuda.get_device_properties().multi_processor_count
        self.write, self.attend, self.merge = triton_kernels()

    def write_kv(self, kv, k, v, slot_mapping):
        assert kv.is_contiguous() and k.shape == v.shape == (
            len(slot_mapping), kv.shape[2], kv.shape[4]), f"{k.shape}, {v.shape}, cache {kv.shape}"
        k, v = k.flatten(1), v.flatten(1)                            # (T, k*Dh), views of qkv
        self.write[len(k),](*kv, k, v, slot_mapping, k.stride(0), v.stride(0), k.shape[1],
                            kv.shape[4], kv.shape[3], power_of_2(k.shape[1]))

    def paged_attention(self, q, kv, block_tables, query_starts, context_lens, scale):
        (tokens, heads, head_dim), (requests, pages) = q.shape, block_tables.shape
        _, _, kv_heads, block_size, kv_dim = kv.shape
        assert kv.is_contiguous() and head_dim == kv_dim and heads % kv_heads == 0, (
            f"q {tuple(q.shape)} does not fit the cache {tuple(kv.shape)}")
        # A program takes BLOCK_M rows, a row being one query head of one query: 16 are the fewest
        # that tensor cores multiply. 64 rows x 128 columns of float32 are 64 registers in each of
        # the 128 threads (4 warps, Triton's default), and as many again for scores and weights;
        # float32 itself, multiplied without tensor cores to be exact, has room for 16 rows. A tile
        # of keys has 16 KB at most, as has one of values: with two of each beside the queries, two
        # programs share a processor (H100: 228 KB) and one fits on any.
        rows, block_d = tokens * heads // kv_heads, max(16, power_of_2(head_dim))
        block_m = min(64 if q.itemsize == 2 else 16, max(16, power_of_2(rows // max(1, requests))))
        block_n = min(64, max(16, 16384 // block_d // q.itemsize))
        tiles = rows // block_m + requests        # at most: each request has one that is not full
        # Too few programs for the GPU? Then several share a context, each with two tiles or more.
        splits = min(self.MAX_SPLITS, 2 * self.processors // max(1, tiles * kv_heads),
                     pages * block_size // (2 * block_n))
        splits = 1 << max(1, splits).bit_length() - 1                    # few versions to compile
        out = q.new_empty(q.shape)
        parts = out if splits == 1 else q.new_empty(splits, *q.shape, dtype=torch.float32)
        sums = q.new_empty(splits, tokens, heads, dtype=torch.float32)
        q = q.flatten(1)                                             # (T, h*Dh), a view
        self.attend[tiles + 1, kv_heads, splits](
            q, *kv, block_tables, query_starts, context_lens, parts, sums, q.stride(0),
            block_tables.stride(0), tokens, requests, scale * 1.44269504,    # log2(e), for exp2
            heads // kv_heads, head_dim, block_size, block_m, block_n, block_d)
        if splits > 1:
            self.merge[tokens * heads,](parts, sums, out, head_dim, block_d, splits)
        return out


def power_of_2(n):
    """The first that is not below n."""
    return 1 << (n - 1).bit_length()


@cache
def triton_kernels():
    """(write_kv, attend, merge), which Triton compiles when they are first called.

    Imported here: torch brings Triton along for CUDA only, and nothing else needs it.
    """
    global tl                          # a kernel's names are looked up among the module's
    import triton
    import triton.language as tl

    @triton.jit
    def write_kv(keys, values, k, v, slot_mapping, k_stride, v_stride, COLUMNS: tl.constexpr,
                 DH: tl.constexpr, B: tl.constexpr, BLOCK: tl.constexpr):
        """One token: its COLUMNS = k*Dh keys, and as many values."""
        token, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
        slot = tl.load(slot_mapping + token)
        real = i < tl.where(slot < 0, 0, COLUMNS)
        block, offset = slot // B, slot % B
        key = tl.load(k + token * k_stride + i, mask=real)
        tl.store(keys + (block * COLUMNS + i) * B + offset, key, mask=real)
        value = tl.load(v + token * v_stride + i, mask=real)
        page = block * (COLUMNS // DH) + i // DH                     # of one head
        tl.store(values + (page * B + offset) * DH + i % DH, value, mask=real)

    @triton.jit(do_not_specialize=["table_stride", "tokens", "requests"])
    def attend(q, keys, values, block_tables, query_starts, context_lens, out, sums, q_stride,
               table_stride, tokens, requests, scale, GROUP: tl.constexpr, DH: tl.constexpr,
               B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
               BLOCK_D: tl.constexpr):
        """One tile of rows of one KV head, over its share of the context (FlashAttention-2).

        The rows of a request are its queries' heads that read this KV head, n * GROUP of them, so
        that all of them share each load of keys and values. out[split] is the softmax over this
        program's keys, sums[split] the log2 of what it was divided by.
        """
        tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        heads, splits = tl.num_programs(1), tl.num_programs(2)
        # Which request? Number r's tiles begin at query_starts[r] * GROUP // BLOCK_M + r: there is
        # room for its rows before those of r + 1. The rows after all requests are one more request,
        # without context: zeros.
        r = -1
        for base in range(0, requests + 1, 128):
            i = base + tl.arange(0, 128)
            begins = tl.load(query_starts + i, mask=i <= requests, other=0) * GROUP // BLOCK_M + i
            r += tl.sum(((begins <= tile) & (i <= requests)).to(tl.int32), 0)
        first = tl.load(query_starts + r)
        n = tl.load(query_starts + r + 1, mask=r < requests, other=tokens) - first
        context = tl.load(context_lens + r, mask=r < requests, other=0)
        begin = (tile - first * GROUP // BLOCK_M - r) * BLOCK_M
        if begin >= n * GROUP:
            return
        row, d = begin + tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_D)
        inside = (row < n * GROUP) & (d < DH)[None, :]
        token, query_head = (first + row // GROUP).to(tl.int64), head * GROUP + row % GROUP
        query = tl.load(q + token * q_stride + query_head * DH + d[None, :], mask=inside, other=0)
        position = context - n + row // GROUP                        # (BLOCK_M, 1)
        end = tl.minimum(context, context - n + (begin + BLOCK_M - 1) // GROUP + 1)
        share = tl.cdiv(end, splits * BLOCK_N) * BLOCK_N
        # Finite, so that rows that have seen no key yet do not subtract infinity from infinity.
        highest = tl.full([BLOCK_M, 1], -1e38, tl.float32)
        total = tl.zeros([BLOCK_M, 1], tl.float32)
        attended = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        for start in range(split * share, tl.minimum(split * share + share, end), BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            # Keys are masked by page, and their scores by position: so B keys, which are contiguous
            # and share a mask, are loaded at once. Of values, a stale one may be NaN: 0 * NaN.
            whole = at // B < tl.cdiv(end, B)
            page = tl.load(block_tables + r * table_stride + at // B, mask=whole, other=0)
            page = page.to(tl.int64) * heads + head                  # of one head
            key = tl.load(keys + (page * DH * B + at % B)[None, :] + d[:, None] * B,
                          mask=whole[None, :] & (d < DH)[:, None], other=0).to(query.dtype)
            value = tl.load(values + (page * B + at % B)[:, None] * DH + d[None, :],
                            mask=(at < end)[:, None] & (d < DH)[None, :], other=0).to(query.dtype)
            scores = tl.dot(query, key, input_precision="ieee") * scale
            scores = tl.where(at[None, :] <= position, scores, float("-inf"))
            before, highest = highest, tl.maximum(highest, tl.max(scores, 1, keep_dims=True))
            weights, decay = tl.exp2(scores - highest), tl.exp2(before - highest)
            total = total * decay + tl.sum(weights, 1, keep_dims=True)
            attended = tl.dot(weights.to(query.dtype), value, attended * decay, "ieee")
        total = tl.maximum(total, 1)   # the highest score weighs 1, so less than that is no key
        index = (split * tokens + token) * heads * GROUP + query_head
        tl.store(out + index * DH + d[None, :], attended / total, mask=inside)
        tl.store(sums + index, highest + tl.log2(total), mask=row < n * GROUP)

    @triton.jit
    def merge(parts, sums, out, DH: tl.constexpr, BLOCK_D: tl.constexpr, SPLITS: tl.constexpr):
        """One row of out: the mean of its parts, weighted by what each was divided by."""
        row, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)[None, :]
        part = tl.arange(0, SPLITS)[:, None] * tl.num_programs(0) + row
        log = tl.load(sums + part)
        weight = tl.exp2(log - tl.max(log, 0, keep_dims=True))
        x = tl.load(parts + part * DH + d, mask=d < DH, other=0)
        mean = tl.sum(x * weight, 0, keep_dims=True) / tl.sum(weight, 0, keep_dims=True)
        tl.store(out + row * DH + d, mean, mask=d < DH)

    return write_kv, attend, merge


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

    The memory has no name (memfd): all open the first rank's through /proc, as only processes of
    the same user can. Nothing is left when the last of them has ended, however.
    """
    ROOM = 1 << 20                     # bytes of a rank's slot; what is larger goes in pieces
    PATIENCE = 1800                    # seconds until a rank is lost, though it lives

    def __init__(self, ranks, index, exchange, spins):
        """exchange(value) -> the values of all ranks of the link, in order: all make a group now,
        and tell each other where their memory is."""
        self.c, self.ranks, self.index = native(), ranks, index
        size = self.c.group_bytes(len(ranks), self.ROOM)
        own = os.memfd_create("nanoshift")                   # takes no memory until it is used
        os.ftruncate(own, size)
        with open(exchange(f"/proc/{os.getpid()}/fd/{own}")[ranks[0]], "r+b") as first:
            self.memory = mmap.mmap(first.fileno(), size)
        exchange(None)                 # all have it open
        os.close(own)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.group = self.c.group_open(address, index, len(ranks), self.ROOM, spins, self.PATIENCE)
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
        row = x[:1].nbytes or out[:1].nbytes
        sent, received = (self.sizes(*(n * row for n in counts)) for counts in (send, receive))
        self._met(self.c.all_to_all(self.group, x.data_ptr(), sent, out.data_ptr(), received))

    def broadcast(self, x):
        """The first rank's x (n,) to all: an all_to_all of as many copies as there are ranks."""
        n, ranks = len(x), len(self.ranks)
        send = [n if self.index == 0 else 0] * ranks
        self.all_to_all(x, x.repeat(ranks), [n] + [0] * (ranks - 1), send)


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
    mark = hashlib.blake2b(repr((source.read_bytes(), flags, cpu, os.uname().machine)).encode(),
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
    pointer, int64, int32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    for name, result, arguments in (
            ("group_bytes", int64, [int32, int64]),
            ("group_open", pointer, [pointer, int32, int32, int64, int32, ctypes.c_double]),
            ("all_reduce", int32, [pointer, pointer, int64]),
            ("all_to_all", int32, [pointer] * 5),
            ("set_threads", None, [int32]),
            ("matmul", None, [pointer] * 3 + [int64] * 4),
            ("rms_norm", None, [pointer] * 3 + [int64] * 2 + [ctypes.c_float]),
            ("silu_mul", None, [pointer] * 2 + [int64] * 3),
            ("attention", int32, [ctypes.POINTER(Attention)])):
        function = getattr(c, name)
        function.restype, function.argtypes = result, arguments
    return c
