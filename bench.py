"""bench.py: the figures of the Shift Parallelism paper in miniature, measured and simulated.

    python bench.py crossover --nproc 8       step time against tokens per step: TP, SP and mixed
    python bench.py compare --nproc 8         the same requests through TP, SP, DP and Shift
    python bench.py simulate --paper          the same on 8 H200s, in virtual time
    python bench.py figures --out DIR         every figure, with its data as CSV
    python bench.py peers | prefill | link    this engine beside others (assets/peers.py)

`compare` and `crossover` also run under torchrun --nproc-per-node 8. With --like h200x8:llama-70b
their link is slowed until communication has the share of a step that it has on that machine; what
is measured so is labelled emulated.

It knows what an engine's step consists of, and the traffic of the world; it does not know how a
step is scheduled (serve.py's own scheduler does that, here too) or who owns what (shift.py).
Tables, metrics and plots are assets/figures.py, presets and their sources assets/hardware.json;
assets/calibrate.py fits the costs of this machine.

In reading order: traffic, the cost of a step, simulate, compare, crossover, main.
"""
import argparse
import csv
import fcntl
import itertools
import json
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter, deque, namedtuple
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from statistics import fmean

import torch

from model import Config
from serve import BlockManager, Engine, Options, Parser, Request, SamplingParams, Scheduler
from shift import Layout, Link, LostRank, Switch, UserError, connect, launch

sys.path.append(str(Path(__file__).parent / "assets"))
import figures as report                                 # these three are in assets/
import peers
from tour import elements_sent

HARDWARE = report.HARDWARE                               # assets/hardware.json

# --------------------------------------------------------------------------------------------------
# Traffic: requests as lengths and arrival times

Call = namedtuple("Call", "at prompt output hashes")     # seconds, tokens, tokens, prefix blocks
Served = namedtuple("Served", "at first last prompt output")      # three times, two lengths
Step = namedtuple("Step", "at seconds tokens mode free") # free: share of the KV blocks
LOADS = (0.2, 0.4, 0.6, 0.8, 1.0)                        # the rate sweep, as shares of the capacity
# An engine's options that are flags here too; --systems says sp, tp and mode.
OPTIONS = {f.name for f in fields(Options)} - {*"sp tp mode explain trace trace_steps".split()}


