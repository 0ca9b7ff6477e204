"""figures.py: what bench.py has measured or simulated, as tables, CSV files and plots.

    python bench.py figures --out DIR --measured COMPARE.json CROSSOVER.json

It knows how results look; it does not know where they come from. The word that stands on every
table and plot (measured, emulated, simulated) is that of the data. Colours are those of Okabe and
Ito, which colour-blind people can tell apart, and every line has a marker or dash of its own.
"""
import csv
import itertools
import json
import math
import platform
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import torch

from shift import UserError, cores

HARDWARE = json.loads((Path(__file__).parent / "hardware.json").read_text())
LABELS = ("mean", "p50", "p90", "p99")
ROWS = [f"{name} {label}" for name in ("ttft", "tpot", "e2e") for label in LABELS] + [
    "tok/s", "peak tok/s", "goodput req/s", "shift steps %", "kv use %", "failed"]
PARTS = ("total", "compute", "all_reduce", "all_to_all", "waiting")
COLOURS = {"tp": "#0072B2", "dp": "#E69F00", "sp": "#009E73", "shift": "#D55E00",
           "compute": "#999999", "all_reduce": "#0072B2", "all_to_all": "#009E73",
           "waiting": "#F0E442", "overhead": "#CC79A7"}
MARKS = {"tp": "o", "dp": "s", "sp": "^", "shift": "D"}


# --------------------------------------------------------------------------------------------------
# Metrics


def summary(calls, served, steps, slo):
    """What a run came to. TTFT, TPOT and completion in ms; tokens in and out count alike."""
    if not served:
        raise UserError("none of the requests fits the context and the KV cache")
    times = {"ttft": [(s.first - s.at) * 1e3 for s in served],
             "tpot": [(s.last - s.first) / max(1, s.output - 1) * 1e3 for s in served],
             "e2e": [(s.last - s.at) * 1e3 for s in served]}
    span, peak = max(s.last for s in served) - min(s.at for s in served), Counter()
    for step in steps:                                       # a long one is spread over its time
        parts = max(1, round(step.seconds))
        peak.update({int(step.at) + i: step.tokens / parts for i in range(parts)})
    good = sum(ttft <= slo[0] and tpot <= slo[1] for ttft, tpot in zip(*list(times.values())[:2]))
    return {**{f"{name} {label}": sorted(values)[int(q * (len(values) - 1))]
               for name, values in times.items()
               for label, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99))},
            **{f"{name} mean": fmean(values) for name, values in times.items()},
            "tok/s": sum(s.prompt + s.output for s in served) / span,
            "peak tok/s": max(peak.values()) / min(1, span), "goodput req/s": good / span,
            "shift steps %": 100 * fmean(step.mode == "shift" for step in steps),
            "kv use %": 100 * (1 - min(step.free for step in steps)),
            "failed": len(calls) - len(served)}


# --------------------------------------------------------------------------------------------------
# Tables and files


def machine():
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":")[1].strip() for line in lines if "model name" in line), name)
    command = " ".join(["python bench.py", *sys.argv[1:]])
    return f"{cores()} cores, {name}, torch {torch.__version__}: {command}"


def label(args, ranks, emulate, switch, **data):
    """Measured data, with what they say of themselves."""
    return {"kind": f"emulated {args.like or 'link'}" if any(emulate) else "measured",
            "title": f"{ranks} ranks, {Path(args.model).name}", "switch": str(switch), **data}


def progress(done, total, what, rank=0):
    """A bar on a terminal's stderr."""
    if sys.stderr.isatty() and rank == 0:
        print(f"\r[{'#' * (30 * done // total):30}] {done}/{total} {what:30}",
              end="\n" * (done == total), file=sys.stderr, flush=True)


def read(path):
    try:
        return json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: {getattr(e, 'strerror', None) or e}") from None


def present(args, data):
    """Print what was measured or simulated, and do what --json and --plot ask for."""
    if data["kind"] != "simulated":
        print(f"{machine()}\nshift: {data['switch']}")
    if "steps" in data:
        crossover(data)
    else:
        data = medians(data) if "tries" in data else data
        print("goodput: TTFT of at most {:g} ms and TPOT of at most {:g} ms".format(*args.slo))
        tables(data)
        pairs(data)
    if args.json:
        Path(args.json).write_text(json.dumps(data))
    if args.plot:
        plot = steps_by_part if "steps" in data else time_line
        save(plot(data), args.plot)


