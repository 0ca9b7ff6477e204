"""peers.py: this engine beside others, and beside what the machine could do at most.

    python bench.py peers                 this engine and Hugging Face transformers (vLLM, if it is
                                          importable), the same weights and requests, in one run
    python bench.py prefill               the share of a prefill that is matrix products
    python bench.py embeddings            embedding texts, beside transformers' padded batches
    python bench.py link                  gloo against shared memory: collectives and decode steps

It knows how to time an Engine; it does not know what an Engine does. Every figure is measured in
the run that prints it; ratios are what to quote, since machines are shared and noisy. Medians of
--repeats runs.
"""
import ctypes
import json
import random
import subprocess
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from pydantic_core import to_json

from assets.protocol import EmbeddingBody
from kernels import NativeKernels, TorchKernels, why_not_native
from model import Config, RandomWeights
from serve import Engine, Options, Pooling, SamplingParams
from shift import Link, UserError, connect, cores, launch

SMALL = "random:dim=512,layers=8,heads=16,kv_heads=8,ffn=1408,vocab=4096"
THIN = "random:dim=576,layers=30,heads=9,kv_heads=3,ffn=1536,vocab=49152"
ROWS = ((1, 128, 64), (32, 128, 64), (8, 1024, 16))          # (batch, tokens in, tokens out)


def add_flags(add):
    add("--model", default=SMALL, help="a random: model")
    add("--ranks", type=int, nargs="+", default=[1, 2])
    add("--mode", default="shift", help="shift, tp or sp")
    add("--quick", action="store_true", help="the first row only")
    add("--repeats", type=int, default=3)


def timed(function, repeats):
    """Seconds of each of `repeats` calls, after one that does not count."""
    function()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return seconds


# --------------------------------------------------------------------------------------------------
# What the machine can do

READ = """
#include <stdint.h>
#include <stddef.h>
float read_all(const float *x, int64_t n) {
  float total = 0;
  #pragma omp parallel for reduction(+:total)
  for (int64_t i = 0; i < n; i++) total += x[i];
  return total;
}
"""


def read_bandwidth(repeats):
    """Bytes a second at which all cores together read memory: the best of torch and plain C."""
    x = torch.ones(128 << 20)                                # 512 MB, far more than any cache
    ways = {"torch sum": x.sum, "torch matrix-vector": lambda: x.view(-1, 2048) @ x[:2048]}
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory, "read.c"), Path(directory, "read.so")
        source.write_text(READ)
        built = subprocess.run(["cc", "-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared",
                                "-fPIC", source, "-o", library], capture_output=True)
        if built.returncode == 0:
            read = ctypes.CDLL(str(library)).read_all
            read.argtypes = [ctypes.c_void_p, ctypes.c_int64]
            ways["C loop"] = lambda: read(x.data_ptr(), x.numel())
        rates = {name: x.nbytes / min(timed(way, repeats)) for name, way in ways.items()}
    best = max(rates, key=rates.get)
    return rates[best], best


def matmul_rates(repeats):
    """Floating-point operations a second of a large matrix product on all cores, by torch and, if
    there is a compiler, by kernels.c."""
    a, ways = torch.randn(2048, 2048), {"torch": TorchKernels()}
    if not why_not_native():
        ways["kernels.c"] = NativeKernels(cores())
    return {name: 2 * 2048 ** 3 / min(timed(lambda: kernels.matmul(a, a), repeats))
            for name, kernels in ways.items()}


def run_limits(repeats, path):
    torch.set_num_threads(cores())
    Path(path).write_text(json.dumps([*read_bandwidth(repeats), matmul_rates(repeats)]))
    return 0


def model_size(config):
    """(parameters that a decode step reads, floating-point operations of one prompt token)."""
    shapes = config.tensors()
    shapes.pop("model.embed_tokens.weight")                  # one row of it
    numbers = {name: torch.Size(shape).numel() for name, shape in shapes.items()}
    return sum(numbers.values()), 2 * sum(numbers.values()) - 2 * numbers.get("lm_head.weight", 0)


# --------------------------------------------------------------------------------------------------
# Engines: each returns (seconds to the first token, seconds from the first to the last) of a batch


def prompts_of(batch, length, vocab, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, length), generator=generator).tolist()


