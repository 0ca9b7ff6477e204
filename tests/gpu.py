"""gpu.py: everything that only a GPU can show, in one command and under five minutes.

    python tests/gpu.py                                one GPU
    torchrun --nproc-per-node 8 tests/gpu.py           the GPUs of a host (or --nproc 8)
    python tests/gpu.py --device cpu --quick           the same code, small, without a GPU

On any rank count: the kernels against the reference, and against the copy and matmul rates of this
very device; the engine against transformers; tokens a second with CUDA graphs and without; vLLM's,
if it is importable. On several ranks also every layout, the collectives, and bench.py's crossover
and compare. One table, and all of it in a file of JSON. Exit code 0: everything was right; 1: the
rows marked WRONG were not; 2: there is no GPU.
"""
import argparse
import gc
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import bench                                             # puts assets/ on the path, too
import kernels
from common import factorizations, write_checkpoint
from model import Config, Graph, Llama, SamplingParams, rope_tables
from peers import model_size, prompts_of
from serve import Engine
from shift import Link, connect, launch
from test_engine import write_tokenizer
from test_graphs import fake_capture

LARGE = dict(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=128256)   # Llama 3.2 1B
SMALL = dict(dim=64, layers=2, heads=8, kv_heads=4, ffn=128, vocab=512)
# (requests, tokens in the cache, new tokens) of each
SHAPES = [(1, 8191, 1), (32, 1023, 1), (256, 511, 1), (16, 500, 4), (1, 0, 2048), (4, 512, 512)]
GREEDY = dict(temperature=0, ignore_eos=True)


class Bench:
    """What the parts share: the flags, the device, and the rows of the table."""

    def __init__(self, args, world):
        self.args, self.world, self.rows = args, world, []
        self.quick, self.cuda = args.quick, args.device == "cuda"
        self.device = torch.device(args.device)              # of cuda: the current one
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        self.dtypes = [*dict.fromkeys([self.dtype, torch.float32])]
        self.fast = kernels.TritonKernels() if self.cuda else kernels.TorchKernels()
        self.limits, self.sync = {}, torch.get_device_module(self.device).synchronize

    def row(self, part, case, value, unit, note="", right=True):
        self.rows.append(dict(part=part, case=case, value=value, unit=unit, note=note, right=right))
        if self.world.rank == 0:
            print(f"{part:12} {case:42} {value:12.4g} {unit:8} {note}{'' if right else ' WRONG'}",
                  flush=True)

    def checked(self, case, got, want, function, nbytes, flops, dtype):
        """A kernel's row: its error, against the largest value, and its rate, in floating-point
        operations if flops are given and else in bytes, against the device's."""
        off = max(((x.float() - y.float()).abs().max() / y.float().abs().max()).item()
                  for x, y in zip(got, want))
        amount, limit, scale, unit = (flops, dtype, 1e12, "TFLOP/s") if flops else (
            nbytes, "copy", 1e9, "GB/s")
        rate = amount / self.seconds(function)
        self.row("kernels", f"{case}, {dtype}".replace("torch.", ""), rate / scale, unit,
                 f"{rate / self.limits[limit]:.0%} of the device's, off by {off:.0e}",
                 off < (2e-2 if dtype == torch.bfloat16 else 1e-4))

    def seconds(self, function):
        """A call's time: of so many calls that together they take a while."""
        self.spent(function, 1)                              # the first one compiles
        calls = 1
        while (spent := self.spent(function, calls)) < (0.01 if self.quick else 0.2):
            calls *= 2
        return spent / calls

    def spent(self, function, calls):
        self.sync()
        start = time.perf_counter()
        for _ in range(calls):
            function()
        self.sync()
        return time.perf_counter() - start

    def random(self, *shape, dtype=None):
        return torch.randn(shape, device=self.device).to(dtype or self.dtype)


# --------------------------------------------------------------------------------------------------
# The device and the kernels