def read_trace(path, minutes, scale):
    """The first minutes of an Azure CSV or a Mooncake JSONL file, lengths multiplied by scale."""
    calls = []
    try:
        with open(path) as file:
            mooncake = file.readline().startswith("{")
            file.seek(0)
            names = (("timestamp", "input_length", "output_length") if mooncake else
                     ("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
            for row in map(json.loads, file) if mooncake else csv.DictReader(file):
                at, *lengths = (row[name] for name in names)
                at = at / 1000 if mooncake else datetime.fromisoformat(at[:26]).timestamp()
                lengths = (max(1, round(int(length) * scale)) for length in lengths)
                calls.append(Call(at, *lengths, row.get("hash_ids", ())))
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"--trace {path}: {getattr(e, 'strerror', None) or repr(e)}; it must be an "
                        f"Azure CSV or a Mooncake JSONL file") from None
    if not calls:
        raise UserError(f"--trace {path} holds no request")
    calls = [call._replace(at=call.at - calls[0].at) for call in calls]
    return [call for call in calls if call.at < minutes * 60]


def prompt_of(call, number, vocab, scale):
    """Token ids: 512 for each prefix block's id, the same in every request, then its own."""
    tokens, block = [], max(1, round(512 * (scale or 1)))
    for seed, size in [*((name, block) for name in call.hashes), (2 ** 40 + number, call.prompt)]:
        if len(tokens) < call.prompt:
            draw = torch.Generator().manual_seed(seed)
            tokens += torch.randint(vocab, (size,), generator=draw).tolist()
    return tokens[:call.prompt]


def make_calls(kind, args, run):
    """[(name, calls, most outstanding at once or None)] of a workload. What comes with time comes
    at a share of the capacity: tokens a second of the best static layout, if all come at once.
    run(system's name, calls) serves them."""
    def capacity(calls):
        static = [name for name in args.systems if "shift" not in name and name != "dp"] or ["tp"]
        calls = [call._replace(at=0.0) for call in calls[:64]]
        return max(run(name, calls)[0]["tok/s"] for name in static)
    if kind == "trace":
        calls = read_trace(args.trace, args.minutes, args.scale or 1)[:args.requests]
        if args.load:
            offered = sum(call.prompt + call.output for call in calls) / max(calls[-1].at, 1e-9)
            stretch = offered / (args.load * capacity(calls))
            calls = [call._replace(at=call.at * stretch) for call in calls]
        return [(kind, calls, None)]
    calls = [Call(0.0, args.input, args.output, ())] * (args.requests or 64)
    if kind in ("latency", "batch"):
        return [(kind, calls, 1 if kind == "latency" else None)]
    rate, draw = capacity(calls) / (args.input + args.output), torch.Generator().manual_seed(0)

    def poisson(share, count):
        gaps = torch.empty(count).exponential_(rate * share, generator=draw)
        return [calls[0]._replace(at=at) for at in gaps.cumsum(0).tolist()]
    if kind == "rate":
        return [(f"rate {load:.0%}", poisson(load, len(calls)), None) for load in LOADS]
    quiet = poisson(0.25, -(-len(calls) // 2))               # and four bursts, together as many
    bursts = [calls[0]._replace(at=quiet[-1].at * (i % 4 + 0.5) / 4) for i in range(len(quiet))]
    return [(kind, sorted(quiet + bursts), None)]


System = namedtuple("System", "sp tp mode")              # mode: tp, sp (pinned) or shift


def parse_system(name, ranks, total):
    """tp, sp, shift over `ranks`; dp; a mixed layout 4x2 (sp x tp); shift4x2: it over that one.
    As many engines of it as fit into `total` ranks share the requests."""
    mixed = re.fullmatch(r"(shift)?([1-9]\d*)x([1-9]\d*)", name)
    sp, tp, mode = ((int(mixed[2]), int(mixed[3]), mixed[1] or "sp") if mixed else
                    {"tp": (ranks, 1, "tp"), "sp": (ranks, 1, "sp"), "dp": (1, 1, "tp"),
                     "shift": (ranks, 1, "shift")}.get(name, (0, 0, None)))
    if not sp or total % (sp * tp):
        raise UserError(f"--systems {name} is none of tp, sp, dp, shift, 4x2, shift4x2, or its "
                        f"ranks do not divide {total}")
    return System(sp, tp, mode)


# --------------------------------------------------------------------------------------------------
# The cost of a step

Model = namedtuple("Model", "config weight word")        # bytes of a weight, and of all the rest


def find_model(name):
    """A preset (llama-70b-fp8, by default bf16), random:..., or a directory of Hugging Face's."""
    preset = re.fullmatch(rf"({'|'.join(HARDWARE['models'])})(-fp8|-bf16)?", name)
    if preset:
        return Model(Config(**HARDWARE["models"][preset[1]]), 1 if preset[2] == "-fp8" else 2, 2)
    if not name.startswith("random:") and not Path(name or "none").is_dir():
        raise UserError(f"--model {name} is no directory, no random:..., and none of "
                        f"{', '.join(HARDWARE['models'])} with -fp8 or -bf16")
    return Model(Config.random(name[7:]) if name.startswith("random:") else Config.read(name), 4, 4)


@dataclass(frozen=True)
class Cluster:
    """What things cost on one GPU, or one rank on CPUs, and on its links, in seconds."""
    name: str
    per_node: int                      # ranks that share the faster link
    nodes: int = 1
    memory: float = 1e11               # bytes for weights and KV cache
    flop_s: float = 0                  # a floating-point operation of a matrix product ...
    pair_s: float = 0                  # ... and of attention
    byte_s: float = 0                  # a byte of memory read or written
    layer_s: float = 0                 # the kernels of a layer, however little they do
    step_s: float = 0                  # a step outside the forward pass ...
    request_s: float = 0               # ... and more for each of its requests
    prompt_token_s: float = 0          # before the engine: reading a prompt
    reduce: tuple = ((0, 0),)          # (seconds a call, seconds a byte) of each way to do it
    exchange: tuple = ((0, 0),)
    node: tuple = (0, 0)               # the same, of the link between nodes
    cores: float = float("inf")        # ranks that compute at the same time
    overlap: bool = True               # a product hides the reading of its weights

    @classmethod
    def named(cls, text, model, changes=()):
        """h200x8, or h200x8x16: 16 nodes of 8; this:FILE is what `crossover --calibrate` wrote.
        `changes` (KEY=NUMBER) replace measured values of hardware.json."""
        if text.startswith("this:"):
            return cls(**report.read(text[5:]))
        found = re.fullmatch(rf"({'|'.join(HARDWARE['gpus'])})x(\d+)(?:x(\d+))?", text)
        known = {key: entry["value"] for key, entry in HARDWARE["measured"].items()}
        if not found or not int(found[2]) * int(found[3] or 1):
            raise UserError(f"--cluster {text} is not like h200x8, h200x8x16 or this:FILE; GPUs: "
                            f"{', '.join(HARDWARE['gpus'])}")
        for key, _, value in (change.partition("=") for change in changes):
            if key not in known or not re.fullmatch(r"[\d.]+(e-?\d+)?", value):
                raise UserError(f"--set {key}={value} is not KEY=NUMBER with {', '.join(known)}")
            known[key] = float(value)
        chip, us = HARDWARE["gpus"][found[1]], lambda key: known[f"{key}_us"] * 1e-6
        link = 1 / (chip["link"] * known["link"])
        return cls(text, int(found[2]), int(found[3] or 1),
                   memory=chip["memory"] * known["memory_share"],
                   flop_s=1 / (chip["fp8" if model.weight == 1 else "bf16"] * known["gemm"]),
                   pair_s=1 / (chip["bf16"] * known["attention"]),
                   byte_s=1 / (chip["bandwidth"] * known["memory"]), layer_s=us("layer"),
                   step_s=us("step"), request_s=us("request"), prompt_token_s=us("prompt_token"),
                   reduce=((us("reduce"), 1e-9 / known["reduce_gbs"]), (us("ring"), link)),
                   exchange=((us("exchange"), link),),
                   node=(us("node"), 1e-9 / known["node_gbs"]))


class Cost:
    """Seconds of a step of one engine (sp, tp) on a cluster. What the busiest rank does is counted
    from the layout; what that costs is the cluster's."""

    def __init__(self, cluster, model, sp, tp):
        self.cluster, self.model, c = cluster, model, model.config
        self.layout = Layout(sp, tp, c.heads, c.kv_heads, c.ffn)
        kv_heads = max(c.kv_heads, sp * tp)                  # few KV heads: replicated
        self.layer = c.dim * c.head_dim * 2 * (c.heads + kv_heads) + 3 * c.dim * c.ffn
        self.cached = 2 * c.layers * self.layout.k * c.head_dim * model.word

    def blocks(self, block_size):
        """KV blocks beside the weights. The vocabulary's two tables are never quantized."""
        c, word = self.model.config, self.model.word
        weights = c.layers * self.layer / self.layout.tp * self.model.weight
        weights += c.vocab * c.dim * word * (1 + 1 / self.layout.ranks)
        blocks = int((self.cluster.memory - weights) / self.cached / block_size)
        if blocks < 1:
            raise UserError(f"sp {self.layout.sp} x tp {self.layout.tp}: {weights / 1e9:.0f} GB of "
                            f"weights do not fit {self.cluster.name}; use a larger tp")
        return blocks

    def amounts(self, plan, mode, engines=1):
        """What the busiest rank does in a step. plan: [(tokens in the cache, tokens to compute)].

        flop, pair: FLOPs of products and attention      weight, byte: bytes of weights and the rest
        reduce, exchange: (calls, bytes each sends, share of them within the node)
        crowd: ranks that compute, all engines together, for each core
        """
        c, word, P = self.model.config, self.model.word, self.layout.ranks
        layout = self.layout if mode == "base" else self.layout.shift
        sp, tp = layout.sp, layout.tp
        tokens = sum(count for _, count in plan)
        t, head = -(-tokens // sp), c.dim * c.vocab / P
        # Read and written between the products: two norms with their residuals, then RoPE and SiLU;
        # with quantized weights also each product's input, once more, to make it small.
        touched = word * (8 * c.dim + (2 * (c.heads + c.kv_heads) * c.head_dim + 3 * c.ffn) / tp)
        touched += (self.model.weight < word) * (word + self.model.weight) * (
            2 * c.dim + (c.heads * c.head_dim + c.ffn) / tp)
        sent = elements_sent(layout, P - 1, tokens, c.dim, c.head_dim)
        swapped = (sent["qkv all_to_all"] + sent["attention all_to_all"]) / 2

        def within(n, stride):         # g of n ranks, every `stride`-th one, are on the same node
            g = min(n, max(1, self.cluster.per_node // stride))
            return (g - 1) / max(1, n - 1) if n > g else 1, g
        share, g = within(tp, 1)       # a ring over n ranks passes through each node n/g times less
        return {"flop": 2 * t * c.layers * self.layer / tp + 2 * len(plan) * head,
                "pair": 4 * c.layers * self.layout.h * c.head_dim * sum(
                    count * start + count * (count + 1) / 2 for start, count in plan),
                "weight": c.layers * self.layer / tp * self.model.weight + head * word,
                "byte": self.cached * sum(map(sum, plan)) + c.layers * t * touched,
                "reduce": (2 * c.layers * (tp > 1), sent["o all_reduce"] * word, share * tp / g
                           if share < 1 else 1),
                "exchange": (2 * c.layers * (sp > 1), swapped * word, within(sp, tp)[0]),
                "crowd": max(1, engines * min(sp, tokens) * tp / self.cluster.cores)}

    def parts(self, plan, mode, engines=1):
        """{compute, all_reduce, all_to_all, overhead}: seconds of the step."""
        x, k = self.amounts(plan, mode, engines), self.cluster

        def collective(ways, calls, nbytes, share):
            wait, byte = k.node if share < 1 else (0, 0)
            near = min(latency + share * nbytes * each for latency, each in ways)
            return calls * (near + wait + (1 - share) * nbytes * byte)
        product = (max if k.overlap else sum)((k.flop_s * x["flop"], k.byte_s * x["weight"]))
        compute = x["crowd"] * (product + k.pair_s * x["pair"] + k.byte_s * x["byte"])
        return {"compute": compute + self.model.config.layers * k.layer_s,
                "all_reduce": collective(k.reduce, *x["reduce"]),
                "all_to_all": collective(k.exchange, *x["exchange"]),
                "overhead": k.step_s + k.request_s * len(plan)}

    def seconds(self, plan, mode, engines=1):
        return sum(self.parts(plan, mode, engines).values())


# --------------------------------------------------------------------------------------------------
# simulate: serve.py's scheduler, blocks and switch in virtual time


class Virtual:
    """An engine whose steps take the time that they would cost, and compute nothing."""

    def __init__(self, system, cost, args):
        self.cost, self.clock, self.load, most = cost, 0.0, 0, args.max_step_tokens
        threshold = {"tp": most, "sp": -1}.get(system.mode, args.threshold)
        if threshold == "auto":                              # with a link of one process
            alone = argparse.Namespace(broadcast=lambda x: x, gather=lambda x: [x])
            self.switch = Switch.measured(self._time_step, most, alone)
        else:
            self.switch = Switch.at(int(threshold), most)
        blocks = BlockManager(args.kv_blocks or cost.blocks(args.block_size), args.block_size)
        self.scheduler = Scheduler(blocks, args.max_seqs, most)
        self.sampled, self.finished, self.added, self.left = [], [], [], {}

    def _time_step(self, mode, tokens):
        """As Engine._time_step: prompts of up to 64 tokens."""
        size = Engine.TIMED
        return self.cost.seconds([(0, min(size, tokens - i)) for i in range(0, tokens, size)], mode)

    def submit(self, number, tokens, output):
        self.added.append((number, tokens))
        self.left[number], self.load = output, self.load + 1

    def step(self, engines):
        """Run one step; returns it, and the numbers of the requests that got a token."""
        start, blocks = self.clock, self.scheduler.blocks
        self.scheduler.apply(self.sampled, self.finished, self.added)
        plan = self.scheduler.schedule()
        assert plan, "requests wait, and none can ever run"
        sizes = [(request.num_computed, count) for request, count in plan]
        tokens = sum(count for _, count in sizes)
        mode = self.switch(tokens)
        self.clock += self.cost.seconds(sizes, mode, engines)
        got = [request.id for request, count in plan
               if request.num_computed + count == len(request.tokens)]
        for number in got:
            self.left[number] -= 1
        self.sampled, self.added = [[0]] * len(got), []
        self.finished = [number for number in got if not self.left[number]]
        self.load -= len(self.finished)
        free = blocks.available / blocks.num_blocks
        return Step(start, self.clock - start, tokens, mode, free), got


def simulate(system, cluster, model, calls, window, args):
    """Serve the calls on as many engines as the cluster holds; (summary, [Served], [Step]).

    A call goes to the engine with the fewest outstanding, once it has come and `window` has room.
    """
    cost = Cost(cluster, model, system.sp, system.tp)
    count = cluster.per_node * cluster.nodes // cost.layout.ranks
    engines = [Virtual(system, cost, args) for _ in range(count)]
    room = engines[0].scheduler.blocks.num_blocks * args.block_size
    came, first, last, steps, ended, waiting = {}, {}, {}, [], 0.0, deque(enumerate(calls))
    while waiting or any(engine.load for engine in engines):
        busy = [engine for engine in engines if engine.load]
        engine = min(busy, key=lambda engine: engine.clock, default=None)
        if waiting and (not window or sum(engine.load for engine in busy) < window):
            number, call = waiting[0]
            at = max(call.at, ended) if window else call.at
            ready = at + call.prompt * cluster.prompt_token_s
            if engine is None or ready <= engine.clock:
                waiting.popleft()
                if call.prompt + call.output <= room:        # else it fails: serve.py refuses it
                    chosen = min(engines, key=lambda engine: engine.load)
                    chosen.clock, came[number] = max(chosen.clock, ready), at
                    tokens = (prompt_of(call, number, model.config.vocab, args.scale)
                              if args.prefix_cache else [number] * call.prompt)
                    chosen.submit(number, tokens, call.output)
                continue
        step, got = engine.step(len(busy))
        steps.append(step)
        for number in got:
            first.setdefault(number, engine.clock)
            last[number] = ended = engine.clock
    served = [Served(came[i], first[i], last[i], *calls[i][1:3]) for i in last]
    return report.summary(calls, served, steps, args.slo), served, steps


def simulated(args, model, cluster):
    """{workload: {system: (summary, [Served], [Step])}} of the command line's."""
    sizes, results = (cluster.per_node, cluster.per_node * cluster.nodes), {}

    def run(system, calls, window=None):
        return simulate(parse_system(system, *sizes), cluster, model, calls, window, args)
    for kind in args.workload:
        for name, calls, window in make_calls(kind, args, run):
            results[name] = {}
            for i, system in enumerate(args.systems):
                results[name][system] = run(system, calls, window)
                report.progress(i + 1, len(args.systems), f"{name}: {system}")
    return results


def run_simulate(args):
    model = find_model(args.model)
    cluster = Cluster.named(args.cluster, model, args.set)
    if args.paper or args.against:
        compared = report.paper if args.paper else report.against
        compared(args, sys.modules[__name__], model, cluster)
    else:
        report.present(args, {"kind": "simulated", "title": f"{args.cluster}, {args.model}",
                              "runs": simulated(args, model, cluster)})


# --------------------------------------------------------------------------------------------------
# compare: the same requests through real engines


class Dealer:
    """Deals calls to the engine with the fewest outstanding, for the engines of one host: in a file
    that all ranks map, the next call, and how many calls each engine took and has finished."""

    def __init__(self, path, me, engines):
        self.lock, self.me = open(path), me
        state = torch.from_file(path, shared=True, size=1 + 2 * engines, dtype=torch.int64)
        self.next, self.taken, self.done = state.split([1, engines, engines])

    def claim(self, calls, window, start):
        """The number of a call that this engine is to serve, once it has come; None: no more."""
        while True:
            fcntl.flock(self.lock, fcntl.LOCK_EX)
            number, loads = int(self.next), self.taken - self.done
            wait = calls[number].at + start - time.perf_counter() if number < len(calls) else None
            mine = wait is not None and wait <= 0 and bool(
                (not window or loads.sum() < window) and loads[self.me] == loads.min())
            self.next += mine
            self.taken[self.me] += mine
            fcntl.flock(self.lock, fcntl.LOCK_UN)
            if mine or wait is None:
                return number if mine else None
            time.sleep(max(0.001, min(wait, 0.02)))


def drive(engine, me, engines, calls, window, world, args):
    """Serve the calls with all engines of the world; (summary, [Served], [Step]) on every rank."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(bytes(8 * (1 + 2 * engines)))
        dealer = Dealer(world.gather(file.name)[0], me, engines)
        world.barrier()
    came, first, last, steps = {}, {}, {}, []
    now = lambda: time.perf_counter() - start
    # The same prompts as in the last run: nothing of it may be in the prefix cache.
    engine.scheduler.blocks = BlockManager(engine.num_blocks, engine.options.block_size)

    def on_step(step):                                       # instead of the trace
        steps.append(Step(step.start - start, step.end - step.start, step.tokens, step.mode,
                          engine.scheduler.blocks.available / engine.num_blocks))

    def on_events(events):
        for event in events:
            last[event.output.queue] = at = now()
            first.setdefault(event.output.queue, at)
            dealer.done[me] += event.finish is not None

    def feed():
        while (number := dealer.claim(calls, window, start)) is not None:
            came[number] = now() if window else calls[number].at
            params = SamplingParams(max_tokens=calls[number].output, temperature=0, ignore_eos=True)
            try:
                engine.submit(prompts[number], params, queue=number)
            except UserError:                                # too long: it fails
                dealer.taken[me] -= 1
        engine.close()
    prompts = [prompt_of(call, i, engine.config.vocab, args.scale) for i, call in enumerate(calls)]
    engine.trace.append, engine.on_events = on_step, on_events
    start = max(world.gather(time.perf_counter()))
    if engine.rank == 0:
        threading.Thread(target=feed, daemon=True).start()
    engine.run()
    del engine.trace.append
    engine.closing = False
    served = [Served(came[i], first[i], last[i], *calls[i][1:3]) for i in last]
    both = zip(*world.gather((served, steps if engine.rank == 0 else [])))
    served, steps = (list(itertools.chain(*of_ranks)) for of_ranks in both)
    return report.summary(calls, served, steps, args.slo), served, steps


def make_engine(system, args, world, emulate):
    """(this rank's engine of a system, which of how many engines it is)."""
    me, ranks = world.rank // (system.sp * system.tp), system.sp * system.tp
    options = {name: getattr(args, name) for name in OPTIONS}
    options |= {**system._asdict(), "link_gbps": emulate[0], "link_us": emulate[1]}
    return Engine(range(me * ranks, (me + 1) * ranks), **options), me, world.size // ranks


def like(args, world, say):
    """(gigabits a second, microseconds) of a link on which this machine's steps under TP have the
    share of communication that those of args.like (cluster:model) have."""
    if not args.like:
        return args.link_gbps, args.link_us
    name, _, model = args.like.partition(":")
    cluster, P = Cluster.named(name, find_model(model)), world.size
    if P == 1:
        raise UserError("--like needs at least 2 ranks: one has nobody to talk to")
    cost = Cost(cluster, find_model(model), 1, cluster.per_node)
    engine, _, _ = make_engine(System(P, 1, "tp"), args, world, (None, None))
    calls, points = 2 * engine.config.layers, []
    for tokens in (1, min(1024, engine.max_model_len - 1)):
        parts = cost.parts([(0, tokens)], "shift")
        here = measured_step(engine, [(0, tokens)], "shift", args.repeats)["compute"]
        share = parts["all_reduce"] / parts["compute"]
        points.append((2 * (P - 1) / P * tokens * engine.config.dim * 4, share * here / calls))
        say(f"{args.like}, TP, {tokens} tokens: all_reduce takes {share:.2f} of the compute time; "
            f"here that is {here * 1e3:.2f} ms, so each all_reduce of {calls} is to take "
            f"{points[-1][1] * 1e6:.0f} us")
    (few, short), (many, long) = points
    byte_s = max((long - short) / (many - few), 1e-15)
    emulate = 8e-9 / byte_s, max(0.0, short - few * byte_s) * 1e6
    say("emulated link: {:.3g} Gbit/s, {:.0f} us".format(*emulate))
    return emulate


def run_compare(args, world, say):
    emulate = like(args, world, say)
    engines = {name: make_engine(parse_system(name, world.size, world.size), args, world, emulate)
               for name in dict.fromkeys([*args.systems, "tp", "shift"])}
    if "trace" in args.workload and not args.scale:          # by default so that the longest fits
        calls = read_trace(args.trace, args.minutes, 1)[:args.requests]
        longest = max(call.prompt + call.output for call in calls)
        args.scale = min(1, (engines["tp"][0].max_model_len - 2) / longest)

    run = lambda system, calls, window=None: drive(*engines[system], calls, window, world, args)
    data = report.label(args, world.size, emulate, engines["shift"][0].switch, tries={}, calls={})
    for kind in args.workload:
        for name, calls, window in make_calls(kind, args, run):
            data["tries"][name] = tries = {system: [] for system in args.systems}
            data["calls"][name] = calls, window, args.scale
            for i in range(args.repeats * len(tries)):       # interleaved: a slow minute hits all
                system = args.systems[i % len(tries)]
                tries[system].append(run(system, calls, window))
                report.progress(i + 1, args.repeats * len(tries), f"{name}: {system}", world.rank)
    if world.rank == 0:
        report.present(args, data)


# --------------------------------------------------------------------------------------------------
# crossover: real steps of every size, and the cost model made of them


def timed_step(engine, plan, name):
    """One real step: its seconds on this rank, in all and by part, waiting for others included.
    plan: [(tokens in the cache, tokens to compute)]."""
    size, free = engine.options.block_size, itertools.cycle(range(engine.num_blocks))
    batch, _ = engine._build([
        (Request(0, [1] * (start + count), start + count, num_computed=start,
                 blocks=list(itertools.islice(free, -(-(start + count) // size)))), count)
        for start, count in plan])
    engine.link.barrier()
    engine.link.counts.clear()
    start = time.perf_counter()
    engine.model.forward(batch, engine.modes[name])
    parts = Counter(total=time.perf_counter() - start)
    for (op, _), count in engine.link.counts.items():
        parts[op] += count.seconds
    parts["compute"] = parts["total"] - parts["all_reduce"] - parts["all_to_all"]
    return parts


def measured_step(engine, plan, name, repeats):
    """The median one of some steps, in seconds: `total` of its slowest rank; means over ranks of
    compute and waiting; of each collective what it took the rank that waited least."""
    tries = [timed_step(engine, plan, name) for _ in range(repeats + 1)]
    ranks = sorted(list(zip(*engine.link.gather(tries)))[1:], key=lambda ranks: max(
        one["total"] for one in ranks))[repeats // 2]
    of = lambda part, how: how(one[part] for one in ranks)
    parts = {part: of(part, min) for part in ("all_reduce", "all_to_all")}
    waiting = sum(of(part, fmean) - seconds for part, seconds in parts.items())
    return {"total": of("total", max), "compute": of("compute", fmean), **parts, "waiting": waiting}


def run_crossover(args, world, say):
    P, emulate, rows = world.size, like(args, world, say), []
    args.max_step_tokens = max(args.tokens, 64)
    auto, _, _ = make_engine(System(P, 1, "shift"), args, world, emulate)
    for sp in [sp for sp in range(1, P + 1) if P % sp == 0]:
        engine, _, _ = make_engine(System(sp, P // sp, "sp"), args, world, emulate)
        for tokens in [2 ** i for i in range(args.tokens.bit_length())]:
            length = min(engine.max_model_len, 1024)         # prompts of up to so many tokens
            plan = [(0, min(length, tokens - i)) for i in range(0, tokens, length)]
            rows.append({"layout": f"{sp}x{P // sp}", "tokens": tokens, "auto":
                         auto.switch(tokens), **measured_step(engine, plan, "base", args.repeats)})
            report.progress(tokens, args.tokens, f"sp {sp} x tp {P // sp}", world.rank)
    if world.rank == 0:
        report.present(args, report.label(args, P, emulate, auto.switch, steps=rows))
    if args.calibrate:
        import calibrate
        calibrate.calibrate(args, world, say, auto, sys.modules[__name__])


# --------------------------------------------------------------------------------------------------
# main


WORLD = {"compare": run_compare, "crossover": run_crossover}             # on ranks of their own


def parse(argv):
    """The command line. A mistake in it is a UserError, to be said in one line."""
    parser = Parser(description="Measured and simulated comparisons.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("peers", "prefill", "embeddings", "link"):
        peers.add_flags(commands.add_parser(name, allow_abbrev=False).add_argument)
    for name in ("crossover", "compare", "simulate", "figures"):
        add = commands.add_parser(name, allow_abbrev=False).add_argument
        big = name in ("simulate", "figures")
        for f in fields(Options):
            if f.name in OPTIONS:
                add(f"--{f.name.replace('_', '-')}", type=f.type, help=f.metadata["help"], default=(
                    {"model": "llama-70b-fp8", "max_step_tokens": 8192} if big else {}).get(
                    f.name, f.default))
        add("--systems", nargs="+", default=["tp", "dp", "sp", "shift"], help="also 4x2, shift4x2")
        add("--workload", nargs="+", default=["latency", "batch", "burst"],
            choices=["latency", "batch", "burst", "rate", "trace"])
        add("--trace", metavar="FILE", help="Azure CSV or Mooncake JSONL")
        add("--minutes", type=float, default=15, help="of the trace")
        add("--scale", type=float, help="factor on a trace's lengths; compare: so that they fit")
        add("--load", type=float, default=None if big else 0.7, help="a trace's share of capacity")
        add("--requests", type=int, help="at most; without a trace 64")
        add("--input", type=int, default=4000 if big else 256, help="tokens")
        add("--output", type=int, default=250 if big else 32, help="tokens")
        add("--slo", type=float, nargs=2, default=[2000, 100], help="TTFT and TPOT, ms")
        add("--json", metavar="FILE", help="all results")
        add("--plot", metavar="FILE", help="a PNG")
        add("--nproc", type=int, default=8, help="ranks to start, without torchrun")
        add("--repeats", type=int, default=3)
        add("--like", metavar="CLUSTER:MODEL", help="emulate, such as h200x8:llama-70b-fp8")
        add("--tokens", type=int, default=4096, help="crossover: the largest step")
        add("--calibrate", metavar="FILE", help="crossover: fit the cost model")
        add("--cluster", default="h200x8", help="GPUs of a node, nodes; or this:FILE")
        add("--set", nargs="+", default=[], metavar="KEY=NUMBER", help="instead of hardware.json's")
        add("--prefix-cache", action="store_true", help="simulate: share what hash_ids name")
        add("--paper", action="store_true", help="simulate: the published cells, and ours")
        add("--against", metavar="FILE", help="simulate what compare --json measured")
        add("--out", default="figures", help="figures: the directory")
        add("--measured", nargs="+", default=[], help="figures: files of --json to draw as well")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if type(value) in (int, float) and not value > 0:
            raise UserError(f"--{name.replace('_', '-')} {value} must be more than 0")
    Options(threshold=getattr(args, "threshold", "auto"))    # complains if it is neither
    if "trace" in getattr(args, "workload", ()) and not args.trace:
        raise UserError("--workload trace needs --trace FILE")
    return args


def in_rank(args):
    """compare or crossover, on one rank."""
    try:
        connect()
        world = Link("gloo")
        WORLD[args.command](args, world, print if world.rank == 0 else lambda *text: None)
    except (UserError, LostRank) as e:
        return complain(e)


def complain(error):
    """Say it once, from rank 0, before any rank ends; returns the exit code."""
    if os.environ.get("RANK", "0") == "0":
        print(f"bench.py: {error}", file=sys.stderr, flush=True)
    else:
        time.sleep(1)
    return 2 if isinstance(error, UserError) else 1


def main(argv=None):
    try:
        args = parse(argv)
        if args.command in WORLD:
            return in_rank(args) if "RANK" in os.environ else launch(in_rank, args.nproc, args)
        print(report.machine())
        if args.command == "simulate":
            run_simulate(args)
        elif args.command == "figures":
            report.make(args, sys.modules[__name__])
        else:
            getattr(peers, args.command)(args)
    except UserError as e:
        return complain(e)


if __name__ == "__main__":
    sys.exit(main())