def run_ours(options, model, rows, repeats, path):
    """On each rank: every row of the table, several times; rank 0 leaves the times in a file."""
    engine = Engine(model=model, max_step_tokens=8192, **options)
    results = []
    for batch, length, out in rows:
        times = []
        for attempt in range(repeats + 1):
            stamps = []
            engine.on_events = lambda events: stamps.append(time.perf_counter())
            prompts = prompts_of(batch, length, engine.config.vocab, seed=attempt)
            start = time.perf_counter()
            engine.generate(prompts, SamplingParams(max_tokens=out, temperature=0, ignore_eos=True))
            if engine.rank == 0:
                times.append((stamps[0] - start, stamps[-1] - stamps[0]))
        results.append(times[1:])
    if engine.rank == 0:
        Path(path).write_text(json.dumps(results))
    return 0


def measured(function, ranks, *args):
    """What function(*args, path) left at path, run by ranks of their own: this process computes
    nothing itself, since OpenMP's threads do not survive a fork."""
    with tempfile.NamedTemporaryFile() as file:
        if launch(function, ranks, *args, file.name):
            raise UserError(f"{function.__name__} on {ranks} ranks failed, see above")
        return json.loads(Path(file.name).read_text())


def ours(model, rows, repeats, ranks, **options):
    return measured(run_ours, ranks, options, model, rows, repeats)


def their_model(config):
    """The same weights in transformers."""
    try:
        import transformers
    except ImportError:
        raise UserError("this compares with transformers: pip install transformers") from None
    torch.set_num_threads(cores())
    weights = RandomWeights(config)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=config.dim, num_hidden_layers=config.layers, num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads, head_dim=config.head_dim, vocab_size=config.vocab,
        intermediate_size=config.ffn, rms_norm_eps=config.norm_eps, tie_word_embeddings=False,
        max_position_embeddings=config.max_len)).float().eval()
    theirs.load_state_dict({name: weights[name] for name in config.tensors()})
    return theirs


def run_transformers(model, rows, repeats, path):
    """The same, by transformers' generate on a static batch; in a process of its own."""
    config = Config.random(model.removeprefix("random:"))
    theirs, results = their_model(config), []
    for batch, length, out in rows:
        times = []
        for attempt in range(repeats + 1):
            stamps = []

            def stamp(ids, scores):
                stamps.append(time.perf_counter())
                return scores
            ids = torch.tensor(prompts_of(batch, length, config.vocab, seed=attempt))
            start = time.perf_counter()
            theirs.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                            max_new_tokens=out, min_new_tokens=out, pad_token_id=0,
                            logits_processor=[stamp])
            times.append((stamps[0] - start, stamps[-1] - stamps[0]))
        results.append(times[1:])
    Path(path).write_text(json.dumps(results))
    return 0


# --------------------------------------------------------------------------------------------------
# peers


def peers(args):
    """The table: a block for each workload, a line for each engine, and the ratios."""
    import importlib.util
    config = Config.random(args.model.removeprefix("random:"))
    weights, flops = model_size(config)
    rows, results = ROWS[:1] if args.quick else ROWS, {}
    limits = [measured(run_limits, 1, args.repeats)]         # before and after each engine: the
    for ranks in args.ranks:                                 # neighbours of a machine come and go
        results[f"nanoshift, {ranks} rank{'s' * (ranks > 1)}"] = ours(
            args.model, rows, args.repeats, ranks, mode=args.mode)
        limits.append(measured(run_limits, 1, args.repeats))
    names = list(results)
    if importlib.util.find_spec("transformers"):
        results["transformers"] = measured(run_transformers, 1, args.model, rows, args.repeats)
        limits.append(measured(run_limits, 1, args.repeats))
    bandwidth = median(bandwidth for bandwidth, *_ in limits)
    rate = median(max(rates.values()) for *_, rates in limits)
    print(f"limits: memory read at {bandwidth / 1e9:.1f} GB/s (median of "
          f"{', '.join(f'{one[0] / 1e9:.1f}' for one in limits)}), matrix products at "
          f"{rate / 1e9:.0f} GFLOP/s; a token reads {weights * 4 / 1e6:.0f} MB of weights\n")
    print("" if importlib.util.find_spec("vllm") else "vLLM is not importable here: not measured\n")
    for i, (batch, length, out) in enumerate(rows):
        print(f"batch {batch}, {length} tokens in, {out} out")
        print(f"{'':24}{'TTFT ms':>10}{'TPOT ms':>10}{'output tok/s':>14}{'total tok/s':>13}")
        lines = {}
        for name, of_rows in results.items():
            first = median(first for first, _ in of_rows[i])
            each = median(rest / max(out - 1, 1) for _, rest in of_rows[i])
            total = median(first + rest for first, rest in of_rows[i])
            lines[name] = first, each, batch * out / total, batch * (length + out) / total
        least = batch * length * flops / rate, weights * 4 / bandwidth
        total = least[0] + least[1] * (out - 1)
        lines["limit"] = *least, batch * out / total, batch * (length + out) / total
        for name, (first, each, output, both) in lines.items():
            print(f"{name:24}{first * 1e3:10.1f}{each * 1e3:10.2f}{output:14.1f}{both:13.1f}")
        best = [min(lines[name][0] for name in names), min(lines[name][1] for name in names),
                max(lines[name][2] for name in names), max(lines[name][3] for name in names)]
        for other in ("transformers", "limit"):
            if other in lines:
                top, theirs = lines[other][:2], lines[other][2:]
                ratios = [*(a / b for a, b in zip(top, best)), *(a / b for a, b in
                                                               zip(best[2:], theirs))]
                print(f"{'ours is faster than ' + other if other != 'limit' else 'of the limit':32}"
                      f"{ratios[0]:.2f} x{ratios[1]:8.2f} x{ratios[2]:12.2f} x{ratios[3]:11.2f} x")
        print()


