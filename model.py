"""model.py: a Llama, from its files to the next token.

What it does: reads a Hugging Face checkpoint (config, safetensors), loads this rank's slices of the
weights in the one order that serves both modes, runs the forward pass under any `Mode`, and
samples. The collectives of Shift Parallelism stand in `run_layers`, where they happen.

What it does not know: text, requests, scheduling, HTTP. A step is a `Batch` of token ids and slots.

    pytest tests/test_model.py

Shapes (one legend in every file):
    T tokens in this step     P ranks = sp * tp      D hidden size      V vocabulary
    H query heads             K KV heads             Dh head size       F MLP width
    h = H/P, k = max(1, K/P), f = F/P   what ONE rank owns (one "block")
    C = (h + 2k) * Dh         one block's q, k and v columns
    t tokens of this rank's slice in this mode: about T/sp
    R requests in this step   n rows whose logits are wanted
"""
import hashlib
import json
import math
import mmap
from collections import namedtuple
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file

from shift import UserError, collectives_of, token_slices

# --------------------------------------------------------------------------------------------------
# Configuration

FAMILIES = {"LlamaForCausalLM": {}, "Qwen2ForCausalLM": {"qkv_bias": True},
            "Qwen3ForCausalLM": {"qk_norm": True}, "LlamaSwiftKVForCausalLM": {}}