def ceilings(b):
    """What this device does at most: nothing else is a fair measure of a kernel."""
    n = 512 if b.quick else 8192
    for dtype in b.dtypes:
        x, y = b.random(n, n, dtype=dtype), b.random(n, n, dtype=dtype)
        b.limits[dtype] = 2 * n ** 3 / b.seconds(lambda: x @ y)
        b.row("device", f"matmul of {n} x {n}, {dtype}", b.limits[dtype] / 1e12, "TFLOP/s")
    b.limits["copy"] = 2 * x.nbytes / b.seconds(lambda: y.copy_(x))
    b.row("device", f"copy of {x.nbytes >> 20} MiB, both ways", b.limits["copy"] / 1e9, "GB/s")


def attention_inputs(b, requests, cached, new, dtype, h, k, dim, block=16):
    """Everything that `attention` takes, of pages in no order."""
    context, T = cached + new, requests * new
    pages = -(-context // block)
    tables = torch.randperm(requests * pages, device=b.device).view(requests, pages).int()
    positions = torch.arange(cached, context, device=b.device).repeat(requests)
    owner = torch.arange(requests, device=b.device).repeat_interleave(new)
    slots = tables[owner, positions // block].long() * block + positions % block
    cos, sin = (table.to(b.device)[positions] for table in rope_tables(
        Config(head_dim=dim), context))
    integers = dict(dtype=torch.int32, device=b.device)
    return (b.random(T, h + 2 * k, dim, dtype=dtype), cos, sin,
            b.random(2, requests * pages, k, block, dim, dtype=dtype), slots, tables,
            torch.arange(0, T + 1, new, **integers), torch.full((requests,), context, **integers),
            dim ** -0.5)


def check_kernels(b):
    """Each kernel against the reference, on the same inputs; and its rate."""
    slow, D, F = kernels.TorchKernels(), 64 if b.quick else 2048, 128 if b.quick else 8192
    for dtype in b.dtypes:
        for t in (1, 256) if b.quick else (1, 32, 256, 2048):
            x, w, gain, wide = (b.random(*shape, dtype=dtype) for shape in (
                (t, D), (2, D, F), (D,), (2, t, F)))
            for name, *given, nbytes, flops in (
                    ("matmul", x, w, w.nbytes, 4 * t * D * F * (t >= 256)),
                    ("rms_norm", x, gain, 1e-5, 2 * x.nbytes, 0),
                    ("silu_mul", wide, wide.nbytes * 3 // 2, 0)):
                fast, reference = getattr(b.fast, name), getattr(slow, name)
                b.checked(f"{name}, {t} tokens", [fast(*given)], [reference(*given)],
                          lambda: fast(*given), nbytes, flops, dtype)
        for requests, cached, new in SHAPES:
            if b.quick:
                requests, cached, new = min(requests, 4), cached // 16, min(new, 64)
            h, k, dim = (8, 4, 8) if b.quick else (32, 8, 64)
            inputs = attention_inputs(b, requests, cached, new, dtype, h, k, dim)
            theirs = [x.clone() if torch.is_tensor(x) else x for x in inputs]
            want, got = slow.attention(*theirs), b.fast.attention(*inputs)
            seen = new * cached + new * (new + 1) // 2       # pairs of a query and a key
            b.checked(f"attention, {requests} x ({cached} + {new})", [got, inputs[3]],
                      [want, theirs[3]], lambda: b.fast.attention(*inputs),
                      inputs[3].nbytes + 2 * inputs[0].nbytes,
                      4 * requests * seen * h * dim * (new >= 64), dtype)


# --------------------------------------------------------------------------------------------------
# The engine


def engine_of(b, directory, **options):
    """A new engine; the memory of the last one is free again, if its caller has dropped it."""
    gc.collect()
    if b.cuda:
        torch.cuda.empty_cache()
    auto = dict(max_seqs=256, max_step_tokens=4096, gpu_memory=0.8) if b.cuda else dict(
        kv_blocks=256, max_seqs=8, max_step_tokens=128, threshold=16, link="gloo")
    return Engine(model=str(directory), **{**auto, **options})


def check_parity(b, directory):
    """Our greedy tokens, one by one, under transformers' logits of the same text, in float32."""
    engine = engine_of(b, directory, dtype="float32")
    out = 4 if b.quick else 24
    prompts = prompts_of(4, 40, engine.config.vocab, seed=1)
    outputs = engine.generate(prompts, SamplingParams(max_tokens=out, **GREEDY))
    del engine
    if outputs is None or not importlib.util.find_spec("transformers"):
        return
    gc.collect()
    from transformers import AutoModelForCausalLM
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(b.device)
    texts = torch.tensor([o.prompt + o.tokens for o in outputs], device=b.device)
    with torch.inference_mode():
        logits = theirs(texts).logits[:, -out - 1:-1]        # those that tell of our tokens
    gap = logits.amax(-1) - logits.gather(-1, texts[:, -out:, None])[..., 0]
    b.row("parity", f"{gap.numel()} greedy tokens, transformers' too", (gap == 0).sum().item(),
          "tokens", f"largest gap {gap.max().item():.1e}", gap.max().item() < 1e-3)


def rates(engine, batch, length, out):
    """(tokens a second of decode, milliseconds a step): the better of two runs."""
    best = 0, 0
    for attempt in range(2):
        stamps = []
        engine.on_events = lambda events: stamps.append((time.perf_counter(), len(events)))
        engine.generate(prompts_of(batch, length, engine.config.vocab, seed=attempt),
                        SamplingParams(max_tokens=out, **GREEDY))
        times, counts = zip(*stamps[-(out - 1):] or [(0, 0)])            # without the prompts
        spent = times[-1] - times[0]
        best = max(best, (sum(counts[1:]) / (spent or 1), spent * 1e3 / max(1, len(times) - 1)))
    return best


def throughput(b, directory):
    """Decode, with CUDA graphs and without; beside what reading the weights allows."""
    batches, out = ((1, 4), 6) if b.quick else ((1, 32, 256), 128)
    for eager in (False, True):
        engine = engine_of(b, directory, eager=eager)
        if not b.cuda and not eager:                         # "graphs" that run eagerly
            engine.model.graphs = [Graph(engine.model, n, 64, fake_capture) for n in (4, 1)]
        weights, _ = model_size(engine.config)
        weights *= engine.model.dtype.itemsize / engine.layout.ranks
        how = "eager" if eager else "graphs"
        for batch in batches:
            rate, step = rates(engine, batch, 128 if b.cuda else 8, out)
            least = weights / b.limits["copy"] * 1e3
            b.row("decode", f"batch {batch}, {how}", rate, "tokens/s",
                  f"{step:.2f} ms a step, {least / step if step else 0:.0%} of it to read weights")
        b.row("start", how, len(engine.model.graphs), "graphs", engine.remark.strip(", "))
        del engine


def vllm(b, directory):
    """The same batches by vLLM, in a process of its own."""
    if b.world.size > 1 or not importlib.util.find_spec("vllm"):
        return
    program = """if 1:
        import json, sys, time
        from vllm import LLM, SamplingParams
        from peers import prompts_of
        model = LLM(sys.argv[1], skip_tokenizer_init=True, dtype="bfloat16", max_model_len=2048,
                    gpu_memory_utilization=0.5, enable_prefix_caching=False)
        def run(batch, out, seed):
            greedy = dict(temperature=0, ignore_eos=True, detokenize=False)
            prompts = [{"prompt_token_ids": p} for p in prompts_of(batch, 128, 128256, seed)]
            start = time.perf_counter()
            model.generate(prompts, SamplingParams(max_tokens=out, **greedy), use_tqdm=False)
            return time.perf_counter() - start
        for batch in (1, 32, 256):
            run(batch, 2, 4)
            times = [run(batch, 129, seed) - run(batch, 1, seed + 2) for seed in (0, 1)]
            print(json.dumps(["vllm", batch, batch * 128 / min(times)]))
    """
    done = subprocess.run([sys.executable, "-c", program, str(directory)], text=True, env={
        **os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'assets'}"}, capture_output=True)
    for line in done.stdout.splitlines():
        if line.startswith('["vllm"'):
            _, batch, rate = json.loads(line)
            b.row("vLLM", f"batch {batch}", rate, "tokens/s")
    if done.returncode:
        b.row("vLLM", "failed", done.returncode, "", done.stderr.strip()[-200:])


# --------------------------------------------------------------------------------------------------
# Several ranks


def layouts(b, directory):
    """Every sp x tp: the same greedy text in float32, and the rate of its collectives."""
    texts = {}
    for sp, tp in factorizations(b.world.size):
        engine = engine_of(b, directory, dtype="float32", sp=sp, tp=tp, threshold=16)
        outputs = engine.generate(prompts_of(4, 40, engine.config.vocab, seed=1),
                                  SamplingParams(max_tokens=8, **GREEDY))
        texts[sp, tp] = [o.tokens for o in outputs or ()]
        same = texts[sp, tp] == texts[1, b.world.size]
        b.row("layouts", f"sp {sp} x tp {tp}: as sp 1 x tp {b.world.size}", same, "", right=same)
        link = engine.link
        del engine
    for tokens in (1, 64) if b.quick else (1, 64, 4096):     # of the last layout's link, all ranks
        x, P = b.random(tokens * b.world.size, 512 if b.quick else 8192), b.world.size
        for name, call in (("all_reduce", lambda: link.all_reduce(x, link.everyone, "test")),
                           ("all_to_all", lambda: link.all_to_all(
                               x, [tokens] * P, [tokens] * P, link.everyone, "test"))):
            link.barrier()
            before, spent = link.counts[name, "test"].bytes, b.spent(call, 20)
            sent = link.counts[name, "test"].bytes - before
            b.row("collectives", f"{name} of {x.nbytes >> 10} KiB", sent / spent / 1e9, "GB/s",
                  f"{spent / 20 * 1e6:.0f} us")
            x.zero_()                                        # sums of sums would overflow


def comparisons(b, directory):
    """bench.py's crossover and compare, on these ranks; its tables, its JSON."""
    say, results = print if b.world.rank == 0 else lambda *text: None, {}
    forward = Llama.forward

    def finished(self, *args):
        """crossover times what `forward` does; on a GPU it only launches it."""
        result = forward(self, *args)
        b.sync()
        return result
    few = ["--max-step-tokens", "64", "--kv-blocks", "64", "--requests", "2", "--input", "8",
           "--output", "4", "--tokens", "16", "--repeats", "1", "--link", "gloo"]
    for command, more in (("crossover", []), ("compare", ["--workload", "latency", "burst"])):
        with tempfile.NamedTemporaryFile() as file:
            args = bench.parse([command, "--model", str(directory), "--json", file.name, *more,
                                *(few if b.quick else ["--kv-blocks", "4096"])])
            Llama.forward = finished if command == "crossover" else forward
            bench.WORLD[command](args, b.world, say)
            if b.world.rank == 0:
                results[command] = json.loads(Path(file.name).read_text())
    return results


# --------------------------------------------------------------------------------------------------


def in_rank(args):
    connect()
    world = Link("gloo")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        torch.set_num_threads(1)
    b, more = Bench(args, world), {}
    with tempfile.TemporaryDirectory() as own:
        directory = Path(world.gather(own)[0]) / "model"
        config = Config(**(SMALL if args.quick else LARGE), max_len=512 if args.quick else 8192,
                        dtype="float32" if args.quick else "bfloat16")
        with world.together():
            if world.rank == 0:
                write_checkpoint(directory, config, change=lambda tensors: tensors.update(
                    {name: w.to(b.dtype) for name, w in tensors.items()}))
                write_tokenizer(directory, config.vocab)
        ceilings(b)
        check_kernels(b)
        check_parity(b, directory)
        throughput(b, directory)
        vllm(b, directory)
        if world.size > 1:
            layouts(b, directory)
            more = comparisons(b, directory)
        if world.rank == 0 and args.json:
            name = torch.cuda.get_device_name() if b.cuda else "cpu"
            Path(args.json).write_text(json.dumps({"device": name, "ranks": world.size, "torch":
                                                   torch.__version__, "rows": b.rows, **more}))
        world.barrier()                                      # the directory goes with its owner
    return any(world.gather(not all(row["right"] for row in b.rows)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--nproc", type=int, help="ranks to start, without torchrun")
    parser.add_argument("--json", default="gpu.json", help="the file of all results")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.device_count():
        print("gpu.py: there is no GPU here; --device cpu --quick runs the same code without one",
              file=sys.stderr)
        return 2
    if args.nproc and "RANK" not in os.environ:
        return launch(in_rank, args.nproc, args)
    return in_rank(args)


if __name__ == "__main__":
    sys.exit(main())