# --------------------------------------------------------------------------------------------------
# prefill and overhead: parts of the same picture that a table of requests does not show


def run_prefill(model, repeats, path):
    """Seconds of the forward pass for 8 x 256 and for 1 x 2048 prompt tokens; and, with 64 requests
    decoding, the share of a step that is not the forward pass. One rank, all cores."""
    engine = Engine(model=model, max_step_tokens=2048, max_seqs=64)
    forward, inside = engine.model.forward, []

    def timed_forward(batch, mode):
        start = time.perf_counter()
        result = forward(batch, mode)
        inside.append(time.perf_counter() - start)
        return result
    engine.model.forward = timed_forward
    greedy = SamplingParams(max_tokens=1, temperature=0)
    results = {}
    for batch, length in ((8, 256), (1, 2048)):
        inside.clear()
        for attempt in range(repeats + 1):
            engine.generate(prompts_of(batch, length, engine.config.vocab, attempt), greedy)
        results[f"{batch} x {length}"] = inside[1:]
    inside.clear()
    for prompt in prompts_of(64, 16, engine.config.vocab, 99):
        engine.submit(prompt, SamplingParams(max_tokens=100, temperature=0, ignore_eos=True))
    engine.close()
    steps = []
    while True:
        start = time.perf_counter()
        if not engine.step():
            break
        steps.append(time.perf_counter() - start)
    results["overhead"] = [1 - forward / step for forward, step in zip(inside[1:], steps[1:])]
    Path(path).write_text(json.dumps(results))
    return 0


def prefill(args):
    config = Config.random(args.model.removeprefix("random:"))
    _, _, rates = measured(run_limits, 1, args.repeats)
    _, flops = model_size(config)
    results = measured(run_prefill, 1, args.model, args.repeats)
    for name, (batch, length) in (("8 x 256", (8, 256)), ("1 x 2048", (1, 2048))):
        attention = 4 * config.layers * config.heads * config.head_dim * length * (length + 1) / 2
        products, all_of_it = batch * length * flops, batch * (length * flops + attention)
        seconds = median(results[name])
        print(f"prefill {name}: {seconds * 1e3:.0f} ms")
        for way, rate in rates.items():
            print(f"    at the {rate / 1e9:.0f} GFLOP/s of a large product by {way}, its matrix "
                  f"products take {products / rate / seconds:.2f} of that, with attention's "
                  f"{all_of_it / rate / seconds:.2f}")
    print(f"64 requests decoding: {100 * median(results['overhead']):.1f} % of a step is "
          f"scheduling, batch building, sampling and bookkeeping")


# --------------------------------------------------------------------------------------------------
# embeddings

TEXTS = (50, 1000), (512, 100)                               # (tokens, about; how many)


