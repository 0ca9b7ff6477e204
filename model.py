"""model.py: a Llama, from its files to the next token.

What it does: reads a Hugging Face checkpoint (config, tokenizer, safetensors), loads this rank's
slices of the weights in the one order that serves both modes, runs the forward pass under any
`Mode`, and samples. The collectives of Shift Parallelism stand in `run_layers`, where they happen.

What it does not know: requests, scheduling, HTTP. A step is a `Batch` of token ids and slots.

    pytest tests/test_model.py

Shapes (one legend in every file):
    T tokens in this step     P ranks = sp * tp      D hidden size      V vocabulary
    H query heads             K KV heads             Dh head size       F MLP width
    h = H/P, k = max(1, K/P), f = F/P   what ONE rank owns (one "block")
    C = (h + 2k) * Dh         one block's q, k and v columns
    t tokens of this rank's slice in this mode: about T/sp
"""
import codecs
import hashlib
import json
import math
import mmap
import re
import unicodedata
from collections import namedtuple
from dataclasses import dataclass, field, fields
from datetime import datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from shift import UserError, token_slices

# --------------------------------------------------------------------------------------------------
# Configuration

FAMILIES = {"LlamaForCausalLM": {}, "Qwen2ForCausalLM": {"qkv_bias": True},
            "Qwen3ForCausalLM": {"qk_norm": True}}
ROPES = {"default": (), "linear": ("factor",),                # the scalings and what they need
         "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                    "original_max_position_embeddings")}


@dataclass(frozen=True)
class Config:
    """The shape of a Llama; the defaults are those of `random:` models."""
    dim: int = 512                     # D
    layers: int = 8
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
        if self.heads % self.kv_heads:
            raise UserError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads "
                            f"equally")
        if self.head_dim < 2 or self.head_dim % 2:
            raise UserError(f"head size {self.head_dim} (hidden size {self.dim}, {self.heads} "
                            f"heads) must be even, and at least 2")
        kind = self.rope["rope_type"]
        if kind not in ROPES:
            raise UserError(f"rope_type {kind!r} is not supported: use a model with default, "
                            f"linear or llama3 scaling")
        lacking = [key for key in ROPES[kind] if key not in self.rope]
        if lacking:
            raise UserError(f"rope_type {kind!r} needs {lacking[0]}, which the model does not give")

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
                           ("hidden_act", "silu")):
            if (hf.get(key) or plain) != plain:
                raise UserError(f"{directory}: {key} = {str(hf[key])[:60]} is not supported, "
                                f"only {plain}")
        # transformers 5 writes rope_parameters; before it, rope_theta and rope_scaling
        rope = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta", 10000.0),
                                             **(hf.get("rope_scaling") or {})}
        rope = {"rope_theta": 10000.0, **rope,
                "rope_type": rope.get("rope_type", rope.get("type", "default"))}
        generation = read_json(directory, "generation_config.json", default={})
        eos = []
        for ids in (hf.get("eos_token_id"), generation.get("eos_token_id")):
            eos += ids if isinstance(ids, list) else [] if ids is None else [ids]
        try:
            return cls(
                dim=hf["hidden_size"], layers=hf["num_hidden_layers"],
                heads=hf["num_attention_heads"],
                kv_heads=hf.get("num_key_value_heads") or hf["num_attention_heads"],
                head_dim=hf.get("head_dim") or 0, ffn=hf["intermediate_size"],
                vocab=hf["vocab_size"], max_len=hf.get("max_position_embeddings", 2048),
                norm_eps=hf.get("rms_norm_eps", 1e-6), tied=hf.get("tie_word_embeddings", False),
                rope=rope, dtype=hf.get("dtype") or hf.get("torch_dtype") or "float32",
                eos=tuple(sorted(set(eos))), **FAMILIES[family])
        except KeyError as e:
            raise UserError(f"{directory}/config.json: {e} is missing") from None

    def tensors(self):
        """Name -> shape of every tensor of the checkpoint, by Hugging Face's names."""
        D, q, kv = self.dim, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"model.embed_tokens.weight": (self.vocab, D), "model.norm.weight": (D,)}
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab, D)
        for i in range(self.layers):
            layer = {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,),
                     "self_attn.q_proj.weight": (q, D), "self_attn.k_proj.weight": (kv, D),
                     "self_attn.v_proj.weight": (kv, D), "self_attn.o_proj.weight": (D, q),
                     "mlp.gate_proj.weight": (self.ffn, D), "mlp.up_proj.weight": (self.ffn, D),
                     "mlp.down_proj.weight": (D, self.ffn)}
            if self.qkv_bias:
                layer |= {f"self_attn.{x}_proj.bias": (q if x == "q" else kv,) for x in "qkv"}
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
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or ".." in name:
        raise UserError(f"--model {name}: no such directory, and not a hub id like org/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError
    try:
        return snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                                 ignore_patterns=["*/*"])
    except GatedRepoError:
        raise UserError(f"--model {name}: a gated repository; accept its licence on the hub, then "
                        f"set HF_TOKEN or run `hf auth login`") from None
    except Exception as e:                           # no such repository, no network, disk full ...
        raise UserError(f"--model {name}: no such directory, and not to be had from the hub "
                        f"({(str(e) or repr(e)).splitlines()[0]})") from None