ROPES = {"default": (), "linear": ("factor",),                # the scalings and what they need
         "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                    "original_max_position_embeddings")}


@dataclass(frozen=True)
class Config:
    """The shape of a Llama; the defaults are those of `random:` models."""
    dim: int = 512                     # D
    layers: int = 8                    # L
    num_key_value_layers: int = 0      # m of SwiftKV; 0 means L, so that there is none of it
    heads: int = 16                    # H
    kv_heads: int = 8                  # K
    head_dim: int = 0                  # Dh; 0 means D / H
    ffn: int = 1408                    # F
    vocab: int = 4096                  # V
    max_len: int = 4096                # the context the model was trained for
    norm_eps: float = 1e-5
    tied: bool = False                 # the head is the embedding table
    qkv_bias: bool = False             # Qwen2
    qk_norm: bool = False              # Qwen3
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    dtype: str = "bfloat16"            # of the checkpoint
    eos: tuple = ()                    # token ids that end a text
    seed: int = 0                      # of a `random:` model

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.dim // self.heads)
        if not 0 <= self.num_key_value_layers <= self.layers:
            raise UserError(f"num_key_value_layers = {self.num_key_value_layers} must be between 0 "
                            f"(no SwiftKV) and {self.layers}, the number of layers")
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads "
                            f"equally")
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"head size {self.head_dim} (hidden size {self.dim}, {self.heads} "
                            f"heads) must be even, and at least 2")
        kind = self.rope["rope_type"]
        if kind not in ROPES or not self.rope.keys() >= set(ROPES[kind]):
            raise UserError(f"rope {self.rope} is not supported; these rope_types are, with what "
                            f"each needs: {ROPES}")

    @property
    def swiftkv(self):
        """Layers m ... L-1, which all take K and V from the residual stream leaving layer m-1
        ("SwiftKV", arXiv 2410.03960)."""
        return range(self.num_key_value_layers or self.layers, self.layers)

    @classmethod
    def random(cls, spec):
        """From "dim=512,layers=8,..." as in --model random:..."""
        known = {f.name: f.type for f in fields(cls) if f.type in (int, bool)}
        values = {}
        for item in filter(None, spec.split(",")):
            name, _, value = item.partition("=")
            zero = name in ("seed", "head_dim") or known.get(name) is bool       # may it be 0?
            if name not in known or not value.isdecimal() or not (zero or int(value)):
                raise UserError(f"--model random: cannot take {item!r}; use name=number with "
                                f"the names {', '.join(known)}")
            values[name] = known[name](int(value))
        return cls(**values, dtype="float32")

    @classmethod
    def read(cls, directory):
        """From config.json (and the end-of-text ids of generation_config.json)."""
        hf = read_json(directory, "config.json")
        family = (hf.get("architectures") or ["none named"])[0]
        if family not in FAMILIES:
            raise UserError(f"{directory}: architecture {family} is not supported; these are: "
                            f"{', '.join(FAMILIES)}")
        for key, plain in (("quantization_config", None), ("attention_bias", False),
                           ("mlp_bias", False), ("use_sliding_window", False),
                           ("hidden_act", "silu"), ("key_value_group_size", 1)):
            if (hf.get(key) or plain) != plain:
                raise UserError(f"{directory}: {key} = {str(hf[key])[:60]} is not supported, "
                                f"only {plain}")
        # transformers 5 writes rope_parameters; before it, rope_theta and rope_scaling
        rope = {"rope_theta": hf.get("rope_theta", 10000.0),
                **(hf.get("rope_parameters") or hf.get("rope_scaling") or {})}
        rope.setdefault("rope_type", rope.pop("type", "default"))            # "type" is older still
        eos = set()
        for file in (hf, read_json(directory, "generation_config.json", default={})):
            ids = file.get("eos_token_id", [])
            eos |= set(ids) if isinstance(ids, list) else {ids}
        try:
            return cls(
                dim=hf["hidden_size"], layers=hf["num_hidden_layers"], ffn=hf["intermediate_size"],
                num_key_value_layers=hf.get("num_key_value_layers") or 0, vocab=hf["vocab_size"],
                heads=hf["num_attention_heads"], head_dim=hf.get("head_dim") or 0,
                kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
                max_len=hf.get("max_position_embeddings", 2048),
                norm_eps=hf.get("rms_norm_eps", 1e-6), tied=hf.get("tie_word_embeddings", False),
                rope=rope, dtype=hf.get("dtype") or hf.get("torch_dtype") or "float32",
                eos=tuple(sorted(eos - {None})), **FAMILIES[family])
        except KeyError as e:
            raise UserError(f"{directory}/config.json: {e} is missing") from None

    def tensors(self):
        """Name -> shape of every tensor of the checkpoint, by Hugging Face's names."""
        D, q, kv = self.dim, self.heads * self.head_dim, self.kv_heads * self.head_dim
        rows = {"q": q, "k": kv, "v": kv}
        shapes = {"model.embed_tokens.weight": (self.vocab, D), "model.norm.weight": (D,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, D)
        if self.swiftkv:
            shapes["model.norm_swiftkv.weight"] = (D,)
        for i in range(self.layers):
            kind = "_swiftkv" * (i in self.swiftkv)
            layer = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
                     **{f"self_attn.{x}_proj{kind}.weight": (n, D) for x, n in rows.items()},
                     "self_attn.o_proj.weight": (D, q), "mlp.gate_proj.weight": (self.ffn, D),
                     "mlp.up_proj.weight": (self.ffn, D), "mlp.down_proj.weight": (D, self.ffn)}
            if self.qkv_bias:
                layer |= {f"self_attn.{x}_proj{kind}.bias": (n,) for x, n in rows.items()}
            if self.qk_norm:
                layer |= {f"self_attn.{x}_norm.weight": (self.head_dim,) for x in "qk"}
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes


def read_json(directory, name, default=None):
    path = Path(directory) / name
    if default is not None and not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist: --model wants a directory in Hugging Face layout, "
                        f"a hub id like org/name, or random:...") from None
    except (OSError, ValueError) as e:
        raise UserError(f"{path} cannot be read: {e}") from None


def find_model(name):
    """The local directory of a model: the directory itself, or a hub id downloaded (or cached)."""
    if Path(name).is_dir():
        return str(name)
    from huggingface_hub import snapshot_download
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                                 ignore_patterns=["*/*"])
    except Exception as e:     # not a hub id, no such repository, or a gated one; no network; ...
        raise UserError(f"--model {name}: no such directory, and not to be had from the hub "
                        f"({' '.join((str(e) or repr(e)).split())})") from None


# --------------------------------------------------------------------------------------------------
# Weights: where they come from, and which slices a rank takes


