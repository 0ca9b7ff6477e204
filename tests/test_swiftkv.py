"""SwiftKV: the logits of a plain-torch reference under every layout, whatever the chunks, rows and
switches; what later layers store, send and skip; the engine; and the script that makes such models.
"""
import itertools
import json
import math
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from assets import train_tiny
from assets.swiftkv import convert
from common import (BLOCK_SIZE, NoLink, factorizations, links, random_texts, requests, small_config,
                    step, world, write_checkpoint)
from kernels import NativeKernels, TorchKernels, why_not_native
from assets.tokenizer import Tokenizer
from model import Checkpoint, Config, Llama, RandomWeights, SamplingParams
from serve import Engine, Pooling
from shift import Layout, UserError, both_modes

ASSETS = Path(__file__).parent.parent / "assets"

# m at its ends and in the middle; K below and above the ranks; with biases, too
MODELS = {"first": small_config("llama", layers=3, num_key_value_layers=1),
          "half": small_config("mha", layers=4, num_key_value_layers=2),
          "last": small_config("qwen2", layers=3, num_key_value_layers=2)}


def write(directory, config, change=None):
    """A checkpoint whose config.json has the keys of Snowflake's."""
    write_checkpoint(directory, config, change=change)
    hf = json.loads((directory / "config.json").read_text())
    hf |= {"architectures": ["LlamaSwiftKVForCausalLM"], "model_type": "llama_swiftkv",
           "swiftkv": True, "num_key_value_layers": config.num_key_value_layers,
           "key_value_group_size": 1}
    (directory / "config.json").write_text(json.dumps(hf))


# --------------------------------------------------------------------------------------------------
# The definition, in plain torch: one text, no cache, no ranks, every token through every layer


def rms(x, weight, eps):
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def turn(x, theta):
    """Rotary embedding of x (heads, T, Dh), as complex numbers (column i, column i + Dh/2)."""
    T, Dh = x.shape[-2:]
    angle = torch.arange(T)[:, None] * theta ** (-torch.arange(0, Dh, 2, dtype=torch.float64) / Dh)
    z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag], -1).float()


def reference(tensors, c, text):
    """Logits (T, V): `tensors` by their names in the checkpoint."""
    head = tensors["model.embed_tokens.weight" if c.tied else "lm_head.weight"]
    return last_hidden(tensors, c, text) @ head.T