def tables(data):
    """A table for each workload: a column for each system. TTFT, TPOT and e2e are milliseconds."""
    for workload, systems in data["runs"].items():
        count = len(next(iter(systems.values()))[1])
        print(f"\n{data['kind']}: {data['title']}, {workload}, {count} requests\n{'':20}"
              + "".join(f"{name:>12}" for name in systems))
        for row in ROWS:
            unit = " ms" if row[:4] in ("ttft", "tpot", "e2e ") else ""
            print(f"{row + unit:20}" + "".join(f"{one[0][row]:12.4g}" for one in systems.values()))


def medians(data):
    """Of compare's tries: "runs" with the median of each number (requests and steps are those of
    the last try), "pairs" with the numbers of all."""
    runs = {workload: {system: ({key: median(one[0][key] for one in tries) for key in tries[0][0]},
                                *tries[-1][1:]) for system, tries in systems.items()}
            for workload, systems in data["tries"].items()}
    pairs = {workload: {system: [one[0] for one in tries] for system, tries in systems.items()}
             for workload, systems in data.pop("tries").items()}
    return {**data, "runs": runs, "pairs": pairs}


def pairs(data):
    """Each shifting system against the best static one (DP apart), in the workload's own metric:
    the median of the interleaved pairs' ratios, and the least and the greatest of them."""
    for workload, systems in data.get("pairs", {}).items():
        own = {"latency": "tpot mean", "batch": "tok/s"}.get(workload, "e2e mean")
        sign = 1 if own == "tok/s" else -1                   # a time is better if it is shorter
        values = {name: [one[own] for one in tries] for name, tries in systems.items()}
        static = [name for name in values if "shift" not in name and name != "dp"]
        for name in [name for name in values if "shift" in name and static]:
            best = max(static, key=lambda other: sign * median(values[other]))
            ratios = [(a / b) ** sign for a, b in zip(values[name], values[best])]
            print(f"{data['kind']}: {workload}, {name} against {best}, the best static layout, in "
                  f"{own}: {median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}] in "
                  f"{len(ratios)} pairs (more than 1 is better)")


def crossover(data):
    """Step times by layout and part, and what auto's choice cost at each size."""
    ranks = max(int(row["layout"].split("x")[0]) for row in data["steps"])
    print(f"\n{data['kind']}: {data['title']}, ms\n{'tokens':>8}{'sp x tp':>9}" + "".join(
        f"{part:>12}" for part in PARTS))
    total = {}
    for row in sorted(data["steps"], key=lambda row: row["tokens"]):
        total[row["tokens"], row["layout"]] = row["total"]
        print(f"{row['tokens']:8}{row['layout']:>9}" + "".join(
            f"{row[part] * 1e3:12.2f}" for part in PARTS))
    tp, sp, before = f"1x{ranks}", f"{ranks}x1", None
    for row in data["steps"]:
        tokens, chosen = row["tokens"], tp if row["auto"] == "shift" else sp
        if row["layout"] == sp:
            of_all = min((total[key], key[1]) for key in total if key[0] == tokens)
            ratio, best = total[tokens, tp] / total[tokens, sp], min(
                (tp, sp), key=lambda layout: total[tokens, layout])
            lost = total[tokens, chosen] / total[tokens, best] - 1
            note = "" if before in (None, best) else "; the better one changes here"
            print(f"{tokens:8} tokens: TP / SP {ratio:.2f}; auto chose "
                  f"{'TP' if chosen == tp else 'SP'}, {lost:.1%} over the better of both{note}; "
                  f"best of all layouts {of_all[1]}, {of_all[0] * 1e3:.2f} ms")
            before = best


def published_ratios(ours):
    """{(row, a, b): our ratio of two columns over the published one}."""
    theirs = HARDWARE["published"]
    return {(row, a, b): ours[row][a] / ours[row][b] / (theirs[row][a] / theirs[row][b])
            for row in ours for a, b in itertools.combinations(theirs[row], 2)
            if {a, b} <= ours[row].keys()}


