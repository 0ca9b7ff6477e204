"""The simulator's arithmetic by hand, traces, the workloads, bad input, and a small real run.

    pytest tests/test_bench.py

The simulator is checked where a step can be worked out on paper: cost of one kind at a time, all
others zero. What `compare` prints is checked against what the engines did.
"""
import argparse
import json
from dataclasses import replace

import pytest

import bench
from bench import Call, Cluster, Cost, Model
from common import deadline
from model import Config
from shift import Layout, UserError
from tour import formula                                 # in assets/, as bench.py arranges

SMALL = Model(Config(dim=64, layers=2, heads=8, kv_heads=4, head_dim=8, ffn=128, vocab=96), 1, 2)
FREE = Cluster("free", 8)                                    # everything costs nothing


def options(**changes):
    args = bench.parse(["simulate", "--workload", "batch"])
    return argparse.Namespace(**{**vars(args), "max_step_tokens": 256, "kv_blocks": 100, **changes})


def run(system, calls, cluster=FREE, window=None, model=SMALL, **changes):
    return bench.simulate(bench.parse_system(system, 8, 8), cluster, model, calls, window,
                          options(**changes))


# --------------------------------------------------------------------------------------------------
# The cost of a step

# One layer: qkv 64 x (8 + 2*8) * 8 (4 KV heads are replicated to 8), o 64 x 64, MLP 3 x 64 x 128.
LAYER = 64 * 24 * 8 + 64 * 64 + 3 * 64 * 128


def test_products_by_hand():
    """FLOPs and weight bytes of the busiest rank, in both modes and a mixed layout."""
    for sp, tp, mode, tokens, share in ((8, 1, "base", 3, 1), (8, 1, "shift", 24, 8),
                                        (4, 2, "base", 6, 2), (1, 8, "base", 24, 8)):
        x = Cost(FREE, SMALL, sp, tp).amounts([(0, 24)], mode)
        head = 64 * 96 / 8                                   # this rank's part, one row is sampled
        assert x["flop"] == 2 * tokens * 2 * LAYER / share + 2 * head
        assert x["weight"] == 2 * LAYER / share + 2 * head   # a byte a weight, two in the head


def test_attention_by_hand():
    """Token i attends to i + 1 positions; one head a rank; the cache is read once a request."""
    x = Cost(FREE, SMALL, 8, 1).amounts([(10, 3), (5, 1)], "shift")
    assert x["pair"] == 4 * 2 * 8 * (11 + 12 + 13 + 6)       # 4 FLOPs, 2 layers, head size 8
    cached = 2 * 2 * 1 * 8 * 2                               # k and v, layers, KV head, size, bytes
    y = Cost(FREE, SMALL, 8, 1).amounts([(0, 3), (0, 1)], "shift")
    assert x["byte"] - y["byte"] == cached * 15


def test_collectives_by_hand():
    """Calls and bytes: DESIGN's formula where the slices are even."""
    for sp, tp, mode in ((8, 1, "base"), (8, 1, "shift"), (2, 4, "base"), (4, 2, "base")):
        x, c = Cost(FREE, SMALL, sp, tp).amounts([(0, 80)], mode), SMALL.config
        a, b = (sp, tp) if mode == "base" else (1, 8)
        sent = x["reduce"][0] * x["reduce"][1] + x["exchange"][0] * x["exchange"][1]
        layout = Layout(a, b, c.heads, c.kv_heads, c.ffn)
        assert sent == pytest.approx(2 * 2 * formula(layout, 80, c.dim, 8))
        assert (x["reduce"][0], x["exchange"][0]) == (4 * (b > 1), 4 * (a > 1))