# --------------------------------------------------------------------------------------------------
# Weights: where they come from, and which slices a rank takes


class Checkpoint:
    """The tensors of a directory's safetensors files, read by slices. Strict: a missing, extra or
    misshapen tensor is an error that names it."""

    def __init__(self, directory, config):
        index = read_json(directory, "model.safetensors.index.json", default={})
        files = sorted(set(index.get("weight_map", {"": "model.safetensors"}).values()))
        self.where, self.handles, mark = {}, {}, hashlib.blake2b()
        for file in files:
            path = Path(directory) / file
            try:
                self.handles[file] = safe_open(path, framework="pt")
                with path.open("rb") as f:                      # all names and shapes, some weights
                    mark.update(f.read(int.from_bytes(f.read(8), "little") + 4096))
            except FileNotFoundError:
                raise UserError(f"{path} does not exist: the checkpoint is incomplete") from None
            except (SafetensorError, OSError) as e:
                raise UserError(f"{path} is not a whole safetensors file ({e}): fetch it again")
            self.where |= dict.fromkeys(self.handles[file].keys(), file)
        wanted, ignored = config.tensors(), {"lm_head.weight"} if config.tied else set()
        missing = sorted(wanted.keys() - self.where.keys())
        extra = sorted(name for name in self.where.keys() - wanted.keys() - ignored
                       if not name.endswith("rotary_emb.inv_freq"))       # old files keep this
        if missing or extra:
            raise UserError(f"{directory}: tensor {(missing + extra)[0]} is "
                            f"{'missing from the files' if missing else 'not part of this model'} "
                            f"({len(missing)} missing, {len(extra)} extra)")
        for name, shape in wanted.items():
            found = tuple(self[name].get_shape())
            if found != shape:
                raise UserError(f"{directory}: tensor {name} has shape {found}, not {shape}")
        self.fingerprint = mark.hexdigest()

    def __getitem__(self, name):
        """A lazy slice: indexing it reads just those rows or columns from the mapped file."""
        return self.handles[self.where[name]].get_slice(name)