def against(args, bench, model, cluster):
    """Simulate the very calls that `compare --json` served, and compare their completion."""
    data, args.prefix_cache = read(args.against), True       # as serve.py has it
    for name, systems in data["runs"].items():
        calls, window, args.scale = data["calls"][name]
        for system, (measured, _, _) in systems.items():
            simulated, _, _ = bench.simulate(
                bench.parse_system(system, cluster.per_node, cluster.per_node), cluster, model,
                [bench.Call(*call) for call in calls], window, args)
            real, ours = measured["e2e mean"], simulated["e2e mean"]
            print(f"{name}, {system}: mean completion {real:.1f} ms measured, {ours:.1f} ms "
                  f"simulated, {ours / real - 1:+.1%}")


def paper(args, bench, model, cluster):
    """The published cells beside ours, as ratios too, and what each assumption does to them."""
    args.max_step_tokens = 131072                            # as in the paper's artifact
    theirs, what = HARDWARE["published"], {
        "TTFT, ms": ("ttft p50", 1), "TPOT, ms": ("tpot p50", 1), "thousand tok/s": ("tok/s", 1e-3),
        "median TTFT, ms": ("ttft p50", 1), "median TPOT, ms": ("tpot p50", 1),
        "peak thousand tok/s": ("peak tok/s", 1e-3)}

    def cells(changes, workloads):
        options = {key: value for key, value in changes.items() if hasattr(args, key)}
        settings = [f"{key}={value}" for key, value in changes.items() if key not in options]
        changed, runs, rows = bench.Cluster.named(args.cluster, model, args.set + settings), {}, {}
        for workload, count in workloads.items():
            runs |= bench.simulated(SimpleNamespace(**{
                **vars(args), **options, "workload": [workload],
                "requests": args.requests or count}), model, changed)
        for row in theirs:
            workload, _, name = row.partition(": ")
            if workload in runs:
                key, unit = what[name]
                rows[row] = {system: one[0][key] * unit for system, one in runs[workload].items()}
        return rows
    alone, counts = {"latency": 4, "batch": 512}, {"latency": 4, "batch": 512, "burst": 512}
    ours = cells({}, counts)
    print(f"simulated: {cluster.name}, {args.model}, {args.input} tokens in and {args.output} out, "
          f"at most {args.max_step_tokens} a step, {counts} requests\n"
          f"published: {theirs['source']}\n\n"
          f"{'simulated / published':28}" + "".join(f"{system:>18}" for system in args.systems))
    for row, values in ours.items():
        print(f"{row:28}" + "".join(f"{value:9.4g} /{theirs[row].get(system, '-'):>7}"
                                    for system, value in values.items()))
    print("\nratios between columns, simulated / published (the paper's bursts are not known to "
          "us: ours are others)")
    for (row, a, b), off in published_ratios(ours).items():
        mine, other = ours[row][a] / ours[row][b], theirs[row][a] / theirs[row][b]
        note = "   a tie" if abs(mine - 1) < 1e-3 else "   another winner"
        print(f"{row:28}{a + ' / ' + b:>12}{mine:9.3f} /{other:7.3f}{off - 1:+8.0%}"
              f"{'' if 0.75 <= off <= 1.25 else '   more than 25 % off'}"
              f"{'' if (mine < 1) == (other < 1) else note}")
    first, rate = ours["latency: TTFT, ms"], ours["batch: thousand tok/s"]
    print(f"\nshift against tp (published: response 1.51 x, throughput 1.5 x): TTFT "
          f"{first['tp'] / first['shift']:.2f} x, throughput {rate['shift'] / rate['tp']:.2f} x")
    if args.trace:
        runs = bench.simulated(SimpleNamespace(**{**vars(args), "workload": ["trace"]}), model,
                               cluster)["trace"]
        for other in ("dp", "tp"):
            print(f"shift against {other}, {Path(args.trace).stem}: mean completion "
                  f"{runs[other][0]['e2e mean'] / runs['shift'][0]['e2e mean']:.2f} x, throughput "
                  f"{runs['shift'][0]['tok/s'] / runs[other][0]['tok/s']:.2f} x")
    print("arXiv 2507.11830 (a production mix with speculation and SwiftKV: not simulated):\n"
          "completion 3.4 x and throughput 1.06 x over the best DP deployment, 1.28 x and 1.7 x "
          "over the best TP one")
    print("\none assumption at a time: ratios of latency and batch within 25 %, winners, the worst")
    cases = [{}] + [{key: value} for key, entry in HARDWARE["measured"].items()
                    for value in ((20, 50, 100) if key == "request_us" else
                                  [entry["value"] * factor for factor in (0.5, 0.75, 1.5, 2, 5)])
                    if key != "memory_share" and not 0 < entry["value"] < 1 < value]
    cases += [{"max_seqs": 64}, {"max_seqs": 1024}, {"threshold": 64}, {"threshold": 512},
              {"max_step_tokens": 2048}, {"max_step_tokens": 8192},
              {"exchange_us": 60, "request_us": 50}]
    for changes in cases:
        name = " ".join(f"{key} {value:g}" for key, value in changes.items()) or "as above"
        varied = cells(changes, alone)
        found = published_ratios(varied)
        worst = max(found, key=lambda key: abs(math.log(found[key])))
        winners = sum((varied[row][a] < varied[row][b]) == (theirs[row][a] < theirs[row][b])
                      for row, a, b in found)
        print(f"{name:24}{sum(0.75 <= off <= 1.25 for off in found.values()):3}{winners:4} of "
              f"{len(found)}   {worst[0]} {worst[1]} / {worst[2]} {found[worst] - 1:+.0%}")