class Checkpoint(dict):
    """The tensors of a directory's safetensors files, by name, mapped into memory: what is never
    used is never read. Strict: a missing, extra or misshapen tensor is an error that names it."""

    def __init__(self, directory, config):
        index = read_json(directory, "model.safetensors.index.json", default={})
        for file in sorted(set(index.get("weight_map", {"": "model.safetensors"}).values())):
            path = Path(directory) / file
            try:
                self.update(load_file(path))
            except FileNotFoundError:
                raise UserError(f"{path} does not exist: the checkpoint is incomplete") from None
            except (SafetensorError, OSError) as e:
                raise UserError(f"{path} is not a whole safetensors file ({e}): fetch it again")
        look = [(name, w.dtype, w.flatten()[:8].tolist()) for name, w in sorted(self.items())]
        self.fingerprint = hashlib.blake2b(repr(look).encode()).hexdigest()
        # a tied model may store its head again, old files keep the rotary frequencies, and those of
        # SwiftKV the projections of the model that it was made from
        spare = ("rotary_emb.inv_freq", *["lm_head.weight"] * config.tied,
                 *(f"layers.{i}.self_attn.{x}_proj.weight" for i in config.swiftkv for x in "qkv"))
        wanted = config.tensors()
        found = {name: tuple(w.shape) for name, w in self.items()
                 if name in wanted or not name.endswith(spare)}
        wrong = [name for name in {**wanted, **found} if wanted.get(name) != found.get(name)]
        if wrong:
            name = wrong[0]
            fault = ("is missing from the files" if name not in found else
                     "is not part of this model" if name not in wanted else
                     f"has shape {found[name]}, not {wanted[name]}")
            raise UserError(f"{directory}: tensor {name} {fault} ({len(wrong)} such faults)")


class RandomWeights:
    """Tensors drawn from the seed and their own name, so the same whatever P: for experiments."""

    def __init__(self, config):
        self.shapes, self.seed = config.tensors(), config.seed
        self.fingerprint = f"random {self.seed}"

    def __getitem__(self, name):
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        draw = torch.randn(self.shapes[name], generator=generator)
        if draw.dim() > 1:
            return draw * draw.shape[1] ** -0.5                 # keeps the size of activations
        return draw * 0.1 + (not name.endswith("bias"))         # norms are near one


# The shards, as pure functions of (whole tensors, layout, rank). All are over the sp blocks of this
# rank's base shard, (sp, in, out): the shift-mode shard, one block, is a contiguous view of it.


def shard_qkv(q, k, v, layout, rank, head_dim):
    """q (H*Dh, D), k and v (K*Dh, D) -> (sp, D, C), columns [q; k; v]; or biases -> (sp, C)."""
    parts = (q, layout.q_heads), (k, layout.kv_heads_of), (v, layout.kv_heads_of)
    rows = torch.cat([w[heads(block).start * head_dim:heads(block).stop * head_dim]
                      for block in layout.shard(rank) for w, heads in parts])
    rows = rows.unflatten(0, (layout.sp, -1))
    return rows.mT if q.dim() == 2 else rows


def shard_gate_up(gate, up, layout, rank):
    """gate and up (F, D) -> (sp, D, 2f), columns [gate; up]."""
    rows = torch.cat([w[block * layout.f:(block + 1) * layout.f]
                      for block in layout.shard(rank) for w in (gate, up)])
    return rows.unflatten(0, (layout.sp, -1)).mT


def shard_columns(w, layout, rank, width):
    """w (D, P*width), o_proj or down_proj -> (sp, width, D): the columns that each block feeds."""
    blocks = layout.shard(rank)
    return w[:, blocks.start * width:blocks.stop * width].T.unflatten(0, (-1, width))


