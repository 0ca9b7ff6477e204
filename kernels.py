"""kernels.py: the paged KV cache, written and read.

What it does: two operations on one layer's cache. `write_kv` puts the keys and values of this
step's tokens into their slots; `paged_attention` lets this step's queries attend over a request's
pages, wherever in the pool they lie. Both are plain torch here: this file is the definition that
any faster version is tested against.

What it does not know: ranks, layers, models, requests. A caller under sequence parallelism and one
under tensor parallelism pass the same tensors: all T tokens of the step, this rank's heads only.

    pytest tests/test_kernels.py

Shapes (one legend in every file):
    T tokens in this step     P ranks = sp * tp      D hidden size      V vocabulary
    H query heads             K KV heads             Dh head size       F MLP width
    h = H/P, k = max(1, K/P), f = F/P   what ONE rank owns (one "block" of heads and MLP columns)
    N blocks in the pool      B tokens per block     R requests in this step
"""
import torch


def write_kv(kv, k, v, slot_mapping):
    """Write this step's keys and values to their slots, in place.

    kv            (2, N, k, B, Dh)   one layer's pool: [0] keys, [1] values. A page of one head is
                                     contiguous, so that attention reads it in one sweep.
    k, v          (T, k, Dh)
    slot_mapping  (T,) int64         block * B + offset of each token; -1 is padding: not written
    """
    _, blocks, heads, block_size, head_dim = kv.shape
    assert k.shape == v.shape == (len(slot_mapping), heads, head_dim), (
        f"k {tuple(k.shape)} and v {tuple(v.shape)} must be (T={len(slot_mapping)}, k={heads}, "
        f"Dh={head_dim})")
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    block, offset = slots // block_size, slots % block_size
    kv[0, block, :, offset] = k[real].to(kv.dtype)            # index (T, :, T) -> (T, k, Dh)
    kv[1, block, :, offset] = v[real].to(kv.dtype)


def paged_attention(q, kv, block_tables, query_starts, context_lens, scale):
    """Causal attention of a mixed batch: prefill chunks and decodes are the same thing here.

    Request r brings the queries `query_starts[r] : query_starts[r+1]`. They are the LAST tokens of
    its context of `context_lens[r]` tokens, which lie, already written, in the pages
    `block_tables[r]`. One query is a decode; several are a prefill chunk or draft tokens.

    q             (T, h, Dh)            kv  (2, N, k, B, Dh), h a multiple of k: query head i reads
                                            KV head i // (h/k) (grouped-query attention)
    block_tables  (R, any) int32        entries past a request's last page are never read
    query_starts  (R+1,) int32          context_lens  (R,) int32
    returns       (T, h, Dh), accumulated in float32, in q's dtype; rows that belong to no request
                  (padding) are zero

    Every row is bounded by its own position, and stale slots past the context are cut off before
    the softmax rather than masked after it: 0 * NaN would be NaN.
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
        keys, values = kv[:, pages].float().transpose(1, 2).reshape(   # (2, pages, k, B, Dh) ->
            2, kv_heads, len(pages) * block_size, head_dim)[:, :, :context]   # (k, context, Dh)
        queries = q[first:last].float().reshape(n, kv_heads, heads // kv_heads, head_dim)
        scores = torch.einsum("nkgd,kcd->kgnc", queries, keys) * scale
        position = torch.arange(context - n, context, device=q.device)        # of each query
        future = torch.arange(context, device=q.device)[None, :] > position[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)       # (k, h/k, n, context)
        attended = torch.einsum("kgnc,kcd->nkgd", weights, values)
        out[first:last] = attended.reshape(n, heads, head_dim).to(q.dtype)
    return out
