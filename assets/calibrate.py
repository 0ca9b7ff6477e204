"""calibrate.py: the costs of this machine, for `bench.py simulate --cluster this:FILE`.

    python bench.py crossover --nproc 8 --calibrate FILE

It knows how to fit costs to step times; it does not know what a step does (bench.Cost counts that).
"""
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from serve import SamplingParams
from shift import cores


def calibrate(args, world, say, engine, bench):
    """Fit a Cluster to pure prefill and pure decode steps; check it on mixed batches and other
    contexts. The parts of a step are fitted one by one: from totals alone the costs that come with
    a mode, its weights and its collectives' latency, could not be told apart."""
    P, model = world.size, bench.Model(engine.config, 4, 4)
    cluster = bench.Cluster(f"this machine, {P} ranks", P, cores=cores(), overlap=False)
    cost = bench.Cost(cluster, model, P, 1)
    pure = [[(0, n)] for n in (8, 64, 256, 1024)] + [
        [(context, 1)] * n for n in (1, 4, 16, 64) for context in (32, 512)]
    held_out = [[(context, 1)] * n + [(start, count)] for n, context in ((3, 200), (12, 900))
                for start, count in ((0, 100), (0, 500), (300, 200))] + [[(1500, 1)] * 6]
    timed = lambda plans: [(plan, mode, bench.measured_step(engine, plan, mode, args.repeats))
                           for plan in plans for mode in ("base", "shift")]
    pure, held_out = timed(pure), timed(held_out)
    amounts = [cost.amounts(plan, mode) for plan, mode, _ in pure]
    totals = [parts["total"] for *_, parts in pure]
    fitted = {}
    for op in ("reduce", "exchange"):
        seconds = [parts["all_" + {"reduce": "reduce", "exchange": "to_all"}[op]]
                   for *_, parts in pure]
        used = [i for i, x in enumerate(amounts) if x[op][0]]
        fitted[op] = (least_squares([[x[op][0], x[op][0] * x[op][1]] for x in (
            amounts[i] for i in used)], [seconds[i] for i in used], [totals[i] for i in used]),)
    flop, pair, byte, layer = least_squares(
        [[*(x["crowd"] * n for n in (x["flop"], x["pair"], x["weight"] + x["byte"])),
          model.config.layers] for x in amounts],
        [parts["total"] - parts["all_reduce"] - parts["all_to_all"] for *_, parts in pure], totals)
    one, many = (overhead(engine, n) for n in (1, 16))
    request = max(0.0, (many - one) / 15)
    cluster = replace(cluster, flop_s=flop, pair_s=pair, byte_s=byte, layer_s=layer, **fitted)
    cost = bench.Cost(cluster, model, P, 1)
    errors = [median(abs(cost.seconds(plan, mode) / parts["total"] - 1)
                     for plan, mode, parts in points) for points in (pure, held_out)]
    if world.rank == 0:
        Path(args.calibrate).write_text(json.dumps(vars(replace(
            cluster, request_s=request, step_s=max(0.0, one - request)))))
    say(f"{args.calibrate}: median error of {len(pure)} pure steps {errors[0]:.1%}, of "
        f"{len(held_out)} held-out ones (mixed batches, other contexts) {errors[1]:.1%}")


def least_squares(amounts, seconds, totals):
    """Costs, none negative, with amounts @ costs near seconds; errors count relative to totals."""
    weights = 1 / torch.tensor(totals, dtype=torch.float64)[:, None]
    rows = torch.tensor(amounts, dtype=torch.float64) * weights
    scale, used = rows.norm(dim=0).clamp(min=1e-30), list(range(rows.shape[1]))
    goal, costs = torch.tensor(seconds, dtype=torch.float64)[:, None] * weights, [0.0] * len(scale)
    while used:
        found = torch.linalg.lstsq((rows / scale)[:, used], goal).solution.flatten()
        if found.min() >= 0:
            for i, value in zip(used, found):
                costs[i] = float(value / scale[i])
            break
        used.pop(int(found.argmin()))                        # the most negative one is left out
    return costs


def overhead(engine, batch):
    """Seconds of a decode step outside the forward pass: schedule, messages, sampling."""
    forward, inside = engine.model.forward, []

    def timed_forward(*args):
        start = time.perf_counter()
        logits = forward(*args)
        inside.append(time.perf_counter() - start)
        return logits
    engine.model.forward = timed_forward
    params = SamplingParams(max_tokens=33, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    engine.generate([[1] * 8] * batch, params)
    whole = (time.perf_counter() - start - sum(inside)) / len(inside)
    engine.model.forward = forward
    return engine.link.broadcast(whole)
