"""CUDA graphs without a GPU: what is captured, padded, replayed and counted, on two ranks.

`fake_capture` stands in for `cuda_capture`. As there, a replay reads the tensors that the capture
read, leaves its result in the tensor that the capture returned, and makes no call that Link sees.
It runs the function again, which a GPU would not; so it also holds each replay to the calls of the
capture, shape by shape. Results are compared bit for bit, with kernels in which a row of a product
does not depend on how many rows there are (torch's own sum in another order when there are more).
"""
import itertools
import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import serve
from common import (BLOCK_SIZE, links, load, random_texts, requests, save, small_config, step,
                    world)
from kernels import TorchKernels
from model import Graph, Llama, RandomWeights, SamplingParams
from serve import Engine
from shift import Layout, Link, UserError, both_modes, collectives_of, connect

RANDOM = "random:dim=32,layers=2,heads=8,kv_heads=2,head_dim=12,ffn=64,vocab=97,max_len=64"
SMALL = dict(model=RANDOM, block_size=4, kv_blocks=64, max_step_tokens=24, max_seqs=7, threshold=10)


class RowByRow(TorchKernels):
    """Each row of x multiplied on its own."""

    @staticmethod
    def matmul(x, w):
        return torch.cat([row @ w for row in x.split(1)], -2) if len(x) else x @ w


def fake_capture(function):
    link = function.func.__self__.link
    kinds = lambda: [call[:6] for call in collectives_of(link.log)]
    result = function()
    captured = kinds()

    def replay():
        before = {key: (count.calls, count.bytes) for key, count in link.counts.items()}
        log = [*link.log]
        link.log.clear()
        result[0].copy_(function()[0])
        assert kinds() == captured, "a graph would make the calls of its capture"
        link.log.clear()
        link.log.extend(log)
        for key, count in link.counts.items():
            count.calls, count.bytes = before.get(key, (0, 0))
        replay.times += 1
    replay.times = 0
    return replay, result


def counted(link):
    return {key: (count.calls, count.bytes) for key, count in link.counts.items()
            if key[1] != "control"}


# --------------------------------------------------------------------------------------------------
# A graph beside the eager model


def build(link, name="llama", **changes):
    config = small_config(name, **changes)
    layout = Layout(link.size, 1, config.heads, config.kv_heads, config.ffn)
    return Llama(config, RandomWeights(config), layout, link, both_modes(layout, link),
                 config.max_len, torch.float32, RowByRow())


def random_steps(draw, work):
    """Steps of 1 ... 12 tokens over the requests, several of one request at once (a prefill chunk,
    or drafts to verify), logits of any rows, until all tokens are computed."""
    while left := [request for request in work if request.computed < len(request.tokens)]:
        some, spare = [], draw.choice((1, 2, 3, 5, 6, 7, 8, 10, 12))
        for request in draw.sample(left, len(left)):
            if n := min(len(request.tokens) - request.computed, spare, draw.randint(1, 5)):
                some.append((request, n))
                spare -= n
        tokens = sum(n for _, n in some)
        yield step(some, sorted(draw.sample(range(tokens), draw.randint(0, tokens))))


