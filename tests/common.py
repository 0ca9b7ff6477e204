"""What the test files share: worlds of ranks under a deadline, small checkpoints, steps to run.

    code = world(function, 8, *args)        eight forked ranks run function(*args); never hangs
    config = write_checkpoint(directory, "llama", kv_heads=2)
    batch = step([(request, 5), (other, 1)], rows=[0, 5])

A rank asserts for itself: a failing assert prints its traceback and makes the code 1. What a test
wants back from its ranks, they `save`, and it `load`s.
"""
import faulthandler
import json
import multiprocessing as mp
import signal
import sys
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

from model import FAMILIES, Batch, Config, RandomWeights
from shift import Group, Link, connect, launch

BLOCK_SIZE = 4                         # tokens per KV block in these tests: small, so many are used


@contextmanager
def deadline(seconds):
    """Raise TimeoutError after so many seconds, and end the processes that this one started."""
    def late(number, frame):
        end_children()
        raise TimeoutError(f"not done within {seconds} seconds")
    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        end_children()


def end_children():
    for child in mp.active_children():
        child.kill()
        child.join()


def world(function, ranks, *args, seconds=120):
    """shift.launch under a deadline; returns the exit code. Late ranks say where they are stuck."""
    with deadline(seconds):
        return launch(_in_rank, ranks, seconds, function, args)


def _in_rank(seconds, function, args):
    faulthandler.dump_traceback_later(max(1, seconds - 2), file=sys.__stderr__)
    return function(*args)


def save(directory, value):
    """Leave a rank's result for the test. Files, because the ranks are other processes."""
    torch.save(value, directory / f"{torch.distributed.get_rank()}.pt")


def load(directory, ranks):
    return [torch.load(directory / f"{rank}.pt") for rank in range(ranks)]


def factorizations(ranks):
    """Every (sp, tp) with sp * tp = ranks."""
    return [(sp, ranks // sp) for sp in range(1, ranks + 1) if ranks % sp == 0]


def links(sizes):
    """{P: (link, index)} over one world: it is cut into consecutive sets of P ranks, for each P.

    This rank's link of each size, and the number of the set that it is in.
    """
    rank = connect()
    ranks = torch.distributed.get_world_size()
    return {P: (Link(ranks=range(rank // P * P, rank // P * P + P)), rank // P)
            for P in sizes if ranks % P == 0}


class NoLink:
    """Stands in for a Link where nothing is sent: one rank, or a look at what each rank stores."""

    def __init__(self, rank=0, size=1):
        self.rank, self.size, self.device = rank, size, torch.device("cpu")

    def group(self, ranks):
        return Group(tuple(ranks), list(ranks).index(self.rank), None)

    def mark(self, what):
        pass


# --------------------------------------------------------------------------------------------------
# Small models, in Hugging Face's layout

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}

# name -> the model. H = F/4 = 8 or 16, so that 1, 2, 4 and 8 ranks can share each of them; head_dim
# is never D/H and the vocabulary (101) is never divisible; K is above, at and below 8 ranks.
MODELS = {
    "llama": dict(kv_heads=2),
    "mha": dict(heads=16, kv_heads=16, tied=True, head_dim=8),
    "linear": dict(kv_heads=8, tied=True,
                   rope={"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}),
    "llama3": dict(kv_heads=1, rope=LLAMA3_ROPE),
    "qwen2": dict(kv_heads=4, qkv_bias=True, tied=True),
    "qwen3": dict(kv_heads=2, qk_norm=True, heads=16, head_dim=16)}


def small_config(name, **changes):
    values = dict(dim=48, layers=2, heads=8, head_dim=12, ffn=64, vocab=101, max_len=64,
                  dtype="float32", eos=(2,), seed=1)
    return Config(**{**values, **MODELS[name], **changes})


def hf_config(config, old=False):
    """config.json, written by hand: as transformers 5 writes it, or as it was before (old)."""
    family = next(name for name, traits in FAMILIES.items() if traits == {
        trait: True for trait in ("qkv_bias", "qk_norm") if getattr(config, trait)})
    hf = {"architectures": [family], "hidden_size": config.dim,
          "model_type": family.removesuffix("ForCausalLM").lower(),
          "num_hidden_layers": config.layers, "num_attention_heads": config.heads,
          "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
          "intermediate_size": config.ffn, "vocab_size": config.vocab,
          "max_position_embeddings": config.max_len, "rms_norm_eps": config.norm_eps,
          "tie_word_embeddings": config.tied, "eos_token_id": list(config.eos),
          "bos_token_id": 1, "hidden_act": "silu", "attention_bias": False}
    if not old:
        return {**hf, "rope_parameters": config.rope, "dtype": config.dtype}
    scaling = {key: value for key, value in config.rope.items() if key != "rope_theta"}
    if scaling["rope_type"] == "linear":
        scaling["type"] = scaling.pop("rope_type")             # older still
    return {**hf, "rope_theta": config.rope["rope_theta"], "torch_dtype": config.dtype,
            "rope_scaling": None if config.rope["rope_type"] == "default" else scaling}


def write_checkpoint(directory, config, shards=1, old=False, change=None):
    """config.json and random weights in `shards` files. `change(tensors)` may spoil them first."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(hf_config(config, old)))
    source = RandomWeights(config)
    tensors = {name: source[name] for name in config.tensors()}
    if change:
        change(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(tensors)}
    for file in files:
        save_file({name: tensors[name] for name in where if where[name] == file}, directory / file,
                  metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": where}))


def oracle_logits(directory, texts):
    """What transformers makes of the same files: the logits (length, V) of each text."""
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        return [model(torch.tensor([text])).logits[0] for text in texts]


# --------------------------------------------------------------------------------------------------
# Steps


@dataclass
class Request:
    tokens: list                        # all of them, the future ones too: tests are teacher-forced
    pages: list                         # its KV blocks, in any order
    computed: int = 0


def requests(texts, seed=0):
    """A Request for each text, with pages out of order. Returns them and the blocks they need."""
    counts = [-(-len(text) // BLOCK_SIZE) for text in texts]
    free = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).tolist()
    return [Request(text, [free.pop() for _ in range(count)])
            for text, count in zip(texts, counts)], sum(counts)


def random_texts(lengths, vocab, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=draw).tolist() for length in lengths]


def step(work, rows="all"):
    """The Batch that computes the next n tokens of each (request, n), and marks them computed."""
    ids, positions, slots, starts, contexts = [], [], [], [0], []
    for request, n in work:
        places = range(request.computed, request.computed + n)
        ids += [request.tokens[i] for i in places]
        positions += places
        slots += [request.pages[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in places]
        starts.append(len(ids))
        contexts.append(places.stop)
        request.computed = places.stop
    most = max(len(request.pages) for request, _ in work)
    tables = [request.pages + [-1] * (most - len(request.pages)) for request, _ in work]
    integers = dict(dtype=torch.int32)
    return Batch(torch.tensor(ids), torch.tensor(positions), torch.tensor(slots),
                 torch.tensor(tables, **integers), torch.tensor(starts, **integers),
                 torch.tensor(contexts, **integers),
                 list(range(len(ids))) if rows == "all" else rows)