@torch.no_grad()
def last_hidden(tensors, c, text):
    """The final hidden states (T, D)."""
    x, kv_input = tensors["model.embed_tokens.weight"][torch.tensor(text)], None
    for i in range(c.layers):
        def project(what, x):
            name = f"model.layers.{i}.self_attn.{what}_proj{'' if kv_input is None else '_swiftkv'}"
            y = x @ tensors[f"{name}.weight"].T
            if c.qkv_bias:
                y = y + tensors[f"{name}.bias"]
            y = y.unflatten(-1, (-1, c.head_dim)).transpose(0, 1)                 # (heads, T, Dh)
            if c.qk_norm and what != "v":
                y = rms(y, tensors[f"model.layers.{i}.self_attn.{what}_norm.weight"], c.norm_eps)
            return y
        weight = lambda name: tensors[f"model.layers.{i}.{name}.weight"]
        if i == (c.num_key_value_layers or c.layers):
            kv_input = rms(x, tensors["model.norm_swiftkv.weight"], c.norm_eps)
        y = rms(x, weight("input_layernorm"), c.norm_eps)
        source = y if kv_input is None else kv_input
        q, k, v = project("q", y), project("k", source), project("v", source)
        q, k = (turn(z, c.rope["rope_theta"]) for z in (q, k))
        k, v = (z.repeat_interleave(c.heads // c.kv_heads, 0) for z in (k, v))
        scores = q @ k.mT * c.head_dim ** -0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        o = scores.masked_fill(future, -math.inf).softmax(-1) @ v
        x = x + o.transpose(0, 1).flatten(1) @ weight("self_attn.o_proj").T
        y = rms(x, weight("post_attention_layernorm"), c.norm_eps)
        x = x + (F.silu(y @ weight("mlp.gate_proj").T) * (y @ weight("mlp.up_proj").T)
                 ) @ weight("mlp.down_proj").T
    return rms(x, tensors["model.norm.weight"], c.norm_eps)


def build(config, source, sp, tp, link, kernels=None):
    layout = Layout(sp, tp, config.heads, config.kv_heads, config.ffn)
    return Llama(config, source, layout, link, both_modes(layout, link), config.max_len,
                 torch.float32, kernels or TorchKernels())


# --------------------------------------------------------------------------------------------------
# Every layout

LENGTHS = (24, 11)
# (tokens of each request), rows: a chunk that samples nothing, one request at its end, drafts (the
# last rows of several tokens), all rows of both, a decode beside a chunk, and one alone
PLAN = [({0: 11, 1: 4}, []), ({0: 1, 1: 3}, [3]), ({0: 6}, [3, 4, 5]), ({0: 4, 1: 2}, "all"),
        ({0: 1, 1: 2}, [0]), ({0: 1}, [0])]
WAYS = "bbbbbb", "bsbbsb", "sbssbs"


def run_plan(model, way, texts, want):
    """Every step of PLAN, in the modes of `way`: what comes out is the reference's, row by row."""
    work, blocks = requests(texts)
    model.allocate_kv(blocks, BLOCK_SIZE)
    worst, link, m = 0.0, model.link, model.config.num_key_value_layers
    for (counts, rows), letter in zip(PLAN, way):
        mode = model.base if letter == "b" else model.shift
        truth = torch.cat([want[r][work[r].computed:work[r].computed + n]
                           for r, n in counts.items()])
        link.counts.clear()
        got, _ = model.forward(step([(work[r], n) for r, n in counts.items()], rows), mode)
        assert (got is None) == (link.rank > 0 or rows == [])
        if got is not None:
            worst = max(worst, (got - (truth if rows == "all" else truth[rows])).abs().max().item())
        calls = {what: count for (_, what), count in link.counts.items()}
        T, D, own = len(truth), model.config.dim, 0
        if mode.sp > 1:
            own = T * (mode.s + 1) // mode.sp - T * mode.s // mode.sp
            assert calls["swiftkv"].calls == 1, "the residual is gathered once"
            assert calls["swiftkv"].bytes == (mode.sp - 1) * own * D * 4
        later = len(model.config.swiftkv) * (rows != []) * (link.size > 1)
        assert ("swiftkv" in calls) == (mode.sp > 1)
        assert ("o" in calls and calls["o"].calls or 0) == m * (mode.tp > 1) + later, (
            "later layers are tensor-parallel over all, and call nothing where no row is wanted")
    return worst


def parity_world(directory, texts, wanted):
    for P, (link, part) in links([1, 2, 4, 8]).items():
        for name in list(MODELS)[part::8 // P]:              # sets of P ranks share out the models
            config = MODELS[name]
            source = RandomWeights(config)
            for sp, tp in factorizations(P):
                model = build(config, source, sp, tp, link)
                for way in WAYS:
                    worst = run_plan(model, way, texts, wanted[name])
                    assert worst < 1e-4, f"{name} sp {sp} tp {tp} {way}: {worst}"


def test_logits_equal_the_reference_under_every_layout(tmp_path):
    """P = 1, 2, 4, 8, every sp x tp; chunks, drafts, all rows, none; modes that switch midway."""
    texts, wanted = random_texts(LENGTHS, 101), {}
    for name, config in MODELS.items():
        write(tmp_path / name, config)
        tensors = load_file(tmp_path / name / "model.safetensors")
        wanted[name] = [reference(tensors, config, text) for text in texts]
        plain = {key.replace("_swiftkv", ""): w for key, w in tensors.items()}
        other = reference(plain, replace(config, num_key_value_layers=0), texts[0])
        assert (other - wanted[name][0]).abs().max() > 0.1, "it must matter where K and V come from"
    assert world(parity_world, 8, tmp_path, texts, wanted) == 0


def test_kernels_in_c_too():
    """The fused C attention, which writes all tokens' K and V and attends for the wanted rows."""
    if why_not_native():
        pytest.skip(why_not_native())
    config = small_config("qwen3", layers=4, num_key_value_layers=2)
    source, texts = RandomWeights(config), random_texts(LENGTHS, 101)
    want = [reference(source, config, text) for text in texts]
    for kernels in (NativeKernels(1), TorchKernels()):
        model = build(config, source, 1, 1, CountingNoLink(), kernels)
        assert run_plan(model, WAYS[0], texts, want) < 1e-4


class CountingNoLink(NoLink):
    counts = {}


def test_rows_that_are_not_last_are_an_error():
    """Attention takes a request's queries for the last tokens of its context, so rows must be."""
    config = MODELS["half"]
    model = build(config, RandomWeights(config), 1, 1, NoLink())
    for rows, fine in (([4, 6], True), ([3, 4, 5, 6], True), ([3], False), ([2, 4], False)):
        work, blocks = requests(random_texts((5, 2), 101))
        model.allocate_kv(blocks, BLOCK_SIZE)
        batch = step([(work[0], 5), (work[1], 2)], rows)
        if fine:
            assert len(model.forward(batch, model.base)[0]) == len(rows)
        else:
            with pytest.raises(AssertionError):
                model.forward(batch, model.base)


# --------------------------------------------------------------------------------------------------
# Weights


def test_later_layers_store_one_block():
    """A rank's share of a later layer is 1/P in any layout, and the same that TP = P gives it."""
    config = small_config("llama", layers=4, num_key_value_layers=3, kv_heads=8)
    source, P = RandomWeights(config), 8
    sizes = [math.prod(shape) for name, shape in config.tensors().items()
             if ".3." in name and "norm" not in name]
    pure = [build(config, source, 1, P, NoLink(block, P)) for block in range(P)]
    for sp, tp in factorizations(P):
        for rank in range(P):
            model = build(config, source, sp, tp, NoLink(rank, P))
            base, shift, want = (one.weights[mode][3] for one, mode in (
                (model, "base"), (model, "shift"), (pure[model.layout.block(rank)], "shift")))
            assert base is shift
            tensors = [w for name, w in vars(shift).items() if w is not None and "norm" not in name]
            assert sum(w.untyped_storage().nbytes() for w in tensors) == sum(sizes) * 4 // P
            for name, w in vars(want).items():
                assert w is None or torch.equal(w, getattr(shift, name)), name
            assert model.weights["base"][0].gate_up.shape[0] == sp, "the others hold sp blocks"


OLD = "model.layers.1.self_attn.k_proj.weight"
NEW = "model.layers.2.self_attn.v_proj_swiftkv.weight"


@pytest.mark.parametrize("change, says", [
    (lambda t: t.pop(NEW), f"{NEW} is missing"),
    (lambda t: t.update({NEW: t[NEW][1:].clone()}), f"{NEW} has shape (23, 48), not (24, 48)"),
    (lambda t: t.pop("model.norm_swiftkv.weight"), "model.norm_swiftkv.weight is missing"),
    (lambda t: t.update({OLD.replace("k_proj", "k_proj_swiftkv"): t[OLD].clone()}), "is not part"),
    (lambda t: t.pop(OLD), f"{OLD} is missing"),
    (lambda t: t.update({NEW.replace("_swiftkv", ""): t[NEW].clone()}), None)])
def test_a_broken_checkpoint_is_named(tmp_path, change, says):
    """Missing, misshapen, in the wrong layer; the teacher's own projections may stay in the file,
    as they do in what Snowflake's trainer saves."""
    config = small_config("llama", layers=4, num_key_value_layers=2)
    write(tmp_path, config, change)
    assert Config.read(tmp_path).swiftkv == range(2, 4)
    if says is None:
        Checkpoint(tmp_path, config)
    else:
        with pytest.raises(UserError) as error:
            Checkpoint(tmp_path, config)
        assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("key, value", [("key_value_group_size", 2), ("num_key_value_layers", 5),
                                        ("num_key_value_layers", -1)])
def test_a_config_that_is_not_supported_is_named(tmp_path, key, value):
    """Layers that share K and V, or an m that is no number of layers: one line with the value."""
    write(tmp_path, small_config("llama", layers=4, num_key_value_layers=2))
    hf = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**hf, key: value}))
    with pytest.raises(UserError) as error:
        Config.read(tmp_path)
    assert f"{key} = {value}" in str(error.value) and "\n" not in str(error.value)


