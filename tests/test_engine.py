"""The engine on real ranks: the same text for every layout, mode, company and interruption.

Worlds of ranks are forked by `common.world`; what a rank finds, it saves for the test to judge.
Equality is claimed in float32. A different token is excused only where rounding may decide: if the
oracle's logits, moved by less than NEAR, could give that token too. Such cases are counted.
"""
import itertools
import json
import os
import random
import threading
import time
from collections import Counter, namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checks import check, checked
from common import factorizations, load, save, small_config, world, write_checkpoint
from assets.tokenizer import Tokenizer, byte_letters
from model import Sample, SamplingParams, sample
from serve import BlockManager, ContextError, Engine, Options, Output, Scheduler
from shift import Link, UserError, connect

NEAR = 1e-4
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
FOUR = replace(GREEDY, max_tokens=4)
TINY = str(Path(__file__).parent.parent / "assets" / "tiny")
RANDOM = "random:dim=32,layers=2,heads=8,kv_heads=2,head_dim=12,ffn=64,vocab=97,max_len=64"
SMALL = dict(model=RANDOM, block_size=4, kv_blocks=64, max_step_tokens=16, max_seqs=3, threshold=4)


def write_tokenizer(directory, vocab):
    """A byte-level BPE without merges: token i is the i-th printable letter."""
    letters = {letter: i for i, letter in enumerate(list(byte_letters())[:vocab])}
    (directory / "tokenizer.json").write_text(json.dumps({
        "model": {"type": "BPE", "vocab": letters, "merges": []}, "added_tokens": [],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False}}))


def answer(engine, work):
    """`generate` with each prompt's own parameters; the Outputs on rank 0, None on the others."""
    outputs = None
    if engine.rank == 0:
        outputs = [engine.submit(prompt, params) for prompt, params in work]
        engine.close()
    engine.run()
    engine.closing = False
    return outputs


def recorded(engine):
    """A list that grows by (tokens, mode) with each step that this engine runs."""
    steps, forward = [], engine.model.forward

    def run(batch, mode):
        steps.append((len(batch.token_ids), mode.name))
        return forward(batch, mode)
    engine.model.forward = run
    return steps


def crossings(steps):
    """How often the mode changed from one step to the next."""
    return sum(mode != after for (_, mode), (_, after) in itertools.pairwise(steps))


class Solo:
    """An engine of one rank, emptied before each request: what a request gets when it is alone."""

    def __init__(self, rank, **options):
        self.engine = Engine(ranks=[rank], **{**SMALL, "max_step_tokens": 64, **options})
        self.logits = []                       # of each token of the last request
        forward = self.engine.model.forward

        def run(batch, mode):
            logits, sums = forward(batch, mode)
            self.logits += [] if logits is None else [*logits]
            return logits, sums
        self.engine.model.forward = run

    def __call__(self, prompt, params):
        self.logits.clear()
        engine = self.engine
        engine.scheduler = Scheduler(BlockManager(engine.num_blocks, 4), 1, 64)
        return answer(engine, [(prompt, params)])[0]


def excused(tokens, wanted, logits, params, prompt):
    """Whether the first token that differs is one that logits within NEAR give; False if none does.

    A token too many or too few is never excused, nor one that no such logits give.
    """
    pairs = zip(tokens, wanted)
    place = next((i for i, (token, want) in enumerate(pairs) if token != want), None)
    if place is None:
        assert len(tokens) == len(wanted), f"{tokens} is shorter or longer than {wanted}"
        return False
    noise = torch.rand(256, len(logits[place]), generator=torch.Generator().manual_seed(0))
    rows = logits[place] + (2 * noise - 1) * NEAR
    draws = sample(rows, [params] * 256, [len(prompt) + place] * 256)
    assert tokens[place] in {draw.token for draw in draws}, (
        f"token {place}: {tokens} instead of {wanted}, and no near tie: best logits "
        f"{logits[place].topk(2).values.tolist()}")
    return True


# --------------------------------------------------------------------------------------------------
# Parity with transformers, for every layout and mode: one world of eight ranks

Job = namedtuple("Job", "ranks sp tp mode model")
MODES = ("shift", "tp", "sp")
# K = 16, 8, 2, 1: above, at and below P; head_dim is never D/H, the vocabulary 101 never divisible
CHECKPOINTS = ("mha", "linear", "llama", "llama3", "qwen2", "qwen3")