def test_seconds_are_amounts_times_costs():
    """Each cost alone; a product hides the reading of its weights, or not."""
    cost = lambda **changes: Cost(replace(FREE, **changes), SMALL, 8, 1)
    plan, x = [(0, 24)], Cost(FREE, SMALL, 8, 1).amounts([(0, 24)], "shift")
    assert cost().seconds(plan, "base") == 0
    assert cost(flop_s=2).seconds(plan, "shift") == 2 * x["flop"]
    assert cost(layer_s=3, step_s=1, request_s=0.5).seconds(plan, "base") == 7.5
    both = dict(flop_s=1.0, byte_s=1.0)
    assert cost(**both).seconds(plan, "shift") == max(x["flop"], x["weight"]) + x["byte"]
    assert cost(**both, overlap=False).seconds(plan, "shift") == x["flop"] + x["weight"] + x["byte"]
    assert cost(flop_s=1, cores=2).seconds(plan, "shift") == 4 * x["flop"]       # 8 ranks, 2 cores
    one = Cost(replace(FREE, flop_s=1, cores=2), SMALL, 8, 1)
    assert one.seconds([(0, 1)], "base") == one.amounts([(0, 1)], "base")["flop"]     # one computes
    ways = ((1.0, 0.0), (0.0, 1.0))                          # the faster one is taken
    assert cost(reduce=ways).parts(plan, "shift")["all_reduce"] == 4 * 1.0
    assert cost(exchange=((1.0, 0.0),)).parts(plan, "base")["all_to_all"] == 4


def test_nodes_by_hand():
    """8 ranks on 2 nodes of 4: what crosses, and that none does within a node."""
    two = replace(FREE, per_node=4, nodes=2, reduce=((0, 1.0),), exchange=((0, 1.0),), node=(5, 10))
    plan, D = [(0, 80)], 64 * 2
    all_reduce = Cost(two, SMALL, 8, 1).parts(plan, "shift")["all_reduce"]
    near, far = 2 * 3 / 4 * 80 * D, 2 * 1 / 2 * 80 * D / 4   # within each node, then a quarter each
    assert all_reduce == pytest.approx(4 * (near + 5 + 10 * far))
    sent = Cost(two, SMALL, 8, 1).amounts(plan, "base")["exchange"][1]
    assert Cost(two, SMALL, 8, 1).parts(plan, "base")["all_to_all"] == pytest.approx(
        4 * (3 / 7 * sent + 5 + 10 * 4 / 7 * sent))
    mixed = Cost(two, SMALL, 2, 4)                           # the rings of 4 stay in a node
    assert mixed.parts(plan, "base")["all_reduce"] == pytest.approx(4 * 2 * 3 / 4 * 40 * D)


def test_presets():
    """The published sizes of the models, and memory: 70B in FP8 needs its 71 GB on each of SP's."""
    model = bench.find_model("llama-70b-fp8")
    one = Cluster.named("h200x8", model)
    cost = Cost(one, model, 1, 1)
    parameters = 80 * cost.layer + 2 * model.config.vocab * model.config.dim
    assert parameters / 1e9 == pytest.approx(70.6, abs=0.1)
    assert bench.find_model("llama-8b").weight == 2
    with pytest.raises(UserError, match="larger tp"):
        Cost(Cluster.named("rtx4090x8", model), model, 8, 1).blocks(16)
    slow = Cluster.named("h200x8", model, ["exchange_us=62"])
    assert slow.exchange[0][0] == pytest.approx(62e-6) and slow.reduce == one.reduce
    assert all(entry["source"] for entry in bench.HARDWARE["measured"].values())
    assert all(entry["source"] for entry in bench.HARDWARE["gpus"].values())


# --------------------------------------------------------------------------------------------------
# Simulation

SECOND = replace(FREE, step_s=1.0)                           # every step takes a second


def test_a_run_by_hand():
    """Two requests of 3 tokens out: the prompts share the first step, all ends after the third."""
    summary, served, steps = run("tp", [Call(0.0, 10, 3, ())] * 2, SECOND)
    assert [(s.at, s.first, s.last) for s in served] == [(0, 1, 3)] * 2
    assert [step.tokens for step in steps] == [20, 2, 2]
    assert summary["tpot mean"] == 1000 and summary["tok/s"] == 26 / 3
    assert summary["failed"] == 0 and summary["shift steps %"] == 100


