"""serve.py: an LLM server with Shift Parallelism.

What it does: keeps requests and their KV blocks, decides each step's tokens, runs the step in the
mode that the switch picks, and speaks the OpenAI HTTP API. Every rank runs the same `Engine.step`
on the same state; rank 0 also samples, reads the clock and talks to clients.

What it does not know: how a mode works (shift.py), what a layer computes (model.py).

    torchrun --nproc-per-node 8 serve.py           the server, on 8 ranks
    python serve.py --nproc 8 --explain            the same, starting the ranks itself

In reading order: requests and blocks, scheduler, outputs, drafts, engine, HTTP, main.
"""
import signal

if __name__ == "__main__":             # while it starts, Ctrl-C just ends it, with no traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import argparse
import asyncio
import hashlib
import itertools
import json
import math
import os
import socket
import sys
import threading
import time
from array import array
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from concurrent.futures import Future
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response, StreamingResponse

from assets.explain import announce, explain
from assets.metrics import Metrics
from assets.page import add_page
from assets.protocol import ChatBody, CompletionBody, EmbeddingBody, Failure, Gate
from assets.tokenizer import RawTokens, Tokenizer
from assets.trace_file import TraceFile
from kernels import NativeKernels, TorchKernels, TritonKernels, why_not_native
from model import (Batch, Checkpoint, Config, Graph, Llama, Pooling, RandomWeights, SamplingParams,
                   cuda_capture, find_model, sample)
from shift import (STOPS, Layout, Link, LostRank, Step, Switch, Trace, UserError, both_modes,
                   connect, cores, launch, split_ranks)

# --------------------------------------------------------------------------------------------------
# Requests and blocks. No torch, no clock, no HTTP: a simulator can drive the same objects.


@dataclass(eq=False)
class Request:
    """What the schedulers know of a request, the same on every rank.

    There is no prefill and no decode here: a request is "compute tokens[num_computed:]". A token
    once sampled is appended to `tokens`, and computed in a later step like any other.
    """
    id: int
    tokens: list                       # the prompt, then the output so far
    num_prompt: int
    pooling: str = None                # to embed, not to continue: "mean", "last" or "first" token
    num_computed: int = 0              # tokens whose keys and values are in the cache
    draft: list = ()                   # guessed tokens that follow, to be verified in the next step
    blocks: list = None                # the block table: block i holds tokens [i*B, (i+1)*B)
    hashes: list = None                # chained hashes of its first full blocks, as far as needed