def padding_world():
    draw, both, padded = random.Random(3), links([1, 2]), Counter()
    for (link, _), name in itertools.product(both.values(), ("llama", "qwen2", "qwen3")):
        eager, graphed = build(link, name), build(link, name)
        work, blocks = requests(random_texts((61, 5, 40, 9, 56, 2, 30), 101))
        for model in (eager, graphed):
            model.allocate_kv(blocks, BLOCK_SIZE)
        graphed.graphs = [Graph(graphed, size, 16, fake_capture) for size in (8, 4, 2, 1)]
        assert not any(kv.any() for kv in graphed.kv), "a capture writes to the KV cache"
        for batch in random_steps(draw, work):
            T, R = len(batch.token_ids), len(batch.context_lens)
            size = next((n for n in (1, 2, 4, 8) if n >= T), None)
            padded["full" if size == T else "padded" if size else "eager"] += 1
            padded["several tokens of a request"] += size is not None and R < T
            times = [graph.replay.times for graph in graphed.graphs]
            counts = [counted(link)]
            want, _ = eager.forward(batch, eager.shift)
            counts.append(counted(link))
            got, _ = graphed.forward(batch, graphed.shift)
            counts.append(counted(link))
            assert (want is None) == (got is None) and (want is None or torch.equal(got, want))
            for ours, theirs in zip(graphed.kv, eager.kv):
                assert torch.equal(ours, theirs), f"T = {T}, R = {R}: the KV caches differ"
            ran = [graph.size for graph, before in zip(graphed.graphs, times)
                   if graph.replay.times > before]
            assert ran == [size] * (size is not None)
            for key in counts[2]:                # all but the logits grow by size/T, and no more
                calls, sent = ([after[key][i] - before.get(key, (0, 0))[i] for before, after
                                in itertools.pairwise(counts)] for i in (0, 1))
                assert calls[0] == calls[1]
                scale = 1 if key[1] == "logits" or not size else size / T
                assert sent[1] == sent[0] * scale, (key, sent, T, size)
        before = [graph.replay.times for graph in graphed.graphs]
        work[0].computed = 60
        graphed.forward(step([(work[0], 1)]), graphed.base)
        assert [graph.replay.times for graph in graphed.graphs] == before, "base mode is eager"
        assert link.size == 1 or link.counts["all_reduce", "mlp"].bytes > 0
    assert len(padded) == 4 and min(padded.values()) > 12, padded


def test_a_padded_replay_is_the_eager_step():
    """Random steps on one and two ranks, three families: the graph of the next size runs, logits
    and KV cache are those of the eager model bit for bit, the bytes sent grow by the padding."""
    assert world(padding_world, 2, seconds=60) == 0


def swiftkv_world():
    """Decodes of one request to eight, chunks with the last row wanted or none, and drafts."""
    link, many = links([2])[2][0], dict(layers=4, num_key_value_layers=2)
    plans = [([2], []), ([3], [2]), ([1, 4], [3, 4]), ([1] * 5, [*range(5)]),
             ([3, 1, 2], [2, 3, 5]), ([1] * 8, [*range(8)]), ([1] * 3, [*range(3)]), ([7], [])]
    for name in ("llama", "qwen2", "qwen3"):
        eager, graphed = build(link, name, **many), build(link, name, **many)
        work, blocks = requests(random_texts([20] * 8, 101))
        for model in (eager, graphed):
            model.allocate_kv(blocks, BLOCK_SIZE)
        graphed.graphs = [Graph(graphed, size, 8, fake_capture) for size in (8, 4, 2)]
        for counts, rows in plans:
            batch = step([*zip(work, counts)], rows)
            want, _ = eager.forward(batch, eager.shift)
            got, _ = graphed.forward(batch, graphed.shift)
            assert (want is None) == (got is None)
            if want is not None:                 # the sums of attention depend on how many queries
                near = 0 if len(rows) == sum(counts) else 1e-5
                torch.testing.assert_close(got, want, rtol=0, atol=near)
            for ours, theirs in zip(graphed.kv, eager.kv):
                assert torch.equal(ours, theirs), f"{counts}, {rows}: the KV caches differ"
        assert [graph.replay.times for graph in graphed.graphs] == [5, 2, 1]
        assert all(kv.any() for kv in graphed.kv)


def test_a_replay_of_swiftkv_is_the_eager_step():
    """The graph takes all its tokens through the later layers, eager steps only the wanted rows:
    the KV cache is the same bit for bit, and so are the logits where all rows are wanted."""
    assert world(swiftkv_world, 2, seconds=60) == 0


# --------------------------------------------------------------------------------------------------
# What is captured: always the same launches, and nothing that a capture cannot hold