# --------------------------------------------------------------------------------------------------
# Plots


def axes(title, columns=1, width=5.0):
    try:
        import matplotlib
    except ImportError:
        raise UserError("plots need matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, panels = plt.subplots(1, columns, figsize=(width, 3.2), squeeze=False)
    figure.suptitle(title, fontsize=8)
    for panel in panels[0]:
        panel.grid(alpha=0.3)
        panel.tick_params(labelsize=7)
    return figure, panels[0]


def label_axes(panel, across, up, legend=True, **scales):
    panel.set_xlabel(across, fontsize=8)
    panel.set_ylabel(up, fontsize=8)
    for axis, scale in scales.items():
        getattr(panel, f"set_{axis}scale")(scale)
    if legend:
        panel.legend(fontsize=6)


def save(figure, path):
    import matplotlib.pyplot as plt
    figure.tight_layout()
    figure.savefig(path, dpi=80, metadata={"Software": None})
    plt.close(figure)


def table_to(path, rows):
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: f"{value:.6g}" if isinstance(value, float) else value
                          for key, value in row.items()} for row in rows)


def line(panel, name, xs, ys):
    other = ("#56B4E9", "#CC79A7", "#000000")[sum(map(ord, name)) % 3]
    panel.plot(xs, ys, color=COLOURS.get(name, other), marker=MARKS.get(name, "x"), ms=4, lw=1.2,
               label=name)


def head(data, what):
    return f"{what}\n{data['kind']}: {data['title']}"


def time_line(data, workload=None, system=None):
    """(b) tokens of each step over time, its mode coloured in; waiting requests are its height."""
    workload = workload or list(data["runs"])[-1]
    system = system or next((s for s in data["runs"][workload] if "shift" in s),
                            next(iter(data["runs"][workload])))
    steps = data["runs"][workload][system][2]
    figure, (panel,) = axes(head(data, f"{workload}: steps of {system} over time"), width=6)
    for mode, name in (("shift", "tp"), ("base", "sp")):
        chosen = [step for step in steps if step[3] == mode]
        panel.scatter([step[0] for step in chosen], [step[2] for step in chosen], s=6,
                      color=COLOURS[name], marker=MARKS[name], label=f"{mode} mode")
    label_axes(panel, "time, s", "tokens in the step", y="log")
    return figure


def steps_by_part(data):
    """(f) what a step consists of, by layout, at a small and at a large size."""
    rows, sizes = data["steps"], sorted({row["tokens"] for row in data["steps"]})
    shown = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    figure, panels = axes(head(data, "parts of a step"), len(shown), 8)
    for panel, tokens in zip(panels, shown):
        chosen, bottom = [row for row in rows if row["tokens"] == tokens], None
        bottom = [0.0] * len(chosen)
        for part, hatch in (("compute", ""), ("all_reduce", "//"), ("all_to_all", ".."),
                            ("waiting", "xx"), ("overhead", "\\\\")):
            values = [row.get(part, 0) * 1e3 for row in chosen]
            panel.bar([row["layout"] for row in chosen], values, bottom=bottom, label=part,
                      color=COLOURS[part], hatch=hatch, edgecolor="white", lw=0)
            bottom = [a + b for a, b in zip(bottom, values)]
        label_axes(panel, f"sp x tp, tokens in the step: {tokens}", "ms",
                   legend=tokens == sizes[0])
    return figure