def shard_vocab(w, ranks, rank):
    """w (V, D) -> the rows [V*r//P, V*(r+1)//P): uneven shares are fine."""
    return w[len(w) * rank // ranks:len(w) * (rank + 1) // ranks]


@dataclass
class LayerWeights:
    """One rank's weights of one layer, for one mode of `blocks` blocks: sp in base, 1 in shift."""
    attention_norm: torch.Tensor       # (D,)
    qkv: torch.Tensor                  # (blocks, D, C)       SwiftKV: q alone, (1, D, h*Dh)
    o: torch.Tensor                    # (blocks, h*Dh, D)
    mlp_norm: torch.Tensor             # (D,)
    gate_up: torch.Tensor              # (blocks, D, 2f)
    down: torch.Tensor                 # (blocks, f, D)
    qkv_bias: torch.Tensor = None      # (blocks, C)  Qwen2
    q_norm: torch.Tensor = None        # (Dh,)        Qwen3
    k_norm: torch.Tensor = None        # (Dh,)
    kv: torch.Tensor = None            # (1, D, 2k*Dh)        SwiftKV: with it, one block only

    def block(self, s):
        """The same layer with block number s alone: views, no bytes of their own."""
        return replace(self, **{name: w[s:s + 1] for name, w in vars(self).items()
                                if w is not None and not name.endswith("norm")})


# --------------------------------------------------------------------------------------------------
# The forward pass


@dataclass
class Batch:
    """One step's work, the same on every rank: R requests with T tokens together."""
    token_ids: torch.Tensor            # (T,) int64
    positions: torch.Tensor            # (T,) int64
    slot_mapping: torch.Tensor         # (T,) int64   where each token's keys and values go
    block_tables: torch.Tensor         # (R, most pages) int32
    query_starts: torch.Tensor         # (R+1,) int32
    context_lens: torch.Tensor         # (R,) int32, this step's tokens included
    rows: list                         # the tokens whose logits are wanted, rising, 0 <= row < T
    pools: int = 0                     # sums of final hidden states that are wanted, and
    pool_of: torch.Tensor = None       # (T,) int64  which of them each token joins; `pools`: none
    swiftkv: torch.Tensor = None       # (T, D) what later layers make K and V of; made in a step

    def to(self, device):
        return replace(self, **{name: value.to(device) for name, value in vars(self).items()
                                if torch.is_tensor(value)})


class Llama:
    """One rank's share of a model. `weights[mode name]` lists the layers as that mode sees them."""

    def __init__(self, config, source, layout, link, modes, max_len, dtype, kernels):
        self.config, self.layout, self.link, self.kernels = config, layout, link, kernels
        self.device, self.dtype = link.device, dtype
        rank, Dh = link.rank, config.head_dim
        self.base, self.shift = modes
        put = lambda w: torch.empty(w.shape, dtype=dtype, device=self.device).copy_(w)

        def load_layer(i):
            weight = lambda name: source[f"model.layers.{i}.{name}.weight"]
            swift, width = i in config.swiftkv, layout.h * Dh
            kind = "_swiftkv" * swift
            # SwiftKV's layers run in shift mode only, and are stored so: this rank's block alone
            own = (layout.shift, layout.block(rank)) if swift else (layout, rank)
            qkv = put(shard_qkv(*(weight(f"self_attn.{x}_proj{kind}") for x in "qkv"), *own, Dh))
            layer = LayerWeights(
                attention_norm=put(weight("input_layernorm")),
                qkv=put(qkv[..., :width]) if swift else qkv,
                o=put(shard_columns(weight("self_attn.o_proj"), *own, width)),
                mlp_norm=put(weight("post_attention_layernorm")),
                gate_up=put(shard_gate_up(weight("mlp.gate_proj"), weight("mlp.up_proj"), *own)),
                down=put(shard_columns(weight("mlp.down_proj"), *own, layout.f)),
                kv=put(qkv[..., width:]) if swift else None)
            if config.qkv_bias:
                biases = (source[f"model.layers.{i}.self_attn.{x}_proj{kind}.bias"] for x in "qkv")
                layer.qkv_bias = put(shard_qkv(*biases, *own, Dh))
            if config.qk_norm:
                layer.q_norm, layer.k_norm = (put(weight(f"self_attn.{x}_norm")) for x in "qk")
            return layer

        base = [load_layer(i) for i in range(config.layers)]
        shift = [layer.block(self.base.s) if layer.kv is None else layer for layer in base]
        self.weights = {"base": base, "shift": shift}
        self.embedding = put(source["model.embed_tokens.weight"])                   # (V, D)
        self.norm = put(source["model.norm.weight"])
        self.norm_swiftkv = put(source["model.norm_swiftkv.weight"]) if config.swiftkv else None
        head = self.embedding if config.tied else source["lm_head.weight"]
        self.head = put(shard_vocab(head, layout.ranks, rank).T)                 # (D, V/P)
        self.cos, self.sin = (table.to(self.device) for table in rope_tables(config, max_len))
        self.kv, self.graphs = [], []                           # graphs: the largest first

    def allocate_kv(self, blocks, block_size):
        """A zeroed pool (2, N, k, B, Dh) for each layer: this rank's KV heads, in both modes."""
        shape = (2, blocks, self.layout.k, block_size, self.config.head_dim)
        zeros = lambda: torch.zeros(shape, dtype=self.dtype, device=self.device)
        if self.device.type == "cpu":           # fresh pages are zero, and cost nothing until used
            nbytes = math.prod(shape) * self.dtype.itemsize
            zeros = lambda: torch.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE),
                                             dtype=self.dtype).view(shape)
        self.kv = [zeros() for _ in range(self.config.layers)]

    @torch.inference_mode()
    def forward(self, batch, mode):
        """Run a step; returns (logits, sums): the logits (rows, V) of `batch.rows` on rank 0, None
        elsewhere; and the sums of hidden states (pools, D), () if none are wanted."""
        fits = [graph for graph in self.graphs if mode is self.shift and not batch.pools
                and len(batch.token_ids) <= graph.size]
        if fits:
            x = fits[-1].run(batch)
        else:
            x, batch, mode = self.hidden(batch.to(self.device), mode)
        self.link.mark("logits")
        logits = self.logits(x, batch.rows, mode, len(batch.token_ids))
        return logits, self.pool(x, batch, mode) if batch.pools else ()

    def hidden(self, batch, mode):
        """x (t, D) after the last layer, and the batch and the mode that it ends in."""
        x, later = self.embed(batch, mode), self.config.swiftkv
        x = self.run_layers(x, 0, later.start, mode, batch)
        if later:
            x, batch = self.swift_kv(x, batch, mode)
            mode = self.shift                           # a shift inside the forward
            x = self.run_layers(x, later.start, later.stop, mode, batch)
        return x, batch, mode

    def embed(self, batch, mode):
        """The embeddings (t, D) of this rank's slice of the tokens."""
        mine = batch.token_ids.split(token_slices(len(batch.token_ids), mode.sp))[mode.s]
        return self.embedding[mine]

    def swift_kv(self, x, batch, mode):
        """Between layers m-1 and m: x (t, D) of `mode` -> x (n, D) of the n wanted rows, and the
        Batch for the later layers. It has all T tokens, the wanted ones first: all of them leave
        keys and values there, but only these bring queries; to attention, the rest are padding.
        """
        T, rows = len(batch.token_ids), batch.rows
        x = self.gather(x, token_slices(T, mode.sp), mode, "swiftkv")                     # (T, D)
        y = self.kernels.rms_norm(x, self.norm_swiftkv, self.config.norm_eps)
        if len(rows) == T or batch.pools:               # all of them: decodes, texts to embed
            return x, replace(batch, swiftkv=y)
        assert {row + 1 for row in rows} <= {*rows, *batch.query_starts.tolist()}, (
            f"rows {rows} are not the last of their requests")
        order = torch.tensor(rows + sorted({*range(T)} - {*rows}), device=x.device)
        starts = torch.searchsorted(order[:len(rows)].int(), batch.query_starts, out_int32=True)
        tokens = {name: getattr(batch, name)[order]
                  for name in ("token_ids", "positions", "slot_mapping")}
        return x[rows], replace(batch, **tokens, query_starts=starts, rows=[*range(len(rows))],
                                swiftkv=y[order])       # contexts end where they did

    def gather(self, x, counts, mode, what):
        """The rows x of every slice, counts[s] of slice s -> (sum(counts), D), on all ranks."""
        if mode.sp == 1:
            return x
        return self.link.all_to_all(x.repeat(mode.sp, 1), [len(x)] * mode.sp, counts,
                                    mode.sp_group, what)        # a copy for each destination

    def run_layers(self, x, first, last, mode, batch):
        """Layers first ... last-1 on x (t, D), this rank's slice of the tokens, in place."""
        c, ops, link, sp = self.config, self.kernels, self.link, mode.sp
        h, k, Dh = self.layout.h, self.layout.k, c.head_dim
        T, t = len(batch.token_ids), x.shape[0]
        slices = token_slices(T, sp)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]             # (T, 1, Dh)
        for i in range(first, last):
            w, kv = self.weights[mode.name][i], self.kv[i]
            link.mark(f"layer {i}")
            y = ops.rms_norm(x, w.attention_norm, c.norm_eps)
            qkv = ops.matmul(y, w.qkv)                  # (t, D) @ (sp, D, C) -> (sp, t, C)
            if w.kv is not None:                        # q of the first t tokens, k and v of all T
                # (1, t, h*Dh), rows of zeros under it; (T, D) @ (1, D, 2k*Dh) -> (1, T, C)
                qkv = torch.cat([F.pad(qkv, (0, 0, 0, T - t)), ops.matmul(batch.swiftkv, w.kv)], -1)
            if w.qkv_bias is not None:
                qkv += w.qkv_bias[:, None]
            qkv = qkv.flatten(0, 1)                     # already ordered by destination: no copy
            if sp > 1:                                  # my tokens, all heads -> all, my heads
                qkv = link.all_to_all(qkv, [t] * sp, slices, mode.sp_group, "qkv")  # -> (T, C)
            qkv = qkv.view(T, h + 2 * k, Dh)
            if w.q_norm is not None:
                norms = torch.cat([w.q_norm.expand(h, Dh), w.k_norm.expand(k, Dh)])
                qkv[:, :h + k] = F.rms_norm(qkv[:, :h + k], (Dh,), None, c.norm_eps) * norms
            o = ops.attention(qkv, cos, sin, kv, batch.slot_mapping, batch.block_tables,
                              batch.query_starts, batch.context_lens, Dh ** -0.5).view(T, h * Dh)
            if sp > 1:                                  # all tokens, my heads -> mine, all heads
                o = link.all_to_all(o, slices, [t] * sp, mode.sp_group, "attention")
                o = o.view(sp, t, h * Dh).transpose(0, 1).reshape(t, sp * h * Dh)
            elif t == 0:                                # SwiftKV, no row wanted: K, V are written
                continue
            o = ops.matmul(o[:t], w.o.flatten(0, 1))    # (t, sp*h*Dh) @ (sp*h*Dh, D) -> (t, D)
            x += link.all_reduce(o, mode.tp_group, "o") if mode.tp > 1 else o
            y = ops.rms_norm(x, w.mlp_norm, c.norm_eps)
            y = ops.silu_mul(ops.matmul(y, w.gate_up))  # (t, D) @ (sp, D, 2f) -> (t, sp*f)
            y = ops.matmul(y, w.down.flatten(0, 1))     # (t, sp*f) @ (sp*f, D) -> (t, D)
            x += link.all_reduce(y, mode.tp_group, "mlp") if mode.tp > 1 else y
        return x

    def logits(self, x, rows, mode, T):
        """x (t, D) after the last layer -> the logits (len(rows), V) on rank 0, None elsewhere.

        Each rank owns a slice of the vocabulary in both modes, so every rank needs every row.
        """
        if not rows:                                    # nobody samples: nobody calls anything
            return None
        starts = [T * s // mode.sp for s in range(mode.sp + 1)]
        owned = [[row - first for row in rows if first <= row < end]
                 for first, end in zip(starts, starts[1:])]     # the rows of each slice
        y = self.kernels.rms_norm(x[owned[mode.s]], self.norm, self.config.norm_eps)
        y = self.gather(y, [len(o) for o in owned], mode, "logits")                 # (n, D)
        logits = self.kernels.matmul(y, self.head)      # (n, V/P), cut unevenly
        P, rank = self.link.size, self.link.rank
        if P > 1:                                       # (V/P, n) to rank 0 -> (V, n) -> (n, V)
            slices = token_slices(self.config.vocab, P)
            logits = self.link.all_to_all(
                logits.mT.contiguous(), [slices[rank]] + [0] * (P - 1),
                [count * (rank == 0) for count in slices], self.link.everyone, "logits").mT
        return None if rank else logits.float().contiguous()

    def pool(self, x, batch, mode):
        """x (t, D) after the last layer -> (pools, D), the sums over the tokens of each pool."""
        mine = batch.pool_of.split(token_slices(len(batch.pool_of), mode.sp))[mode.s]
        y = self.kernels.rms_norm(x, self.norm, self.config.norm_eps).float()
        sums = y.new_zeros(batch.pools + 1, y.shape[1]).index_add_(0, mine, y)
        if mode.sp > 1:                                 # a pool's tokens may lie in several slices
            sums = self.link.all_reduce(sums, mode.sp_group, "pool")
        return sums[:-1]


def rope_tables(config, length):
    """cos and sin of every position, (length, 1, Dh) each, with the scaling of config.rope.

    As `rotate` wants them: both halves of cos are alike, those of sin have opposite signs.

    "linear" stretches all wavelengths by `factor`; "llama3" (Llama 3.1) only those long against the
    original context, with a smooth passage between the two.
    """
    rope, half = config.rope, torch.arange(0, config.head_dim, 2, dtype=torch.float64)
    frequency = rope["rope_theta"] ** -(half / config.head_dim)                      # (Dh/2,)
    if rope["rope_type"] == "linear":
        frequency = frequency / rope["factor"]
    if rope["rope_type"] == "llama3":
        turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)     # 1: short wave, kept; 0: stretched
        frequency = frequency * (keep + (1 - keep) / rope["factor"])
    angle = torch.arange(length, dtype=torch.float64)[:, None, None] * frequency
    cos, sin = angle.cos().float(), angle.sin().float()
    return torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)