def test_one_at_a_time_and_dealing():
    """window 1: each waits for the one before. dp: two requests run beside each other."""
    calls = [Call(0.0, 10, 2, ())] * 2
    _, served, _ = run("tp", calls, SECOND, window=1)
    assert [(s.at, s.last) for s in served] == [(0, 2), (2, 4)]
    _, served, steps = run("dp", calls, SECOND)
    assert [s.last for s in served] == [2, 2] and len(steps) == 4


def test_arrivals_and_refusals():
    """A late request is served from its arrival; one larger than the pool fails, the rest run."""
    calls = [Call(0.0, 10, 1, ()), Call(5.5, 10, 1, ()), Call(6.0, 9999, 1, ())]
    summary, served, _ = run("tp", calls, SECOND)
    assert [(s.at, s.first) for s in served] == [(0, 1), (5.5, 6.5)] and summary["failed"] == 1
    with pytest.raises(UserError, match="none of the requests"):
        run("tp", calls[2:], SECOND)


def test_the_switch_in_virtual_time():
    """auto finds where the modes cross; a threshold is kept."""
    # base mode pays 4 all_to_alls of 10 s; shift mode 4 all_reduces, together 0.8 s a token
    each = 0.8 / 4 / (2 * 7 / 8 * 64 * 2)
    cluster = replace(SECOND, exchange=((10.0, 0.0),), reduce=((0.0, each),))
    for prompt, first in ((49, "shift"), (52, "base")):
        _, _, steps = run("shift", [Call(0.0, prompt, 3, ())], cluster)
        assert [step.mode for step in steps] == [first, "shift", "shift"]
    _, _, steps = run("shift", [Call(0.0, 100, 5, ())], SECOND, threshold="50")
    assert [step.mode for step in steps] == ["base"] + ["shift"] * 4


def test_prefixes_and_determinism():
    """Prompts with the same hash ids begin alike, and the cache saves the second one's prefix."""
    calls = [Call(0.0, 600, 2, (7, 8)), Call(9.0, 600, 2, (7, 9))]
    prompts = [bench.prompt_of(call, i, 96, None) for i, call in enumerate(calls)]
    assert prompts[0][:512] == prompts[1][:512] and prompts[0][512:] != prompts[1][512:]
    counts = {}
    for cache in (False, True):
        runs = [run("4x2", calls, SECOND, prefix_cache=cache, max_step_tokens=1024)
                for _ in range(2)]
        assert runs[0] == runs[1]
        counts[cache] = [step.tokens for step in runs[0][2]]
    assert counts == {False: [600, 1, 600, 1], True: [600, 1, 88, 1]}


def test_workloads():
    """Numbers of calls, their order, and the rate that the capacity gives."""
    args, capacity = options(requests=40, input=90, output=10), {"tok/s": 1000.0}
    make = lambda kind: bench.make_calls(kind, args, lambda name, calls: (capacity, [], []))
    assert make("latency")[0][2] == 1 and make("batch")[0][2] is None
    [(_, burst, _)] = make("burst")
    assert len(burst) == 40 and burst == sorted(burst) and burst == make("burst")[0][1]
    sweep = make("rate")
    assert [name for name, _, _ in sweep] == ["rate 20%", "rate 40%", "rate 60%", "rate 80%",
                                              "rate 100%"]
    spans = [calls[-1].at for _, calls, _ in sweep]
    assert spans[-1] == pytest.approx(40 / 10, rel=0.5) and spans[0] > spans[-1]