def jobs():
    """Every factorization of 1, 2, 4 and 8 ranks in every mode, with models by turns; the trained
    model at every P."""
    found = [Job(P, sp, tp, mode, CHECKPOINTS[(i + 2 * m + P // 3) % 6]) for P in (8, 4, 2, 1)
             for i, (sp, tp) in enumerate(factorizations(P)) for m, mode in enumerate(MODES)]
    return found + [Job(P, sp, P // sp, "shift", "tiny") for P, sp in
                    ((8, 4), (4, 2), (2, 2), (1, 1))]


def directory_of(root, model):
    return TINY if model == "tiny" else str(root / model)


def prompts_for(model):
    """Lengths that make steps large and small by turns: two seats, so most prompts wait."""
    draw = random.Random(model)
    vocab = 4096 if model == "tiny" else 101
    return [[draw.randrange(vocab) for _ in range(length)] for length in (9, 13, 3, 21, 15, 17, 5)]


def parity_world(root):
    rank, results = connect(), {}
    for P in (8, 4, 2, 1):
        jobs_of_P = [job for job in jobs() if job.ranks == P]
        for job in jobs_of_P[rank // P::8 // P]:             # the sets of P ranks share the work
            engine = Engine(range(rank // P * P, rank // P * P + P), **{
                **SMALL, "model": directory_of(root, job.model), "mode": job.mode,
                "sp": job.sp, "tp": job.tp, "max_seqs": 2, "threshold": 6})
            if P < 8:
                checked(engine)
            steps = recorded(engine)
            outputs = engine.generate(prompts_for(job.model), FOUR)
            assert (outputs is None) == (engine.rank > 0)
            if outputs:
                results[job] = [output.tokens for output in outputs], steps
    save(root, {tuple(job): result for job, result in results.items()})


@pytest.fixture(scope="module")
def parity(tmp_path_factory):
    """The ranks' results by job, and the directory of the checkpoints."""
    root = tmp_path_factory.mktemp("parity")
    for name in CHECKPOINTS:
        config = small_config(name)
        write_checkpoint(root / name, config)
        write_tokenizer(root / name, config.vocab)
    assert world(parity_world, 8, root, seconds=300) == 0
    results = {}
    for part in load(root, 8):
        results |= {Job(*job): result for job, result in part.items()}
    assert results.keys() == set(jobs())
    return results, root


@pytest.fixture(scope="module")
def oracle(parity):
    """oracle(model) -> (tokens, logits) of each of its prompts: greedy, by transformers."""
    from transformers import AutoModelForCausalLM
    known = {}

    def ask(name):
        if name not in known:
            model = AutoModelForCausalLM.from_pretrained(directory_of(parity[1], name),
                                                         dtype=torch.float32).eval()
            model.generation_config.eos_token_id = None
            known[name] = []
            for prompt in prompts_for(name):
                ids = torch.tensor([prompt])
                out = model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0,
                    max_new_tokens=FOUR.max_tokens, output_logits=True,
                    return_dict_in_generate=True)
                known[name].append((out.sequences[0, len(prompt):].tolist(),
                                    [row[0] for row in out.logits]))
        return known[name]
    return ask


@pytest.mark.parametrize("job", jobs(), ids=lambda job: "P{}-sp{}-tp{}-{}-{}".format(*job))
def test_greedy_text_is_that_of_transformers(parity, oracle, job):
    """Each layout and mode: the tokens of Hugging Face's greedy generation; at most one near tie.
    The steps cross the threshold many times in shift mode; pinned modes never switch."""
    tokens, steps = parity[0][job]
    ties = sum(excused(got, want, logits, FOUR, prompt) for got, (want, logits), prompt in
               zip(tokens, oracle(job.model), prompts_for(job.model)))
    print(f"{ties} near ties, {crossings(steps)} crossings in {len(steps)} steps")
    assert ties <= 1
    most = {"shift": 6, "tp": SMALL["max_step_tokens"], "sp": 0}[job.mode]
    assert all((mode == "shift") == (count <= most) for count, mode in steps)
    if job.mode == "shift":                                 # and just at the threshold, too
        assert crossings(steps) >= 7 and {6, 7} <= {count for count, _ in steps}


def test_the_oracle_tells_tokens_apart(parity, oracle):
    """The comparison can fail: a wrong token is not excused, nor is a text cut short."""
    (tokens, logits), prompt = oracle("llama")[0], prompts_for("llama")[0]
    with pytest.raises(AssertionError, match="no near tie"):
        excused([*tokens[:2], (tokens[2] + 1) % 101, *tokens[3:]], tokens, logits, FOUR, prompt)
    with pytest.raises(AssertionError, match="shorter"):
        excused(tokens[:-1], tokens, logits, FOUR, prompt)


# --------------------------------------------------------------------------------------------------
# Same seed, same text


def sampled_work():
    draw = random.Random(5)
    params = SamplingParams(max_tokens=8, temperature=0.9, top_p=0.95, ignore_eos=True)
    return [([draw.randrange(97) for _ in range(length)], replace(params, seed=length))
            for length in (14, 2, 9, 5, 1, 11)]


def same_seed_world(root):
    """Rank 0 alone; pairs of ranks in four ways, all eight in three: order and seats differ too."""
    rank, work, texts = connect(), sampled_work(), {}
    logits = []
    if rank == 0:
        solo = Solo(0)
        alone = []
        for one in work:
            alone.append(solo(*one).tokens)
            logits.append(list(solo.logits))
        texts["alone"] = alone
    pair = rank // 2
    ways = [(2, dict(sp=2, mode="sp")), (2, dict(tp=2, mode="tp", max_seqs=1)),
            (2, dict(sp=2, threshold=3)), (2, dict(tp=2, threshold=5, max_seqs=6))][pair:pair + 1]
    ways += [(8, dict(sp=4, tp=2, threshold=4)), (8, dict(tp=8, mode="tp", max_seqs=6)),
             (8, dict(sp=8, mode="sp", max_seqs=6))]
    for P, options in ways:
        engine = Engine(range(rank // P * P, rank // P * P + P), **{**SMALL, **options})
        order = sorted(range(6), key=lambda i: (i * 5 + pair * (P == 2)) % 6)
        outputs = answer(engine, [work[i] for i in order])
        if outputs:
            places = sorted(range(6), key=lambda place: order[place])
            texts[f"P {P} {options}"] = [outputs[place].tokens for place in places]
    save(root, (texts, logits))


def test_the_same_seed_gives_the_same_text(tmp_path):
    """Temperature 0.9, top_p 0.95: for P = 1, 2 and 8, in any mode and any company, the tokens of
    the request alone on one rank; at most one near tie in 42 texts."""
    assert world(same_seed_world, 8, tmp_path, seconds=90) == 0
    ranks = load(tmp_path, 8)
    logits = ranks[0][1]
    texts = {way: tokens for texts, _ in ranks for way, tokens in texts.items()}
    assert len(texts) == 8 and len({tuple(tokens) for tokens in texts["alone"]}) == 6
    ties = sum(excused(got, want, rows, params, prompt) for tokens in texts.values()
               for got, want, rows, (prompt, params) in
               zip(tokens, texts["alone"], logits, sampled_work()))
    print(f"{ties} near ties")
    assert ties <= 1


# --------------------------------------------------------------------------------------------------
# Random traffic on two ranks


def random_request(draw, texts):
    """A prompt that often begins like an earlier one, and parameters of all kinds."""
    prompt = draw.choice(texts)[:draw.randint(1, 24)] if texts and draw.random() < 0.6 else []
    prompt = prompt + [draw.randrange(97) for _ in range(draw.randint(not prompt, 9))]
    params = SamplingParams(
        max_tokens=draw.randint(1, 18), seed=draw.randrange(1000), ignore_eos=True,
        temperature=draw.choice((0, 0, 0.7, 1.3)), top_p=draw.choice((1, 0.9)),
        top_k=draw.choice((0, 20)), stop=draw.choice(((), ("7 ", "1 5"))))
    return prompt, params


def traffic_world(root, steps, link, kernels, speculate="off"):
    """Rank 0 submits and cancels between steps; afterwards it asks for each text alone."""
    rank, draw = connect(), random.Random(11)
    engine = checked(Engine(**{
        **SMALL, "kv_blocks": 14, "max_seqs": 5, "max_step_tokens": 12, "threshold": 6, "sp": 2,
        "link": link, "kernels": kernels, "speculate": speculate}))
    engine.IDLE_TICK = 0.01
    run, outputs, ended = recorded(engine), [], Counter()
    engine.on_events = lambda events: ended.update(
        event.output.id for event in events if event.finish)
    for _ in range(steps):
        alive = [output for output in outputs if output.finish is None]
        if rank == 0 and len(alive) < 7 and draw.random() < 0.4:
            texts = [output.prompt + output.tokens for output in outputs[-20:]]
            outputs.append(engine.submit(*random_request(draw, texts)))
        if alive and draw.random() < 0.04:
            engine.cancel(draw.choice(alive))
        assert engine.step()
    if rank == 0:
        engine.close()
    engine.run()
    check(engine.scheduler)
    assert engine.checks >= engine.steps.total() > 0
    assert not engine.scheduler.requests and engine.scheduler.blocks.available == 14
    found = None
    if rank == 0:
        assert not engine.outputs and all(output.finish for output in outputs)
        assert ended == Counter(output.id for output in outputs), "each has one end"
        found = judge(outputs, Solo(0))
        found |= {"preemptions": engine.scheduler.preemptions, "steps": engine.steps.total(),
                  "cached": engine.scheduler.cached_tokens, "crossings": crossings(run),
                  "drafted": engine.drafted, "accepted": engine.accepted}
    save(root, found)


def judge(outputs, solo):
    """Hold each Output to the one that it has alone; a cancelled one to the beginning of that."""
    found = Counter()
    for output in outputs:
        want = solo(output.prompt, output.params)
        count = len(output.tokens)
        found[output.finish] += 1
        if output.finish == "cancelled":
            found["ties"] += excused(output.tokens, want.tokens[:count], solo.logits, output.params,
                                     output.prompt)
        elif excused(output.tokens[:len(want.tokens)], want.tokens[:count], solo.logits,
                     output.params, output.prompt):
            found["ties"] += 1
        else:
            assert (output.tokens, output.text, output.finish) == (
                want.tokens, want.text, want.finish), output.id
    return dict(found)


@pytest.mark.parametrize("link, kernels", [("auto", "auto"), ("gloo", "torch")])
def test_random_traffic(tmp_path, link, kernels):
    """450 steps of arrivals, shared prefixes, cancellations, greedy and sampled, on a pool of 14
    blocks, all invariants and both ranks' states compared in each step: every text is the one that
    the request has alone, each request ends once, and no block is lost."""
    assert world(traffic_world, 2, tmp_path, 450, link, kernels, seconds=120) == 0
    found = load(tmp_path, 2)[0]
    print(found)
    assert found["length"] > 50 and found["stop"] > 5 and found["cancelled"] > 5
    assert found["preemptions"] > 5 and found["cached"] > 100 and found["crossings"] > 50
    assert found.get("ties", 0) <= 2


# --------------------------------------------------------------------------------------------------
# Two ranks, one thing at a time


def preempted_world(root):
    """Two requests of 8 + 14 tokens on 7 blocks of 4: together they need 11."""
    rank = connect()
    work = [(list(range(first, first + 8)), replace(GREEDY, max_tokens=14, temperature=t, seed=3))
            for first, t in ((10, 0.8), (40, 0))]
    engine = checked(Engine(**{**SMALL, "kv_blocks": 7, "sp": 2}))
    lengths = []                                 # of the second output, when it was preempted
    preempt = engine.scheduler._preempt

    def noted(request):
        lengths.append(len(request.tokens) - request.num_prompt)
        preempt(request)
    engine.scheduler._preempt = noted
    outputs = answer(engine, work)
    assert engine.scheduler.preemptions == len(lengths) > 0 and 0 < lengths[0] < 14
    if rank == 0:
        assert [len(output.tokens) for output in outputs] == [14, 14]
        found = judge(outputs, Solo(0))
        assert found["length"] == 2 and found.get("ties", 0) == 0


def test_a_preempted_request_goes_on_where_it_was(tmp_path):
    """Out of blocks in decode: the same text as alone, and each token is counted once."""
    assert world(preempted_world, 2, tmp_path) == 0


def refusals_world():
    rank = connect()
    engine = Engine(**{**SMALL, "kv_blocks": 10, "sp": 2})
    assert engine.max_model_len == 40, "the pool is smaller than the context of 64"
    if rank == 0:
        good = engine.submit([5] * 8, GREEDY)
        for prompt, most, kind, words in (
                ([], 6, UserError, "empty"), ([1, 97], 6, UserError, "97"),
                ([-1], 6, UserError, "-1"), ([1] * 35, 6, ContextError, "40"),
                ([1] * 100, 1, ContextError, "100"), ([1] * 40, 1, ContextError, "40"),
                ([1], 10 ** 9, ContextError, "1000000000")):
            with pytest.raises(kind, match=words) as error:
                engine.submit(prompt, replace(GREEDY, max_tokens=most))
            assert "\n" not in str(error.value)
        longest = engine.submit([1] * 39, replace(GREEDY, max_tokens=1))
        engine.close()
    engine.run()
    if rank == 0:
        assert len(good.tokens) == 6 and len(longest.tokens) == 1
        assert judge([good, longest], Solo(0))["length"] == 2


def test_what_can_never_run_is_refused_at_once():
    """Too long for the context or the pool, empty, token ids out of range: an error that names the
    value, at submission; a request that just fits runs, and so does the one under way."""
    assert world(refusals_world, 2) == 0


def refused_generate_world():
    rank = connect()
    engine = Engine(**{**SMALL, "sp": 2})
    with pytest.raises(UserError, match="empty"):
        engine.generate([[1, 2], []], GREEDY)
    outputs = engine.generate([[1, 2]], GREEDY)
    assert rank > 0 or len(outputs[0].tokens) == 6
    assert engine.scheduler.prompt_tokens == 2, "nothing of the refused call was computed"


def test_generate_refuses_on_every_rank():
    """A prompt that cannot run: every rank's call raises, so that the ranks stay together."""
    assert world(refused_generate_world, 2, seconds=30) == 0


def twice_world():
    rank = connect()
    engine = checked(Engine(**{**SMALL, "sp": 2}))
    texts = [engine.generate([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]], GREEDY) for _ in range(3)]
    assert engine.scheduler.cached_tokens == 2 * 4, "the later calls found the first's prefix"
    assert engine.generate([], GREEDY) == ([] if rank == 0 else None)
    assert engine.generate(["3 1 4 1 5 9 2 6"], GREEDY) is None or rank == 0
    if rank == 0:
        assert texts[0][0].tokens == texts[1][0].tokens == texts[2][0].tokens
        assert texts[0][1].tokens == texts[1][1].tokens == texts[2][1].tokens
        assert all(output.text == "".join(f"{token} " for token in output.tokens)
                   for output in texts[2])
        engine.tokenizer.eos = {texts[0][0].tokens[3]}
    ended = engine.generate([[3, 1, 4, 1, 5, 9, 2, 6]], replace(GREEDY, ignore_eos=False))
    if rank == 0:
        last = texts[0][0].tokens.index(*engine.tokenizer.eos)
        assert ended[0].tokens == texts[0][0].tokens[:last + 1] and ended[0].finish == "stop"
    engine.IDLE_TICK = 0.01
    assert engine.step(), "the engine is still open"


def test_generate_works_again_and_again():
    """Several calls on one engine: equal texts, the prefix cache stays; no prompt at all is
    fine too, and the end token ends a text for all ranks."""
    assert world(twice_world, 2) == 0


def threads_world():
    """The ranks run; a thread of rank 0 submits, cancels and closes. The idle tick is longer
    than the deadline of the test, which ends whatever does not wake the engine."""
    rank = connect()
    engine, events = Engine(**{**SMALL, "sp": 2}), []
    engine.IDLE_TICK = 90
    engine.on_events = events.extend

    def client():
        time.sleep(0.3)                                     # the engine is idle by now
        long = engine.submit([1, 2, 3], replace(GREEDY, max_tokens=50))
        short = engine.submit([4, 5], GREEDY)
        while len(long.tokens) < 3 or short.finish is None:
            time.sleep(0.001)
        engine.cancel(long)
        while long.finish is None:
            time.sleep(0.001)
        time.sleep(0.3)                                     # idle again
        last = engine.submit([6], GREEDY)
        while last.finish is None:
            time.sleep(0.001)
        time.sleep(0.3)
        engine.close()
        outputs.extend([long, short, last])

    outputs, thread = [], threading.Thread(target=client)
    if rank == 0:
        thread.start()
    engine.run()
    assert not engine.scheduler.requests
    assert engine.scheduler.blocks.available == engine.num_blocks
    if rank == 0:
        thread.join()
        assert [output.finish for output in outputs] == ["cancelled", "length", "length"]
        assert 3 <= len(outputs[0].tokens) < 50 and len(outputs[2].tokens) == 6
        for output in outputs:
            mine = [event for event in events if event.output is output]
            assert "".join(event.text for event in mine) == output.text
            assert [event.finish for event in mine if event.finish] == [output.finish]


def test_other_threads_submit_cancel_and_close():
    """From another thread of rank 0: each call wakes the idle engine."""
    assert world(threads_world, 2, seconds=45) == 0


def grace_world(grace):
    rank = connect()
    engine, ended = Engine(**{**SMALL, "sp": 2, "max_seqs": 1}), []
    engine.on_events = lambda events: ended.extend(
        (event.output.id, event.finish) for event in events if event.finish)
    step = engine.step
    engine.step = lambda: (time.sleep(0.02), step())[1]     # 50 tokens take a second
    if rank == 0:
        outputs = [engine.submit([i], replace(GREEDY, max_tokens=50)) for i in range(2)]
        engine.close(grace=grace)
    began = time.monotonic()
    engine.run()
    assert time.monotonic() - began < 10
    assert not engine.scheduler.requests
    if rank == 0:
        assert sorted(ended) == [(0, "cancelled"), (1, "cancelled")]
        assert (len(outputs[0].tokens) > 0) == (grace > 0)
        assert len(outputs[0].tokens) < 50 and not outputs[1].tokens


@pytest.mark.parametrize("grace", [0, 0.3])
def test_close_cancels_what_is_left_after_the_grace(grace):
    """Running and waiting requests, and those that no rank has heard of, end as cancelled, with one
    event each, and `run` returns."""
    assert world(grace_world, 2, grace, seconds=30) == 0


def cancelled_world():
    rank = connect()
    engine, ended = checked(Engine(**{**SMALL, "max_seqs": 1, "sp": 2})), []
    engine.IDLE_TICK = 0.01
    engine.on_events = lambda events: ended.extend(
        (event.output.id, event.finish) for event in events if event.finish)
    stages = {"heard of by none": 0, "waiting": 1, "in its prompt": 2, "in decode": 5, "ended": 10}
    for i, (stage, steps) in enumerate(stages.items()):
        if rank == 0:
            first = engine.submit([9] * 3, GREEDY) if stage == "waiting" else None
            output = engine.submit([i] * 40, GREEDY)
        for _ in range(steps):
            engine.step()
        if rank == 0:
            engine.cancel(output)
            engine.cancel(output)                           # no harm
        for _ in range(8):
            engine.step()
        if rank == 0:
            assert output.finish == ("length" if stage == "ended" else "cancelled"), stage
            assert [finish for id, finish in ended if id == output.id] == [output.finish], stage
            assert first is None or len(first.tokens) == 6
    assert not engine.scheduler.requests
    assert engine.scheduler.blocks.available == engine.num_blocks


def test_cancelled_in_every_state():
    """Before any rank has heard of it, waiting, in its prompt, in decode, at its end: it ends once,
    says so once, and gives its blocks back. Cancelling twice, or too late, does no harm."""
    assert world(cancelled_world, 2, seconds=30) == 0


def asks_world():
    engine, level = Engine(**{**SMALL, "sp": 2}), SMALL["threshold"] + 1
    engine.IDLE_TICK = 90
    if engine.rank == 0:
        answers = [engine.ask("threshold", level), engine.ask("collectives", 7)]
    engine.step()
    assert engine.switch.threshold == level
    if engine.rank == 0:
        switch, ranks = [answer.result(0) for answer in answers]
        assert switch is engine.switch and ranks == [None, None], "step 7 has not been"
        late = engine.ask("threshold", "auto")
        engine.fail("a reason")
        assert "a reason" in str(late.exception(0)), "nobody waits for what will never come"
        with pytest.raises(UserError, match="a reason"):
            engine.ask("threshold", "auto")


def test_asks_are_answered_by_all_ranks_or_refused():
    """A new threshold is every rank's from the next step on; what is asked of an engine that has
    ended, or just before, is refused. (It waited for ever, and held up the server's end.)"""
    assert world(asks_world, 2, seconds=30) == 0


def long_message_world():
    rank = connect()
    options = dict(model="random:dim=32,layers=1,heads=2,kv_heads=2,ffn=32,vocab=9973,max_len=4096",
                   block_size=16, kv_blocks=300, max_step_tokens=1024, threshold=4)
    draw = random.Random(0)
    prompts = [[draw.randrange(9973) for _ in range(4000)], [1, 2, 3]]
    assert len(json.dumps(prompts)) > Link.PACKET
    outputs = Engine(sp=2, **options).generate(prompts, GREEDY)
    if rank == 0:
        alone = Engine(ranks=[0], **options)
        for output, prompt in zip(outputs, prompts):
            assert output.tokens == alone.generate([prompt], GREEDY)[0].tokens


def test_a_message_longer_than_a_packet():
    """A prompt of 4,000 tokens is more than the 16 KB that one broadcast carries: same text."""
    assert world(long_message_world, 2) == 0


# --------------------------------------------------------------------------------------------------
# Options


@pytest.mark.parametrize("name, value, remedy", [
    *[(name, value, "at least 1") for name in
      ("sp", "tp", "max_model_len", "max_step_tokens", "max_seqs", "kv_blocks", "block_size")
      for value in (0, -3)],
    ("mode", "dp", "shift, tp, sp"), ("link", "mpi", "auto, "), ("dtype", "int8", "float32"),
    ("threshold", "many", "auto or a number"), ("threshold", -1, "auto or a number"),
    ("threshold", "1.5", "auto or a number"), ("threshold", "²", "auto or a number")])
def test_options_name_the_value_and_the_remedy(name, value, remedy):
    """A value that cannot be is a UserError of one line: the flag, the value, what would do."""
    with pytest.raises(UserError) as error:
        Options(**{name: value})
    text = str(error.value)
    assert f"--{name.replace('_', '-')} {value}" in text and remedy in text and "\n" not in text


def test_options_refuse_unknown_names():
    """A misspelt option is an error, never ignored."""
    with pytest.raises(TypeError, match="max_tokens"):
        Options(max_tokens=3)


def impossible_world(root):
    connect()
    for options, words in (
            (dict(sp=3), ("sp 3", "2 ranks")), (dict(sp=2, tp=2), ("sp 2", "tp 2", "2 ranks")),
            (dict(max_model_len=65), ("--max-model-len 65", "64")),
            (dict(max_model_len=50, kv_blocks=12), ("--max-model-len 50", "12 blocks")),
            (dict(model="random:dim=56,heads=7,kv_heads=7,ffn=7"), ("2 ranks", "7 heads", "1, 7")),
            (dict(model="random:width=3"), ("width=3",)), (dict(model="nowhere"), ("nowhere",)),
            (dict(model=str(root)), (str(root), "config.json")),
            (dict(link="nccl"), ("--link nccl", "gloo"))):
        if options.get("link") == "nccl" and torch.cuda.device_count():
            continue
        with pytest.raises(UserError) as error:
            Engine(**{**SMALL, **options})
        text = str(error.value)
        assert all(word in text for word in words) and "\n" not in text, text


def test_impossible_options_are_refused_on_every_rank(tmp_path):
    """What only the model, the pool or the number of ranks rules out: the value and the remedy."""
    assert world(impossible_world, 2, tmp_path, seconds=30) == 0


DIFFERENCES = {
    "seats": (dict(max_seqs=3), dict(max_seqs=4)),
    "threshold": (dict(threshold=3), dict(threshold=4)),
    "blocks": (dict(kv_blocks=30), dict(kv_blocks=31)),
    "seed of the weights": (dict(model=RANDOM + ",seed=1"), dict(model=RANDOM + ",seed=2")),
    "layout": (dict(sp=2), dict(sp=1)),
    "one measures": (dict(threshold="auto"), dict(threshold=4)),
    "one is pinned": (dict(threshold="auto", mode="shift"), dict(threshold="auto", mode="tp")),
    "sizes measured": (dict(threshold="auto", max_step_tokens=16),
                       dict(threshold="auto", max_step_tokens=32)),
    "model": (dict(model=RANDOM), dict(model=TINY)),
    "one has no such model": (dict(model=RANDOM), dict(model="nowhere")),
    "one layout is impossible": (dict(sp=2), dict(sp=3))}


def different_world(options):
    rank = connect()
    with pytest.raises(UserError) as error:
        Engine(**{**SMALL, **options[rank]})
    name = next(name for name in options[0] if options[0][name] != options[1][name])
    words = name, str(options[0][name]), str(options[1][name])
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("difference", DIFFERENCES)
def test_ranks_started_differently_say_so(difference):
    """Different options on two ranks: both raise an error that names the option and both values,
    soon, and neither waits for ever."""
    assert world(different_world, 2, DIFFERENCES[difference], seconds=20) == 0


def changed_files_world(root):
    os.chdir(root / str(connect()))
    with pytest.raises(UserError) as error:
        Engine(**{**SMALL, "model": "model"})
    assert str(error.value)


@pytest.mark.parametrize("change", [dict(layers=3), dict(norm_eps=1e-6), dict(seed=2)])
def test_ranks_that_read_different_files_say_so(tmp_path, change):
    """The same name on two hosts, but other shapes, another config or other weights: as above."""
    for rank, changes in enumerate((dict(), change)):
        write_checkpoint(tmp_path / str(rank) / "model", small_config("llama", **changes))
        write_tokenizer(tmp_path / str(rank) / "model", 101)
    assert world(changed_files_world, 2, tmp_path, seconds=20) == 0


# --------------------------------------------------------------------------------------------------
# The measured switch


class Timed(Engine):
    """An engine that knows how long its calibration took."""

    def _make_switch(self):
        began = time.monotonic()
        switch = super()._make_switch()
        self.seconds = time.monotonic() - began
        return switch


def measured_world(root):
    rank = connect()
    engine = Timed(model=TINY, kv_blocks=128)
    kinds = {what for _, what in engine.link.counts}
    assert kinds <= {"control"}, f"the calibration is still counted: {kinds}"
    assert all(not kv.any() for kv in engine.model.kv), "the calibration is still in the KV pool"
    assert engine.link.gather(engine.switch.shift) == [engine.switch.shift] * 2
    assert len(engine.switch.shift) == engine.options.max_step_tokens + 1
    measured = engine.generate(["Once upon a time"], GREEDY)
    fixed = Engine(model=TINY, kv_blocks=128, threshold=3).generate(["Once upon a time"], GREEDY)
    if rank == 0:
        assert measured[0].tokens == fixed[0].tokens
    save(root, (engine.seconds, str(engine.switch)))


def test_the_switch_measures_itself(tmp_path):
    """`auto` on the trained model: within 10 s, the same table on both ranks, and no trace of it in
    the KV pool or the counts; the text is that of a fixed threshold."""
    assert world(measured_world, 2, tmp_path) == 0
    (seconds, table), _ = load(tmp_path, 2)
    print(f"{seconds:.1f} s: {table}")
    assert seconds < 10


# --------------------------------------------------------------------------------------------------
# Output: what clients see. No ranks.


class Pieces:
    """A tokenizer of given byte strings; token 0 ends a text."""
    eos = frozenset([0])

    def __init__(self, *pieces):
        self.pieces = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]

    def token_bytes(self, token):
        return self.pieces[token - 1] if token else b""

    decoder = Tokenizer.decoder


def said(pieces, most=100, end=False, **params):
    """Push the pieces one by one, then the end token; the Output and what each push showed."""
    output = Output(0, [1], SamplingParams(max_tokens=most, **params), Pieces(*pieces))
    shown = []
    for token in [*range(1, len(pieces) + 1), *[0] * end]:
        event = output.push(Sample(token, None, None))
        assert event.finish == output.finish and event.output is output
        shown.append(event.text)
        if event.finish:
            break
    assert output.text == "".join(shown)
    return output, shown


@pytest.mark.parametrize("pieces, stop, shown", [
    (["one", " st", "op", " more"], ["stop"], ["one", " ", ""]),        # over two tokens
    (["a", "b", "c", "d", "e"], ["bcd"], ["a", "", "", ""]),            # over several
    (["text ST", "OP"], ["STOP"], ["text ", ""]),                       # begins inside a token
    (["xSTOPy"], ["STOP"], ["x"]),                                      # inside one token
    (["STOP"], ["STOP"], [""]),                                         # nothing else
    (["aa", "a", "b"], ["aab"], ["", "a", ""]),                         # its start repeats
    (["abab", "abc", "x"], ["ababc"], ["", "ab"]),
    (["a b c d"], ["d", "b"], ["a "]),                                  # the earliest wins
    (["x", "END", "b"], ["ENDING", "b"], ["x", "", "END"]),             # the other did not come
    (["é", "\n", "\n", "z"], ["\n\n"], ["é", "", ""])])
def test_stop_strings(pieces, stop, shown):
    """A stop string ends the text wherever its tokens begin, and no letter of it is ever shown."""
    output, texts = said(pieces, stop=tuple(stop))
    assert texts == shown and output.finish == "stop"


def test_held_text_is_shown_when_it_proves_not_to_be_a_stop():
    """What may be the start of a stop string is held back, no longer than that and no more."""
    output, shown = said(["a", "S", "T", "x", "S", "TO", "P"], stop=("STOP",))
    assert shown == ["a", "", "", "STx", "", "", ""] and output.finish == "stop"


@pytest.mark.parametrize("end, most, finish", [(True, 100, "stop"), (False, 3, "length")])
def test_held_text_is_shown_when_the_request_ends_without_the_stop(end, most, finish):
    """The end token, or the last token allowed: the start of a stop string was text after all."""
    output, shown = said(["a", "S", "T"], most, end, stop=("STOP",))
    assert "".join(shown) == "aST" and shown[:2] == ["a", ""] and output.finish == finish


def test_the_end_token_has_no_text_and_can_be_ignored():
    """eos: "stop", counted among the tokens; with ignore_eos it is a token like any other."""
    output, shown = said(["a", "b"], end=True)
    assert (shown, output.finish, output.tokens) == (["a", "b", ""], "stop", [1, 2, 0])
    output, shown = said(["a", "b"], end=True, ignore_eos=True)
    assert (shown, output.finish, output.tokens) == (["a", "b", ""], None, [1, 2, 0])


def test_the_last_token_allowed_ends_the_text():
    """max_tokens: "length"; an end token or a stop string in that very place: "stop"."""
    output, shown = said(["a", "b", "c"], most=2)
    assert (output.finish, output.tokens) == ("length", [1, 2])
    assert said(["a"], most=2, end=True)[0].finish == "stop"
    output, shown = said(["a", "b"], most=2, stop=("b",))
    assert (output.finish, shown) == ("stop", ["a", ""])


@pytest.mark.parametrize("text", ["é", "€", "🎈", "a🎈é€b"])
def test_characters_split_over_tokens(text):
    """One byte per token: a character is shown when it is whole, and never in halves."""
    data = text.encode()
    output, shown = said([data[i:i + 1] for i in range(len(data))], len(data))
    assert output.text == text and "\ufffd" not in "".join(shown)
    ends = [len(text[:i].encode()) for i in range(1, len(text) + 1)]
    assert [i + 1 for i, one in enumerate(shown) if one] == ends


def test_half_a_character_at_the_end_is_marked():
    """A text cut inside a character ends with the replacement sign; bytes that are none have it."""
    assert said(["a", "🎈".encode()[:2]], most=2)[0].text == "a\ufffd"
    assert said(["a", "é".encode()[:1]], end=True)[0].text == "a\ufffd"
    assert said(["a", b"\xff", "b"], most=3)[0].text == "a\ufffdb"


def test_samples_are_kept_only_where_log_probabilities_are_asked_for():
    """One Sample for each token, or none at all."""
    assert len(said(["a", "b"], logprobs=0)[0].samples) == 2
    assert said(["a", "b"])[0].samples == []


def test_random_texts_and_stops():
    """Random tokens and stop strings over two letters and a character of two bytes: after each
    token just what is certain was shown, and the first stop string to be complete ends the text."""
    draw, stopped = random.Random(0), 0
    for _ in range(3000):
        letters = lambda most: "".join(draw.choice("abé") for _ in range(draw.randint(1, most)))
        stops = tuple(letters(4) for _ in range(draw.randint(0, 3)))
        data, pieces = letters(12).encode(), []
        while data:
            cut = draw.randint(1, 4)
            pieces, data = pieces + [data[:cut]], data[cut:]
        output, shown = said(pieces, stop=stops)
        for count in range(1, len(shown) + 1):
            text = b"".join(pieces[:count]).decode(errors="ignore")
            found = [text.find(stop) for stop in stops if stop in text]
            if found:
                text = text[:min(found)]
            else:                                # all but the longest end that may become a stop
                starts = {stop[:i] for stop in stops for i in range(1, len(stop))}
                held = max((len(start) for start in starts if text.endswith(start)), default=0)
                text = text[:len(text) - held]
            assert "".join(shown[:count]) == text, (pieces, stops, shown)
            assert (count == len(shown) and output.finish == "stop") == bool(found)
        stopped += output.finish == "stop"
    assert 500 < stopped < 2900
