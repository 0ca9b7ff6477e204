"""The model under every layout and both modes: transformers' logits, one KV cache, counted bytes,
strict loading within one rank's memory, and the sampler."""
import ctypes
import json
import math
import os
import threading
from dataclasses import fields, replace

import pytest
import torch

from common import (BLOCK_SIZE, MODELS, NoLink, factorizations, links, load, oracle_logits,
                    random_texts, requests, save, small_config, step, world, write_checkpoint)
from kernels import TorchKernels, turned
from model import (Checkpoint, Config, LayerWeights, Llama, RandomWeights, SamplingParams, sample,
                   shard_columns, shard_gate_up, shard_qkv, shard_vocab)
from shift import Layout, Link, UserError, both_modes, connect

WEIGHTS = [f.name for f in fields(LayerWeights)]


def build(config, source, sp, tp, link, dtype=torch.float32):
    layout = Layout(sp, tp, config.heads, config.kv_heads, config.ffn)
    return Llama(config, source, layout, link, both_modes(layout, link), config.max_len, dtype,
                 TorchKernels())


def calls(link):
    return {key: count.calls for key, count in link.counts.items()}


# --------------------------------------------------------------------------------------------------
# The same logits as transformers, whatever the layout and the mode

LENGTHS = (23, 9)                       # two requests, and the steps (request, tokens) to run them
PLAN = [((0, 11), (1, 4)), ((0, 1), (1, 5)), ((0, 11),)]


def run_plan(model, mode, texts):
    """Every step of PLAN in one mode -> all rows' logits, by request, on the link's rank 0."""
    work, blocks = requests(texts)
    model.allocate_kv(blocks, BLOCK_SIZE)
    logits = [[] for _ in texts]
    for counts in PLAN:
        out, _ = model.forward(step([(work[r], n) for r, n in counts]), mode)
        assert (out is None) == (model.link.rank > 0), "logits belong to rank 0"
        if out is not None:
            assert out.dtype == torch.float32
            for (r, n), rows in zip(counts, out.split([n for _, n in counts])):
                logits[r].append(rows)
    return [torch.cat(rows) if rows else None for rows in logits]