def crossing(data):
    """(g) step time against tokens, by layout."""
    figure, (panel,) = axes(head(data, "step time against tokens in the step"))
    ranks = max(int(row["layout"].split("x")[0]) for row in data["steps"])
    names = {f"1x{ranks}": "tp", f"{ranks}x1": "sp"}
    for layout in dict.fromkeys(row["layout"] for row in data["steps"]):
        rows = [row for row in data["steps"] if row["layout"] == layout]
        line(panel, names.get(layout, layout), [row["tokens"] for row in rows],
             [row["total"] * 1e3 for row in rows])
    label_axes(panel, "tokens in the step", "ms", x="log", y="log")
    return figure


def sweep(data, what, across, xs, pick, up, **scales):
    """A line for each system over xs; pick(summary) is the height. Returns (figure, CSV rows)."""
    figure, (panel,) = axes(head(data, what))
    for system in next(iter(data["runs"].values())):
        line(panel, system, xs, [pick(one[system][0]) for one in data["runs"].values()])
    label_axes(panel, across, up, **scales)
    return figure


def csv_rows(data):
    return [{"kind": data["kind"], "run": run, "system": system, **one[0]}
            for run, systems in data["runs"].items() for system, one in systems.items()]


def trade_off(args, bench, cluster, model):
    """(a) TPOT against throughput, ever more requests kept outstanding; and the CSV rows."""
    data, rows = {"kind": "simulated", "title": f"{args.cluster}, {args.model}, {args.input} in, "
                  f"{args.output} out"}, []
    figure, (panel,) = axes(head(data, "1, 4, 16, 64, 256 requests outstanding"))
    for name in args.systems:
        system, points = bench.parse_system(name, cluster.per_node, cluster.per_node), []
        for window in (1, 4, 16, 64, 256):
            calls = [bench.Call(0.0, args.input, args.output, ())] * max(4, 2 * window)
            one, _, _ = bench.simulate(system, cluster, model, calls, window, args)
            points.append((one["tok/s"], one["tpot mean"]))
            rows.append({**data, "system": name, "outstanding": window, **one})
        line(panel, name, *zip(*points))
    label_axes(panel, "throughput, tokens/s", "mean TPOT, ms", x="log", y="log")
    return figure, rows


def distributions(data, workload):
    """(c) cumulative distributions of TTFT, TPOT and completion."""
    figure, panels = axes(head(data, f"{workload}: share of requests at most so slow"), 3, 9)
    values = {"TTFT, s": lambda s: s[1] - s[0], "completion, s": lambda s: s[2] - s[0],
              "TPOT, s": lambda s: (s[2] - s[1]) / max(1, s[4] - 1)}
    for panel, (name, value) in zip(panels, values.items()):
        for (system, (_, served, _)), dash in zip(data["runs"][workload].items(),
                                                  itertools.cycle(("-", "--", "-.", ":"))):
            xs = sorted(max(1e-4, value(one)) for one in served)
            panel.plot(xs, [(i + 1) / len(xs) for i in range(len(xs))], dash, lw=1.4,
                       color=COLOURS.get(system), label=system)
        label_axes(panel, name, "share of requests", x="log")
    return figure