class RandomWeights:
    """Tensors drawn from the seed and their own name, so the same whatever P: for experiments."""

    def __init__(self, config):
        self.shapes, self.seed = config.tensors(), config.seed
        self.fingerprint = f"random {self.seed}"

    def __getitem__(self, name):
        digest = hashlib.blake2b(f"{self.seed} {name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
        shape = self.shapes[name]
        draw = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            return draw * shape[1] ** -0.5                      # keeps the size of activations
        return draw * 0.1 + (not name.endswith("bias"))         # norms are near one


# The shards, as pure functions of (whole tensors or lazy slices, layout, rank). All are over the sp
# blocks of this rank's base shard, and (out, in) or (in, out) so that ROWS are blocks: block b
# alone, the shift-mode shard, is then a contiguous slice of rows, a view.


def shard_qkv(q, k, v, layout, rank, head_dim):
    """q (H*Dh, D), k and v (K*Dh, D) -> (sp*C, D): for each block its rows [q; k; v]; or biases."""
    rows = lambda heads: slice(heads[0] * head_dim, (heads[-1] + 1) * head_dim)
    parts = []
    for block in layout.shard(rank):
        parts += [q[rows(layout.q_heads(block))], k[rows(layout.kv_heads_of(block))],
                  v[rows(layout.kv_heads_of(block))]]
    return torch.cat(parts)


def shard_gate_up(gate, up, layout, rank):
    """gate and up (F, D) -> (sp*2*f, D): for each block the rows [gate; up]."""
    columns = [slice(b * layout.f, (b + 1) * layout.f) for b in layout.shard(rank)]
    return torch.cat([part[c] for c in columns for part in (gate, up)])


def shard_columns(w, layout, rank, width):
    """w (D, P*width), o_proj or down_proj -> (sp*width, D): the input rows of each block."""
    blocks = layout.shard(rank)
    return w[:, blocks[0] * width:(blocks[-1] + 1) * width].T.contiguous()


def shard_vocab(w, ranks, rank):
    """w (V, D) -> the rows [V*r//P, V*(r+1)//P): uneven shares are fine."""
    vocab = w.get_shape()[0] if hasattr(w, "get_shape") else len(w)
    return w[vocab * rank // ranks:vocab * (rank + 1) // ranks]


@dataclass
class LayerWeights:
    """One rank's weights of one layer, for one mode of `blocks` blocks: sp in base, 1 in shift."""
    attention_norm: torch.Tensor       # (D,)
    qkv: torch.Tensor                  # (blocks*C, D)
    o: torch.Tensor                    # (blocks*h*Dh, D)
    mlp_norm: torch.Tensor             # (D,)
    gate_up: torch.Tensor              # (blocks*2*f, D)
    down: torch.Tensor                 # (blocks*f, D)
    qkv_bias: torch.Tensor = None      # (blocks*C,)  Qwen2
    q_norm: torch.Tensor = None        # (Dh,)        Qwen3
    k_norm: torch.Tensor = None        # (Dh,)

    def block(self, s, sp):
        """The same layer with block number s of sp alone: views, no bytes of their own."""
        def rows(w):
            return None if w is None else w[len(w) * s // sp:len(w) * (s + 1) // sp]
        return LayerWeights(self.attention_norm, rows(self.qkv), rows(self.o), self.mlp_norm,
                            rows(self.gate_up), rows(self.down), rows(self.qkv_bias),
                            self.q_norm, self.k_norm)


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

    def to(self, device):
        return Batch(*(value.to(device) if isinstance(value, torch.Tensor) else value
                       for value in (getattr(self, f.name) for f in fields(self))))


class Llama:
    """One rank's share of a model. `weights[mode name]` lists the layers as that mode sees them."""

    def __init__(self, config, source, layout, link, modes, max_len, dtype, kernels):
        self.config, self.layout, self.link, self.kernels = config, layout, link, kernels
        self.device, self.dtype = link.device, dtype
        rank = link.rank
        self.base, self.shift = modes

        def put(w):
            """A tensor, or a lazy slice of a file, piece by piece: never whole in between."""
            shape = w.get_shape() if hasattr(w, "get_shape") else w.shape
            out = torch.empty(shape, dtype=dtype, device=self.device)
            for i in range(0, shape[0], 4096):
                out[i:i + 4096] = w[i:i + 4096]
            return out

        def load_layer(i):
            def get(name):
                return source[f"model.layers.{i}.{name}"]
            qkv = lambda kind: put(shard_qkv(*(get(f"self_attn.{x}_proj.{kind}") for x in "qkv"),
                                             layout, rank, config.head_dim))
            return LayerWeights(
                attention_norm=put(get("input_layernorm.weight")), qkv=qkv("weight"),
                o=put(shard_columns(get("self_attn.o_proj.weight"), layout, rank,
                                    layout.h * config.head_dim)),
                mlp_norm=put(get("post_attention_layernorm.weight")),
                gate_up=put(shard_gate_up(get("mlp.gate_proj.weight"), get("mlp.up_proj.weight"),
                                          layout, rank)),
                down=put(shard_columns(get("mlp.down_proj.weight"), layout, rank, layout.f)),
                qkv_bias=qkv("bias") if config.qkv_bias else None,
                q_norm=put(get("self_attn.q_norm.weight")) if config.qk_norm else None,
                k_norm=put(get("self_attn.k_norm.weight")) if config.qk_norm else None)

        base = [load_layer(i) for i in range(config.layers)]
        shift = [layer.block(self.base.s, self.base.sp) for layer in base]
        self.weights = {"base": base, "shift": shift}
        self.embedding = put(source["model.embed_tokens.weight"])                   # (V, D)
        self.norm = put(source["model.norm.weight"])
        self.head = (shard_vocab(self.embedding, layout.ranks, rank) if config.tied else
                     put(shard_vocab(source["lm_head.weight"], layout.ranks, rank)))
        self.cos, self.sin = (table.to(self.device) for table in rope_tables(config, max_len))
        self.kv = []

    def allocate_kv(self, blocks, block_size):
        """A zeroed pool (2, N, k, B, Dh) for each layer: this rank's KV heads, in both modes."""
        shape, self.kv = (2, blocks, self.layout.k, block_size, self.config.head_dim), []
        for _ in range(self.config.layers):
            if self.device.type == "cpu":       # fresh pages are zero, and cost nothing until used
                memory = mmap.mmap(-1, math.prod(shape) * self.dtype.itemsize)
                self.kv.append(torch.frombuffer(memory, dtype=self.dtype).view(shape))
            else:
                self.kv.append(torch.zeros(shape, dtype=self.dtype, device=self.device))

    @torch.inference_mode()
    def forward(self, batch, mode):
        """Run a step; returns the logits (rows, V) of `batch.rows` on rank 0, None elsewhere."""
        x = self.embed(batch, mode)
        x = self.run_layers(x, 0, self.config.layers, mode, batch)
        return self.logits(x, batch.rows, mode, len(batch.token_ids))

    def embed(self, batch, mode):
        """The embeddings (t, D) of this rank's slice of the tokens."""
        return self.embedding[batch.token_ids.split(token_slices(len(batch.token_ids), mode.sp))[
            mode.s]]

    def run_layers(self, x, first, last, mode, batch):
        """Layers first ... last-1 on x (t, D), this rank's slice of the tokens; returns (t, D)."""
        c, ops, link, sp = self.config, self.kernels, self.link, mode.sp
        h, k, f, Dh, D = self.layout.h, self.layout.k, self.layout.f, c.head_dim, c.dim
        C, T, t = (h + 2 * k) * Dh, len(batch.token_ids), x.shape[0]
        slices = token_slices(T, sp)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]             # (T, 1, Dh)
        for w, kv in list(zip(self.weights[mode.name], self.kv))[first:last]:
            y = F.rms_norm(x, (D,), w.attention_norm, c.norm_eps)
            qkv = ops.linear(y, w.qkv.view(sp, C, D))   # (t, D) @ (sp, D, C) -> (sp, t, C)
            if w.qkv_bias is not None:
                qkv += w.qkv_bias.view(sp, 1, C)
            qkv = qkv.reshape(sp * t, C)                # already ordered by destination: no copy
            if sp > 1:                                  # my tokens, all heads -> all, my heads
                qkv = link.all_to_all(qkv, [t] * sp, slices, mode.sp_group, "qkv")  # -> (T, C)
            qk, v = qkv.view(T, h + 2 * k, Dh).split([h + k, k], 1)
            if w.q_norm is not None:
                qk = torch.cat([F.rms_norm(qk[:, :h], (Dh,), w.q_norm, c.norm_eps),
                                F.rms_norm(qk[:, h:], (Dh,), w.k_norm, c.norm_eps)], 1)
            q, key = rotate(qk, cos, sin).split([h, k], 1)      # (T, h, Dh), (T, k, Dh)
            ops.write_kv(kv, key, v, batch.slot_mapping)
            o = ops.paged_attention(q, kv, batch.block_tables, batch.query_starts,
                                    batch.context_lens, Dh ** -0.5).view(T, h * Dh)
            if sp > 1:                                  # all tokens, my heads -> mine, all heads
                o = link.all_to_all(o, slices, [t] * sp, mode.sp_group, "attention")
                o = o.view(sp, t, h * Dh).transpose(0, 1).reshape(t, sp * h * Dh)
            o = ops.matmul(o, w.o)                      # (t, sp*h*Dh) @ (sp*h*Dh, D) -> (t, D)
            if mode.tp > 1:
                o = link.all_reduce(o, mode.tp_group, "o")
            x = x + o
            y = F.rms_norm(x, (D,), w.mlp_norm, c.norm_eps)
            gate, up = ops.linear(y, w.gate_up).view(t, sp, 2, f).unbind(2)         # (t, sp, f)
            y = ops.matmul((F.silu(gate) * up).reshape(t, sp * f), w.down)          # -> (t, D)
            if mode.tp > 1:
                y = link.all_reduce(y, mode.tp_group, "mlp")
            x = x + y
        return x

    def logits(self, x, rows, mode, T):
        """x (t, D) after the last layer -> the logits (len(rows), V) on rank 0, None elsewhere.

        Each rank owns a slice of the vocabulary in both modes, so every rank needs every row.
        """
        if not rows:                                    # nobody samples: nobody calls anything
            return None
        link, n = self.link, len(rows)
        ends = torch.tensor(token_slices(T, mode.sp)).cumsum(0).tolist()
        owned = [[row for row in rows if start <= row < end]
                 for start, end in zip([0] + ends, ends)]                 # the rows of each slice
        start = ends[mode.s] - len(x)
        y = F.rms_norm(x[[row - start for row in owned[mode.s]]], (self.config.dim,), self.norm,
                       self.config.norm_eps)
        if mode.sp > 1:                                 # a copy for each destination -> (n, D)
            counts = [len(o) for o in owned]
            y = link.all_to_all(y.repeat(mode.sp, 1), [len(y)] * mode.sp, counts, mode.sp_group,
                                "logits")
        part = self.kernels.linear(y, self.head).flatten()             # (n, V/P), cut unevenly
        P, V = link.size, self.config.vocab
        if P == 1:
            return part.view(n, V).float()
        widths = [V * (r + 1) // P - V * r // P for r in range(P)]
        part = link.all_to_all(part, [len(part)] + [0] * (P - 1),
                               [n * width * (link.rank == 0) for width in widths], link.everyone,
                               "logits")                # every slice to rank 0
        if link.rank:
            return None
        parts = part.split([n * width for width in widths])
        return torch.cat([p.view(n, width) for p, width in zip(parts, widths)], -1).float()


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


def rotate(x, cos, sin):
    """Rotary embedding of x (T, heads, Dh), Hugging Face's pairing: column i with i + Dh/2."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(x.dtype)


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

    def __post_init__(self):
        for name, ok, say in (
                ("max_tokens", self.max_tokens >= 1, "must be at least 1"),
                ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "must be 0 to max_tokens"),
                ("temperature", 0 <= self.temperature < math.inf, "must be 0 or more, and finite"),
                ("top_k", -1 <= self.top_k < 2 ** 63, "must be a count, or 0 or -1 for no limit"),
                ("seed", abs(self.seed or 0) < 2 ** 64, "must fit into 64 bits"),
                ("top_p", 0 <= self.top_p <= 1, "must be between 0 and 1"),
                ("min_p", 0 <= self.min_p <= 1, "must be between 0 and 1"),
                ("logprobs", 0 <= (self.logprobs or 0) <= 20, "must be between 0 and 20"),
                ("stop", all(self.stop), "must not hold an empty text")):
            if not ok:
                raise UserError(f"{name} = {getattr(self, name)!r:.60} {say}")


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
    drawn = [i for i, p in enumerate(params) if p.temperature >= 1e-5]        # below: greedy
    if drawn:
        column = lambda values: torch.tensor(values, dtype=torch.float64,
                                             device=logits.device)[:, None]
        ps, vocab = [params[i] for i in drawn], logits.shape[-1]
        scaled, order = logits[drawn].double().sort(dim=-1, descending=True, stable=True)
        scaled = (scaled - scaled[:, :1]) / column([p.temperature for p in ps])
        probs = scaled.softmax(-1)
        place = torch.arange(vocab, device=logits.device)
        probs = probs * (place < column([p.top_k if p.top_k > 0 else vocab for p in ps]))
        probs = probs / probs.sum(-1, keepdim=True)
        before = probs.cumsum(-1) - probs
        keep = (before < column([p.top_p for p in ps])) | (place == 0)
        keep &= probs >= column([p.min_p for p in ps]) * probs[:, :1]
        mass = (probs * keep).cumsum(-1)
        u = column([uniform(p.seed, positions[i]) for i, p in zip(drawn, ps)])
        # never past the last kept token: u < 1, but u * mass may round up to the whole mass
        pick = torch.searchsorted(mass, u * mass[:, -1:], right=True).clamp(max=vocab - 1)
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


# --------------------------------------------------------------------------------------------------
# Text

# What GPT-2 splits by, and the same with every digit on its own (SmolLM2)
GPT2_SPLIT = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
DIGITS_SPLIT = (r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+")


def byte_letters():
    """The letter that stands for each byte in byte-level BPE files (GPT-2): printable bytes stand
    for themselves, the other 68 for the letters from 256 up."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


class Tokenizer:
    """A tiktoken Encoding built from Hugging Face's tokenizer.json: byte-level BPE of the GPT-2,
    Llama 3, Qwen and SmolLM families; and the model's chat template, in jinja2's sandbox."""

    def __init__(self, directory, config):
        import tiktoken
        file = f"{directory}/tokenizer.json"
        spec = read_json(directory, "tokenizer.json")
        extra = read_json(directory, "tokenizer_config.json", default={})
        model, normalizer = spec["model"], spec.get("normalizer") or {}
        if model.get("type") != "BPE" or normalizer.get("type", "NFC") != "NFC":
            raise UserError(f"{file}: only byte-level BPE is supported (GPT-2, Llama 3, Qwen, "
                            f"SmolLM), not {model.get('type')} with normalizer "
                            f"{normalizer.get('type')}")
        added = {token["content"]: token["id"] for token in spec.get("added_tokens", [])}
        for token in spec.get("added_tokens", []):
            if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
                raise UserError(f"{file}: added token {token['content']!r} takes more or less than "
                                f"its own text (lstrip, rstrip, single_word): not supported")
        letters = byte_letters()
        try:
            ranks = {bytes(letters[c] for c in token): i
                     for token, i in model["vocab"].items() if token not in added}
        except KeyError as e:
            raise UserError(f"{file}: not byte-level BPE ({e} is no byte's letter)") from None
        newest, seen = -1, set()                    # tiktoken merges by id, so ids must be in order
        for merge in model["merges"]:
            merged = merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
            if merged not in seen and model["vocab"][merged] < newest:
                raise UserError(f"{file}: the merge that makes {merged!r} is not in order of ids")
            seen.add(merged)
            newest = max(newest, model["vocab"][merged])
        self.size = 1 + max([*ranks.values(), *added.values()])
        for byte in range(256):                     # what the vocabulary lacks, encode drops; it
            # does not join what was on both sides of it, as transformers would
            ranks.setdefault(bytes([byte]), self.size + byte)
        self.encoding = tiktoken.Encoding("model", pat_str=split_pattern(spec, file),
                                          mergeable_ranks=ranks, special_tokens=added)
        self.nfc = bool(normalizer)
        self.bytes = [b""] * self.size              # special tokens have no text
        for token, i in ranks.items():
            self.bytes[i:i + 1] = [token] if i < self.size else []
        special = {token["id"] for token in spec.get("added_tokens", []) if token.get("special")}
        for token, i in added.items():
            self.bytes[i] = b"" if i in special else token.encode()
        named = {name: token["content"] if isinstance(token, dict) else token for name, token in
                 extra.items() if name in ("bos_token", "eos_token") and token}
        self.bos_token, self.eos_token = named.get("bos_token", ""), named.get("eos_token", "")
        self.eos = set(config.eos) | ({added[self.eos_token]} & set(added.values())
                                      if self.eos_token in added else set())
        self.bos = first_special(spec, added)       # put in front of a plain prompt, if at all
        self.template = self._template(directory, extra)

    def encode(self, text, bos=True):
        """Text -> ids. Special tokens written out in it count as themselves, as in transformers; a
        beginning-of-text token is put in front unless there is one already."""
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        try:
            ids = [i for i in self.encoding.encode(text, allowed_special="all") if i < self.size]
        except ValueError as e:                     # the regular expression gave up
            raise UserError(f"a text of {len(text)} characters cannot be cut into words: {e}")
        return [self.bos] + ids if bos and self.bos is not None and ids[:1] != [self.bos] else ids

    def token_bytes(self, token):
        """What a token adds to the output; special tokens and padding rows add nothing."""
        return self.bytes[token] if token < self.size else b""

    def decoder(self):
        """Bytes in, text out, never half a character: `decode(bytes, final=False)`."""
        return codecs.getincrementaldecoder("utf-8")(errors="replace")

    def _template(self, directory, extra):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        path, source = Path(directory) / "chat_template.jinja", extra.get("chat_template")
        if path.is_file():
            source = path.read_text(encoding="utf-8")
        if isinstance(source, list):                # several, by name
            source = {one["name"]: one["template"] for one in source}.get("default")
        if not source:
            return None

        def refuse(message):
            raise UserError(f"the chat template refuses these messages: {message}")
        env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                            extensions=["jinja2.ext.loopcontrols"])
        env.globals.update(raise_exception=refuse,
                           strftime_now=lambda pattern: datetime.now().strftime(pattern))
        env.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False,
                                                                    **options)
        try:
            return env.from_string(source)
        except TemplateError as e:
            raise UserError(f"{directory}: the chat template cannot be read: {e}") from None

    def chat(self, messages):
        """Messages (role, content) -> the ids of the prompt, by the model's own template."""
        if self.template is None:
            raise UserError("this model has no chat template: use /v1/completions")
        from jinja2 import TemplateError
        try:
            text = self.template.render(messages=messages, add_generation_prompt=True, tools=None,
                                        bos_token=self.bos_token, eos_token=self.eos_token)
        except (TemplateError, TypeError) as e:
            raise UserError(f"the chat template refuses these messages: {e}") from None
        return self.encode(text, bos=False)         # the template writes the beginning-of-text


def split_pattern(spec, file):
    """The regular expression that cuts text into words before BPE, from the pre_tokenizer."""
    steps = spec.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds, first, last = [step.get("type") for step in steps], steps[0], steps[-1]
    own = last.get("use_regex", True)               # does ByteLevel cut too, as GPT-2 does?
    if kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and own:
            return GPT2_SPLIT
        if kinds == ["Digits", "ByteLevel"] and own and first["individual_digits"]:
            return DIGITS_SPLIT
        if (kinds == ["Split", "ByteLevel"] and not own and "Regex" in first["pattern"]
                and first["behavior"] == "Isolated" and not first.get("invert")):
            return first["pattern"]["Regex"]        # Llama 3, Qwen
    raise UserError(f"{file}: this kind of pre_tokenizer, {kinds}, is not supported (those of "
                    f"GPT-2, Llama 3, Qwen and SmolLM are)")


def first_special(spec, added):
    """The id that the post_processor puts in front of every text, or None."""
    post = spec.get("post_processor") or {}
    for step in post.get("processors", [post]):
        first = (step.get("single") or [{}])[0] if step.get("type") == "TemplateProcessing" else {}
        if "SpecialToken" in first:
            return added[first["SpecialToken"]["id"]]
    return None


class RawTokens:
    """The tokenizer of `random:` models, which know no words: "17 4 99" is three token ids."""
    eos, bos = frozenset(), None

    def __init__(self, config):
        self.vocab = config.vocab

    def encode(self, text, bos=True):
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise UserError(f"a random: model knows no words, only token ids below {self.vocab}, "
                            f"such as [17, 4] or \"17 4\"; not {text[:40]!r}") from None

    def token_bytes(self, token):
        return f"{token} ".encode()

    decoder = Tokenizer.decoder

    def chat(self, messages):
        raise UserError("a random: model has no chat template: use /v1/completions")
