"""arctic.py: what Arctic Inference's other parts add to Shift Parallelism, with assets/tiny.

    python assets/arctic.py suffix --nproc 1        suffix decoding, by kind of work
    python assets/arctic.py drafting --nproc 1      what a draft costs, and what a history weighs
    python assets/arctic.py crossover --batch 8     drafts make steps larger: base mode, not shift
    python assets/arctic.py prefill --nproc 2       SwiftKV: what is left of a prompt's time
    python assets/arctic.py table --nproc 2         Shift, + suffix, + SwiftKV, + both: one workload

All engines live in one world and take turns, so that what else the machine does meets all alike.
"""
import argparse
import random
import sys
import time
import tracemalloc
from pathlib import Path
from statistics import mean, median

import torch.distributed as dist

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from assets.tokenizer import Tokenizer
from assets.train_tiny import Story, new_name
from model import Config, Sample
from serve import Drafter, Engine, Output, SamplingParams, Scheduler, launch
from shift import connect

TINY = Path(__file__).parent / "tiny"
SWIFT = Path(__file__).parent / "tiny-swiftkv"


def tasks(kind, count, seed=0):
    """Prompts of a kind of work, on stories that were not trained on."""
    rng, chats = random.Random(f"{kind} {seed}"), []
    while len(chats) < count:
        story = Story(rng, "held")
        text, name = story.text, story.slots["name"]
        chats.append({
            "repeat": f"Repeat this text:\n\n{text}",
            "edit": f"Rewrite this text with the name {new_name(rng)} instead of {name}:\n\n{text}",
            "unrelated": f"Tell me a story about {name}.",
            "noise": f"Tell me a story about {name}.",
            "long": f"Repeat this text:\n\n{text}\n\n" + "\n\n".join(
                Story(rng, "held").text for _ in range(6))}[kind])
    return chats


def answer(engine, chats, at_once, **params):
    """Serve the chats, so many at once; (seconds, their Outputs, which only rank 0 has)."""
    seed, outputs = params.pop("seed", 0), []
    engine.link.barrier()
    start = time.perf_counter()
    for i in range(0, len(chats), at_once):
        prompts = [engine.tokenizer.chat([{"role": "user", "content": chat}])
                   for chat in chats[i:i + at_once]] if engine.rank == 0 else None
        outputs += engine.generate(prompts, SamplingParams(seed=seed + i, **params)) or ()
    return time.perf_counter() - start, outputs


def run(engine, chats, most=200, at_once=1, temperature=0, seed=0):
    """(seconds, output tokens, steps, drafted, accepted) of serving the chats."""
    counts = lambda: (engine.steps.total(), engine.drafted, engine.accepted)
    before = counts()
    seconds, outputs = answer(engine, chats, at_once, max_tokens=most, temperature=temperature,
                              seed=seed)
    return seconds, [one.tokens for one in outputs], *(b - a for a, b in zip(before, counts()))


def suffix(args):
    """For each kind of work: with and without drafts, in turns. Unrelated work is stories drawn at
    temperature 1, noise is drawn at 3; the other two are greedy."""
    engines = {name: Engine(model=str(TINY), threshold="auto", speculate=name)
               for name in ("off", "suffix")}
    rank = engines["off"].rank
    for at_once in args.batch:
        for kind, heat in (("repeat", 0), ("edit", 0), ("unrelated", 1), ("noise", 3)):
            pairs, same, totals = [], True, [0, 0, 0, 0]
            for repeat in range(args.repeats):
                chats = tasks(kind, max(4, at_once), seed=f"{at_once} {repeat}")     # no chat twice
                found = {name: run(engines[name], chats, at_once=at_once, temperature=heat,
                                   seed=1000 * repeat + 100 * at_once)
                         for name in sorted(engines, reverse=repeat % 2)}
                pairs.append(found["off"][0] / found["suffix"][0])
                same &= found["off"][1] == found["suffix"][1]
                tokens = sum(map(len, found["off"][1]))
                totals = [a + b for a, b in zip(totals, (tokens, *found["suffix"][2:]))]
            tokens, steps, drafted, accepted = totals
            if rank == 0:
                print(f"{kind:9} {at_once:3} at once: {median(pairs):.2f} x as fast (pairs "
                      f"{min(pairs):.2f} to {max(pairs):.2f}); {accepted / steps:.2f} drafts "
                      f"accepted a step, {accepted / max(1, drafted):.0%} of {drafted}; "
                      f"same tokens: {same}", flush=True)


