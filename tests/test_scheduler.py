"""Blocks and plans: BlockManager and Scheduler driven directly, without a model and without ranks.

The model of these tests is a hash: a token's "keys and values" are one number that depends on the
token, its position and the numbers of all tokens before it, READ from a simulated pool through the
block table. A wrong table, a stale slot or an overwritten shared block therefore changes the text.
"""
import random
from collections import Counter

import pytest

from checks import check, check_blocks, digest
from serve import BlockManager, Scheduler

VOCAB = 997


def value(token, position, earlier):
    """What a token leaves in the cache."""
    return hash((token, position, *earlier))


def alone(prompt, count):
    """The next `count` tokens without a scheduler: every value in one list."""
    tokens, values = list(prompt), []
    for _ in range(count):
        while len(values) < len(tokens):
            values.append(value(tokens[len(values)], len(values), values))
        tokens.append(values[-1] % VOCAB)
    return tokens[len(prompt):]


class Pool:
    """A KV cache as a list of slots, and the model that writes and reads it."""

    def __init__(self, blocks):
        self.blocks, self.size = blocks, blocks.block_size
        self.slots = [-1] * (blocks.num_blocks * blocks.block_size)
        self.content = {}                # name -> what the first block of that name held

    def run(self, plan):
        """Compute the plan; returns the samples as Scheduler.apply wants them."""
        sampled = []
        for request, count in plan:
            tokens, end = [*request.tokens, *request.draft], request.num_computed + count
            slots = [request.blocks[i // self.size] * self.size + i % self.size for i in range(end)]
            for i in range(request.num_computed, end):
                earlier = [self.slots[slot] for slot in slots[:i]]
                self.slots[slots[i]] = value(tokens[i], i, earlier)
            if end >= len(request.tokens):                   # one, and those drafted that follow
                new = [self.slots[slot] % VOCAB for slot in slots[len(request.tokens) - 1:]]
                right = [*map(int.__eq__, new, request.draft), False].index(False)
                sampled.append(new[:right + 1])
        return sampled

    def check(self):
        """Every block under a name holds what a block of that name has always held."""
        for name, block in self.blocks.block_of.items():
            held = tuple(self.slots[block * self.size:(block + 1) * self.size])
            assert self.content.setdefault(name, held) == held, f"block {block} was written again"


class Driver:
    """Copies of one scheduler, fed the same messages as the ranks of an engine are, and one pool.

    Each step holds them to all that the Scheduler's docstring promises.
    """

    def __init__(self, blocks=64, size=4, max_seqs=8, budget=32, copies=1):
        self.copies = [Scheduler(BlockManager(blocks, size), max_seqs, budget)
                       for _ in range(copies)]
        self.scheduler, self.blocks = self.copies[0], self.copies[0].blocks
        self.pool, self.steps = Pool(self.blocks), 0
        self.message = [], [], [], []    # what the next step will hear: see Scheduler.apply
        self.guess = lambda id: []       # a draft for a request that goes on
        self.prompts, self.wanted, self.outputs = {}, {}, {}         # by id
        self.start_by = {}               # the last step in which a request may get its first token

    def add(self, prompt, count):
        """A request for `count` tokens; returns its id."""
        id = len(self.prompts)
        self.prompts[id], self.wanted[id], self.outputs[id] = list(prompt), count, []
        older = [i for i in self.unfinished() if i != id]
        self.start_by[id] = self.steps + 1 + sum(len(self.prompts[i]) + self.wanted[i]
                                                 for i in older)
        self.message[2].append((id, list(prompt)))
        return id

    def cancel(self, id):
        """As an engine does it, be it known to the schedulers or in the message to come."""
        self.wanted[id] = 0
        self.message[1].append(id)

    def unfinished(self):
        return [id for id, count in self.wanted.items() if len(self.outputs[id]) < count]

    def request(self, id):
        return self.scheduler.requests.get(id)

    def step(self):
        """One turn of all copies; returns {id: tokens computed}."""
        message, self.message = self.message, ([], [], [], [])
        for copy in self.copies:
            copy.apply(*message)
            copy.schedule()
            check(copy)
        plans = [[(request.id, count) for request, count in copy.plan] for copy in self.copies]
        assert all(plan == plans[0] for plan in plans)
        assert len({digest(copy) for copy in self.copies}) == 1
        self.steps += 1
        self.pool.check()
        self.promises(dict(plans[0]), dict(message[3]))
        self.message[0].extend(self.pool.run(self.scheduler.plan))
        samples = iter(self.message[0])
        for request, count in self.scheduler.plan:
            if request.num_computed + count >= len(request.tokens):
                self.outputs[request.id] += next(samples)
                if len(self.outputs[request.id]) == self.wanted[request.id]:
                    self.message[1].append(request.id)
                elif draft := self.guess(request.id):
                    self.message[3].append((request.id, draft))
        assert next(samples, None) is None
        return dict(plans[0])

    def promises(self, plan, sent):
        s = self.scheduler
        left = [len(request.tokens) - request.num_computed for request in s.running]
        assert list(plan) == [request.id for request in s.running], "all that run, and no other"
        assert all(count >= 1 for count in plan.values()), "every one of them advances"
        assert all([*request.draft] == sent.get(request.id, [])[:len(request.draft)]
                   for request in s.running), "drafts of this message, and no older ones"
        drafts, text = sum(len(r.draft) for r in s.running), min(sum(left), s.max_step_tokens)
        assert sum(plan.values()) == text + drafts, "all the budget, no more"
        assert not drafts or text + drafts <= min(s.SMALL, s.max_step_tokens), "in small steps only"
        assert len(s.running) <= s.max_seqs
        assert not s.requests or s.running[0].id == min(s.requests), "the oldest always runs"
        ages = [request.id for request in [*s.running, *s.waiting]]
        assert ages == sorted(ages), "first come, first served"
        if s.waiting and len(s.running) < s.max_seqs:
            pages = s.blocks.pages(len(s.waiting[0].tokens))
            assert pages + len(s.running) > s.blocks.available, "seat and blocks, yet waiting"
        for id in plan:
            self.start_by.pop(id, None)
        assert all(self.steps <= self.start_by[id] for id in s.requests if id in self.start_by)

    def run(self, most):
        """Steps until all have finished, and forgotten by the scheduler; at most so many."""
        before = self.steps
        while self.unfinished() or any(self.message):
            self.step()
            assert self.steps - before <= most, f"not done in {most} steps"

    def held_to_alone(self):
        """Every finished request's text is the one it has without a scheduler."""
        for id, count in self.wanted.items():
            assert not count or self.outputs[id] == alone(self.prompts[id], count), id


# --------------------------------------------------------------------------------------------------
# Blocks


def named(manager, count, first=0):
    """`count` blocks of one reference, published under the names b"0", b"1", ..."""
    blocks = manager.allocate(count)
    for i, block in enumerate(blocks, first):
        manager.publish(block, b"%d" % i)
    return blocks


def test_a_block_goes_from_empty_to_used_to_empty_or_cached_and_is_evicted():
    """The state diagram of the BlockManager docstring, edge by edge."""
    manager = BlockManager(3, 4)
    assert (manager.available, len(manager.empty), len(manager.cached)) == (3, 3, 0)
    plain, shared = manager.allocate(2)
    assert manager.available == 1 and manager.references[plain] == manager.references[shared] == 1
    manager.publish(shared, b"name")
    manager.release([plain, shared])
    assert plain in manager.empty and list(manager.cached) == [shared] and manager.available == 3
    assert manager.match([b"name"]) == [shared]
    manager.take([shared])
    manager.take([shared])
    assert manager.references[shared] == 2 and not manager.cached and manager.available == 2
    manager.release([shared])
    assert manager.references[shared] == 1 and not manager.cached, "still used by the other"
    manager.release([shared])
    assert list(manager.cached) == [shared]
    assert sorted(manager.allocate(3)) == [0, 1, 2], "evicted where nothing is empty"
    assert manager.match([b"name"]) == [] and manager.hash_of == [None] * 3
    check_blocks(manager)


def test_eviction_takes_the_least_recently_used_and_a_text_from_its_end():
    """Texts leave in the order in which they were last used; of each text its last block first."""
    manager = BlockManager(6, 4)
    old, young = named(manager, 3), named(manager, 3, first=3)
    manager.release(old)
    manager.release(young)
    assert list(manager.cached) == old[::-1] + young[::-1]
    manager.take(old)                                        # used again: now the youngest
    manager.release(old)
    assert list(manager.cached) == young[::-1] + old[::-1]
    evicted = [manager.allocate(1)[0] for _ in range(4)]
    assert evicted == young[::-1] + old[-1:]
    assert manager.match([b"0", b"1", b"2"]) == old[:2] and manager.match([b"3"]) == []
    check_blocks(manager)


def test_empty_blocks_are_used_before_cached_ones_are_evicted():
    """The cache is only given up when nothing is empty."""
    manager = BlockManager(4, 4)
    manager.release(named(manager, 2))
    manager.allocate(2)
    assert len(manager.match([b"0", b"1"])) == 2 and manager.available == 2


def test_match_stops_at_the_first_hole():
    """A block whose predecessor is gone is not a prefix of anything."""
    manager = BlockManager(4, 4)
    blocks = named(manager, 4)
    manager.release(blocks[1:2])
    manager.allocate(1)                                      # evicts number 1
    assert manager.match([b"0", b"1", b"2", b"3"]) == blocks[:1]
    assert manager.match([b"1", b"2"]) == [] and manager.match([b"2", b"3"]) == blocks[2:]
    assert manager.match([]) == []


def test_a_name_belongs_to_one_block_and_a_block_has_one_name():
    """Publishing twice changes nothing; the duplicate is empty again once it is released."""
    manager = BlockManager(4, 4)
    first, second = manager.allocate(2)
    manager.publish(first, b"name")
    manager.publish(second, b"name")
    manager.publish(first, b"other")
    assert manager.match([b"name"]) == [first] and manager.match([b"other"]) == []
    manager.release([first, second])
    assert list(manager.cached) == [first] and second in manager.empty
    check_blocks(manager)


def test_a_blocks_name_covers_its_tokens_and_all_before_them():
    """Equal tokens after different ones have different names; equal texts have equal names."""
    driver = Driver(size=4)
    texts = [[1, 2, 3, 4, 5, 6, 7, 8], [9, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 9],
             [1, 2, 3, 4, 5, 6, 7, 8, 0]]
    ids = [driver.add(text, 2) for text in texts]
    driver.step()
    driver.step()
    a, b, c, d = (driver.request(id).hashes[:2] for id in ids)
    assert a == d and a[0] == c[0]
    assert len({*a, *b, *c}) == 5


CORRUPTIONS = {
    "an empty block in use": lambda m: m.references.__setitem__(m.empty[-1], 1),
    "a block lost": lambda m: m.empty.pop(),
    "a block empty twice": lambda m: m.empty.__setitem__(0, m.empty[1]),
    "a cached block in use": lambda m: m.references.__setitem__(next(iter(m.cached)), 1),
    "empty and cached": lambda m: m.empty.__setitem__(0, next(iter(m.cached))),
    "a negative count": lambda m: m.references.__setitem__(m.empty[0], -1),
    "an empty block with a name": lambda m: m.hash_of.__setitem__(m.empty[0], b"x"),
    "a cached block without a name": lambda m: m.hash_of.__setitem__(next(iter(m.cached)), None),
    "a name for another block": lambda m: m.block_of.__setitem__(b"0", m.empty[0]),
    "a cached block that nobody finds": lambda m: m.block_of.pop(m.hash_of[next(iter(m.cached))]),
    "a used block that nobody finds": lambda m: m.block_of.pop(b"0")}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_check_sees_a_corrupted_block(corruption):
    """check_blocks passes before, and fails after one field is wrong."""
    manager = BlockManager(8, 4)
    used = named(manager, 2)
    manager.release(named(manager, 2, first=2))
    check_blocks(manager)
    assert manager.references[used[0]] and manager.hash_of[used[0]] == b"0"
    CORRUPTIONS[corruption](manager)
    with pytest.raises(AssertionError):
        check_blocks(manager)


MISTAKES = {
    "a reference too many": lambda s: s.blocks.take([s.running[0].blocks[0]]),
    "a block of another's": lambda s: s.running[0].blocks.__setitem__(0, s.running[1].blocks[0]),
    "a waiting one with blocks": lambda s: setattr(s.waiting[0], "blocks", []),
    "a waiting one with a draft": lambda s: setattr(s.waiting[0], "draft", [1]),
    "a draft without a block": lambda s: (s.apply([[7]] * 2, [], []), s.schedule(),
                                          setattr(s.running[0], "draft", [1] * 9)),
    "a draft amid a prompt": lambda s: setattr(s.running[0], "draft", [1]),
    "a name for what is not computed":
        lambda s: s.blocks.publish(s.running[0].blocks[-1], b"name"),
    "a request in no list": lambda s: s.running.pop(),
    "too few blocks": lambda s: s.running[0].tokens.extend([1] * 9),
    "computed without a sample": lambda s: setattr(s.running[0], "num_computed", 5)}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_sees_a_corrupted_request(mistake):
    """check passes before, and fails after one field is wrong."""
    driver = Driver(max_seqs=2)
    for first in range(3):
        driver.add([first] * 5, 2)
    driver.step()
    MISTAKES[mistake](driver.scheduler)
    with pytest.raises(AssertionError):
        check(driver.scheduler)


CHANGES = {
    "a token": lambda s: s.running[0].tokens.__setitem__(0, 7),
    "a waiting token": lambda s: s.waiting[0].tokens.append(7),
    "a draft": lambda s: setattr(s.running[0], "draft", [1]),
    "the progress": lambda s: setattr(s.running[0], "num_computed", 1),
    "a block table": lambda s: s.running[0].blocks.reverse(),
    "the order of requests": lambda s: s.running.reverse(),
    "the order of empty blocks": lambda s: s.blocks.empty.reverse(),
    "the order of cached blocks":
        lambda s: s.blocks.cached.move_to_end(next(iter(s.blocks.cached))),
    "which blocks are cached": lambda s: s.blocks.cached.popitem()}


@pytest.mark.parametrize("change", CHANGES)
def test_the_digest_differs_when_the_state_does(change):
    """Two schedulers with equal histories have equal digests, until one thing is different."""
    one, other = (Driver(max_seqs=2) for _ in range(2))
    for driver in (one, other):
        driver.add([9] * 9, 1)
        driver.run(5)
        for first in range(3):
            driver.add([first] * 5, 2)
        driver.step()
    assert digest(one.scheduler) == digest(other.scheduler)
    CHANGES[change](other.scheduler)
    assert digest(one.scheduler) != digest(other.scheduler)


# --------------------------------------------------------------------------------------------------
# Budget and prefix cache


def test_a_prompt_is_computed_in_chunks_of_the_budget():
    """A chunk smaller than the rest of the prompt; only the last one samples."""
    driver = Driver(budget=6)
    id = driver.add(range(20), 2)
    counts = []
    while driver.unfinished():
        counts.append(driver.step()[id])
    assert counts == [6, 6, 6, 2, 1]
    driver.held_to_alone()


def test_a_budget_smaller_than_a_block():
    """Blocks fill over several steps, and have a name only when they are full."""
    driver = Driver(size=16, budget=3)
    driver.add(range(40), 3)
    published = []
    while driver.unfinished():
        driver.step()
        published.append(len(driver.blocks.block_of))
    assert published == [0] * 6 + [1] * 5 + [2] * 5
    driver.held_to_alone()


def test_a_prompt_wholly_in_the_cache_still_computes_its_last_token():
    """Block-aligned and all cached: the last block is computed again, for the logits, elsewhere."""
    driver = Driver(size=4)
    first = driver.add(range(8), 1)
    driver.run(3)
    cached = driver.blocks.match(driver.scheduler.blocks.block_of)
    second = driver.add(range(8), 3)
    assert driver.step() == {second: 4}
    assert len(cached) == 2 and driver.request(second).blocks[0] == cached[0]
    assert driver.request(second).blocks[1] != cached[1]
    driver.run(5)
    assert driver.outputs[second][:1] == driver.outputs[first]
    assert driver.scheduler.cached_tokens == 4 and driver.scheduler.prompt_tokens == 16
    driver.held_to_alone()


@pytest.mark.parametrize("length, cached", [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (13, 12)])
def test_what_of_a_prompt_is_found_in_the_cache(length, cached):
    """At most (length - 1) // B whole blocks, so one token at least is left to compute."""
    driver = Driver(size=4)
    driver.add(range(12), 1)
    driver.run(3)
    id = driver.add(range(length), 1)
    assert driver.step() == {id: length - cached}


def test_the_budget_is_counted_after_the_prefix_hit():
    """48 of 64 tokens cached: the other 16 fit the budget of 16 in one step."""
    driver = Driver(size=4, budget=16)
    driver.add(range(49), 1)
    driver.run(6)
    id = driver.add(range(64), 2)
    assert driver.step() == {id: 16}
    driver.run(4)
    driver.held_to_alone()


def test_an_output_is_a_prefix_too():
    """A second turn finds the first turn's prompt and output, except the token never computed."""
    driver = Driver(size=4)
    first = driver.add(range(6), 7)                          # 12 tokens computed, the 13th sampled
    driver.run(10)
    turn = [*range(6), *driver.outputs[first]]
    second = driver.add(turn + [1, 2], 2)
    assert driver.step() == {second: 3}
    driver.run(4)
    driver.held_to_alone()


def test_shared_blocks_stay_when_one_of_their_requests_ends():
    """The longer-lived request still reads them, whatever comes to the pool in between."""
    driver = Driver(blocks=8, size=4)
    one = driver.add(range(9), 2)
    driver.step()
    two = driver.add([*range(8), 50, 51], 10)
    driver.step()
    shared = driver.request(two).blocks[:2]
    assert shared == driver.request(one).blocks[:2]
    assert [driver.blocks.references[block] for block in shared] == [2, 2]
    driver.step()
    assert driver.request(one) is None and [driver.blocks.references[b] for b in shared] == [1, 1]
    driver.add(range(100, 110), 2)                           # needs all that is free
    driver.run(20)
    driver.held_to_alone()


def test_the_same_prompt_twice_in_one_step():
    """Neither finds the other's blocks; both publish, one has the names, both texts are right."""
    driver = Driver(size=4)
    for _ in range(2):
        driver.add(range(10), 3)
    assert driver.step() == {0: 10, 1: 10}
    driver.run(4)
    driver.held_to_alone()
    assert len(driver.blocks.cached) == 3 and len(driver.blocks.block_of) == 3


def test_several_tokens_at_once_are_computed_next():
    """A step may sample more than one token of a request: the next plan computes them all."""
    scheduler = Scheduler(BlockManager(8, 4), 4, 16)
    scheduler.apply([], [], [(0, [1, 2, 3])])
    assert [count for _, count in scheduler.schedule()] == [3]
    scheduler.apply([[4, 5, 6]], [], [])
    plan = scheduler.schedule()
    assert [count for _, count in plan] == [3] and plan[0][0].tokens == [1, 2, 3, 4, 5, 6]
    assert len(plan[0][0].blocks) == 2
    check(scheduler)


# --------------------------------------------------------------------------------------------------
# Nobody starves. (Driver.promises holds every step to it; these are the cases that would tempt.)


def test_decodes_advance_while_prompts_keep_coming():
    """Two new prompts in every step: each decode still gets its token in every step."""
    driver = Driver(blocks=200, max_seqs=12, budget=12)
    decodes = [driver.add([i], 40) for i in range(3)]
    for i in range(40):
        for j in range(2):
            driver.add([100 + i, j, *range(6)], 1)
        plan = driver.step()
        assert all(plan[id] == 1 for id in decodes)
    assert not set(decodes) & set(driver.unfinished())
    driver.run(200)
    driver.held_to_alone()


def test_decodes_advance_beside_a_long_prompt_and_it_gets_the_rest():
    """A prompt of 500 tokens beside three decodes: they have 1 each of the 16, it has 13."""
    driver = Driver(blocks=300, budget=16)
    decodes = [driver.add([i], 60) for i in range(3)]
    driver.step()
    long = driver.add(range(500), 2)
    for _ in range(500 // 13):
        assert driver.step() == {**dict.fromkeys(decodes, 1), long: 13}
    driver.run(30)
    driver.held_to_alone()


def test_a_long_prompt_advances_while_short_ones_keep_coming():
    """The older long prompt keeps the larger part of each step; the newcomers have a token each."""
    driver = Driver(blocks=300, max_seqs=8, budget=16)
    long = driver.add(range(400), 1)
    for i in range(40):
        driver.add([500 + i], 1)
        assert driver.step()[long] >= 9
        if long not in driver.unfinished():
            break
    assert i <= 400 // 9
    driver.run(100)
    driver.held_to_alone()


def test_there_are_no_more_seats_than_tokens_in_a_step():
    """max_seqs above the budget: only as many run as can each have a token."""
    driver = Driver(max_seqs=50, budget=3)
    for i in range(7):
        driver.add([i, i], 3)
    assert len(driver.step()) == 3
    driver.run(30)
    driver.held_to_alone()


# --------------------------------------------------------------------------------------------------
# Out of blocks


def test_the_youngest_gives_way_and_is_computed_again():
    """Out of blocks in decode: the youngest is preempted, keeps its tokens and its prompt's length,
    and goes on later with the text it would have had."""
    driver = Driver(blocks=7, size=4)
    old, young = driver.add(range(8), 14), driver.add(range(20, 28), 14)
    while not driver.scheduler.preemptions:
        driver.step()
    request, so_far = driver.request(young), list(driver.outputs[young])
    assert 0 < len(so_far) < 14 and request in driver.scheduler.waiting
    assert (request.blocks, request.num_computed, request.num_prompt) == (None, 0, 8)
    assert request.tokens == [*range(20, 28), *so_far]
    assert driver.request(old) in driver.scheduler.running
    plan = {}
    while young not in plan:
        plan = driver.step()
    request = driver.request(young)
    assert request.num_prompt == 8 and request.tokens == [*range(20, 28), *so_far]
    assert plan[young] == len(request.tokens) - request.num_computed > 1, "all in one chunk again"
    driver.run(40)
    driver.held_to_alone()


@pytest.mark.parametrize("size, blocks", [(1, 30), (4, 8), (16, 2)])
def test_two_requests_that_exceed_the_pool_together_both_finish(size, blocks):
    """No livelock: each fits alone, both together do not, and the oldest is never preempted."""
    driver = Driver(blocks=blocks, size=size, budget=10)
    driver.add(range(10), 20)
    driver.add(range(50, 60), 20)
    driver.run(2 * 30)
    driver.held_to_alone()
    assert len(driver.blocks.empty) + len(driver.blocks.cached) == blocks


def test_nobody_is_admitted_only_to_be_preempted_straight_away():
    """A newcomer leaves a free block for each that runs, so that they grow without its blocks."""
    driver = Driver(blocks=4, size=4)
    old = driver.add(range(7), 4)
    driver.step()
    young = driver.add(range(50, 58), 2)
    while old in driver.unfinished():
        assert driver.step() == {old: 1} and driver.request(young) in driver.scheduler.waiting
    driver.run(4)
    assert driver.scheduler.preemptions == 0
    driver.held_to_alone()


def test_a_request_that_fills_the_pool_runs_when_it_is_alone():
    """All blocks, the last one too, also if the cache holds its own prefix or another's."""
    driver = Driver(blocks=6, size=4)
    for prompt in (range(20), range(20), range(30, 50)):
        driver.add(prompt, 5)                                # 24 tokens computed: 6 blocks
        driver.run(12)
    driver.held_to_alone()


def test_several_give_way_in_one_step_and_come_back_in_their_order():
    """Three small ones are preempted, the youngest first, and stand in line by age."""
    driver = Driver(blocks=12, size=1, budget=12)
    for i in range(4):
        driver.add([i, i], 9)
    waited = []
    while driver.unfinished() or any(driver.message):
        driver.step()
        waited.append([request.id for request in driver.scheduler.waiting])
    assert [3] in waited and [2, 3] in waited and [1, 2, 3] in waited
    driver.held_to_alone()


# --------------------------------------------------------------------------------------------------
# Everything at once


def state_of(driver, id):
    """What a request is at, in words: cancellations are tried in each of these."""
    request = driver.request(id)
    if request is None:
        return "unheard of"
    if request.blocks is None:
        return "preempted" if driver.outputs[id] else "waiting"
    return "in decode" if driver.outputs[id] else "in its prompt"


def random_prompt(draw, driver, documents, most):
    """The start of a document, or of an earlier request's text, and perhaps something new."""
    source = draw.choice(documents)
    if driver.prompts and draw.random() < 0.4:
        id = draw.choice(list(driver.prompts)[-20:])
        source = driver.prompts[id] + driver.outputs[id]
    prompt = source[:draw.randint(1, most)]
    return prompt + [draw.randrange(VOCAB) for _ in range(draw.choice((0, 0, 1, 7)))]


def arrivals(draw, driver, documents, room, most):
    """New requests, of any length that fits, unless `most` or more are there."""
    for _ in range(draw.choice((0, 0, 1, 3)) if len(driver.unfinished()) < most else 0):
        prompt = random_prompt(draw, driver, documents, room * 2 // 3)[:room - 1]
        driver.add(prompt, draw.randint(1, min(room - len(prompt), room // 2)))


CANCEL = {"unheard of": 0.02, "waiting": 0.004, "in its prompt": 0.04, "in decode": 0.01,
          "preempted": 0.04}             # the chance in each step, by state
SHAPES = [(1, 40, 5, 7), (1, 25, 30, 12), (4, 12, 4, 6), (4, 9, 3, 16), (4, 24, 10, 11),
          (16, 4, 4, 5), (16, 5, 6, 20)]


@pytest.mark.parametrize("size, blocks, max_seqs, budget", SHAPES)
def test_random_traffic(size, blocks, max_seqs, budget):
    """Arrivals, shared prefixes and cancellations in every state, on a tiny pool: three copies stay
    alike, every promise is kept, no published block is written, and all texts are right."""
    draw = random.Random(f"{size} {blocks} {budget}")
    driver = Driver(blocks, size, max_seqs, budget, copies=3)
    documents = [[draw.randrange(VOCAB) for _ in range(size * blocks)] for _ in range(3)]
    room, cancelled, names, evicted = size * blocks, Counter(), set(), 0
    while driver.steps < 3000:
        arrivals(draw, driver, documents, room, most=8)
        for id in driver.unfinished():
            state = state_of(driver, id)
            if draw.random() < CANCEL[state]:
                cancelled[state] += 1
                driver.cancel(id)
        driver.step()
        evicted += len(names - driver.blocks.block_of.keys())
        names = set(driver.blocks.block_of)
    driver.run(8 * room)
    driver.held_to_alone()
    assert driver.blocks.available == blocks and not driver.scheduler.requests
    whole = sum(count > 0 for count in driver.wanted.values())
    assert whole > 100 and driver.scheduler.cached_tokens > 500 and evicted > 100
    assert driver.scheduler.preemptions > 10 and all(cancelled[state] for state in CANCEL)
