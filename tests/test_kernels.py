"""The paged KV cache against dense attention (torch's own) on contiguous keys and values: the torch
kernels, which are the definition, and the C ones on one core and on two. And the C products."""
import pytest
import torch
import torch.nn.functional as F

from kernels import NativeKernels, TorchKernels, turned, why_not_native

kernels = None                          # the version under test


@pytest.fixture(autouse=True, params=["torch", "C, 1 thread", "C, 2 threads"])
def each_version(request):
    global kernels
    if request.param == "torch":
        kernels = TorchKernels()
        return
    if why_not_native():
        pytest.skip(why_not_native())
    kernels = NativeKernels(int(request.param[3]))


def paged_attention(q, kv, *batch):
    """The version's `attention` where there is nothing to rotate and nothing to write."""
    tokens, _, head_dim = q.shape
    qkv = torch.cat([q, q.new_full((tokens, 2 * kv.shape[2], head_dim), torch.nan)], 1)
    cos, sin = torch.ones(tokens, 1, head_dim), torch.zeros(tokens, 1, head_dim)
    return kernels.attention(qkv, cos, sin, kv, torch.full((tokens,), -1), *batch)


# (context, queries) of each request of a step. Blocks here are of 4 and 16, so 4, 8, 16 and 32 are
# contexts that end exactly on a block boundary, 5, 17 and 33 begin a new one.
STEPS = {
    "decodes": [(1, 1), (5, 1), (16, 1), (17, 1), (40, 1)],
    "prefills": [(1, 1), (4, 4), (17, 17), (32, 32)],
    "chunks": [(20, 7), (32, 16), (33, 2), (8, 4)],
    "mixed, empty requests": [(9, 0), (33, 1), (16, 16), (0, 0), (21, 5), (12, 0)],
    "nobody": [(0, 0), (8, 0)]}
HEADS = [(4, 4), (4, 1), (8, 2), (8, 1), (2, 1)]            # (h, k): groups of 1, 4, 4, 8, 2