# --------------------------------------------------------------------------------------------------
# CUDA graphs


def cuda_capture(function, pool):
    """Note which kernels `function` launches, NCCL's too, without running them. Returns a function
    that launches them all at once, on the same memory, and what `function` returned.

    pool    a torch.cuda.graph_pool_handle(): graphs may share one, if they never run side by side
    """
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's watchdog, a thread, may look at its events meanwhile
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = function()
    return graph.replay, result


class Graph:
    """`Llama.hidden` in shift mode for up to `size` tokens, captured once and replayed. With few
    tokens the kernels are shorter than the time to launch them one by one.

    A replay reads where the capture read: a Batch of `size` tokens and requests, of which a step
    fills the first. The rest has no slot, so it never gets into the KV cache, and belongs to no
    request, so no real token attends to it: padding costs time and bytes, and changes nothing.
    (In base mode it would: it moves the slices.) The logits stay outside, as their rows vary.

    pages    the longest block table
    capture  as `cuda_capture`, its pool given
    """

    @torch.inference_mode()
    def __init__(self, model, size, pages, capture):
        zeros = partial(torch.zeros, dtype=torch.int32, device=model.device)
        self.size, self.link = size, model.link
        # -1: no slot, and the last token and position, which will do as well as any
        self.inputs = Batch(*(zeros(3, size) - 1).long(), zeros(size, pages), zeros(size + 1),
                            zeros(size), rows=[*range(size)])
        function = partial(model.hidden, self.inputs, model.shift)
        function()                     # compiles kernels and connects ranks, which no graph can
        self.link.log.clear()
        self.replay, (self.x, *_) = capture(function)
        self.calls = collectives_of(self.link.log)

    def run(self, batch):
        """x (size, D): its first rows are the step's."""
        self.inputs.slot_mapping.fill_(-1)
        self.inputs.query_starts.fill_(len(batch.token_ids))             # no queries
        for static, tensor in [*zip(vars(self.inputs).values(), vars(batch).values())][:6]:
            static[tuple(map(slice, tensor.shape))].copy_(tensor)        # the tensors
        self.replay()
        self.link.repeat(self.calls)   # while the GPU works
        return self.x