def written(tokenizer, tokens, prompt=(0,)):
    """An Output that has just been given these tokens."""
    output = Output(0, list(prompt), SamplingParams(max_tokens=len(tokens)), tokenizer)
    output.tokens, output.finish = list(tokens), "length"
    return output


def drafting(args):
    """The time of a draft beside a history of 1 MB, for stories that go on by half; then the memory
    after 10,000 finished requests: stories, and tokens at random, the worst case."""
    if dist.get_rank():                                      # one process is enough for this
        return
    tokenizer, rng = Tokenizer(TINY, Config.read(TINY)), random.Random(0)
    new_story, drafter, size = lambda: Story(rng, "held").text, Drafter(), 0
    while size < 2**20:
        text = new_story()
        drafter.next(written(tokenizer, tokenizer.encode(text)), 0)
        size += len(text.encode())
    kept = len(drafter.new.tokens) + len(drafter.old.tokens)
    times, first, drafted = [], [], 0
    for _ in range(200):
        tokens = tokenizer.encode(new_story())
        half = len(tokens) // 2
        output = Output(0, tokens[:half], SamplingParams(max_tokens=9999), tokenizer)
        for i, token in enumerate(tokens[half:]):
            output.push(Sample(token, None, None))
            start = time.perf_counter()
            drafts = drafter.next(output, Scheduler.SMALL - 1)
            (times if i else first).append(time.perf_counter() - start)
            drafted += len(drafts)
    slow = sorted(times)[len(times) * 99 // 100]
    print(f"a draft beside {size / 2**20:.1f} MB of text, {kept} tokens: "
          f"{mean(times) * 1e6:.0f} us (median {median(times) * 1e6:.0f}, 99 % below "
          f"{slow * 1e6:.0f}); the first one, of a new prompt, {median(first) * 1e6:.0f}; "
          f"{drafted / len(times):.0%} found something")
    stories = [tokenizer.encode(new_story()) for _ in range(2000)]
    for kind, tokens in (("stories", lambda i: stories[i % 2000]),
                         ("random", lambda i: [rng.randrange(128_000) for _ in range(200)])):
        tracemalloc.start()
        drafter, sizes = Drafter(), []
        for i in range(10_000):
            drafter.next(written(tokenizer, tokens(i)), 0)
            if i % 2500 == 2499:
                sizes.append(f"{tracemalloc.get_traced_memory()[0] / 2**20:.0f}")
        print(f"after 2,500, 5,000, 7,500 and 10,000 {kind}: {', '.join(sizes)} MB; at most "
              f"{tracemalloc.get_traced_memory()[1] / 2**20:.0f}", flush=True)
        tracemalloc.stop()


def crossover(args):
    """The same decodes, and a threshold that only drafts exceed."""
    for at_once in args.batch:
        for name in ("off", "suffix"):
            engine = Engine(model=str(TINY), threshold=24, speculate=name)
            chats = tasks("repeat", at_once)
            run(engine, chats, most=1, at_once=at_once)      # the prompts, for the prefix cache
            before = engine.steps.copy(), engine.step_tokens.copy()
            _, tokens, *_ = run(engine, chats, at_once=at_once)
            steps, computed = engine.steps - before[0], engine.step_tokens - before[1]
            if engine.rank == 0:
                print(f"{at_once} decodes, threshold 24, speculate {name}: {steps['base']} of "
                      f"{steps.total()} steps in base mode, {computed.total() / steps.total():.1f} "
                      f"tokens a step, {sum(map(len, tokens)) / steps.total():.1f} of them sampled",
                      flush=True)


def prefill(args):
    """SwiftKV: the time of a prompt of 2,048 tokens when m of 8 layers see all of it, in turns, and
    the share of the arithmetic that is left."""
    spec, most, kept = "random:dim=512,layers=8,max_len=4096,num_key_value_layers=", 2048, (8, 4, 2)
    engines = {m: Engine(model=f"{spec}{m}", mode="sp", max_step_tokens=most) for m in kept}
    rng, seconds = random.Random(0), {m: [] for m in kept}
    for repeat in range(args.repeats + 1):
        prompt = [rng.randrange(4096) for _ in range(most)]
        for m in sorted(kept, reverse=repeat % 2):
            engines[m].link.barrier()
            start = time.perf_counter()
            engines[m].generate([prompt], SamplingParams(max_tokens=1, temperature=0))
            seconds[m].append(time.perf_counter() - start)
    c = engines[8].config
    kv = 2 * c.dim * c.kv_heads * c.head_dim
    layer = kv + 2 * c.dim * c.heads * c.head_dim + 3 * c.dim * c.ffn + (
        most * c.heads * c.head_dim)                         # attention: 2 products, half a context
    for m in kept if engines[8].rank == 0 else ():
        ratio = median(one / whole for one, whole in zip(seconds[m][1:], seconds[8][1:]))
        print(f"m = {m} of 8: {median(seconds[m][1:]) * 1e3:.0f} ms, {ratio:.3f} of all; expected "
              f"{(m * layer + (8 - m) * kv) / (8 * layer):.3f}", flush=True)


def mixed(seed):
    """Chats of all kinds, shuffled: much to read or much to write, repetitive or not."""
    chats = [chat for kind, count in (("repeat", 4), ("edit", 4), ("long", 4), ("unrelated", 4))
             for chat in tasks(kind, count, seed)]
    random.Random(seed).shuffle(chats)
    return chats


def table(args):
    """Shift Parallelism alone, with each of the others, and with both: the same chats in turns."""
    systems = {"Shift alone": (TINY, "off"), "+ suffix decoding": (TINY, "suffix"),
               "+ SwiftKV": (SWIFT, "off"), "+ both": (SWIFT, "suffix")}
    engines = {name: Engine(model=str(model), threshold="auto", speculate=speculate)
               for name, (model, speculate) in systems.items()}
    found = {name: [] for name in engines}
    for at_once in args.batch:
        for repeat in range(args.repeats):
            for name in sorted(engines, reverse=repeat % 2):
                found[name].append(figures(engines[name], mixed(f"{at_once} {repeat}"), at_once))
        if engines["Shift alone"].rank == 0:
            print(f"16 chats, {at_once} at once | seconds | of Shift alone | TTFT ms | TPOT ms | "
                  f"output tok/s")
            for name, runs in found.items():
                seconds, ttft, tpot, rate = (median(column) for column in zip(*runs))
                ratio = median(one[0] / alone[0] for one, alone in
                               zip(runs, found["Shift alone"]))
                print(f"{name} | {seconds:.2f} | {ratio:.2f} | {ttft * 1e3:.1f} | "
                      f"{tpot * 1e3:.2f} | {rate:.0f}", flush=True)
        found = {name: [] for name in engines}


def figures(engine, chats, at_once):
    """(seconds, median TTFT, mean seconds of a token after the first, output tokens a second)."""
    seconds, outputs = answer(engine, chats, at_once, max_tokens=150, temperature=0)
    if engine.rank:
        return 0, 0, 0, 0
    tokens = sum(len(one.tokens) for one in outputs)
    after = sum(one.last - one.first for one in outputs) / (tokens - len(outputs))
    return seconds, median(one.first - one.arrived for one in outputs), after, tokens / seconds


def main(args):
    connect()
    globals()[args.command](args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("suffix", "drafting", "crossover", "prefill", "table"))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parsed = parser.parse_args()
    sys.exit(launch(main, parsed.nproc, parsed))
