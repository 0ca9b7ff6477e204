"""The trace: the file of four ranks' steps, held to itself and to what the Link counts."""
import json
import os
import signal
from collections import Counter, defaultdict

import pytest
from common import load, save, world

from model import SamplingParams
from serve import Engine
from assets.trace_file import LANES
from shift import connect

MODEL = "random:dim=64,layers=3,heads=8,kv_heads=4,ffn=64,vocab=97,max_len=64"
SMALL = dict(model=MODEL, sp=2, tp=2, threshold=8, max_step_tokens=32, max_seqs=3, kv_blocks=64)


def traced_world(root, most, killed):
    rank = connect()
    slow = dict(link_us=20_000) if killed else {}               # a step lasts longer than 0.1 s
    engine = Engine(**SMALL, **slow, trace=str(root / "trace.json"), trace_steps=most)
    prompts = [list(range(1, length)) for length in (30, 5, 17, 9)]
    if killed and rank == 0:
        def kill(events):
            if engine.steps.total() == 6:                       # while others are in a step
                os.kill(os.getpid(), signal.SIGKILL)
        engine.on_events = kill
    engine.generate(prompts, SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    save(root, ({key: count.bytes for key, count in engine.link.counts.items()},
                engine.steps.total(), [step.tokens for step in engine.trace]))


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    root = tmp_path_factory.mktemp("trace")
    assert world(traced_world, 4, root, 10_000, False, seconds=60) == 0
    return json.loads((root / "trace.json").read_text()), load(root, 4)


def spans(events, lane):
    """{rank: [(start, end, event)]}, in order, of one lane."""
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["tid"] == LANES.index(lane):
            found[event["pid"]].append((event["ts"], event["ts"] + event["dur"], event))
    return {rank: sorted(of, key=lambda span: span[:2]) for rank, of in found.items()}


def test_lanes_are_in_order_and_inside_their_step(traced):
    """No two spans of a lane overlap; layers, compute and collectives fill the steps."""
    events, results = traced
    for lane in LANES:
        for rank, of in spans(events, lane).items():
            for (_, end, _), (start, _, _) in zip(of, of[1:]):
                assert start >= end - 0.01, (lane, rank)                 # microseconds
    for rank, steps in spans(events, "steps").items():
        assert len(steps) == results[rank][1] > 6
        whole = sum(end - start for start, end, _ in steps)
        parts = [sum(end - start for start, end, _ in spans(events, lane)[rank])
                 for lane in ("compute", "collectives")]
        assert sum(parts) == pytest.approx(whole, rel=1e-6) and min(parts) > 0
        layers = Counter(event["name"] for _, _, event in spans(events, "layers")[rank])
        assert layers == dict.fromkeys(["layer 0", "layer 1", "layer 2", "logits"], len(steps))
        names = {event["name"].split()[0] for _, _, event in steps}
        assert names == {"base", "shift"}


def test_a_collective_ends_nowhere_before_all_have_begun(traced):
    """For each one, the latest start of its ranks is before the earliest end, clocks considered."""
    events, _ = traced
    error = max(event["args"].get("clock_error", 0) for event in events if event["ph"] == "M"
                and "args" in event) * 1e6
    assert error < 1e5
    met = defaultdict(list)
    for rank, of in spans(events, "collectives").items():
        turn = Counter()
        for start, end, event in of:
            key = tuple(event["args"]["group"]), event["name"], event["args"]["step"]
            met[*key, turn[key]].append((start, end, rank))
            turn[key] += 1
    assert len(met) > 100
    for (group, *_), calls in met.items():
        assert sorted(rank for *_, rank in calls) == sorted(group)
        assert max(start for start, *_ in calls) <= min(end for _, end, _ in calls) + error


def test_bytes_are_those_that_the_link_counts(traced):
    """Summed over the file, by rank and kind."""
    events, results = traced
    for rank, of in spans(events, "collectives").items():
        sums = Counter()
        for *_, event in of:
            what, op = event["name"].split()
            sums[op, what] += event["args"]["bytes"]
        counts = {key: n for key, n in results[rank][0].items() if key[1] != "control"}
        assert sums == counts and sum(sums.values()) > 0


def test_requests_and_counters(traced):
    """Each request begins and ends once; the counters are rank 0's, one of each a step."""
    events, results = traced
    ends = Counter((event["ph"], event["id"]) for event in events if event["ph"] in "be")
    assert ends == {(kind, id): 1 for kind in "be" for id in range(4)}
    counters = Counter(event["name"] for event in events if event["ph"] == "C")
    assert counters == dict.fromkeys(["tokens", "waiting", "KV blocks"], results[0][1])
    tokens = [event["args"] for event in events if event["name"] == "tokens"]
    assert [args["tokens"] for args in tokens] == results[0][2]
    assert {args["threshold"] for args in tokens} == {8}


def test_the_file_is_bounded_and_whole_at_its_bound(tmp_path):
    """--trace-steps ends the file, not the server."""
    assert world(traced_world, 4, tmp_path, 3, False, seconds=60) == 0
    events = json.loads((tmp_path / "trace.json").read_text())
    assert {len(of) for of in spans(events, "steps").values()} == {3}
    assert load(tmp_path, 4)[0][1] > 6


def full_world(root):
    rank = connect()
    engine = Engine(**SMALL, link_us=5000, trace=str(root / "trace.json"))
    if rank == 2:
        os.dup2(os.open("/dev/full", os.O_WRONLY), engine.file.file)
    outputs = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=9, ignore_eos=True))
    assert outputs is None or len(outputs[0].tokens) == 9
    save(root, (engine.steps.total(), engine.file.file))


def test_a_full_disk_ends_the_file_and_not_the_server(tmp_path, capfd):
    """One rank can write no more: it says so once and all go on; what the others write is whole."""
    assert world(full_world, 4, tmp_path, seconds=60) == 0
    said = [line for line in capfd.readouterr().out.splitlines() if "--trace" in line]
    assert said == ["serve.py: rank 2: --trace ends here: No space left on device"]
    assert load(tmp_path, 4) == [(9, None)] * 4
    events = json.loads((tmp_path / "trace.json").read_text())
    steps = {rank: len(of) for rank, of in spans(events, "steps").items()}
    assert steps == {0: 9, 1: 9, 3: 9}


def test_a_killed_server_leaves_whole_steps(tmp_path):
    """After kill -9 of rank 0, in a step, only the closing bracket is missing."""
    assert world(traced_world, 4, tmp_path, 10_000, True, seconds=60) != 0
    text = (tmp_path / "trace.json").read_text()
    with pytest.raises(ValueError):
        json.loads(text)
    events = json.loads(text.rstrip().rstrip(",") + "]")
    assert {len(of) for of in spans(events, "steps").values()} <= {6, 7}