# --------------------------------------------------------------------------------------------------
# Sampling


@dataclass(frozen=True)
class SamplingParams:
    """How one request continues; checked here, so that nothing later has to.

    temperature  0 is greedy            top_k, top_p, min_p  0 (or -1), 1 and 0 switch them off
    seed         None: a fresh one      logprobs  None, or how many alternatives to report
    stop, stop_token_ids  what ends the output and is not part of it, as an end-of-text token does
    min_tokens   so many come before any of these can
    """
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = None
    stop: tuple = ()
    stop_token_ids: tuple = ()
    ignore_eos: bool = False
    logprobs: int = None
    pooling = None                     # no field: it continues a text, and makes no vector of it

    def __post_init__(self):
        for name, least, most in (
                ("max_tokens", 1, math.inf), ("min_tokens", 0, self.max_tokens),
                ("temperature", 0, 1e308), ("top_k", -1, 2 ** 63 - 1), ("top_p", 0, 1),
                ("min_p", 0, 1), ("seed", 1 - 2 ** 64, 2 ** 64 - 1), ("logprobs", 0, 20)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise UserError(f"{name} = {value!r:.60} must be between {least} and {most}")
        if not all(self.stop):
            raise UserError(f"stop = {self.stop!r:.60} must not hold an empty text")


@dataclass(frozen=True)
class Pooling:
    """What to make of a text instead of continuing it: one vector, normalised to length 1.

    pooling     the mean of all final hidden states, the last token's (which has seen all), or the
                first's
    dimensions  how many numbers of it to keep, before normalising
    """
    pooling: str = "mean"
    dimensions: int = None
    max_tokens, stop_token_ids, seed, ignore_eos = 0, (), 0, True        # as in SamplingParams

    def __post_init__(self):
        if self.pooling not in ("mean", "last", "first"):
            raise UserError(f"pooling = {self.pooling!r:.60} is none of mean, last, first")


Sample = namedtuple("Sample", "token logprob top")     # top: [(token, logprob)], best first


def uniform(seed, position):
    """The one random number of a draw, in [0, 1): from the request's seed and the position."""
    digest = hashlib.blake2b(f"{seed} {position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2 ** 53


def sample(logits, params, positions):
    """One Sample for each row of logits (n, V): the token, and log-probabilities where asked.

    A row's draw depends on its own logits, parameters and position only, never on the batch: the
    distribution, cut to top_k, top_p and min_p, is laid out by falling probability, and the row's
    own `uniform` number picks the place (inversion). Log-probabilities are of the model's own
    distribution, before temperature and cuts.
    """
    tokens = logits.argmax(-1)
    rows = {i: (p.temperature, p.top_k if p.top_k > 0 else math.inf, p.top_p, p.min_p,
                uniform(p.seed, positions[i]))
            for i, p in enumerate(params) if p.temperature >= 1e-5}           # below: greedy
    if rows:
        drawn, columns = list(rows), torch.tensor(list(rows.values()), dtype=torch.float64)
        temperature, top_k, top_p, min_p, u = columns.to(logits.device).T[..., None]   # (n, 1) each
        logit, order = logits[drawn].double().sort(dim=-1, descending=True, stable=True)
        probs = ((logit - logit[:, :1]) / temperature).softmax(-1)
        place = torch.arange(logits.shape[-1], device=logits.device)
        probs = probs * (place < top_k)
        probs = probs / probs.sum(-1, keepdim=True)
        before = probs.cumsum(-1) - probs
        keep = ((before < top_p) | (place == 0)) & (probs >= min_p * probs[:, :1])
        mass = (probs * keep).cumsum(-1)
        pick = torch.searchsorted(mass, u * mass[:, -1:], right=True)
        # never past the last kept token: u < 1, but u * mass may round up to the whole mass
        pick = torch.minimum(pick, keep.sum(-1, keepdim=True) - 1)
        tokens[drawn] = order.gather(-1, pick)[:, 0]
    samples = [Sample(token, None, None) for token in tokens.tolist()]
    for i, p in enumerate(params):
        if p.logprobs is not None:
            logprobs = logits[i].float().log_softmax(-1)
            best = logprobs.topk(min(p.logprobs, len(logprobs)))
            samples[i] = Sample(samples[i].token, logprobs[samples[i].token].item(),
                                list(zip(best.indices.tolist(), best.values.tolist())))
    return samples