class Launches(TorchDispatchMode):
    """The operations that run, with their shapes; not those within the kernels' attention."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        self.seen.append((str(function), [tuple(x.shape) for x in [*args, result]
                                          if isinstance(x, torch.Tensor)]))
        return result


def launches_world():
    connect()
    model = build(Link(ranks=[0]), "qwen3")
    model.kernels.attention = lambda qkv, cos, *rest: qkv[:, :model.layout.h] * cos
    model.allocate_kv(4, BLOCK_SIZE)
    graph, seen = Graph(model, 4, 4, fake_capture), []
    work, _ = requests(random_texts((9, 7), 101))
    for counts in ((2, 1), (1, 1)):
        batch = step([(request, n) for request, n in zip(work, counts)])
        with torch.inference_mode():
            graph.run(batch)
            with Launches() as launches:
                model.hidden(graph.inputs, model.shift)
        seen.append(launches.seen)
    first, second = seen
    assert len(first) > 40 and first == second
    for name, _ in first:
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "item",
                                                 "masked_select", "_to_copy")), name


def test_a_capture_meets_no_value_of_a_tensor():
    """The operations of `hidden` do not depend on the batch's contents, and none of them brings a
    value to the host or makes a tensor whose size depends on one: no CUDA graph could hold these.
    (Attention is the kernels' own matter: the reference loops over requests.)"""
    assert world(launches_world, 1, seconds=20) == 0


# --------------------------------------------------------------------------------------------------
# The engine with graphs


def run(engine, draw):
    """Traffic that comes and goes. Returns the texts, the steps, the calls and bytes counted."""
    engine.link.counts.clear()
    steps, forward = [], engine.model.forward

    def noted(batch, mode):
        steps.append((len(batch.token_ids), mode.name))
        return forward(batch, mode)
    engine.model.forward = noted
    outputs = []
    for turn in range(60):
        if turn % 4 == 0 and engine.rank == 0:
            prompt = [draw.randrange(97) for _ in range(draw.randint(1, 18))]
            outputs.append(engine.submit(prompt, SamplingParams(
                max_tokens=draw.randint(1, 12), temperature=draw.choice((0, 0, 1)), seed=turn)))
        engine.step()
    if engine.rank == 0:
        engine.close()
    engine.run()
    return [output.tokens for output in outputs], [*steps], counted(engine.link)


def engine_world(root):
    connect()
    serve.NativeKernels = lambda threads: RowByRow()
    engines = {name: Engine(**SMALL, sp=2) for name in ("eager", "graphs")}
    graphed = engines["graphs"]
    graphed._capture(fake_capture)
    assert [graph.size for graph in graphed.model.graphs] == [8, 4, 2, 1]
    assert "4 CUDA graphs" in graphed.remark
    found = {name: run(engine, random.Random(5)) for name, engine in engines.items()}
    for ours, theirs in zip(graphed.model.kv, engines["eager"].model.kv):
        assert torch.equal(ours, theirs), "the KV caches differ"
    times = {graph.size: graph.replay.times for graph in graphed.model.graphs}
    vectors = [engine.embed([[5, 6, 7], [8]]) for engine in engines.values()]
    assert graphed.rank or torch.equal(*vectors), "a step that pools is eager"
    save(root, (found, times, {graph.size: graph.replay.times for graph in graphed.model.graphs}))


def test_the_engine_runs_the_same_with_graphs(tmp_path):
    """Greedy and sampled traffic on two ranks, threshold 10: the same steps and texts, the same KV
    cache bit for bit; steps of up to 8 tokens are replayed, those of 9 and 10 are eager, larger
    ones run in base mode; each all_reduce sends what its step has, padded to the graph's size."""
    assert world(engine_world, 2, tmp_path, seconds=60) == 0
    for found, times, after in load(tmp_path, 2):
        assert after == times
        (texts, steps, sent), (texts_too, steps_too, sent_too) = found["eager"], found["graphs"]
        assert texts == texts_too and steps == steps_too
        sizes = [next((n for n in (1, 2, 4, 8) if n >= T), T) for T, mode in steps
                 if mode == "shift"]
        assert times == {n: sizes.count(n) for n in (8, 4, 2, 1)} and min(times.values()) > 0
        assert {9, 10} & {T for T, mode in steps if mode == "shift"}
        assert {mode for _, mode in steps} == {"shift", "base"}
        for key, (calls, nbytes) in sent.items():
            extra = 0
            if key in (("all_reduce", "o"), ("all_reduce", "mlp")):      # (T, D) float32, 2 layers
                assert nbytes == 2 * 32 * 4 * sum(T for T, mode in steps if mode == "shift")
                extra = 2 * 32 * 4 * sum(sizes) - nbytes
                assert extra > 0
            assert sent_too[key] == (calls, nbytes + extra), key


def reasons_world():
    connect()
    for options, sizes in ((dict(threshold=1), [1]), (dict(threshold=0), []),
                           (dict(threshold=500), [24, 16, 8, 4, 2, 1]), (dict(mode="sp"), []),
                           (dict(eager=True), []), (dict(explain=1), [8, 4, 2, 1]),
                           (dict(explain=2), []), (dict(link_us=1), []),
                           (dict(trace="/dev/null"), [])):
        engine = Engine(**{**SMALL, **options})
        assert not engine.model.graphs, "on a CPU all is eager"
        engine._capture(fake_capture)
        assert [graph.size for graph in engine.model.graphs] == sizes, options
        assert f"{len(sizes)} CUDA graphs" in engine.remark


def test_which_steps_get_graphs():
    """Those that the switch runs in shift mode; none with --eager, when traced, or emulated."""
    assert world(reasons_world, 2, seconds=60) == 0


# --------------------------------------------------------------------------------------------------
# Start-up


def profile_world():
    rank = connect()
    engine = Engine(**SMALL)
    ran, forward = [], engine.model.run_layers
    engine.model.run_layers = lambda x, *rest: ran.append(len(x)) or forward(x, *rest)
    if rank == 0:                                # alone: the other rank need not come
        engine._profile()
        assert ran == [24 // 2, 24], "the largest step, in both modes"
    engine.link.barrier()
    assert counted(engine.link)["all_reduce", "mlp"] if rank == 0 else not counted(engine.link)
    outputs = engine.generate([[5, 6]], SamplingParams(max_tokens=2))    # it sends again
    assert outputs is None or len(outputs[0].tokens) == 2


def test_the_profile_step_sends_nothing():
    """One rank alone runs it, in both modes, and the engine still works afterwards."""
    assert world(profile_world, 2, seconds=30) == 0


@pytest.mark.parametrize("phase, failing", [
    ("__init__", [0]), ("__init__", [1]), ("allocate_kv", [0]), ("allocate_kv", [1]),
    ("hidden", [0, 1])])
def test_out_of_memory_is_said_once(phase, failing, monkeypatch, capfd):
    """A rank cannot have its weights or its pool, or both the memory of a capture: one line with
    the device and the remedy, exit code 2, and no rank waits for the other."""
    works, calls = getattr(Llama, phase), []

    def full(self, *args):
        calls.append(phase)
        small = phase == "allocate_kv" and len(calls) == 1    # that of the steps that are tried
        if torch.distributed.get_rank() in failing and not small:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")
        return works(self, *args)
    monkeypatch.setattr(Llama, phase, full)
    assert world(starting, 2, seconds=30) == 2
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "out of memory on cpu" in lines[0], lines
    assert all(word in lines[0] for word in ("--tp", "--max-step-tokens", "--gpu-memory"))
    assert ("rank 1" in lines[0]) == (failing == [1])


def starting():
    """A server that also captures, as it would on GPUs. It never gets to serve."""
    start = Engine.__init__

    def started(self, **options):
        start(self, **options)
        with self.link.together():
            self._capture(fake_capture)
        raise UserError("it has started")
    Engine.__init__ = started
    return serve.main(["--port", "0", "--model", RANDOM, "--kv-blocks", "64", "--threshold", "4"])