class BlockManager:
    """The pool of KV blocks: reference counts, a prefix cache, eviction of the least recently used.

    A block is in exactly one state:

        empty   -> allocate -> used (references > 0) -> release -> empty
                                 |  publish: its content has a name (hash)
                                 v
        evicted <- allocate <- cached (published, no references) <-> used: take, release

    A published block is never written again, so any number of requests may read it.
    """

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks
        self.hash_of = [None] * num_blocks
        self.block_of = {}                                   # hash -> block, the prefix cache
        self.empty = list(range(num_blocks))[::-1]
        self.cached = OrderedDict()                          # least recently used first

    @property
    def available(self):
        return len(self.empty) + len(self.cached)

    def pages(self, tokens):
        return -(-tokens // self.block_size)

    def extend_hashes(self, request, blocks):
        """Name the first `blocks` full blocks: each hash covers all tokens before it too."""
        for i in range(len(request.hashes), blocks):
            tokens = request.tokens[i * self.block_size:(i + 1) * self.block_size]
            parent = request.hashes[-1] if i else b""
            request.hashes.append(hashlib.blake2b(parent + array("q", tokens).tobytes(),
                                                  digest_size=16).digest())

    def match(self, hashes):
        """The longest run of cached blocks from the start."""
        found = (self.block_of.get(h) for h in hashes)
        return list(itertools.takewhile(lambda block: block is not None, found))

    def take(self, blocks):
        """One more reference to blocks that were matched."""
        for block in blocks:
            if self.references[block] == 0:
                del self.cached[block]
            self.references[block] += 1

    def allocate(self, count):
        """`count` blocks of one reference each; the caller has looked at `available`."""
        while len(self.empty) < count:                       # evict
            block, _ = self.cached.popitem(last=False)
            del self.block_of[self.hash_of[block]]
            self.hash_of[block] = None
            self.empty.append(block)
        blocks = [self.empty.pop() for _ in range(count)]
        for block in blocks:
            self.references[block] = 1
        return blocks

    def publish(self, block, name):
        """The block is full, computed and verified: others may read it under this hash."""
        if self.hash_of[block] is None and name not in self.block_of:
            self.hash_of[block], self.block_of[name] = name, block

    def release(self, blocks):
        """One reference less. The last blocks of a text are evicted before its first ones."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0 and self.hash_of[block] is None:
                self.empty.append(block)
            elif self.references[block] == 0:
                self.cached[block] = None


# --------------------------------------------------------------------------------------------------
# Scheduler


class Scheduler:
    """Decides which tokens the next step computes. Deterministic: every rank runs its own copy on
    the same messages and comes to the same plan, so the plan itself is never sent.

    Promises, for any mix of requests: a running request gets at least one token in every step (a
    decode never waits for a prefill, nor a prefill for decodes); a waiting one is admitted in the
    step in which a seat and blocks for its whole prompt are free, first come first served; the
    oldest request is never preempted, so something always finishes. It follows that a waiting
    prompt runs after at most as many steps as the requests before it still need tokens.
    """
    SMALL = 64                         # tokens in a step, above which no draft is computed

    def __init__(self, blocks, max_seqs, max_step_tokens):
        self.blocks = blocks
        self.max_seqs = min(max_seqs, max_step_tokens)       # each running request has its token
        self.max_step_tokens = max_step_tokens
        self.requests = {}                                   # id -> Request, all alive
        self.running = []                                    # oldest first ...
        self.waiting = deque()                               # ... and all older than these
        self.plan = []                                       # [(request, tokens)] of this step
        self.preemptions = self.prompt_tokens = self.cached_tokens = 0

    def apply(self, sampled, finished, added, drafts=()):
        """What happened since the last plan, in one fixed order.

        sampled   for each request of the plan whose last token was computed: its new tokens, which
                  are the accepted drafts and one more
        added     [(id, prompt tokens)], or with a third, to embed: see Request.pooling
        finished  ids to forget, complete or cancelled; one just added may be among them
        drafts    [(id, tokens that may come after those just sampled)]
        """
        sampled = iter(sampled)
        for request, count in self.plan:
            before, request.draft = request.num_computed, ()
            request.num_computed += count
            if request.num_computed >= len(request.tokens) and not request.pooling:
                request.tokens += next(sampled)
                # Of rejected drafts nothing is left: what comes next writes to their slots.
                request.num_computed = min(request.num_computed, len(request.tokens) - 1)
            self._publish(request, before)
        self.plan = []
        for id, draft in drafts:
            self.requests[id].draft = draft
        for id, tokens, *pooling in added:
            self.requests[id] = Request(id, list(tokens), len(tokens), *pooling, hashes=[])
            self.waiting.append(self.requests[id])
        for id in finished:
            request = self.requests.pop(id)
            if request.blocks is None:
                self.waiting.remove(request)
            else:
                self.running.remove(request)
                self.blocks.release(request.blocks)

    def _publish(self, request, before):
        """Offer the blocks that were filled since `before` tokens were computed. Of a text to embed
        nothing is kept, nor is it found: all its hidden states are wanted."""
        full = 0 if request.pooling else request.num_computed // self.blocks.block_size
        self.blocks.extend_hashes(request, full)
        for i in range(before // self.blocks.block_size, full):
            self.blocks.publish(request.blocks[i], request.hashes[i])

    def schedule(self):
        """Returns the plan: every running request with the number of tokens it computes now."""
        self._grow()
        while self.waiting and len(self.running) < self.max_seqs and self._admit(self.waiting[0]):
            self.running.append(self.waiting.popleft())
        self._clip_drafts()
        spare = self.max_step_tokens - len(self.running)     # one token each, then oldest first
        for request in self.running:
            count = min(len(request.tokens) + len(request.draft) - request.num_computed, 1 + spare)
            spare -= count - 1
            self.plan.append((request, count))
        return self.plan

    def _grow(self):
        """Blocks for the tokens that running requests have gained, when those of rejected drafts
        are back; if too few, preempt the youngest."""
        for request in self.running:
            pages = self.blocks.pages(len(request.tokens))
            self.blocks.release(request.blocks[pages:])
            del request.blocks[pages:]
        grown = 0
        while grown < len(self.running):
            request = self.running[grown]
            need = self.blocks.pages(len(request.tokens)) - len(request.blocks)
            if need <= self.blocks.available:
                request.blocks += self.blocks.allocate(need)
                grown += 1
            else:
                self._preempt(self.running.pop())

    def _clip_drafts(self):
        """Drafts get what is left: they delay no prompt, preempt nobody, and keep a step small."""
        room = min(self.SMALL, self.max_step_tokens) - sum(
            len(request.tokens) - request.num_computed for request in self.running)
        for request in self.running:
            request.draft = request.draft[:max(0, room)]
            need = self.blocks.pages(len(request.tokens) + len(request.draft)) - len(request.blocks)
            if need > self.blocks.available:
                request.draft, need = (), 0
            request.blocks += self.blocks.allocate(need)
            room -= len(request.draft)

    def _preempt(self, request):
        """Give up the blocks; its tokens, output included, are computed again when it is back. It
        is older than all who wait, and what it published it will find in the prefix cache."""
        self.blocks.release(request.blocks)
        request.blocks, request.num_computed, request.draft = None, 0, ()
        self.waiting.appendleft(request)
        self.preemptions += 1

    def _admit(self, request):
        """Blocks for all its tokens, from the prefix cache where possible. The last token is always
        computed, for its logits, so it is never in a matched block and no matched block is written.
        One block stays free for each running request, or they would preempt it straight away."""
        full = 0 if request.pooling else (len(request.tokens) - 1) // self.blocks.block_size
        self.blocks.extend_hashes(request, full)
        matched = self.blocks.match(request.hashes[:full])
        need = self.blocks.pages(len(request.tokens)) - len(matched)
        idle = sum(self.blocks.references[block] == 0 for block in matched)
        if need + idle + len(self.running) > self.blocks.available:
            return False
        self.blocks.take(matched)
        request.blocks = matched + self.blocks.allocate(need)
        request.num_computed = len(matched) * self.blocks.block_size
        self.prompt_tokens += len(request.tokens)
        self.cached_tokens += request.num_computed
        return True


# --------------------------------------------------------------------------------------------------
# Outputs: what clients see. Rank 0 only.

Event = namedtuple("Event", "output text samples finish")    # finish: None, or why it ended


class Output:
    """The text of one request as it grows: stop strings, half characters, log-probabilities."""

    def __init__(self, id, prompt, params, tokenizer, index=0, queue=None):
        self.id, self.prompt, self.params, self.tokenizer = id, prompt, params, tokenizer
        self.index, self.queue, self.unwanted = index, queue, False      # for who reads the events
        self.tokens, self.text, self.samples, self.finish, self.first = [], "", [], None, None
        self.decoder, self.held, self.offset = tokenizer.decoder(), "", 0
        self.ends = {*params.stop_token_ids, *(() if params.ignore_eos else tokenizer.eos)}
        self.arrived = self.last = time.monotonic()          # and `first`: for TTFT and TPOT
        self.drafted = self.accepted = 0
        self.tree, self.trust = None, 0.5                    # of the Drafter

    def learn(self, drafted, accepted):
        """Count a step's draft. `trust` is the share of drafted tokens that come out so: it follows
        them fast, and where nothing is drafted it slowly grows, to try anew."""
        self.drafted += drafted
        self.accepted += accepted
        self.trust += (0.3 * (accepted / min(drafted, accepted + 1) - self.trust) if drafted else
                       0.02 * (1 - self.trust))

    def push(self, one):
        """Take one Sample; returns the Event: the text that is now certain, and whether it ends."""
        self.tokens.append(one.token)
        self.last = time.monotonic()
        self.first = self.first or self.last
        may_stop = len(self.tokens) > self.params.min_tokens
        ended = may_stop and one.token in self.ends
        if ended:
            self.finish = "stop"
        elif len(self.tokens) >= self.params.max_tokens:
            self.finish = "length"
        added = b"" if ended else self.tokenizer.token_bytes(one.token)
        self.held += self.decoder.decode(added, final=self.finish is not None)
        found = [at for at in map(self.held.find, self.params.stop) if at >= 0]
        if found and may_stop:
            self.finish, self.held = "stop", self.held[:min(found)]
        text, self.held = self._split(self.held)
        self.text += text
        if self.params.logprobs is not None:
            self.samples.append(one)
        return Event(self, text, [one], self.finish)

    def _split(self, held):
        """(text to send, text to keep): an end that may be the start of a stop string is kept."""
        if self.finish is None and self.params.stop:
            for size in range(min(len(held), max(map(len, self.params.stop)) - 1), 0, -1):
                if any(stop.startswith(held[-size:]) for stop in self.params.stop):
                    return held[:-size], held[-size:]
        return held, ""


class Embedding(Output):
    """An Output without text: the vector of the prompt, as its sums come in, chunk by chunk; after
    a preemption all over again."""
    vector = 0

    def push(self, sums, first, end):
        """Add sums (D,), of tokens first ... end-1; in the end `vector` is bytes, of float32: as
        Python floats it would cost more than the model (Arctic Inference, arXiv 2507.11830)."""
        self.vector, self.last = sums + (self.vector if first else 0), time.monotonic()
        if end == len(self.prompt):
            vector = torch.nn.functional.normalize(self.vector[:self.params.dimensions], dim=0)
            self.vector, self.finish = vector.cpu().numpy().tobytes(), "stop"
        return Event(self, "", [], self.finish)


# --------------------------------------------------------------------------------------------------
# Drafts: suffix decoding (arXiv 2411.04975). Rank 0 only.


class Suffixes:
    """The suffix tree of a text that grows, with counts, for runs of at most DEPTH tokens.

    A node of the tree is a run of tokens, and what is asked of it is how often each token came
    after it. Here a node is the list of the places where its run ended: those of every pair of
    tokens are kept, those of longer runs are found among them, and so is what followed. So a token
    costs one place, where a tree in memory would have up to DEPTH nodes for it.
    """
    DEPTH, LATEST = 32, 64             # tokens matched at most; places looked at, the latest
    LEAST = 0.1                        # chance of being accepted, for a token to be drafted

    def __init__(self, tokens=()):
        self.tokens, self.places = [], defaultdict(list)     # (token, token) -> where a third came
        self.extend(tokens)

    def extend(self, tokens):
        for token in tokens:
            self.tokens.append(token)
            self.places[tuple(self.tokens[-2:])].append(len(self.tokens))

    def draft(self, context, most, trust):
        """What may follow the tokens of `context`: (tokens that will probably be accepted, draft).

        From the longest run that ends the context and has occurred, the token that followed most
        often, and so on. Each has a chance of its share of the places times `trust`. At most as
        many as the run is long, and `most`.
        """
        text, length = self.tokens, 2
        found = [at for at in self.places.get(tuple(context[-2:]), ())[-self.LATEST:]
                 if at < len(text)]
        while length < min(self.DEPTH, len(context)):
            longer = [at for at in found if at > length and text[at - length - 1]
                      == context[-length - 1]]
            if not longer:
                break
            found, length = longer, length + 1
        draft, chance, score = [], 1.0, 0.0
        while found and len(draft) < min(most, length):
            token, count = Counter(text[at] for at in reversed(found)).most_common(1)[0]
            chance *= trust * count / len(found)
            if chance < self.LEAST or token < 0:             # -1: there the text ended
                break
            draft.append(token)
            score += chance
            found = [at + 1 for at in found if text[at] == token and at + 1 < len(text)]
        return score, draft


class Drafter:
    """Drafts for all requests: each from its own text, or from the outputs of finished requests.

    Of those, the last HISTORY tokens are kept, and as many before them. An output that follows an
    old one contains it, so what is used is also new: the least recently used is forgotten.
    """
    HISTORY = 200_000                  # tokens

    def __init__(self):
        self.old, self.new = Suffixes(), Suffixes()

    def next(self, output, room):
        """[(id, draft)] for an output that has just grown, with a draft of at most `room` tokens;
        [] if there is nothing to say, or the output is complete: then it is remembered."""
        if output.finish:
            if len(self.new.tokens) > self.HISTORY:
                self.old, self.new = self.new, Suffixes()
            self.new.extend((-1, *output.tokens, -1))
            output.tree = None
        room = min(room, output.params.max_tokens - len(output.tokens) - 1)
        if output.finish or room < 1:
            return []
        tree = output.tree = output.tree or Suffixes(output.prompt)
        tree.extend(output.tokens[len(tree.tokens) - len(output.prompt):])
        _, draft = max(one.draft(tree.tokens, room, output.trust)
                       for one in (tree, self.new, self.old))
        return [(output.id, draft)] if draft else []


def verify(outputs, drafts, logits):
    """Sample the next token of each Output, and go on while what is drawn is what was drafted. So
    the text is the one that it would have without drafts. Returns the Events.

    logits (rows, V): for each output, those after its last token, then after each drafted one.
    In rounds: no row is drawn in vain, as a draw can cost more than the forward pass of a token.
    """
    parts = logits.split([len(draft) + 1 for draft in drafts])
    live = [*zip(outputs, parts, ([*draft, None] for draft in drafts))]
    events, i = [], 0
    while live:
        rows = torch.stack([part[i] for _, part, _ in live])
        for row, (output, *_) in zip(rows, live):
            if len(output.tokens) < output.params.min_tokens:            # finite, as JSON must be
                row[list(output.ends)] = torch.finfo(rows.dtype).min
        samples = sample(rows, [output.params for output, *_ in live],
                         [len(output.prompt) + len(output.tokens) for output, *_ in live])
        events += [output.push(one) for (output, *_), one in zip(live, samples)]
        live = [each for each, one in zip(live, samples)
                if one.token == each[2][i] and not each[0].finish]
        i += 1
    return events


# --------------------------------------------------------------------------------------------------
# Engine


def option(default, help, choices=None, least=-math.inf, most=math.inf, bare=None):
    """A field of Options: its default, and what the command line and the checks make of it.
    bare: its value where the flag stands alone."""
    return field(default=default, metadata={
        "help": help + f" [{choices}]" * bool(choices), "limits": (choices, least, most),
        "bare": {"nargs": "?", "const": bare} if bare else {}})


@dataclass(frozen=True)
class Options:
    """Everything an Engine can be told; the command line has the same names."""
    model: str = option(str(Path(__file__).parent / "assets" / "tiny"),
                        "directory in Hugging Face layout, hub id, or random:dim=512,layers=8,...")
    sp: int = option(None, "sequence-parallel degree of base mode; default: all ranks", least=1)
    tp: int = option(None, "tensor-parallel degree of base mode; sp * tp = ranks", least=1)
    threshold: str = option("auto", "shift mode up to N tokens in a step; auto measures")
    mode: str = option("shift", "tp or sp pin one mode, for comparison", "shift, tp, sp")
    link: str = option("auto", "auto: nccl on GPUs, else shm or gloo", "auto, nccl, shm, gloo")
    link_gbps: float = option(None, "emulate a slower link: gigabits a second", least=1e-6)
    link_us: float = option(None, "emulate a slower link: microseconds a collective", least=0)
    kernels: str = option("auto", "c or torch on CPUs; auto: c with a compiler", "auto, c, torch")
    eager: bool = option(False, "on GPUs: no CUDA graphs, as with --trace and --explain 2")
    gpu_memory: float = option(0.9, "share of a GPU's memory to use", least=0.01, most=1)
    dtype: str = option("auto", "auto: on CPUs float32", "auto, float32, bfloat16, float16")
    max_model_len: int = option(None, "longest prompt + output; default: the model's", least=1)
    max_step_tokens: int = option(2048, "tokens in a step", least=1)
    max_seqs: int = option(256, "requests in a step", least=1)
    kv_blocks: int = option(None, "blocks in the KV pool; default: by memory", least=1)
    block_size: int = option(16, "tokens in a KV block", least=1)
    speculate: str = option("off", "suffix: draft tokens from what was written before",
                            "off, suffix")
    explain: int = option(0, "1: a line a step; 2: its collectives too", least=0, most=2, bare=1)
    trace: str = option(None, "write a file for ui.perfetto.dev")
    trace_steps: int = option(10_000, "steps in that file, at most", least=1)

    def __post_init__(self):
        for f in fields(self):
            value, name = getattr(self, f.name), f"--{f.name.replace('_', '-')}"
            choices, least, most = f.metadata["limits"]
            if choices and value not in choices.split(", "):
                raise UserError(f"{name} {value} is none of {choices}")
            if isinstance(value, (int, float)) and not least <= value <= most:
                above = f", at most {most}" * (most < math.inf)
                raise UserError(f"{name} {value} must be at least {least}{above}")
        if self.threshold != "auto" and not str(self.threshold).isdecimal():
            raise UserError(f"--threshold {self.threshold} must be auto or a number of tokens")


class ContextError(UserError):
    """The request is longer than the context."""
    code = "context_length_exceeded"                         # OpenAI's


def make_link(options, link):
    """(link, kernels, remark): the fastest collectives and kernels that this machine has, the same
    on all ranks of `link`; the cores divided over the ranks; and why, if something is missing."""
    local, here, world = (int(os.environ.get(key, default)) for key, default in
                          (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("WORLD_SIZE", 1)))
    slow = options.link_gbps or options.link_us
    emulate = (options.link_gbps or math.inf, options.link_us or 0) if slow else None
    gpus = torch.cuda.device_count() if options.link in ("auto", "nccl") else 0
    if here > gpus > 0 or options.link == "nccl" and not gpus:
        raise UserError(f"--link {options.link} wants a GPU for each rank, but there are {here} "
                        f"ranks and {gpus} GPUs: start fewer ranks, or use --link shm or gloo")
    if gpus:
        torch.cuda.set_device(local)
        return Link("nccl", link.world_ranks, f"cuda:{local}", emulate), TritonKernels(), ""
    threads = max(1, cores() // here)
    missing = next((reason for reason in link.gather(why_not_native()) if reason), None)
    no_c = missing or options.dtype not in ("auto", "float32") and f"--dtype {options.dtype}"
    if options.kernels == "c" and no_c:
        raise UserError(f"--kernels c cannot be had: {no_c}; use --kernels auto")
    plain = no_c or options.kernels == "torch"
    kernels = TorchKernels() if plain else NativeKernels(threads)
    # Two pools of threads would take the cores from each other: torch's works, or kernels.c's.
    torch.set_num_threads(threads if plain else 1)
    no_shm = "ranks on several hosts" if world > here else missing
    if options.link == "shm" and no_shm:
        raise UserError(f"--link shm cannot be had: {no_shm}; use --link auto")
    backend = "gloo" if options.link == "gloo" or no_shm else "shm"
    remark = f" (torch kernels: {missing})" if missing else ""
    return Link(backend, link.world_ranks, emulate=emulate), kernels, remark


class Engine:
    """One model on the ranks of one link. Every rank makes one and calls the same methods.

        engine = Engine(model="assets/tiny", threshold=64)
        outputs = engine.generate(["Once upon a time"], SamplingParams(max_tokens=50))

    Between two steps rank 0 sends one message; every rank applies it and schedules alone. Several
    engines can live in one world: `ranks` names those of this one.
    """
    IDLE_TICK = 2.0                    # seconds between signs of life while there is nothing to do
    TIMED = 64                         # tokens of a prompt in the calibration of the switch
    GRAPHED = (*range(256, 0, -8), 4, 2, 1)                  # tokens of a step: CUDA graphs

    def __init__(self, ranks=None, **options):
        self.options = Options(**options)
        if not dist.is_initialized():
            connect()
        self.link = Link("gloo", ranks)
        self._same_everywhere(**vars(self.options))
        self.link, self.kernels, self.remark = make_link(self.options, self.link)
        self.rank = self.link.rank
        self._load()
        self._size_kv()
        self.scheduler = Scheduler(BlockManager(self.num_blocks, self.options.block_size),
                                   self.options.max_seqs, self.options.max_step_tokens)
        with self.link.together():
            self.switch = self.first_switch = self._make_switch()
            self.model.allocate_kv(self.num_blocks, self.options.block_size)
        if self.link.device.type == "cuda":
            with self.link.together():
                self._capture(partial(cuda_capture, pool=torch.cuda.graph_pool_handle()))
        self.link.counts.clear()       # of what was only tried
        self.trace, self.file = Trace(maxlen=256), TraceFile(self.link, self.options)
        self.sampled, self.finished, self.drafts = [], [], []
        self.drafter = Drafter() if self.options.speculate == "suffix" else None
        self.drafted = self.accepted = 0
        self.outputs = {}              # id -> Output, alive; rank 0, the engine's thread only
        self.inbox, self.asks, self.ids = [], deque(), itertools.count()
        # Guards these three, and `closing`. Reentrant: a signal may call `close` in any line.
        self.wake = threading.Condition()
        self.closing, self.deadline = False, math.inf        # end when done; when to stop waiting
        self.refusal, self.beat = None, time.monotonic()     # why nothing is taken; the last turn
        self.steps, self.step_tokens, self.mode, self.switches = Counter(), Counter(), None, 0
        self.on_events = lambda events: None                 # called with the Events of each step

    # Start-up

    def _load(self):
        options, link = self.options, self.link
        sp, tp = split_ranks(link.size, options.sp, options.tp)
        with link.together():
            if options.model.startswith("random:"):
                config = Config.random(options.model.removeprefix("random:"))
                source, self.tokenizer = RandomWeights(config), RawTokens(config)
            else:
                directory = find_model(options.model)        # the hub's locks: one rank downloads
                config = Config.read(directory)
                source = Checkpoint(directory, config)
                self.tokenizer = Tokenizer(directory, config) if self.rank == 0 else None
            self.layout = Layout(sp, tp, config.heads, config.kv_heads, config.ffn)
        self._same_everywhere(config=config, checkpoint=source.fingerprint)
        self.config, self.max_model_len = config, options.max_model_len or config.max_len
        if self.max_model_len > config.max_len:
            raise UserError(f"--max-model-len {self.max_model_len} > the model's {config.max_len}")
        auto = "float32" if link.device.type == "cpu" else config.dtype
        dtype = getattr(torch, auto if options.dtype == "auto" else options.dtype)
        self.modes = {mode.name: mode for mode in both_modes(self.layout, link)}
        with link.together():
            self.model = Llama(config, source, self.layout, link, self.modes.values(),
                               self.max_model_len, dtype, self.kernels)
            # for the steps that `_profile` and `_time_step` try
            self.model.allocate_kv(-(-self.TIMED // options.block_size), options.block_size)

    def _size_kv(self):
        """The pool: as many blocks as asked for or as fit, the same number on every rank."""
        options, config, size = self.options, self.config, self.options.block_size
        token = 2 * config.layers * self.layout.k * config.head_dim * self.model.dtype.itemsize
        if self.link.device.type == "cpu":
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
            memory //= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        else:
            with self.link.together():
                self._profile()
                free, total = torch.cuda.mem_get_info()
                memory = int(free - (1 - options.gpu_memory) * total)
        fits = min(self.link.gather(memory // (token * size)))
        useful = -(-self.max_model_len // size) * options.max_seqs
        self.num_blocks = options.kv_blocks or max(0, min(fits, useful))
        self.max_model_len = min(self.max_model_len, self.num_blocks * size)
        if self.max_model_len < (options.max_model_len or 1):
            raise UserError(f"--max-model-len {options.max_model_len or 1} is more than the pool's "
                            f"{self.num_blocks} blocks x {size}: raise --kv-blocks or --gpu-memory")

    def _profile(self):
        """Run the largest step in each mode, and sample: torch keeps the memory that this takes, so
        what is still free is the pool's. Nothing is sent: no rank waits for one without memory."""
        self.link.silent, seqs = True, self.options.max_seqs
        self._time_step("base", self.options.max_step_tokens)
        self._time_step("shift", self.options.max_step_tokens)
        self.link.silent = False
        logits = torch.zeros(seqs, self.config.vocab, device=self.link.device)
        sample(logits, [SamplingParams(seed=0)] * seqs, range(seqs))

    def _capture(self, capture):
        """CUDA graphs of the steps that the switch runs in shift mode; the small ones fit in the
        memory of the large. A replay can not be traced, nor its link slowed: then none is made."""
        options, start, before = self.options, time.perf_counter(), torch.cuda.memory_reserved()
        eager = options.eager or options.trace or options.explain > 1 or self.link.emulate
        pages = self.scheduler.blocks.pages(self.max_model_len)
        self.model.graphs = [Graph(self.model, size, pages, capture) for size in self.GRAPHED
                             if not eager and self.switch.shift[size:size + 1] == [True]]
        seconds, memory = time.perf_counter() - start, torch.cuda.memory_reserved() - before
        self.remark += f", {len(self.model.graphs)} CUDA graphs ({seconds:.1f} s, {memory:,} bytes)"

    def _make_switch(self):
        options, most = self.options, self.options.max_step_tokens
        if options.mode != "shift":
            return Switch.at(most if options.mode == "tp" else -1, most, f"--mode {options.mode}")
        if options.threshold != "auto":
            return Switch.at(int(options.threshold), most)
        if self.link.size == 1:
            return Switch.at(most, most, "one rank: the modes are the same")
        return Switch.measured(self._time_step, most, self.link)

    @torch.inference_mode()
    def _time_step(self, name, tokens):
        """Seconds of a forward pass over prompts of up to TIMED tokens. Two layers stand for all,
        as they are alike; the logits are run too: with few tokens their collectives count. What
        SwiftKV does after its first layers takes as long in either mode, and is left out."""
        length = min(self.TIMED, tokens, self.max_model_len)
        blocks = [*range(-(-length // self.options.block_size))]         # all prompts write to them
        prompts = [[0] * min(length, tokens - first) for first in range(0, tokens, length)]
        batch = self._build([(Request(0, prompt, len(prompt), blocks=blocks), len(prompt))
                             for prompt in prompts])[0].to(self.link.device)
        mode, run = self.modes[name], min(2, self.config.swiftkv.start)
        x = self.model.embed(batch, mode)

        def now():
            torch.get_device_module(self.link.device).synchronize()
            return time.perf_counter()
        self.link.barrier()
        start = now()
        self.model.run_layers(x, 0, run, mode, batch)
        middle = now()
        self.model.logits(x, batch.rows, mode, tokens)
        return (middle - start) * self.config.swiftkv.start / run + now() - middle

    def _same_everywhere(self, **values):
        """Ranks that were started differently would wait for each other for ever: say so."""
        prints = self.link.gather({name: repr(value) for name, value in values.items()})
        for rank, other in enumerate(prints):
            for name, value in other.items():
                if value != prints[0][name]:
                    raise UserError(f"rank {rank} has {name} = {value}, but rank 0 has "
                                    f"{prints[0][name]}: start all ranks with the same")

    # Running

    def step(self):
        """One turn, the same on every rank; False once there will be no more."""
        message = self.link.broadcast(self._next_message() if self.rank == 0 else None)
        self.scheduler.apply(*(message[key] for key in ("sampled", "finished", "added", "drafts")))
        for what, value in message["asks"]:
            self._answer(what, value)
        if message["stop"]:
            self.file.close()
            return False
        plan = self.scheduler.schedule()
        if not plan:
            self.file.flush()
            self.link.barrier()                              # an idle tick: everybody is alive
            return True
        start = time.perf_counter()
        self.link.log.clear()
        tokens = sum(count for _, count in plan)
        mode = self.modes[self.switch(tokens)]               # the switch
        batch, sampling = self._build(plan)
        logits, sums = self.model.forward(batch, mode)
        if self.rank == 0:
            self._deliver(plan, sampling, logits, sums)
        self._record(plan, tokens, mode, start)
        return True

    def run(self):
        """Steps until `close` was called on rank 0 and all is done."""
        while self.step():
            self.beat = time.monotonic()

    def generate(self, prompts, params=SamplingParams()):
        """Continue each prompt (a text or token ids); returns their Outputs, on rank 0.

        Call it on every rank. Rank 0's arguments count; the other ranks return None.
        """
        outputs = None
        with self.link.together():                           # a mistake is raised on every rank
            if self.rank == 0:
                ids = [self.tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]
                for prompt in ids:
                    self.admissible(prompt, params)          # all, before the first one runs
                outputs = [self.submit(prompt, params, index=i) for i, prompt in enumerate(ids)]
                self.close()
        self.run()
        self.closing, self.refusal = False, None
        return outputs

    def embed(self, prompts, pooling="mean", dimensions=None):
        """The vectors (prompts, dimensions) of texts or lists of token ids, float32, on rank 0.
        As `generate`: call it on every rank."""
        outputs = self.generate(prompts, Pooling(pooling, dimensions))
        if outputs:
            vectors = bytearray().join(output.vector for output in outputs)
            return torch.frombuffer(vectors, dtype=torch.float32).view(len(outputs), -1)

    def _build(self, plan):
        """The plan as tensors, and those requests whose next token this step samples: a row of
        logits for their last token and for each drafted one."""
        size = self.options.block_size
        token_ids, positions, slots, starts, rows, sampling = [], [], [], [0], [], []
        pooled, pool_of = [request for request, _ in plan if request.pooling], []
        for request, count in plan:
            first, last = request.num_computed, request.num_computed + count
            token_ids += request.tokens[first:last]
            token_ids += request.draft
            positions += range(first, last)
            slots += [request.blocks[i // size] * size + i % size for i in range(first, last)]
            starts.append(starts[-1] + count)
            if pooled:
                known = len(request.tokens)
                pool = pooled.index(request) if request.pooling else len(pooled)
                joins = {"last": (known - 1,), "first": (0,)}.get(request.pooling, range(known))
                pool_of += [pool if i in joins else len(pooled) for i in range(first, last)]
            if last >= len(request.tokens) and not request.pooling:
                rows += range(starts[-1] - 1 - len(request.draft), starts[-1])
                sampling.append(request)
        pages = max(len(request.blocks) for request, _ in plan)
        tables = [request.blocks + [0] * (pages - len(request.blocks)) for request, _ in plan]
        contexts = [request.num_computed + count for request, count in plan]
        short = (torch.tensor(values, dtype=torch.int32) for values in (tables, starts, contexts))
        return Batch(*map(torch.tensor, (token_ids, positions, slots)), *short, rows, len(pooled),
                     torch.tensor(pool_of) if pooled else None), sampling

    def _record(self, plan, tokens, mode, start):
        """Count this step, and tell the trace and --explain's reader of it."""
        self.steps[mode.name] += 1
        self.step_tokens[mode.name] += tokens
        self.switches += self.mode not in (None, mode)
        self.mode = mode
        decode = sum(count for request, count in plan if request.num_computed >= request.num_prompt)
        step = Step(self.steps.total(), tokens, tokens - decode, decode, mode.name, start,
                    time.perf_counter(), [*self.link.log])
        self.trace.append(step)
        self.file.step(step, self)
        if self.options.explain and self.rank == 0:
            explain(self, step, mode)

    # Rank 0: clients on one side, the message to all ranks on the other

    def admissible(self, prompt, params):
        """Raise UserError if this request could never run, so that nothing waits for ever."""
        if not prompt:
            raise UserError("the prompt is empty: give it at least one token id")
        bad = [t for t in (*prompt, *params.stop_token_ids) if not 0 <= t < self.config.vocab]
        if bad:
            raise UserError(f"token id {bad[0]!r:.40} is none of the {self.config.vocab} there are")
        if len(prompt) + params.max_tokens > self.max_model_len:
            raise ContextError(f"{len(prompt)} tokens and max_tokens = {params.max_tokens!r:.40} "
                               f"exceed the maximum context length, {self.max_model_len}")
        wanted, most = getattr(params, "dimensions", None), self.config.dim
        if wanted is not None and not 1 <= wanted <= most:
            raise UserError(f"dimensions = {wanted!r:.40} must be between 1 and the model's {most}")

    def submit(self, prompt, params, index=0, queue=None):
        """Queue a request (any thread); its Events come through `on_events`, step by step."""
        self.admissible(prompt, params)
        if params.seed is None:
            params = replace(params, seed=int.from_bytes(os.urandom(8), "big"))
        with self.wake:
            kind = Embedding if params.pooling else Output
            output = kind(next(self.ids), prompt, params, self.tokenizer, index, queue)
            self.inbox.append(output)
            self.wake.notify()
        return output

    def cancel(self, output):
        """Forget a request (any thread), whatever state it is in; no harm if it has ended."""
        output.unwanted = True                               # seen before the next step

    def ask(self, what, value):
        """Something that all ranks do between two steps (any thread); returns its Future result:
        "threshold", N or "auto": the switch from now on; "collectives", a step: each rank's."""
        future = Future()
        with self.wake:
            if self.refusal:
                raise UserError(self.refusal)
            self.asks.append((what, value, future))
            self.wake.notify()
        return future

    def _answer(self, what, value):
        if what == "threshold":
            self.switch = result = self.first_switch if value == "auto" else Switch.at(
                value, self.options.max_step_tokens)
        else:
            result = self.link.gather(self.trace.collectives(value))
        if self.rank == 0:
            self.asks.popleft()[-1].set_result(result)

    def close(self, grace=math.inf):
        """Finish what is queued, then end `run`; after `grace` seconds cancel what is left."""
        with self.wake:
            self.closing, self.refusal = True, "the server is shutting down"
            self.deadline = time.monotonic() + grace
            self.wake.notify()

    def fail(self, reason):
        """The engine can go no further (any thread): end every request, and take no new ones."""
        self.refusal = self.refusal or reason
        self.on_events([Event(output, "", [], "error") for output in
                        (*self.outputs.values(), *self.inbox)])
        while self.asks:
            self.asks.popleft()[-1].set_exception(UserError(self.refusal))

    def _next_message(self):
        """What all ranks must know before the next step; waits here while nothing is to be done."""
        with self.wake:
            if not (self.outputs or self.finished):
                self.wake.wait_for(lambda: self.inbox or self.asks or self.closing,
                                   timeout=self.IDLE_TICK)
            added, self.inbox = self.inbox, []
            self.outputs |= {output.id: output for output in added}
        late = time.monotonic() > self.deadline
        for output in [one for one in self.outputs.values() if one.unwanted or late]:
            output.finish = "cancelled"
            self.finished.append(output.id)
            del self.outputs[output.id]
            self.on_events([Event(output, "", [], output.finish)])
        message = {"sampled": self.sampled, "finished": self.finished,
                   "added": [(output.id, output.prompt, output.params.pooling) for output in added],
                   "drafts": self.drafts,
                   "asks": [(what, value) for what, value, _ in [*self.asks]],
                   "stop": self.closing and not (self.outputs or self.inbox)}
        self.sampled, self.finished, self.drafts = [], [], []
        return message

    @torch.inference_mode()
    def _deliver(self, plan, sampling, logits, sums):
        """What the step found, for the clients. The other ranks hear of it in the next message."""
        pooled = [pair for pair in plan if pair[0].pooling]
        events = [self.outputs[request.id].push(row, request.num_computed,
                                                request.num_computed + count)
                  for (request, count), row in zip(pooled, sums)]
        if sampling:
            events += self._sample(sampling, logits)
        for output in [event.output for event in events if event.finish]:
            self.finished.append(output.id)
            del self.outputs[output.id]
            self.file.request(output.id, output.arrived, output.last)
        self.on_events(events)

    def _sample(self, sampling, logits):
        """Draw the next tokens from logits (rows, V), and the drafts after them. The Events."""
        events = verify([self.outputs[request.id] for request in sampling],
                        [request.draft for request in sampling], logits)
        room = Scheduler.SMALL // len(self.scheduler.running) - 1
        for request in sampling:
            output, drafted = self.outputs[request.id], len(request.draft)
            new = output.tokens[len(request.tokens) - request.num_prompt:]
            output.learn(drafted, len(new) - 1)
            self.drafted += drafted
            self.accepted += len(new) - 1
            self.sampled.append(new)
            if self.drafter:
                self.drafts += self.drafter.next(output, room)
        return events


# --------------------------------------------------------------------------------------------------
# HTTP: the OpenAI API


class Api:
    """The routes, over one engine. They run in uvicorn's thread: towards the engine they call
    `submit` and `cancel`; from it, events come once a step and go to each call's own queue."""

    def __init__(self, engine, name, flags=None):
        self.engine, self.name, self.tokenizer = engine, name, engine.tokenizer
        self.created, self.flags, self.metrics = int(time.time()), flags or Flags(), Metrics(engine)

    def app(self):
        import fastapi
        kinds = UserError, fastapi.exceptions.RequestValidationError, HTTPException, Exception
        app = fastapi.FastAPI(title="nanoshift", version="1",
                              exception_handlers=dict.fromkeys(kinds, Failure.handle))
        app.add_middleware(Gate, keys=self.flags.api_key or ())

        @app.get("/health")
        async def health():
            late = time.monotonic() - self.engine.beat > 3 * self.engine.IDLE_TICK
            status = self.engine.refusal or ("slow" if late else "ok")
            return JSONResponse({"status": status}, 200 if status == "ok" else 503)

        add_page(app, self)

        @app.get("/v1/models")
        @app.get("/v1/models/{id:path}")
        async def models(id: str = ""):
            return self._model(id) if id else {"object": "list", "data": [self._model(self.name)]}

        @app.post("/v1/completions")
        async def completions(body: CompletionBody, request: fastapi.Request):
            return await self._answer(body, request)

        @app.post("/v1/embeddings")
        async def embeddings(body: EmbeddingBody, request: fastapi.Request):
            return await self._answer(body, request)

        @app.post("/v1/chat/completions")
        async def chat_completions(body: ChatBody, request: fastapi.Request):
            return await self._answer(body, request)

        return app

    def _model(self, name):
        if name != self.name:
            raise Failure(404, f"no model {name!r:.80} here, only {self.name!r}", "model_not_found")
        return {"id": self.name, "object": "model", "created": self.created,
                "owned_by": "nanoshift", "max_model_len": self.engine.max_model_len}

    def _admit(self, body, choices):
        """Refuse what would wait too long, before it costs anything."""
        self._model(body.model or self.name)
        if self.engine.refusal:
            raise Failure(503, self.engine.refusal)
        most = self.engine.options.max_seqs + self.flags.max_waiting
        if len(self.engine.outputs) + len(self.engine.inbox) + choices > most:
            raise Failure(503 if choices <= most else 400, f"{choices} more would be too many: "
                          f"{most} requests may run or wait", headers={"retry-after": "1"})

    async def _answer(self, body, request):
        """Submit every choice of every prompt; stream or collect their events."""
        prompts, head = await self._encode(body), body.head(self.name)
        choices = body.choices(room=max(1, self.engine.max_model_len - len(prompts[0])))
        outputs = self._submit(head["id"], request, [*itertools.product(prompts, choices)],
                               body.stream)
        if body.stream:
            return StreamingResponse(self._stream(body, head, outputs),
                                     media_type="text/event-stream")
        async for _ in self._events(outputs):
            pass
        return Response(to_json(body.answer(head, outputs)), media_type="application/json")

    async def _encode(self, body):
        """The prompts (texts, ids, or conversations) as token ids; outside the engine's thread."""
        prompts = body.prompts()
        self._admit(body, len(prompts) * (body.n or 1))
        if not all(prompts):
            raise UserError("the prompt is empty: give it at least one character or token id")
        return await asyncio.to_thread(lambda: [body.encode(self.tokenizer, one)
                                                for one in prompts])

    def _submit(self, name, request, pairs, stream):
        """Queue all (prompt, params) or none; returns their Outputs, which share one queue: of all
        events for a stream, else of the last ones only."""
        for pair in pairs:
            self.engine.admissible(*pair)
        call = asyncio.Queue()
        call.name, call.stream = name, stream
        outputs = [self.engine.submit(*pair, i, call) for i, pair in enumerate(pairs)]
        call.guard = asyncio.create_task(self._cancel_after(request, outputs))
        return outputs

    async def _cancel_after(self, request, outputs):
        """Forget what is unfinished when the answer has been sent, or its client has gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        for output in outputs:
            self.engine.cancel(output)

    async def _stream(self, body, head, outputs):
        """Server-sent events: a chunk for each step that has text, usage if asked for, [DONE]."""
        pack = lambda **rest: f"data: {json.dumps({**head, **rest}, ensure_ascii=False)}\n\n"
        try:
            for output in outputs if isinstance(body, ChatBody) else ():     # once: who speaks
                yield pack(choices=[{"index": output.index, "finish_reason": None, "delta": {
                    "role": "assistant", "content": ""}}])
            async for event in self._events(outputs):
                if event.text or event.finish or event.output.params.logprobs is not None:
                    yield pack(choices=[body.choice(*event)])
            if (body.stream_options or {}).get("include_usage"):
                yield pack(choices=[], usage=body.usage(outputs))
            yield "data: [DONE]\n\n"
        except Failure as error:                             # too late for a status: an error event
            yield f"data: {json.dumps(error.body)}\n\n"

    async def _events(self, outputs):
        left = len(outputs)
        while left:
            event = await outputs[0].queue.get()             # the same for all
            await asyncio.sleep(0)     # with many at hand, still hear that the client has gone
            if event.finish in ("cancelled", "error"):
                raise Failure(503, self.engine.refusal or "cancelled: its client does not read it")
            left -= event.finish is not None
            yield event

    def dispatch(self, events):
        """Hand a step's events to the calls that wait for them; in uvicorn's thread."""
        for event in events:
            output, call = event.output, event.output.queue
            self.metrics.generation_tokens += len(event.samples)
            if event.finish or call.stream and call.qsize() < 1024:
                call.put_nowait(event)
            elif call.stream:                                # no memory for what nobody reads
                self.engine.cancel(output)
            line = event.finish and self.metrics.finished(output, event.finish)
            if line and not self.flags.quiet:
                print(line + "\n", end="", flush=True)       # in one write: threads share stdout


# --------------------------------------------------------------------------------------------------
# main


@dataclass(frozen=True)
class Flags(Options):
    """The command line: what the engine is told, and what the server is."""
    nproc: int = option(None, "start this many ranks on this host (without torchrun)", least=1)
    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "0: any free one", least=0, most=65535)
    api_key: list = option(None, "ask for this key on all routes but /health and /; repeatable")
    max_waiting: int = option(1024, "requests that may wait for a seat; more get a 503", least=0)
    grace: float = option(20, "seconds to finish running requests on SIGTERM", least=0, most=25)
    step_timeout: float = option(60, "seconds until a collective is stuck, not slow", least=1)
    quiet: bool = option(False, "no line in the log for each request")
    fixed_threshold: bool = option(False, "the page may not change the threshold")


class Parser(argparse.ArgumentParser):
    """Its mistakes are UserErrors, so that one rank can say them once."""

    def error(self, message):
        raise UserError(f"{message} (see --help)")


def parse(argv):
    """The command line."""
    parser = Parser(prog="serve.py", description="Serve a Llama with Shift Parallelism.",
                    allow_abbrev=False)
    kinds = {bool: {"action": "store_true"}, list: {"action": "append"}}
    for f in fields(Flags):
        parser.add_argument(f"--{f.name.replace('_', '-')}", default=f.default,
                            help=f.metadata["help"], **f.metadata["bare"],
                            **kinds.get(f.type, {"type": f.type}))
    return Flags(**vars(parser.parse_args(argv)))


def bind(host, port):
    """The server's socket, taken before the model is loaded: a port in use shows at once."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except OSError as e:
        raise UserError(f"--host {host} --port {port}: {e.strerror}; choose another") from None


def serve(flags):
    """One rank's life, from joining the others to leaving."""
    began = time.perf_counter()
    rank = connect()
    with Link("gloo").together():
        listener = bind(flags.host, flags.port) if rank == 0 else None
    engine = Engine(**{f.name: getattr(flags, f.name) for f in fields(Options)})

    def stop(number, frame):           # once: finish what runs; twice: at once
        engine.close(0 if engine.closing else flags.grace)
    # Only rank 0 decides about the end; the others hear of it in the next message.
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN if rank else stop)
    ended = threading.Event()
    finish = start_http(engine, flags, listener, began) if rank == 0 else lambda: None
    threading.Thread(target=watch, args=(engine, flags, ended, finish), daemon=True).start()
    try:
        engine.run()
    finally:                           # whatever ended it: no client waits for ever
        ended.set()
        engine.fail("the engine has ended: a rank is lost, or failed")
        finish()
    engine.model.graphs.clear()        # NCCL waits for ever for a graph that holds its calls
    dist.destroy_process_group()


def watch(engine, flags, ended, finish):
    """A thread that ends this rank when it is stuck, not slow: in a slow step one collective
    follows another. Rank 0 gives up first, as it can tell the clients. Turns are counted, not
    seconds, since a machine may have been asleep."""
    calls, turns, patience = 0, 0, flags.step_timeout / 0.5 * (1.25 if engine.rank else 1)
    while turns < patience:
        if ended.wait(0.5):
            return
        before, calls = calls, sum(count.calls for count in [*engine.link.counts.values()])
        turns = turns + 1 if calls == before else 0
    why = (f"stuck in step {engine.steps.total()}: no collective has returned for "
           f"{flags.step_timeout:g} s (--step-timeout), so a rank hangs or is stopped")
    print(f"serve.py: rank {engine.rank}: {why}", file=sys.stderr, flush=True)
    engine.fail(why)
    finish()
    os._exit(1)


def start_http(engine, flags, listener, began):
    """Serve from a thread of its own; returns the function that ends it."""
    import uvicorn
    name = engine.options.model.rstrip("/").removeprefix(str(Path(__file__).parent) + "/")
    api = Api(engine, name, flags)
    server = uvicorn.Server(uvicorn.Config(api.app(), log_level="warning", access_log=False))
    loop = asyncio.new_event_loop()
    engine.on_events = lambda events: loop.call_soon_threadsafe(api.dispatch, events)
    serving = server.serve(sockets=[listener])
    thread = threading.Thread(target=loop.run_until_complete, args=[serving], daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.01)
    announce(engine, name, flags, listener.getsockname(), time.perf_counter() - began)

    def finish():
        server.should_exit = True
        thread.join(timeout=5)
    return finish


def main(argv=None):
    """The command; returns the exit code. With --nproc it starts ranks, which run this again."""
    try:
        flags = parse(argv)
        if flags.nproc and "RANK" not in os.environ:
            return launch(main, flags.nproc, argv)
        return serve(flags)
    except UserError as e:             # said once; the other ranks, which know it too, meet rank 0
        if "RANK" in os.environ and not dist.is_initialized():
            connect()                  # and leave after it: torchrun ends all as soon as one has
        if os.environ.get("RANK", "0") == "0":
            print(f"serve.py: {e}", file=sys.stderr, flush=True)
        else:
            time.sleep(1)
        return 2
    except LostRank as e:
        print(f"serve.py: rank {os.environ.get('RANK')}: {e}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