def make(args, bench):
    """Every figure: (a) to (g) simulated, and those of the --measured files beside them."""
    out, model = Path(args.out), bench.find_model(args.model)
    out.mkdir(parents=True, exist_ok=True)
    cluster = bench.Cluster.named(args.cluster, model, args.set)
    made = []

    def run(**changes):
        runs = bench.simulated(SimpleNamespace(**{**vars(args), **changes}), model, cluster)
        return {"kind": "simulated", "title": f"{args.cluster}, {args.model}, {args.input} in, "
                f"{args.output} out", "runs": runs}

    def keep(name, figure, rows):
        save(figure, out / f"{name}.png")
        table_to(out / f"{name}.csv", rows)
        made.append(name)
        print(f"{out / name}.png, .csv", flush=True)
    keep("a-trade-off", *trade_off(args, bench, cluster, model))
    data = run(workload=["burst"])
    keep("b-burst", time_line(data), [
        {"kind": data["kind"], "system": system, "at s": step[0], "tokens": step[2],
         "mode": step[3]}
        for system, one in data["runs"]["burst"].items() for step in one[2][::10]])
    if args.trace:
        data = run(workload=["trace"])
        data["title"] = f"{args.cluster}, {args.model}, {Path(args.trace).stem}"
        keep("c-trace", distributions(data, "trace"), csv_rows(data))
    data = run(workload=["rate"])
    keep("d-rate", sweep(data, "completion against rate", "requests, % of the best static layout's "
                         "capacity", [100 * load for load in bench.LOADS],
                         lambda one: one["e2e mean"], "mean completion, ms", y="log"),
         csv_rows(data))
    lengths, data = [500, 1000, 2000, 4000, 8000, 16000], {"runs": {}}
    for length in lengths:
        one = run(workload=["latency"], input=length, requests=2)
        data = {**one, "title": f"{args.cluster}, {args.model}, {args.output} out",
                "runs": {**data["runs"], f"{length} in": one["runs"]["latency"]}}
    keep("e-length", sweep(data, "TTFT against prompt length", "prompt, tokens", lengths,
                           lambda one: one["ttft mean"], "TTFT, ms", x="log", y="log"),
         csv_rows(data))
    data = simulated_steps(args, bench, cluster, model)
    keep("f-parts", steps_by_part(data), data["steps"])
    keep("g-crossover", crossing(data), data["steps"])
    keep("g-threshold", *thresholds(args, bench, cluster, model))
    for path in args.measured:
        data = read(path)
        name = f"measured-{Path(path).stem}"
        if "steps" in data:
            keep(f"{name}-parts", steps_by_part(data), data["steps"])
            keep(f"{name}-crossover", crossing(data), data["steps"])
        else:
            for workload in data["runs"]:
                keep(f"{name}-{workload}", distributions(data, workload), csv_rows(data))
    return made


def simulated_steps(args, bench, cluster, model):
    """Data like crossover's, from the cost model: prompts of 1,024 tokens."""
    P, rows = cluster.per_node, []
    for sp in [sp for sp in range(1, P + 1) if P % sp == 0]:
        cost = bench.Cost(cluster, model, sp, P // sp)
        for tokens in [2 ** i for i in range(14)]:
            parts = cost.parts([(0, min(1024, tokens - i)) for i in range(0, tokens, 1024)], "base")
            rows.append({"layout": f"{sp}x{P // sp}", "tokens": tokens, **parts, "waiting": 0.0,
                         "total": sum(parts.values())})
    return {"kind": "simulated", "title": f"{args.cluster}, {args.model}", "steps": rows}


def thresholds(args, bench, cluster, model):
    """(g) the number of tokens from which SP is faster than TP, as the link gets slower."""
    from dataclasses import replace
    rows, P = [], cluster.per_node
    for factor in (0.25, 0.5, 1, 2, 4, 8, 16):
        ways = lambda ways: tuple((wait, byte * factor) for wait, byte in ways)
        slower = replace(cluster, reduce=ways(cluster.reduce), exchange=ways(cluster.exchange))
        cost = bench.Cost(slower, model, P, 1)
        first = next((n for n in range(1, 8193) if cost.seconds([(0, n)], "base")
                      < cost.seconds([(0, n)], "shift")), None)
        rows.append({"kind": "simulated", "link GB/s": 1e-9 / slower.exchange[0][1],
                     "threshold tokens": first})
    data = {"kind": "simulated", "title": f"{args.cluster}, {args.model}"}
    figure, (panel,) = axes(head(data, "best threshold against link bandwidth"))
    known = [row for row in rows if row["threshold tokens"]]
    line(panel, "shift", [row["link GB/s"] for row in known],
         [row["threshold tokens"] for row in known])
    label_axes(panel, "link, GB/s in one direction", "tokens from which SP is faster",
               x="log", y="log", legend=False)
    return figure, rows
