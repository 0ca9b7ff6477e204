"""arctic.py: what Arctic Inference's other parts do for assets/tiny, beside Shift Parallelism alone.

    python assets/arctic.py suffix --nproc 1        suffix decoding, by kind of work
    python assets/arctic.py table --nproc 2         Shift, + suffix, + SwiftKV, + both: one workload

All engines live in one world and take turns, so that what else the machine does meets all alike.
"""
import argparse
import random

import sys
import time
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))

from assets.train_tiny import Story, new_name
from serve import Engine, SamplingParams, launch

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
            "long": f"Repeat this text:\n\n{text}\n\n" + "\n\n".join(
                Story(rng, "held").text for _ in range(6))}[kind])
    return chats


def run(engine, chats, most=200, at_once=1, temperature=0):
    """Serve the chats, so many at once; (seconds, output tokens, steps, drafted, accepted)."""
    before = engine.steps.total(), engine.drafted, engine.accepted
    params, tokens = SamplingParams(max_tokens=most, temperature=temperature, seed=1), []
    engine.link.barrier()
    start = time.perf_counter()
    for i in range(0, len(chats), at_once):
        prompts = [engine.tokenizer.chat([{"role": "user", "content": chat}])
                   for chat in chats[i:i + at_once]] if engine.rank == 0 else None
        outputs = engine.generate(prompts, params)
        tokens += [output.tokens for output in outputs or ()]
    after = engine.steps.total(), engine.drafted, engine.accepted
    return time.perf_counter() - start, tokens, *(b - a for a, b in zip(before, after))


def suffix(args):
    """For each kind of work: with and without drafts, in turns."""
    engines = {name: Engine(model=str(TINY), threshold="auto", speculate=name)
               for name in ("off", "suffix")}
    rank, ratios = engines["off"].rank, []
    for at_once in args.batch:
        for kind in ("repeat", "edit", "unrelated"):
            pairs, same, totals = [], True, [0, 0, 0, 0]
            for repeat in range(args.repeats):
                chats = tasks(kind, max(4, at_once), seed=repeat)
                found = {name: run(engines[name], chats, at_once=at_once)
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


def main(args):
    globals()[args.command](args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", choices=("suffix", "table"))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parsed = parser.parse_args()
    sys.exit(launch(main, parsed.nproc, parsed))