def texts_of(length, count, vocab, seed):
    """Token ids of texts of 0.75 to 1.25 times that length."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(length * 3 // 4, length * 5 // 4))]
            for _ in range(count)]


def run_our_embeddings(model, repeats, path):
    """For each of TEXTS: seconds of each run, and of building its answers, in both formats."""
    engine, found = Engine(model=model), []
    for length, count in TEXTS:
        seconds, building = [], []
        for attempt in range(repeats + 1):
            texts = texts_of(length, count, engine.config.vocab, attempt)
            start = time.perf_counter()
            outputs = engine.generate(texts, Pooling())
            seconds.append(time.perf_counter() - start)
        for form in ("float", "base64"):
            body = EmbeddingBody(input="", encoding_format=form)
            building.append(median(timed(lambda: to_json(body.answer({}, outputs)), 5)))
        found.append((seconds[1:], building))
    Path(path).write_text(json.dumps(found))


def run_their_embeddings(model, repeats, path):
    """The same texts in batches of 32, sorted by length and padded, masked, and averaged."""
    config = Config.random(model.removeprefix("random:"))
    theirs, found = their_model(config).model, []
    for length, count in TEXTS:
        seconds = []
        for attempt in range(repeats + 1):
            texts = texts_of(length, count, config.vocab, attempt)
            start = time.perf_counter()
            ordered = sorted(texts, key=len)
            for i in range(0, count, 32):
                part = [torch.tensor(text) for text in ordered[i:i + 32]]
                ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True)
                mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in part],
                                                       batch_first=True)
                with torch.inference_mode():
                    hidden = theirs(ids, attention_mask=mask).last_hidden_state
                    torch.nn.functional.normalize((hidden * mask[..., None]).sum(1))
            seconds.append(time.perf_counter() - start)
        found.append(seconds[1:])
    Path(path).write_text(json.dumps(found))


def embeddings(args):
    """Tokens a second, all cores, beside transformers and beside what matrix products allow."""
    config = Config.random(args.model.removeprefix("random:"))
    _, flops = model_size(config)
    _, _, rates = measured(run_limits, 1, args.repeats)
    ours = measured(run_our_embeddings, 1, args.model, args.repeats)
    theirs = measured(run_their_embeddings, 1, args.model, args.repeats)
    for (length, count), (seconds, building), other in zip(TEXTS, ours, theirs):
        tokens = [sum(map(len, texts_of(length, count, config.vocab, attempt)))
                  for attempt in range(1, args.repeats + 1)]
        speed, their_speed = (median(n / s for n, s in zip(tokens, times))
                              for times in (seconds, other))
        of = ", ".join(f"{speed * flops / rate:.2f} of {way}'s matmul rate"
                       for way, rate in rates.items())
        print(f"{count} texts of about {length} tokens: {speed:.0f} tokens/s, transformers "
              f"{their_speed:.0f}, ratio {speed / their_speed:.2f}; {of}; answers built in "
              f"{building[0] / median(seconds):.1%} (float), {building[1] / median(seconds):.1%} "
              f"(base64) of the time")


# --------------------------------------------------------------------------------------------------
# link


def run_link(backend, shape, repeats, path):
    connect()
    torch.set_num_threads(1)
    link = Link(backend)
    x = torch.ones(shape)
    for _ in range(3):
        link.all_reduce(x, link.everyone, "bench")
    link.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        link.all_reduce(x, link.everyone, "bench")
    if link.rank == 0:
        Path(path).write_text(json.dumps((time.perf_counter() - start) / repeats))
    return 0


def link(args):
    torch.set_num_threads(1)                                 # so nothing is lost in a fork
    for ranks, shape, repeats in ((8, (8, 512), 50), (2, (8, 512), 200), (2, (4096, 512), 20)):
        gloo, shm = (measured(run_link, ranks, backend, shape, repeats)
                     for backend in ("gloo", "shm"))
        x, y = torch.ones(shape), torch.empty(shape)
        copies = 3 * median(timed(lambda: y.copy_(x), 20))
        print(f"all_reduce {shape} float32, {ranks} ranks: gloo {gloo * 1e3:.3f} ms, shm "
              f"{shm * 1e3:.3f} ms, ratio {gloo / shm:.0f}; shm / copying it three times "
              f"{shm / copies:.2f}")
    tpot = {}
    for backend in ("gloo", "shm"):
        times = ours(Options.model, ((1, 16, 24),), 1, 8, mode="tp",
                     link=backend)[0]
        tpot[backend] = median(rest / 23 for _, rest in times)
    print(f"assets/tiny, 8 ranks, --mode tp: gloo {tpot['gloo'] * 1e3:.1f} ms a token, shm "
          f"{tpot['shm'] * 1e3:.2f} ms, ratio {tpot['gloo'] / tpot['shm']:.0f}")