# --------------------------------------------------------------------------------------------------
# The engine

SPEC = "dim=32,layers=4,heads=8,kv_heads=2,head_dim=12,ffn=64,vocab=97,max_len=64,"
SPEC += "num_key_value_layers=2"


def likely(tensors, config, prompt, output):
    """Is every token of a greedy output the reference's, up to rounding?"""
    logits = reference(tensors, config, prompt + output)[len(prompt) - 1:-1]
    chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    return (logits.max(-1).values - chosen < 1e-4).all()


def engine_world(model, prompts):
    for options in (dict(sp=2, explain=2), dict(tp=2), dict(sp=2, threshold="auto")):
        engine = Engine(**{**dict(model=model, block_size=4, kv_blocks=64, max_step_tokens=16,
                                  max_seqs=3, threshold=4), **options})
        tensors = RandomWeights(engine.config)
        for _ in range(2):                                   # the second time from the prefix cache
            outputs = engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0))
            for prompt, output in zip(prompts, outputs or ()):
                assert len(output.tokens) == 8
                assert likely(tensors, engine.config, prompt, output.tokens), options
        assert engine.scheduler.cached_tokens >= 16
        assert "auto" in options.values() or min(engine.steps.values()) > 2, "both modes must run"


def test_the_engine_gives_the_references_tokens():
    """Greedy, two ranks: prompts longer than a step, in company, again from the prefix cache."""
    prompts = random_texts((29, 5, 18, 11), 97, seed=3)
    assert world(engine_world, 2, f"random:{SPEC}", prompts) == 0


