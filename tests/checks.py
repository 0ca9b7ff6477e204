"""The invariants of blocks and schedulers, and an engine or a server that is held to them.

    engine = checked(Engine(...))                  checked in every step, and over its ranks
    python tests/checks.py --nproc 2 ...           serve.py, with such an engine

Cheap enough for every step of a small pool.
"""
import hashlib
import itertools
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).parent.parent))

import serve


def check_blocks(blocks):
    """free + cached + used = total, and no block is two of them."""
    used = [b for b, count in enumerate(blocks.references) if count]
    assert all(count >= 0 for count in blocks.references), blocks.references
    assert sorted([*blocks.empty, *blocks.cached, *used]) == list(range(blocks.num_blocks)), used
    named = {block: name for block, name in enumerate(blocks.hash_of) if name is not None}
    assert named == {block: name for name, block in blocks.block_of.items()}, "names mixed up"
    assert named.keys() >= blocks.cached.keys() and not named.keys() & {*blocks.empty}


def check(scheduler):
    """After `schedule`: the blocks are those of the block tables, every request is in one list and
    has the blocks of its tokens and draft, and none that is to be written has a name."""
    check_blocks(scheduler.blocks)
    held = [0] * scheduler.blocks.num_blocks
    for block in itertools.chain.from_iterable(request.blocks for request in scheduler.running):
        held[block] += 1
    assert held == scheduler.blocks.references, "references are not those of the block tables"
    assert all(request.blocks is None and not request.draft for request in scheduler.waiting)
    assert len(scheduler.running) + len(scheduler.waiting) == len(scheduler.requests)
    for request in scheduler.running:
        text = len(request.tokens)
        assert request.num_computed < text and (not request.draft
                                                or request.num_computed == text - 1), request
        assert len(request.blocks) == scheduler.blocks.pages(text + len(request.draft)), request
        assert all(scheduler.blocks.hash_of[block] is None for block in
                   request.blocks[request.num_computed // scheduler.blocks.block_size:]), request


def digest(scheduler):
    """A number that differs when the state does: ranks compare it."""
    state = [(r.id, r.num_computed, r.tokens, r.draft, r.blocks) for r in scheduler.running], [
        (r.id, r.tokens) for r in scheduler.waiting], scheduler.blocks.empty, list(
        scheduler.blocks.cached)
    return hashlib.blake2b(repr(state).encode(), digest_size=8).hexdigest()


def checked(engine):
    """The engine, with its invariants checked and its ranks compared after each `schedule`."""
    schedule = engine.scheduler.schedule

    def and_check():
        plan = schedule()
        check(engine.scheduler)
        digests = engine.link.gather(digest(engine.scheduler))
        assert len(set(digests)) == 1, f"step {engine.steps.total()}: ranks disagree: {digests}"
        engine.checks += 1
        return plan
    engine.scheduler.schedule, engine.checks = and_check, 0
    return engine


if __name__ == "__main__":
    Engine = serve.Engine
    serve.Engine = lambda **options: checked(Engine(**options))
    sys.exit(serve.main())
