"""swiftkv.py: makes a SwiftKV checkpoint of any Llama, and teaches that of assets/tiny.

    python assets/swiftkv.py --model DIR --keep M --out DIR                   any Llama
    python assets/swiftkv.py --model assets/tiny --keep 3 --out assets/tiny-swiftkv --distil 300

Layers M and up take keys and values from the residual stream that leaves layer M-1 ("SwiftKV",
arXiv 2410.03960), by projections that start as those of the Llama. The new directory holds these
alone: its index names the Llama's own files for the rest, by relative paths.

The change costs quality, and distillation gives most of it back: with --distil the new tensors
learn, on the corpus of train_tiny.py, to lead to the Llama's own probabilities. The loss on text
held out, and a sample, are printed for the Llama, and for the new model before and after.
"""
import argparse
import json
import os
import random
import shutil
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import load_file, save_file

NEW = "swiftkv.safetensors"


def convert(source, keep, out):
    """Write the SwiftKV checkpoint `out`, layers `keep` and up changed."""
    source, out = Path(source), Path(out)
    config = json.loads((source / "config.json").read_text())
    layers = config["num_hidden_layers"]
    if config["architectures"] != ["LlamaForCausalLM"] or not 0 < keep < layers:
        sys.exit(f"{source}: a {config['architectures']} of {layers} layers; this is for a "
                 f"LlamaForCausalLM, and --keep {keep} must be between 1 and {layers - 1}")
    index = source / "model.safetensors.index.json"
    files = (sorted(set(json.loads(index.read_text())["weight_map"].values()))
             if index.exists() else ["model.safetensors"])
    where = {}
    for file in files:
        with safe_open(source / file, "pt") as opened:
            where |= dict.fromkeys(opened.keys(), file)

    def tensor(name):
        with safe_open(source / where[name], "pt") as opened:
            return opened.get_tensor(name)

    later = [f"model.layers.{i}.self_attn.{x}_proj" for i in range(keep, layers) for x in "qkv"]
    new = {f"{name}_swiftkv.weight": tensor(f"{name}.weight") for name in later}
    new["model.norm_swiftkv.weight"] = tensor(f"model.layers.{keep}.input_layernorm.weight")
    out.mkdir(parents=True, exist_ok=True)
    for path in [*source.glob("*token*"), *source.glob("*.jinja"), *source.glob("gen*.json")]:
        shutil.copy(path, out)
    config |= {"architectures": ["LlamaSwiftKVForCausalLM"], "model_type": "llama_swiftkv",
               "swiftkv": True, "num_key_value_layers": keep, "key_value_group_size": 1}
    kept = {name: os.path.relpath(source / file, out) for name, file in where.items()
            if name.removesuffix(".weight") not in later}
    write_json(out / "config.json", config)
    write_json(out / index.name, {"metadata": {}, "weight_map": kept | dict.fromkeys(new, NEW)})
    write_tensors(out / NEW, new)


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_tensors(path, tensors):
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)


def distil(source, keep, out, steps, batch=4, length=512, rate=1e-3, temperature=2.0, seed=1):
    """Teach the new tensors of `out`, for so many steps, to give the logits of `source`, which is
    assets/tiny or has its shape: KL divergence at a temperature, as the paper has it."""
    import train_tiny
    llama, tok = train_tiny.load(str(source))
    llama.requires_grad_(False)
    saved = load_file(out / NEW)
    new = {name: torch.nn.Parameter(w.float()) for name, w in saved.items()}

    class Student:
        """As train_tiny.Llama, whose layers it shares, with the new tensors in their place."""

        def later(self, x, cos, sin):
            y = F.rms_norm(x, x.shape[-1:], new["model.norm_swiftkv.weight"], train_tiny.NORM_EPS)
            for i in range(keep, train_tiny.LAYERS):
                layer = llama.layers[i]
                q, k, v = (F.linear(z, new[f"model.layers.{i}.self_attn.{p}_proj_swiftkv.weight"])
                           .unflatten(-1, (-1, train_tiny.HEAD_DIM)).transpose(1, 2)
                           for p, z in (("q", layer.input_layernorm(x)), ("k", y), ("v", y)))
                q, k = (train_tiny.rotate(z, cos, sin) for z in (q, k))
                o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                x = x + layer.self_attn.o_proj(o.transpose(1, 2).flatten(2))
                x = x + layer.mlp(layer.post_attention_layernorm(x))
            return F.linear(llama.norm(x), llama.embed_tokens.weight)

        def __call__(self, ids):
            return self.later(*first_layers(ids))

        loss = train_tiny.Llama.loss

    def first_layers(ids):
        cos, sin = llama.cos[:ids.shape[1]], llama.sin[:ids.shape[1]]
        x = llama.embed_tokens(ids)
        for layer in llama.layers[:keep]:
            x = layer(x, cos, sin)
        return x, cos, sin

    def report(name, model):
        print(f"{name}: held-out loss {train_tiny.held_loss(model, tok):.4f}", flush=True)
        prompt = train_tiny.BOS + "Once upon a time, a small fox named Nim"
        print(f"    {train_tiny.generate(model, tok, prompt, most=100)}", flush=True)

    student = Student()
    report("the Llama", llama)
    report("initialised", student)
    optimizer = torch.optim.AdamW(new.values(), lr=rate, weight_decay=0.0)
    rows = train_tiny.rows(tok, random.Random(seed), "train", length)
    start = time.time()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min((step + 1) / 20, 1.0, 1.5 * (1 - step / steps))
        ids = torch.tensor([next(rows)[:-1] for _ in range(batch)])
        with torch.no_grad():
            x, cos, sin = first_layers(ids)
            wanted = x
            for layer in llama.layers[keep:]:
                wanted = layer(wanted, cos, sin)
            wanted = F.linear(llama.norm(wanted), llama.embed_tokens.weight)
        given, wanted = ((z / temperature).log_softmax(-1).flatten(0, 1)
                         for z in (student.later(x, cos, sin), wanted))
        loss = F.kl_div(given, wanted, log_target=True, reduction="batchmean") * temperature ** 2
        loss.backward()
        torch.nn.utils.clip_grad_norm_(new.values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.4f}, "
                  f"{time.time() - start:.0f} s", flush=True)
    taught = {name: w.detach().to(saved[name].dtype) for name, w in new.items()}
    for name, w in taught.items():
        new[name].data = w.float()                       # as it is read again
    report("distilled", student)
    write_tensors(out / NEW, taught)


def main():
    parser = argparse.ArgumentParser(description="Makes a SwiftKV checkpoint of a Llama.")
    parser.add_argument("--model", required=True, help="directory in Hugging Face layout")
    parser.add_argument("--keep", type=int, required=True, help="layers that stay as they are")
    parser.add_argument("--out", required=True, help="directory to write")
    parser.add_argument("--distil", type=int, default=0, metavar="STEPS",
                        help="teach it for so many steps; for assets/tiny only")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    convert(args.model, args.keep, args.out)
    if args.distil:
        distil(Path(args.model), args.keep, Path(args.out), args.distil)


if __name__ == "__main__":
    main()