# --------------------------------------------------------------------------------------------------
# Traces

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.9799600,3180,8
2023-11-16 18:19:03.9799600,10,1
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 4000, "input_length": 100, "output_length": 1, "hash_ids": [0]}
"""


def test_traces(tmp_path):
    """Both formats, the minutes, the scale, and the load at which they come."""
    azure, mooncake = tmp_path / "a.csv", tmp_path / "m.jsonl"
    azure.write_text(AZURE)
    mooncake.write_text(MOONCAKE)
    assert bench.read_trace(azure, 1, 0.5) == [Call(0, 2404, 5, ()), Call(1, 1590, 4, ())]
    assert bench.read_trace(mooncake, 15, 1) == [Call(0, 6758, 500, [0, 1]), Call(3, 100, 1, [0])]
    args = options(trace=mooncake, load=0.5)
    [(_, calls, _)] = bench.make_calls("trace", args, lambda name, calls: ({"tok/s": 100}, 0, 0))
    assert (6758 + 500 + 101) / calls[-1].at == pytest.approx(50)


@pytest.mark.parametrize("text", ["", "nonsense\n1,2\n", "{\"timestamp\": 1}\n", "TIMESTAMP\nx\n"])
def test_bad_traces(tmp_path, text):
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(UserError, match="--trace .*trace"):
        bench.read_trace(file, 15, 1)


# --------------------------------------------------------------------------------------------------
# The command line

MISTAKES = {"simulate --cluster h300x8": "h300x8", "simulate --model llama-9b": "llama-9b",
            "simulate --systems tp pp": "--systems pp", "simulate --set speed=3": "--set speed=3",
            "simulate --workload trace": "--trace FILE", "simulate --requests 0": "--requests 0",
            "simulate --threshold many": "--threshold many", "simulate --bad": "--bad",
            "simulate --cluster this:/no/such": "/no/such", "compare --workload nice": "nice",
            "simulate --workload trace --trace /no/such": "--trace /no/such",
            "simulate --against /no/such": "/no/such", "crossover --tokens -1": "--tokens -1",
            "simulate --cluster rtx4090x8 --systems dp": "larger tp", "": "command"}


@pytest.mark.parametrize("command", MISTAKES)
def test_mistakes_get_one_line(command, capsys):
    assert bench.main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("bench.py: ")
    assert MISTAKES[command] in error


def test_simulate_prints_what_it_writes(tmp_path, capsys):
    file = tmp_path / "out.json"
    command = f"simulate --workload latency --requests 2 --output 3 --json {file}"
    assert not bench.main(command.split())
    data, text = json.loads(file.read_text()), capsys.readouterr().out
    assert data["kind"] == "simulated" and set(data["runs"]["latency"]) == {
        "tp", "dp", "sp", "shift"}
    assert "simulated: h200x8, llama-70b-fp8, latency, 2 requests" in text
    ttft = data["runs"]["latency"]["tp"][0]["ttft mean"]
    assert f"{ttft:12.4g}" in text


# --------------------------------------------------------------------------------------------------
# Real engines


def test_compare_on_two_ranks(tmp_path):
    """Every request is served by every system with all its tokens, and the pairs are there."""
    file = tmp_path / "out.json"
    model = "random:dim=32,layers=1,heads=4,kv_heads=2,ffn=64,vocab=64,max_len=128"
    command = (f"compare --nproc 2 --model {model} --workload batch --requests 5 --input 20 "
               f"--output 4 --repeats 2 --threshold 16 --kv-blocks 64 --max-step-tokens 64 "
               f"--json {file}")
    with deadline(60):
        assert not bench.main(command.split())
    data = json.loads(file.read_text())
    assert data["kind"] == "measured"
    for system, (summary, served, steps) in data["runs"]["batch"].items():
        assert summary["failed"] == 0 and len(served) == 5
        assert sorted(one[3:] for one in served) == [[20, 4]] * 5
        assert all(at <= first <= last for at, first, last, _, _ in served)
        assert sum(step[2] for step in steps) == 5 * (20 + 3), system
        assert {step[3] for step in steps} == {"tp": {"shift"}, "dp": {"shift"}, "sp": {"base"},
                                               "shift": {"base", "shift"}}[system]
        assert len(data["pairs"]["batch"][system]) == 2


def test_calls_are_dealt_to_the_least_loaded(tmp_path):
    file = tmp_path / "deal"
    file.write_bytes(bytes(8 * 5))
    dealers = [bench.Dealer(str(file), me, 2) for me in range(2)]
    calls = [Call(0.0, 1, 1, ())] * 3
    assert [dealers[0].claim(calls, None, 0), dealers[1].claim(calls, None, 0)] == [0, 1]
    dealers[1].done[1] += 1                                  # engine 1 has finished its call
    assert dealers[1].claim(calls, None, 0) == 2
    assert [dealer.claim(calls, None, 0) for dealer in dealers] == [None, None]