def embedding_world(model, texts):
    for options in (dict(sp=4), dict(sp=2, tp=2), dict(tp=4)):
        engine = Engine(**options, model=model, block_size=4, kv_blocks=64, max_step_tokens=16,
                        max_seqs=3, threshold=6, speculate="suffix")
        tensors, greedy = RandomWeights(engine.config), SamplingParams(max_tokens=12, temperature=0)
        pools = {"mean": lambda h: h.mean(0), "last": lambda h: h[-1], "first": lambda h: h[0]}
        outputs = []
        if engine.rank == 0:
            for kind, text in itertools.product(pools, texts):
                outputs += engine.submit(text, Pooling(kind)), engine.submit(text, greedy)
            engine.close()
        engine.run()
        for embedding, output in zip(outputs[::2], outputs[1::2]):
            hidden = last_hidden(tensors, engine.config, embedding.prompt)
            want = F.normalize(pools[embedding.params.pooling](hidden), dim=0)
            got = torch.frombuffer(bytearray(embedding.vector), dtype=torch.float32)
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
            assert likely(tensors, engine.config, output.prompt, output.tokens), options
        assert engine.rank or engine.accepted > 0 and len(engine.steps) == 2, engine.steps


def test_embeddings_are_the_references_pooled():
    """Texts longer than a step, in company of others that are continued, with drafts: their steps
    take all tokens through the later layers."""
    prompts = random_texts((29, 5, 18), 97, seed=3)
    assert world(embedding_world, 4, f"random:{SPEC}", prompts + [[5, 6, 7] * 6]) == 0


# --------------------------------------------------------------------------------------------------
# The script, and what it made


def loss(directory, text):
    """Of the text, by the reference and by model.py, which must agree: the mean over its tokens."""
    config = Config.read(directory)
    tensors = {name: w.float() for name, w in Checkpoint(directory, config).items()}
    model = build(config, tensors, 1, 1, NoLink())
    work, blocks = requests([text])
    model.allocate_kv(blocks, BLOCK_SIZE)
    got, _ = model.forward(step([(work[0], len(text))]), model.base)
    if config.swiftkv:
        assert (got - reference(tensors, config, text)).abs().max() < 1e-4
    return F.cross_entropy(got[:-1], torch.tensor(text[1:])).item()


def test_the_script_makes_a_checkpoint_that_runs(tmp_path):
    """From assets/tiny: it loads, its files are the Llama's own but for the new tensors, and it is
    worse than the Llama, but not by much. The one in assets, distilled, is better than that."""
    convert(ASSETS / "tiny", 3, tmp_path / "made")
    assert sorted(os.listdir(tmp_path / "made")) == sorted(
        name for name in os.listdir(ASSETS / "tiny-swiftkv") if name != "README.md")
    assert (tmp_path / "made" / "swiftkv.safetensors").stat().st_size < 1e6
    tokenizer, rng = Tokenizer(tmp_path / "made", Config.read(tmp_path / "made")), random.Random(5)
    texts = [tokenizer.encode(train_tiny.document(rng, "held"))[:400] for _ in range(16)]
    llama, made, distilled = (sum(loss(directory, text) for text in texts) / 16 for directory in (
        ASSETS / "tiny", tmp_path / "made", ASSETS / "tiny-swiftkv"))
    print(f"held-out loss: Llama {llama:.4f}, initialised {made:.4f}, distilled {distilled:.4f}")
    assert llama < distilled < made < llama + 0.1
    with pytest.raises(SystemExit, match="--keep 6 must be between 1 and 5"):
        convert(ASSETS / "tiny", 6, tmp_path / "no")