def parity_world(directory, texts, wanted):
    for P, (link, part) in links([1, 2, 4, 8]).items():
        for name in list(MODELS)[part::8 // P]:              # sets of P ranks share out the models
            config = Config.read(directory / name)
            source = Checkpoint(directory / name, config)
            for sp, tp in factorizations(P):
                model = build(config, source, sp, tp, link)
                for mode in (model.base, model.shift):
                    for got, want in zip(run_plan(model, mode, texts), wanted[name]):
                        if link.rank == 0:
                            worst = (got - want).abs().max().item()
                            assert worst < 1e-4, f"{name} sp {sp} tp {tp} {mode.name}: {worst}"
        assert P == 1 or sum(calls(link).values()) > 50, "every rank must take part"


def test_logits_equal_transformers_under_every_layout(tmp_path):
    """All rows of mixed steps, P = 1, 2, 4, 8, every sp x tp, base and shift mode: within 1e-4."""
    texts, wanted = random_texts(LENGTHS, 101), {}
    for i, name in enumerate(MODELS):
        config = small_config(name)
        write_checkpoint(tmp_path / name, config, shards=1 + i % 3, old=i % 2 == 1)
        assert Config.read(tmp_path / name) == replace(config, seed=0)
        wanted[name] = oracle_logits(tmp_path / name, texts)
        assert wanted[name][0].std() > 0.3, "flat logits would prove nothing"
    assert world(parity_world, 8, tmp_path, texts, wanted) == 0


def tails_world(directory, text, wanted):
    """T = 1 ... 3*sp+1 tokens: shorter than sp, equal, uneven; some ranks with no token at all."""
    connect()
    link, config = Link(), Config.read(directory)
    source, draw = Checkpoint(directory, config), torch.Generator().manual_seed(5)
    for sp, tp in ((2, 4), (4, 2), (8, 1)):
        model = build(config, source, sp, tp, link)
        for T in range(1, 3 * sp + 2):
            rows = torch.rand(T, generator=draw).lt(0.4).nonzero().flatten().tolist()
            work, blocks = requests([text[:T]])
            model.allocate_kv(blocks, BLOCK_SIZE)
            before = link.counts["all_to_all", "logits"].calls
            got, _ = model.forward(step([(work[0], T)], rows), model.base)
            assert (link.counts["all_to_all", "logits"].calls > before) == bool(rows)
            if link.rank or not rows:
                assert got is None
            else:
                assert got.shape == (len(rows), 101)
                worst = (got - wanted[rows]).abs().max().item()
                assert worst < 1e-4, f"sp {sp} tp {tp}, T = {T}, rows {rows}: {worst}"


def test_every_small_number_of_tokens(tmp_path):
    """No padding: T = 1 ... 3*sp+1 for sp = 2, 4, 8 and any choice of rows equal transformers."""
    write_checkpoint(tmp_path, small_config("llama"))
    text = random_texts([25], 101, seed=2)[0]
    assert world(tails_world, 8, tmp_path, text, oracle_logits(tmp_path, [text])[0]) == 0


# --------------------------------------------------------------------------------------------------
# The invariance: one KV cache and one copy of the weights for both modes

# (tokens, mode): a prompt in base mode, then token by token with crossings, and a chunk in between
CROSSINGS = [(13, "base"), (1, "shift"), (1, "shift"), (1, "base"), (1, "shift"), (6, "base"),
             (1, "base"), (3, "shift"), (1, "shift"), (1, "base")]


def invariance_world(texts):
    connect()
    link = Link()
    for name in ("llama", "mha", "qwen3"):
        config = small_config(name)
        source = RandomWeights(config)
        reference = build(config, source, 1, 8, link)
        want, _ = run_crossings(reference, texts, [(n, "shift") for n, _ in CROSSINGS])
        want_pools = dict(link.gather((reference.layout.block(link.rank), reference.kv)))
        for sp, tp in ((2, 4), (4, 2), (8, 1)):
            model = build(config, source, sp, tp, link)
            got, log = run_crossings(model, texts, CROSSINGS)
            block = model.layout.block(link.rank)
            for layer, (mine, other) in enumerate(zip(model.kv, want_pools[block])):
                written = 2 * mine.shape[2] * config.head_dim * sum(map(len, texts))
                assert mine.count_nonzero() == written, "the cache of every token, no other"
                torch.testing.assert_close(mine, other, rtol=0, atol=1e-5, msg=lambda m: (
                    f"{name} sp {sp} tp {tp} rank {link.rank} layer {layer}: {m}"))
            if link.rank == 0:
                torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
            for mode, made in log:                         # by a step, whatever came before it
                degree_sp, degree_tp = (sp, tp) if mode == "base" else (1, 8)
                expected = {("all_to_all", what): config.layers for what in ("qkv", "attention")
                            if degree_sp > 1}
                expected |= {("all_reduce", what): config.layers for what in ("o", "mlp")
                             if degree_tp > 1}
                assert made == {**expected, ("all_to_all", "logits"): 1 + (degree_sp > 1)}, mode


def by_slot(kv):
    """A pool (2, N, k, B, Dh), its pages of keys turned -> (N*B, 2*k*Dh)."""
    keys, values = turned(kv[0]).permute(0, 3, 1, 2), kv[1].transpose(1, 2)       # (N, B, k, Dh)
    return torch.stack([keys, values], 2).flatten(0, 1).flatten(1)


def run_crossings(model, texts, plan):
    """One request per text, all advancing alike -> (last row's logits of each step, calls made)."""
    work, blocks = requests(texts, seed=3)
    model.allocate_kv(blocks, BLOCK_SIZE)
    modes, logits, log = {"base": model.base, "shift": model.shift}, [], []
    for n, name in plan:
        batch = step([(request, n) for request in work])
        pools, before = [pool.clone() for pool in model.kv], calls(model.link)
        out, _ = model.forward(replace(batch, rows=batch.rows[-1:]), modes[name])
        log.append((name, {key: count - before.get(key, 0) for key, count in
                           calls(model.link).items() if count > before.get(key, 0)}))
        logits.append(out)
        written = torch.zeros(blocks * BLOCK_SIZE, dtype=torch.bool)
        written[batch.slot_mapping] = True
        for old, new in zip(pools, model.kv):
            same = by_slot(old) == by_slot(new)
            assert same[~written].all() and not same[written].all(1).any(), "a switch moves nothing"
    return (torch.cat(logits) if logits[0] is not None else None), log


def test_one_cache_serves_both_modes():
    """Crossing between the modes leaves the very cache of a pure TP = 8 run, and sends nothing."""
    texts = random_texts([sum(n for n, _ in CROSSINGS)] * 2, 101, seed=4)
    assert world(invariance_world, 8, texts) == 0


@pytest.mark.parametrize("name", MODELS)
def test_shift_mode_is_a_view_of_base_modes_weights(name):
    """Every shift-mode weight lies in a base-mode weight's storage, and is TP = P's shard."""
    config = small_config(name)
    source = RandomWeights(config)
    for P in (1, 2, 8):
        pure = [build(config, source, 1, P, NoLink(block, P)) for block in range(P)]
        for sp, tp in factorizations(P):
            for rank in range(P):
                model = build(config, source, sp, tp, NoLink(rank, P))
                own = pure[model.layout.block(rank)].weights["base"]
                stored = {}
                for base, shifted, tp_shard in zip(*model.weights.values(), own):
                    for weight in WEIGHTS:
                        whole, view, want = (getattr(x, weight) for x in (base, shifted, tp_shard))
                        if whole is None:
                            assert view is None and weight in ("qkv_bias", "q_norm", "k_norm",
                                                                      "kv")
                            continue
                        storages = [tensor.untyped_storage() for tensor in (whole, view)]
                        assert storages[0].data_ptr() == storages[1].data_ptr()
                        assert view.is_contiguous() and torch.equal(view, want)
                        stored |= {storage.data_ptr(): storage.nbytes() for storage in storages}
                base_bytes = sum(getattr(x, weight).nbytes for x in model.weights["base"]
                                 for weight in WEIGHTS if getattr(x, weight) is not None)
                assert sum(stored.values()) == base_bytes, "bytes beyond base mode's weights"


# --------------------------------------------------------------------------------------------------
# Bytes: what a step sends is what the design's formula says


def bytes_world(texts):
    connect()
    link = Link()
    for name in ("llama", "mha"):
        config = small_config(name)
        source = RandomWeights(config)
        h, D, Dh, V = config.heads // 8, config.dim, config.head_dim, config.vocab
        C = (h + 2 * max(1, config.kv_heads // 8)) * Dh
        for sp, tp in factorizations(8):
            model = build(config, source, sp, tp, link)
            work, blocks = requests(texts)
            model.allocate_kv(blocks, BLOCK_SIZE)
            for T, rows, mode in ((13, [0, 4, 5, 12], model.base), (3, [1], model.base),
                                  (13, [0, 4, 5, 12], model.shift), (3, [], model.shift)):
                for request in work:
                    request.computed = 0
                link.counts.clear()
                model.forward(step([(work[0], T)], rows), mode)
                link.broadcast("control is counted apart" if link.rank == 0 else None)
                m_sp, m_tp, s = (sp, tp, link.rank // tp) if mode.name == "base" else (1, 8, 0)
                first, last = T * s // m_sp, T * (s + 1) // m_sp
                mine, owned = last - first, sum(first <= row < last for row in rows)
                width = V * (link.rank + 1) // 8 - V * link.rank // 8
                reduce = 2 * (m_tp - 1) / m_tp * mine * D * config.layers
                want = {("all_to_all", "qkv"): (m_sp - 1) * mine * C * config.layers,
                        ("all_to_all", "attention"): (T - mine) * h * Dh * config.layers,
                        ("all_reduce", "o"): reduce, ("all_reduce", "mlp"): reduce,
                        ("all_to_all", "logits"): (m_sp - 1) * owned * D
                        + (link.rank > 0) * len(rows) * width}
                got = {key: count.bytes / 4 for key, count in link.counts.items()}
                assert got.pop(("broadcast", "control")) == (link.rank == 0) * Link.PACKET / 4
                assert got == {key: n for key, n in want.items() if n or key in got}, (
                    f"{name} sp {sp} tp {tp} {mode.name} T {T} rank {link.rank}: {got} not {want}")
                got.pop(("all_to_all", "logits"), None)
                mean = sum(link.gather(sum(got.values()) / config.layers)) / 8
                closed = T * D * (4 * (m_tp - 1) / (m_tp * m_sp) + (m_sp - 1) / (m_sp * 8) * (
                    2 * config.heads + 2 * max(config.kv_heads, 8)) * Dh / D)
                assert abs(mean - closed) < 1e-6 * closed, (mean, closed)


def test_bytes_sent_are_those_of_the_formula():
    """Rank by rank and op by op, every factorization of 8, uneven T, head_dim not D/H, K < P."""
    assert world(bytes_world, 8, random_texts([13], 101)) == 0


# --------------------------------------------------------------------------------------------------
# Loading


@pytest.mark.parametrize("name", MODELS)
def test_shards_together_are_the_whole(name):
    """Over all ranks every row of every weight is somewhere, in block-major order, and no other."""
    config = small_config(name)
    H, K, Dh, F_, D = config.heads, config.kv_heads, config.head_dim, config.ffn, config.dim
    whole = RandomWeights(config)
    get = lambda part: whole[f"model.layers.1.{part}.weight"]
    q, k, v = (get(f"self_attn.{x}_proj") for x in "qkv")
    gate, up, o, down = (get(x) for x in ("mlp.gate_proj", "mlp.up_proj", "self_attn.o_proj",
                                          "mlp.down_proj"))
    for sp, tp in sum((factorizations(P) for P in (1, 2, 4, 8)), []):
        P = sp * tp
        layout = Layout(sp, tp, H, K, F_)
        h, n, f = H // P, max(1, K // P), F_ // P
        blocks = {}
        for rank in range(P):
            s, t = divmod(rank, tp)
            qkv = shard_qkv(q, k, v, layout, rank, Dh).mT.reshape(sp, h + 2 * n, Dh, D)
            gate_up = shard_gate_up(gate, up, layout, rank).mT.reshape(sp, 2, f, D)
            parts = [shard_columns(w, layout, rank, width)
                     for w, width in ((o, h * Dh), (down, f))]
            for i in range(sp):
                cell = (qkv[i], gate_up[i], parts[0][i], parts[1][i])
                known = blocks.setdefault(t * sp + i, cell)      # all ranks (., t) hold the same
                assert all(torch.equal(a, b) for a, b in zip(cell, known))
        rows = [torch.cat([blocks[b][i] for b in range(P)], axis) for i, axis in
                ((0, 0), (1, 1), (2, 0), (3, 0))]
        assert torch.equal(torch.cat([blocks[b][0][:h] for b in range(P)]), q.view(H, Dh, D))
        for which, whole_kv in ((slice(h, h + n), k), (slice(h + n, None), v)):
            for head in range(H):                                # the KV head that q head reads
                local = blocks[head // h][0][which][head % h // (h // n)]
                assert torch.equal(local, whole_kv.view(K, Dh, D)[head // (H // K)])
        assert torch.equal(rows[1][0], gate) and torch.equal(rows[1][1], up)
        assert torch.equal(rows[2], o.T) and torch.equal(rows[3], down.T)
        for w in (whole["model.embed_tokens.weight"], torch.arange(5)):
            assert torch.equal(torch.cat([shard_vocab(w, P, rank) for rank in range(P)]), w)


def tensors_of(model):
    """Every tensor that a rank stores, views of another left out."""
    layers = [getattr(layer, name) for layer in model.weights["base"] for name in WEIGHTS]
    head = [] if model.config.tied else [model.head]
    return [t for t in layers + [model.embedding, model.norm] + head if t is not None]


def test_sharded_single_and_old_style_files_load_alike(tmp_path):
    """One file, three with an index, config.json in the old style: the same config and weights."""
    config = small_config("qwen2", layers=3)
    ways = {"one": {}, "three": dict(shards=3), "old": dict(shards=2, old=True)}
    for way, options in ways.items():
        write_checkpoint(tmp_path / way, config, **options)
        read = Config.read(tmp_path / way)
        assert read == replace(config, seed=0)
        source = Checkpoint(tmp_path / way, read)
        for rank in range(4):
            got = build(read, source, 2, 2, NoLink(rank, 4))
            want = build(config, RandomWeights(config), 2, 2, NoLink(rank, 4))
            for a, b in zip(tensors_of(got), tensors_of(want), strict=True):
                assert torch.equal(a, b)
        tables = [set(vars(build(read, source, 2, 2, NoLink(r, 4)))) for r in range(2)]
        assert tables[0] == tables[1]


def edit(directory, name, change):
    path = directory / name
    hf = json.loads(path.read_text())
    change(hf)
    path.write_text(json.dumps(hf))


@pytest.mark.parametrize("change, says", [
    (dict(quantization_config={"quant_method": "fp8"}), "quantization_config"),
    (dict(architectures=["MixtralForCausalLM"]), "MixtralForCausalLM"),
    (dict(architectures=None), "none named"),
    (dict(hidden_act="gelu"), "gelu"), (dict(attention_bias=True), "attention_bias"),
    (dict(mlp_bias=True), "mlp_bias"), (dict(use_sliding_window=True), "use_sliding_window"),
    (dict(hidden_size=None), "hidden_size"), (dict(rope_parameters={"rope_type": "yarn"}), "yarn"),
    (dict(rope_parameters=None, rope_scaling={"type": "dynamic", "factor": 2.0}), "dynamic"),
    (dict(num_key_value_heads=3), "3"), (dict(head_dim=7), "7"),
    (dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), "factor")])
def test_a_config_that_is_not_supported_is_named(tmp_path, change, says):
    """Another architecture, quantization, biases, scaling, heads that cannot be: one clear line."""
    write_checkpoint(tmp_path, small_config("llama"))
    edit(tmp_path, "config.json", lambda hf: hf.update(change) or [
        hf.pop(key) for key, value in change.items() if value is None])
    with pytest.raises(UserError) as error:
        Config.read(tmp_path)
    assert says in str(error.value) and "\n" not in str(error.value)


def spoil(directory, how):
    """One way to break a good checkpoint of two files; (the config it is read with)."""
    config = small_config("llama")
    lost, odd = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    change = {"missing": lambda t: t.pop(lost), "extra": lambda t: t.update(extra=torch.ones(1)),
              "shape": lambda t: t.update({odd: t[odd][:, 1:].contiguous()}),
              "tied": lambda t: t.pop("lm_head.weight")}.get(how)
    write_checkpoint(directory, config, shards=2, change=change)
    second = directory / "model-00002-of-00002.safetensors"
    if how == "truncated":
        second.write_bytes(second.read_bytes()[:-100])
    if how == "header":
        second.write_bytes(b"not a safetensors file at all, no header and no tensor")
    if how == "file":
        second.unlink()
    if how == "nothing":
        (directory / "model.safetensors.index.json").unlink()
    if how == "index":
        (directory / "model.safetensors.index.json").write_text("{")
    return config


@pytest.mark.parametrize("how, says", [
    ("missing", "model.layers.1.mlp.up_proj.weight is missing"), ("extra", "extra is not part"),
    ("shape", "model.layers.0.self_attn.k_proj.weight has shape (24, 47), not (24, 48)"),
    ("tied", "lm_head.weight is missing"), ("truncated", "model-00002-of-00002.safetensors"),
    ("header", "model-00002-of-00002.safetensors"), ("index", "index.json"),
    ("file", "model-00002-of-00002.safetensors does not exist"),
    ("nothing", "model.safetensors does not exist")])
def test_a_broken_checkpoint_is_named(tmp_path, how, says):
    """A missing, extra or misshapen tensor, a file cut short or absent: one line that names it."""
    config = spoil(tmp_path, how)
    with pytest.raises(UserError) as error:
        Checkpoint(tmp_path, config)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_a_checkpoint_may_hold_besides(tmp_path):
    """A tied model's copy of the head and old rotary tables are no error; no config.json is one."""
    config = small_config("mha")
    write_checkpoint(tmp_path, config, change=lambda t: t.update({
        "lm_head.weight": torch.ones(101, 48),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    assert Checkpoint(tmp_path, config).fingerprint
    (tmp_path / "config.json").unlink()
    with pytest.raises(UserError, match="config.json does not exist") as error:
        Config.read(tmp_path)
    assert "\n" not in str(error.value)


def test_random_models():
    """random:dim=...: the same tensors every time, others for another seed; bad names refused."""
    config = Config.random("dim=40,layers=1,heads=4,kv_heads=2,ffn=24,vocab=50,qk_norm=1,seed=3")
    assert (config.dim, config.head_dim, config.qk_norm, config.dtype) == (40, 10, True, "float32")
    a, b, c = (RandomWeights(x) for x in (config, config, replace(config, seed=4)))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(a[name], b[name]) and not torch.equal(a[name], c[name])
    assert a.fingerprint == b.fingerprint != c.fingerprint
    for spec, says in (("dim=x", "dim=x"), ("width=4", "width=4"), ("layers=0", "layers=0"),
                       ("dim", "'dim'"), ("heads=-1", "heads=-1"), ("heads=6,kv_heads=4", "4"),
                       ("dim=8,heads=16", "16"), ("dim=40,heads=8", "head")):
        with pytest.raises(UserError) as error:
            Config.random(spec)
        assert says in str(error.value) and "\n" not in str(error.value)


# A checkpoint of 1 GB, so that one copy too many shows

BIG = Config(dim=2048, layers=8, heads=16, kv_heads=8, ffn=5632, vocab=32000, max_len=64)


def write_big_checkpoint(path):
    """BIG's tensors in bfloat16: one piece of random bytes, over and over."""
    header, end = {}, 0
    for name, shape in BIG.tensors().items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text, piece = json.dumps(header).encode(), os.urandom(1 << 24)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        while end > 0:
            f.write(piece[:end])
            end -= len(piece)


def anonymous_bytes():
    """This process's own memory, without mapped files: a checkpoint's pages are the kernel's."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("RssAnon"))


def memory_world(directory, file, sp, tp, dtype):
    connect()
    link = Link()
    link.barrier()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)
    trim(0)                            # what earlier tests have freed would be used again, unseen
    idle = peak = anonymous_bytes()
    done = threading.Event()

    def watch():
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_bytes())
    watcher = threading.Thread(target=watch)
    watcher.start()
    model = build(BIG, Checkpoint(file, BIG), sp, tp, link, dtype)
    done.set()
    watcher.join()
    link.barrier()
    save(directory, (sum(tensor.nbytes for tensor in tensors_of(model)), peak - idle))


@pytest.fixture(scope="module")
def big_checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("big")
    write_big_checkpoint(directory / "model.safetensors")
    yield directory
    (directory / "model.safetensors").unlink()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc/self/status")
@pytest.mark.parametrize("sp, tp, dtype", [(1, 4, torch.bfloat16), (2, 2, torch.float32)])
def test_loading_takes_no_more_memory_than_the_ranks_share(tmp_path, big_checkpoint, sp, tp, dtype):
    """A rank's peak of its own memory while loading: its share of the weights, and 150 MB."""
    assert world(memory_world, 4, tmp_path, big_checkpoint, sp, tp, dtype, seconds=120) == 0
    for rank, (share, peak) in enumerate(load(tmp_path, 4)):
        print(f"rank {rank} of sp {sp} x tp {tp}, {dtype}: its share {share / 1e6:.0f} MB, "
              f"at the peak {peak / 1e6:.0f} MB: {(peak - share) / 1e6:+.0f} MB")
        assert share <= peak + 5e6, "the watch must see at least what is stored"
        assert peak <= share + 150e6


# --------------------------------------------------------------------------------------------------
# Sampling


def logits_of(rows=1, vocab=50, seed=0, spread=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def tokens(logits, positions=None, **options):
    """The tokens drawn for each row, all with the same parameters."""
    params = SamplingParams(**{"seed": 11, **options})
    positions = range(len(logits)) if positions is None else positions
    return [s.token for s in sample(logits, [params] * len(logits), list(positions))]


def test_greedy():
    """Temperature 0 or next to it, top_k 1, top_p 0 and min_p 1 all take the most likely token."""
    logits = logits_of(40)
    best = logits.argmax(-1).tolist()
    for options in (dict(temperature=0), dict(temperature=0.0, seed=None), dict(temperature=1e-30),
                    dict(top_k=1), dict(top_p=0.0), dict(min_p=1.0)):
        assert tokens(logits, **options) == best, options
    assert tokens(logits) != best, "at temperature 1 it must not"
    tie = torch.tensor([[1.0, 3.0, 3.0, 0.0]] * 50)
    assert set(tokens(tie, temperature=0)) == {1}


def test_what_cuts_nothing_changes_nothing():
    """top_p 1, min_p 0, and top_k off or beyond the vocabulary: the draws of the bare softmax."""
    logits = logits_of(300)
    plain = tokens(logits)
    for options in (dict(top_p=1.0), dict(top_k=-1), dict(top_k=50), dict(top_k=10 ** 9),
                    dict(min_p=0.0)):
        assert tokens(logits, **options) == plain, options
    assert tokens(logits, temperature=5.0) != plain and tokens(logits, seed=12) != plain


def test_a_draw_depends_on_seed_and_position_only():
    """A row alone, in any batch, in any order, next to any parameters: the same token."""
    logits = logits_of(60, seed=1)
    params = [SamplingParams(temperature=[0, 0.5, 1.0, 3.0][i % 4], top_k=[0, 5, 100][i % 3],
                             top_p=[1.0, 0.9][i % 2], min_p=[0.0, 0.05][i // 2 % 2], seed=i // 7,
                             logprobs=[None, 2][i % 2]) for i in range(60)]
    positions = [(7 * i) % 23 for i in range(60)]
    batch = sample(logits, params, positions)
    for i in range(60):
        assert sample(logits[i:i + 1], params[i:i + 1], positions[i:i + 1]) == batch[i:i + 1]
    order = torch.randperm(60, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = sample(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert shuffled == [batch[i] for i in order]
    one = logits_of().expand(400, -1)
    assert len(set(tokens(one))) > 5 and len(set(tokens(one, positions=[3] * 400))) == 1
    assert len({tokens(one[:1], positions=[3], seed=seed)[0] for seed in range(400)}) > 5


def chi_square(counts, probs):
    """(statistic, its bound): five standard deviations above the mean, cells of 5 and more."""
    expected = probs.double() * counts.sum()
    cells = expected >= 5
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum().item()
    freedom = cells.sum().item() - 1
    return statistic, freedom + 5 * math.sqrt(2 * freedom) + 5


def test_draws_follow_the_distribution():
    """20,000 positions against softmax, at three temperatures and under cuts: chi-square."""
    logits, count = logits_of(vocab=30), 20_000
    for options in (dict(), dict(temperature=0.6), dict(temperature=2.5, seed=99), dict(top_k=7),
                    dict(top_p=0.8), dict(min_p=0.1), dict(temperature=1.5, top_k=12, top_p=0.9)):
        drawn = torch.tensor(tokens(logits.expand(count, -1), **options)).bincount(minlength=30)
        probs = cut((logits[0].double() / options.get("temperature", 1)).softmax(-1), **options)
        assert drawn[probs == 0].sum() == 0, options
        statistic, bound = chi_square(drawn, probs)
        assert statistic < bound, f"{options}: {statistic:.0f}, bound {bound:.0f}"
    statistic, bound = chi_square(drawn, logits[0].softmax(-1))
    assert statistic > bound, "a wrong distribution must be seen"


def cut(probs, top_k=0, top_p=1.0, min_p=0.0, **_):
    """The kept tokens' probabilities, spelt out one token at a time."""
    order, total, kept = sorted(range(len(probs)), key=lambda i: -probs[i]), 0.0, []
    whole = sum(probs[i] for i in order[:top_k or None])
    for place, i in enumerate(order[:top_k or None]):
        if place == 0 or (total < top_p and probs[i] >= min_p * probs[order[0]]):
            kept.append(i)
        total += probs[i] / whole
    out = torch.zeros_like(probs)
    out[kept] = probs[kept] / sum(probs[i] for i in kept)
    return out


def test_cuts_are_exact():
    """Every token inside a cut is drawn, and none outside: 2,000 positions, flat enough to see."""
    logits = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05]).log()[[3, 0, 4, 2, 1]].expand(2000, -1)
    for options, kept in ((dict(top_k=1), {1}), (dict(top_k=3), {1, 4, 3}), (dict(top_p=0.49), {1}),
                          (dict(top_p=0.51), {1, 4}), (dict(top_p=0.69), {1, 4}),
                          (dict(top_p=0.71), {1, 4, 3}), (dict(top_p=0.96), {0, 1, 2, 3, 4}),
                          (dict(min_p=0.39), {1, 4}), (dict(min_p=0.41), {1}),
                          (dict(min_p=0.19), {1, 4, 3, 0}),
                          (dict(top_k=3, top_p=0.6), {1, 4}), (dict(top_k=2, top_p=0.7), {1}),
                          (dict(), {0, 1, 2, 3, 4})):
        assert set(tokens(logits, **options)) == kept, options


def test_logprobs():
    """log_softmax of the model's own logits, best first, whatever the temperature and the cuts."""
    logits = logits_of(6)
    want = logits.log_softmax(-1)
    for options in (dict(temperature=0), dict(temperature=2.0, top_k=3, seed=1)):
        for asked in (0, 1, 5, 20):
            params = [SamplingParams(logprobs=asked, **options)] * 6
            for i, one in enumerate(sample(logits, params, range(6))):
                assert one.logprob == pytest.approx(want[i, one.token].item(), abs=1e-5)
                assert len(one.top) == asked
                ids, values = [t for t, _ in one.top], [p for _, p in one.top]
                assert ids == logits[i].argsort(descending=True).tolist()[:asked]
                assert values == pytest.approx(want[i, ids].tolist(), abs=1e-5)
    small = sample(logits[:1, :3], [SamplingParams(logprobs=20, seed=0)], [0])[0]
    assert len(small.top) == 3, "a vocabulary smaller than what was asked"
    nothing = sample(logits, [SamplingParams(seed=0)] * 6, range(6))[0]
    assert nothing.logprob is None and nothing.top is None


@pytest.mark.parametrize("name, value", [
    ("max_tokens", 0), ("temperature", -0.1), ("temperature", math.inf), ("temperature", math.nan),
    ("top_k", -2), ("top_p", -0.1), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.5),
    ("min_p", 1.5), ("logprobs", -1), ("logprobs", 21), ("stop", ("a", ""))])
def test_bad_parameters_are_named(name, value):
    """The error says which parameter, and its value."""
    with pytest.raises(UserError) as error:
        SamplingParams(**{name: value})
    assert name in str(error.value) and str(value) in str(error.value)