def scene(contexts, kv_heads, head_dim, block_size, dtype=torch.float32, seed=0):
    """A pool, NaN in stale slots, written by write_kv: (kv, tables, keys, values, slots, pages).

    keys[r], values[r] (context, k, Dh) are what request r's cache must hold; pages are the two
    tables (N, B, k, Dh) that they come from. Neighbouring requests share their first page where
    both fill one, as a cached prefix is shared; request 2 also lists it twice. The tokens are
    written in a random order, among padding (slot -1) of NaN.
    """
    draw = torch.Generator().manual_seed(seed)
    pages_of = [-(-context // block_size) for context in contexts]
    pool = sum(pages_of) + 3
    free = torch.randperm(pool, generator=draw).tolist()
    tables = [[free.pop() for _ in range(count)] for count in pages_of]
    for r in range(1, len(contexts)):
        if min(contexts[r - 1], contexts[r]) >= block_size:
            tables[r][0] = tables[r - 1][0]
        if r == 2 and contexts[r] >= 2 * block_size:
            tables[r][1] = tables[r][0]
    page_k, page_v = torch.randn(2, pool, block_size, kv_heads, head_dim, generator=draw)
    slots = {table[i // block_size] * block_size + i % block_size
             for table, context in zip(tables, contexts) for i in range(context)}
    slots = torch.tensor(sorted(slots) + [-1] * 5, dtype=torch.int64)
    slots = slots[torch.randperm(len(slots), generator=draw)]
    new_k, new_v = (torch.where(slots[:, None, None] < 0, torch.nan, page.flatten(0, 1)[slots])
                    for page in (page_k, page_v))
    kv = torch.full((2, pool, kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    kernels.write_kv(kv, new_k, new_v, slots)
    whole = [[page[table].flatten(0, 1)[:context].to(dtype).float()
              for table, context in zip(tables, contexts)] for page in (page_k, page_v)]
    padded = torch.full((len(contexts), max([1, *pages_of]) + 2), 10 ** 6, dtype=torch.int32)
    for r, table in enumerate(tables):
        padded[r, :len(table)] = torch.tensor(table, dtype=torch.int32)
    return kv, padded, *whole, slots, (page_k, page_v)


def dense(q, keys, values, scale):
    """q (n, h, Dh), the last n tokens of a context of keys and values (context, k, Dh)."""
    n, context, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    seen = torch.ones(n, context, dtype=torch.bool).tril(context - n)
    keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    out = F.scaled_dot_product_attention(q.transpose(0, 1), keys, values, seen, scale=scale)
    return out.transpose(0, 1)


def attend(step, heads, kv_heads, head_dim, block_size, kv_dtype=torch.float32,
           q_dtype=torch.float32, padding=3):
    """(what paged_attention says, what dense attention says) of a step, padding rows included."""
    contexts = [context for context, _ in step]
    kv, tables, keys, values, _, _ = scene(contexts, kv_heads, head_dim, block_size, kv_dtype)
    starts = torch.tensor([0] + [n for _, n in step]).cumsum(0).int()
    q = torch.randn(int(starts[-1]) + padding, heads, head_dim,
                    generator=torch.Generator().manual_seed(1)).to(q_dtype)
    q[starts[-1]:] = torch.nan
    got = paged_attention(q, kv, tables, starts, torch.tensor(contexts).int(), 0.3)
    want = torch.zeros_like(q, dtype=torch.float32)
    for r, (first, last) in enumerate(zip(starts[:-1], starts[1:])):
        if last > first:
            want[first:last] = dense(q[first:last].float(), keys[r], values[r], 0.3)
    return got, want


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_kv_fills_the_named_slots_and_no_other(block_size, dtype):
    """Each token's k and v at [block, head, offset] of its slot; every other slot is still NaN."""
    contexts = [5, 16, 40, 0, 33]
    kv, _, _, _, slots, pages = scene(contexts, 3, 12, block_size, dtype)
    want = torch.full_like(kv, torch.nan)
    for slot in slots[slots >= 0].tolist():
        block, offset = divmod(slot, block_size)
        for which, page in enumerate(pages):
            for head in range(3):
                pool = (turned(want[0]).mT, want[1])[which]        # (N, k, B, Dh), views
                pool[block, head, offset] = page[block, offset, head].to(dtype)
    assert 0 < want.isnan().float().mean() < 1, "some slots must be stale for this to mean anything"
    torch.testing.assert_close(kv, want, rtol=0, atol=0, equal_nan=True)


def test_write_kv_overwrites_only_what_this_step_computes():
    """A second step leaves the tokens of the first as they were."""
    draw = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 6, 2, 8, generator=draw)
    together, apart = torch.zeros(2, 2, 3, 2, 4, 8)
    slots = torch.tensor([9, 2, 3, 11, 0, 7])
    kernels.write_kv(together, k, v, slots)
    kernels.write_kv(apart, k[:4], v[:4], slots[:4])
    kernels.write_kv(apart, k[4:], v[4:], slots[4:])
    assert together.count_nonzero() == 2 * 6 * 2 * 8
    torch.testing.assert_close(apart, together, rtol=0, atol=0)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("head_dim", [12, 32, 64])
def test_paged_attention_equals_dense_attention(step, heads, kv_heads, head_dim):
    """Any mix of requests, pages out of order and shared, NaN in every stale slot: as if dense."""
    for block_size in (4, 16):
        got, want = attend(STEPS[step], heads, kv_heads, head_dim, block_size)
        assert got.dtype == torch.float32 and got.shape == want.shape
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5)


def test_random_steps():
    """Random requests of random sizes: as if dense."""
    draw = torch.Generator().manual_seed(7)
    number = lambda low, high: int(torch.randint(low, high + 1, (), generator=draw))
    for _ in range(40):
        contexts = [number(1, 50) for _ in range(number(1, 6))]
        work = [(context, number(0, context)) for context in contexts]
        kv_heads = number(1, 3)
        got, want = attend(work, kv_heads * number(1, 4), kv_heads, 2 * number(1, 20), number(1, 9),
                           padding=number(0, 2))
        torch.testing.assert_close(got, want, rtol=0, atol=2e-5, msg=lambda m: f"{work}: {m}")


def test_bfloat16_cache():
    """The cache may be rounded, the arithmetic may not: float32 inside whatever the inputs are."""
    step = STEPS["mixed, empty requests"]
    got, want = attend(step, 8, 2, 64, 16, kv_dtype=torch.bfloat16)
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    got, want = attend(step, 8, 2, 64, 16, kv_dtype=torch.bfloat16, q_dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want.bfloat16(), rtol=0.01, atol=1e-3)   # one rounding


def test_padding_rows_are_zero_and_a_step_may_be_all_padding():
    """Rows that belong to no request are zero even where q is NaN."""
    for name in ("mixed, empty requests", "nobody"):
        got, _ = attend(STEPS[name], 4, 2, 12, 4, padding=6)
        assert got[-6:].count_nonzero() == 0 and not got[-6:].isnan().any()


def test_a_row_sees_nothing_after_its_own_position():
    """Changing the last token of a chunk changes its last row only."""
    contexts = torch.tensor([10]).int()
    kv, tables, _, _, _, _ = scene([10], 1, 12, 4)
    q = torch.randn(6, 2, 12, generator=torch.Generator().manual_seed(3))
    run = lambda: paged_attention(q, kv, tables, torch.tensor([0, 6]).int(), contexts, 0.3)
    before = run()
    turned(kv[0])[tables[0, 2], :, :, 1] = 9.0              # position 9: page 2, offset 1
    kv[1, tables[0, 2], :, 1] = 9.0
    changed = (run() != before).flatten(1).any(1)
    assert changed.tolist() == [False] * 5 + [True]


def test_impossible_shapes_are_caught():
    """A caller's mistake stops here, with the numbers, and does not become a wrong answer."""
    kv, tables, _, _, slots, _ = scene([10], 2, 12, 4)
    q, starts = torch.randn(3, 4, 12), torch.tensor([0, 3]).int()
    good = dict(q=q, kv=kv, block_tables=tables, query_starts=starts,
                context_lens=torch.tensor([10]).int(), scale=0.3)
    assert paged_attention(*good.values()).shape == q.shape
    for bad, says in ((dict(context_lens=torch.tensor([2]).int()), "3 queries, context 2"),
                      (dict(context_lens=torch.tensor([99]).int()), "context 99"),
                      (dict(query_starts=torch.tensor([0, 4]).int()), "T=3"),
                      (dict(q=torch.randn(3, 3, 12)), "does not fit"),
                      (dict(q=torch.randn(3, 4, 10)), "must be")):
        with pytest.raises(AssertionError, match=says):
            paged_attention(*{**good, **bad}.values())
    with pytest.raises(AssertionError, match="must be"):
        kernels.write_kv(kv, torch.zeros(2, 2, 12), torch.zeros(3, 2, 12), slots[:3])


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 13, 63, 64, 65, 200])
def test_products(rows):
    """matmul is torch's product: few and many rows, odd sizes, deep sums, views, none at all."""
    draw = torch.Generator().manual_seed(rows)
    for n, k in ((1, 1), (7, 5), (19, 33), (48, 64), (130, 101), (96, 1100)):
        x, w = torch.randn(rows, 2 * k, generator=draw), torch.randn(3, k, n, generator=draw)
        for a in (x[:, :k].contiguous(), x[:, k:]):
            want = (a.double() @ w.double()).float()
            for some in (1, slice(None), slice(2, None)):
                torch.testing.assert_close(kernels.matmul(a, w[some]), want[some], rtol=1e-5,
                                           atol=2e-4)


@pytest.mark.parametrize("rows, width", [(0, 8), (1, 1), (3, 20), (5, 64), (40, 100)])
def test_what_stands_between_the_products(rows, width):
    """rms_norm and silu_mul, written out; also where exp overflows."""
    draw = torch.Generator().manual_seed(width)
    x, weight = torch.randn(rows, width, generator=draw), torch.randn(width, generator=draw)
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), want, rtol=1e-5, atol=1e-6)
    for sp in (1, 3):
        x = torch.randn(sp, rows, 2 * width, generator=draw) * 40
        gate, up = x[..., :width], x[..., width:]
        want = (gate * torch.sigmoid(gate) * up).transpose(0, 1).reshape(rows, sp * width)
        torch.testing.assert_close(kernels.silu_mul(x), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("head_dim, block_size", [(2, 4), (12, 16), (64, 16), (128, 5)])
def test_attention_rotates_and_writes(head_dim, block_size):
    """A prompt of 37 tokens: pairs turned as complex numbers, then as if dense; not the padding."""
    draw, tokens, heads, k = torch.Generator().manual_seed(0), 37, 6, 2
    qkv = torch.randn(tokens + 2, heads + 2 * k, head_dim, generator=draw)
    angle = torch.randn(tokens + 2, 1, head_dim // 2, generator=draw)
    cos, sin = angle.cos(), angle.sin()
    table = torch.randperm(12, generator=draw)[:-(-tokens // block_size)]
    place = torch.arange(tokens)
    slots = table[place // block_size] * block_size + place % block_size
    slots = torch.cat([slots, torch.tensor([-1, -1])])
    kv = torch.full((2, 12, k, block_size, head_dim), torch.nan)
    want_kv = kv.clone()
    pairs = torch.complex(*qkv.unflatten(-1, (2, -1)).unbind(-2)) * torch.complex(cos, sin)
    moved = torch.cat([pairs.real, pairs.imag], -1)
    kernels.write_kv(want_kv, moved[:, heads:-k], qkv[:, -k:], slots)
    got = kernels.attention(qkv, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), kv, slots,
                            table[None].int(), torch.tensor([0, tokens]).int(),
                            torch.tensor([tokens]).int(), 0.3)
    torch.testing.assert_close(kv, want_kv, rtol=1e-5, atol=1e-6, equal_nan=True)
    want = dense(moved[:tokens, :heads], moved[:tokens, heads:-k], qkv[:tokens, -k:], 0.3)
    torch.testing.assert_close(got[:tokens], want, rtol=0, atol=2e-5)
    assert got[tokens:].count_nonzero() == 0


def test_long_contexts_and_wide_heads():
    """Contexts over many tiles of keys, chunks over many tiles of queries, head sizes to 256."""
    for head_dim in (64, 128, 256):
        got, want = attend([(300, 1), (200, 130), (65, 65), (64, 3)], 6, 2, head_dim, 16)
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)
