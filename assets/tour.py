"""tour.py: Shift Parallelism in the terminal, on real ranks with real tensors.

What it does: starts the ranks, gives them one toy attention layer, runs it in base mode and in
shift mode, and prints what each rank owns, every shape on the way, every byte sent, and one KV
block as each mode wrote it. `attention_layer` is the mechanism in 25 lines; `Llama.run_layers` in
model.py is the same with all that a real model needs (norms, RoPE, pages, an MLP).

What it does not know: models, requests, HTTP.

    python shift.py                                                   the tour
    python shift.py --ranks 4 --sp 2 --tp 2 --heads 8 --kv-heads 2    of another layout

Shapes (one legend in every file):
    T tokens in this step     P ranks = sp * tp      D hidden size      t tokens of this rank
    H query heads             K KV heads             Dh head size
    h = H/P, k = max(1, K/P)   what ONE rank owns (one "block" of heads)
    C = (h + 2k) * Dh          one block's q, k and v columns
"""
import argparse
import os
import sys
import textwrap
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from shift import (Layout, Link, Switch, UserError, both_modes, connect, cores, launch,
                   split_ranks, token_slices)

WIDTH = 98
PAGE = 16                              # tokens in a KV block
COLOURS = {"bold": 1, "base": 36, "shift": 33}


# --------------------------------------------------------------------------------------------------
# The layer: the same lines run both modes


class Weights:
    """One rank's weights of the layer, stored once, and the view of them that each mode uses.

    `stored` is the shard of base mode: its sp blocks, one after the other. Block s of them is the
    one that this rank computes alone in shift mode, so shift mode's weights are a slice of it.
    """

    def __init__(self, layout, rank, dim, head_dim):
        draw = torch.Generator().manual_seed(0)              # the same whole layer on every rank
        whole = lambda heads: dyadic(draw, heads, head_dim, dim) / 16
        q, k, v, o = map(whole, (layout.heads, layout.kv_heads, layout.kv_heads, layout.heads))
        qkv = [torch.cat([q[list(layout.q_heads(block))], k[list(layout.kv_heads_of(block))],
                          v[list(layout.kv_heads_of(block))]]).flatten(0, 1)
               for block in layout.shard(rank)]
        o = [o[list(layout.q_heads(block))].flatten(0, 1) for block in layout.shard(rank)]
        self.stored = torch.stack(qkv), torch.stack(o)       # (sp, C, D) and (sp, h*Dh, D)
        s, _ = layout.coordinates(rank)
        self.of = {"base": self.stored, "shift": [w[s:s + 1] for w in self.stored]}

    def extra_bytes(self):
        """What shift mode's weights take beyond base mode's: those not in the same storage."""
        return sum(view.nbytes for view, w in zip(self.of["shift"], self.stored)
                   if view.untyped_storage().data_ptr() != w.untyped_storage().data_ptr())


def dyadic(draw, *shape):
    """Random numbers, all multiples of 1/8: their products and sums are exact in any order.

    So keys and values can be compared bit for bit. With a trained model's weights both modes agree
    up to rounding, as any two orders of a sum do.
    """
    return torch.randint(-4, 5, shape, generator=draw).float() / 8


def attention_layer(x, weights, mode, layout, link, kv, tokens, note):
    """x (t, D) -> (t, D); keys and values of this rank's block go to kv (2, T, k, Dh).

    `note(what, letters, tensor, says)` is told of every shape.
    """
    (w_qkv, w_o), sp, h, k = weights.of[mode.name], mode.sp, layout.h, layout.k
    T, t, Dh, slices = tokens, x.shape[0], kv.shape[-1], token_slices(tokens, mode.sp)
    C, wide = (h + 2 * k) * Dh, f"its tokens, {sp} blocks" if sp > 1 else "all tokens, its block"
    note("x", "(t, D)", x, "its slice of the tokens" if sp > 1 else "all tokens")
    qkv = x @ w_qkv.mT                                  # (t, D) @ (sp, D, C) -> (sp, t, C)
    note("x @ w_qkv", "(sp, t, C)", qkv, wide)
    qkv = qkv.view(sp * t, C)                           # already ordered by destination
    if sp > 1:                                          # my tokens, all heads -> all, my heads
        qkv = link.all_to_all(qkv, [t] * sp, slices, mode.sp_group, "qkv")
        note("all_to_all", "(T, C)", qkv, "all tokens, its block", mode.sp_group, "qkv")
    q, *new = qkv.view(T, h + 2 * k, Dh).split([h, k, k], 1)
    kv.copy_(torch.stack(new))                          # the KV cache: all tokens, my block's heads
    q, key, value = (y.transpose(0, 1) for y in (q, *(y.repeat_interleave(h // k, 1) for y in kv)))
    o = F.scaled_dot_product_attention(q, key, value, is_causal=True)         # (h, T, Dh)
    o = o.transpose(0, 1).reshape(T, h * Dh)
    note("attention", "(T, h*Dh)", o, "keys, values now cached")
    if sp > 1:                                          # all tokens, my heads -> mine, all heads
        o = link.all_to_all(o, slices, [t] * sp, mode.sp_group, "attention").view(sp, t, h * Dh)
        note("all_to_all", "(sp, t, h*Dh)", o, wide, mode.sp_group, "attention")
        o = o.transpose(0, 1).reshape(t, sp * h * Dh)
        note("transpose", "(t, sp*h*Dh)", o, "a token's heads in a row")
    o = o @ w_o.flatten(0, 1)                           # (t, sp*h*Dh) @ (sp*h*Dh, D) -> (t, D)
    note("@ w_o", "(t, D)", o, "its part of a sum" if mode.tp > 1 else "the result")
    if mode.tp > 1:
        link.all_reduce(o, mode.tp_group, "o")
        note("all_reduce", "(t, D)", o, "the sum: the result", mode.tp_group, "o")
    return o


def elements_sent(layout, rank, tokens, dim, head_dim):
    """Elements that one rank sends to others in one layer of base mode, by collective.

    Worked out from the token slices, in the order of the forward pass. Their average over the ranks
    is the closed form of `formula`. (DESIGN: a ring all_reduce of n ranks sends 2(n-1)/n of x.)
    """
    s, _ = layout.coordinates(rank)
    mine, columns = token_slices(tokens, layout.sp)[s], (layout.h + 2 * layout.k) * head_dim
    reduce = 2 * (layout.tp - 1) / layout.tp * mine * dim
    return {"qkv all_to_all": (layout.sp - 1) * mine * columns,
            "attention all_to_all": (tokens - mine) * layout.h * head_dim,
            "o all_reduce": reduce, "mlp all_reduce": reduce}


def formula(layout, tokens, dim, head_dim):
    """The average over ranks: T*D * [4(tp-1)/(tp*sp) + (sp-1)/(sp*P) * (2H + 2K')*Dh/D]."""
    sp, tp, ranks = layout.sp, layout.tp, layout.ranks
    both = 2 * layout.heads + 2 * max(layout.kv_heads, ranks)
    return tokens * dim * (4 * (tp - 1) / (tp * sp)
                           + (sp - 1) / (sp * ranks) * both * head_dim / dim)


def traffic(layout, tokens, dim, head_dim):
    """Elements sent in one layer, as the average over the ranks: by collective, and summed up."""
    sent = [elements_sent(layout, rank, tokens, dim, head_dim) for rank in range(layout.ranks)]
    mean = {op: sum(one[op] for one in sent) / layout.ranks for op in sent[0]}
    total = sum(mean.values())
    return {**mean, "sum": total, "closed form": formula(layout, tokens, dim, head_dim),
            "sum / (T * D)": total / tokens / dim}


# --------------------------------------------------------------------------------------------------
# On every rank: run the layer both ways, keep what happened, and let rank 0 tell


def rank_main(layout, tokens, dim, head_dim):
    """What each of the started processes does; returns its exit code."""
    torch.set_num_threads(1)
    rank = connect()
    link = Link()                                       # gloo: it works everywhere
    modes = both_modes(layout, link)
    weights = Weights(layout, rank, dim, head_dim)
    x = dyadic(torch.Generator().manual_seed(1), tokens, dim)
    seen = {mode.name: run(x, weights, mode, layout, link, head_dim) for mode in modes}
    base, shift = (seen[mode.name] for mode in modes)
    first, last = ends(tokens, layout.sp, modes[0].s)
    seen.update(stored=sum(w.nbytes for w in weights.stored), extra=weights.extra_bytes(),
                view=[(w.shape, view.shape, view.storage_offset())
                      for w, view in zip(weights.stored, weights.of["shift"])],
                same_kv=torch.equal(base["kv"], shift["kv"]),
                gap=(base["out"] - shift["out"][first:last]).abs().max().item()
                if last > first else 0.0)
    for result in (base, shift):
        result.pop("out")
        result["kv"] = result["kv"][:, :PAGE].clone()   # of which a part is printed
    told = link.gather(seen)
    if rank == 0:
        tell(layout, tokens, dim, head_dim, told)

    def step_seconds(name, size):
        mode = modes[name == "shift"]
        mine = x.new_zeros(token_slices(size, mode.sp)[mode.s], dim)
        kv = x.new_empty(2, size, layout.k, head_dim)
        link.barrier()
        start = time.perf_counter()
        attention_layer(mine, weights, mode, layout, link, kv, size, lambda *_: None)
        return time.perf_counter() - start

    switch = Switch.measured(step_seconds, 256, link, budget=1.5) if layout.sp > 1 else None
    if rank == 0:
        tell_when(layout, tokens, dim, head_dim, told[0]["stored"], switch)
    link.barrier()
    return 0


def run(x, weights, mode, layout, link, head_dim):
    """One step of all tokens x (T, D) in one mode: its shapes, bytes sent, cache and output."""
    notes, T = [], len(x)
    first, last = ends(T, mode.sp, mode.s)
    kv = x.new_empty(2, T, layout.k, head_dim)

    def note(what, letters, tensor, says, group=None, name=None):
        nbytes = None if group is None else link.counts[what, name].bytes
        notes.append((what, group and group.ranks, letters, tuple(tensor.shape), nbytes, says))

    link.counts.clear()
    out = attention_layer(x[first:last], weights, mode, layout, link, kv, T, note)
    sent = {f"{what} {op}": count.bytes for (op, what), count in link.counts.items()}
    return {"notes": notes, "sent": sent, "kv": kv, "out": out}


def ends(tokens, sp, s):
    """The tokens of slice s: from the first up to, and without, the last."""
    return tokens * s // sp, tokens * (s + 1) // sp


# --------------------------------------------------------------------------------------------------
# What it says


def paint(text, colour):
    """Colour for eyes only: a file or a pipe gets plain text."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\033[{COLOURS[colour]}m{text}\033[0m"


def chapter(number, title):
    print("\n" + paint(f"{number}. {title} ".ljust(WIDTH, "-"), "bold"))


def span(items):
    """A range in words: 4-7, 4, or none."""
    return "-".join(map(str, sorted({items[0], items[-1]}))) if items else "none"


def members(ranks):
    """Ranks of a group, short: 0-7, or 1 3 5 7, or 1 3 .. 15."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return span(ranks)
    return " ".join(map(str, ranks if len(ranks) < 5 else [*ranks[:2], "..", ranks[-1]]))


def size(nbytes):
    return f"{nbytes / 1024:,.1f} KB" if nbytes < 2 ** 20 else f"{nbytes / 2 ** 20:,.1f} MB"


def count(number, noun):
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def ownership(layout, tokens):
    """Which rank owns what, as a table."""
    lines = [
        "        |      in both modes       |       base mode       |      shift mode",
        "rank s t|block q heads KV heads    | tokens    weights of  | tokens    weights of",
        "        |      = its KV cache      |           blocks      |           block",
        "-" * 80]
    for rank in range(layout.ranks):
        (s, t), block = layout.coordinates(rank), layout.block(rank)
        own = range(*ends(tokens, layout.sp, s))
        lines.append(
            f"{rank:4} {s} {t}|{block:5} {span(layout.q_heads(block)):7} "
            f"{span(layout.kv_heads_of(block)):12}| {span(own):9} {span(layout.shard(rank)):12}| "
            f"{span(range(tokens)):9} {block}")
    return "\n".join(lines)


def sums(layout, tokens, dim, head_dim):
    """The traffic of one layer in both modes, as a table."""
    base, shift = (traffic(way, tokens, dim, head_dim) for way in (layout, layout.shift))
    return "\n".join([f"{'':24}{'base':>14}{'shift':>14}",
                      *(f"{name:24}{base[name]:14,.3f}{shift[name]:14,.3f}" for name in base)])


def introduce(layout, tokens):
    print(f"{layout.ranks} ranks = sp {layout.sp} x tp {layout.tp};  {layout.heads} query heads, "
          f"{layout.kv_heads} KV heads;  a step of {tokens} tokens")
    chapter(1, "Who owns what")
    print(ownership(layout, tokens))
    print(f"""
Every layer is cut into {count(layout.ranks, 'equal block')}, one for each rank. A rank has two \
coordinates: s, its slice
of the tokens, and t, its shard of the weights; rank = s * tp + t. The line that matters:

    rank (s, t) attends with the heads of block t * sp + s   in BOTH modes

so the keys and values of a head are on one rank whatever the mode: a switch moves nothing.""",
          flush=True)


def tell(layout, tokens, dim, head_dim, told):
    """Chapters 2 to 5, from what the ranks have seen."""
    hero = min(layout.tp + (layout.tp > 1), layout.ranks - 1)     # s = t = 1, where there is one
    (s, t), block, seen = layout.coordinates(hero), layout.block(hero), told[hero]
    me = f"rank {hero} = (s {s}, t {t})"
    chapter(2, "One copy of the weights, two views")
    print(f"{me} stores the {count(layout.sp, 'block')} {span(layout.shard(hero))} of shard {t}, "
          f"one after the other. Shift mode uses\nnumber {s} of them, block {block}, where it "
          "lies: a slice of the same memory.\n")
    for name, (whole, view, offset) in zip(("w_qkv", "w_o"), seen["view"]):
        print(f"    {name:5}  base {str(tuple(whole)):20} shift {str(tuple(view)):20} "
              f"starts at element {offset:,}")
    print(f"\nStored: {size(seen['stored'])}. Beyond that, for shift mode: {seen['extra']} bytes "
          f"(all ranks together: {sum(one['extra'] for one in told)}).")

    chapter(3, f"One attention layer, seen from {me}")
    print("Real processes have just moved these numbers. Lines with * are the only places where "
          "ranks talk.")
    for name, way in (("base", layout), ("shift", layout.shift)):
        own = range(*ends(tokens, way.sp, way.coordinates(hero)[0]))
        blocks = layout.shard(hero) if name == "base" else [block]
        print("\n" + paint(f"{name} mode: sp {way.sp} x tp {way.tp}; tokens {span(own)}, weights "
                           f"of {'block' if len(blocks) == 1 else 'blocks'} {span(blocks)}", name))
        for what, ranks, letters, shape, nbytes, says in seen[name]["notes"]:
            place = f"{what} over {members(ranks)}" if ranks else what
            sent = f"{size(nbytes)} sent" if ranks else ""
            print(f"  {'*' if ranks else ' '} {place:24} {letters:14} {str(shape):15} {sent:>13}  "
                  f"{says}")

    chapter(4, "The same KV block, as each mode wrote it")
    head = layout.kv_heads_of(block)[0]
    print(f"Keys of KV head {head} in the cache of rank {hero}, KV block 0 "
          f"(its first {count(min(PAGE, tokens), 'token')}), the first columns:\n")
    width = min(5, head_dim)
    print(f"  token  {'after a base step':{9 * width}}   after a shift step")
    for token in range(min(4, tokens)):
        rows = ["".join(f"{number:9.4f}" for number in seen[name]["kv"][0, token, 0, :width])
                for name in ("base", "shift")]
        print(f"  {token:5}{paint(rows[0], 'base')}   {paint(rows[1], 'shift')}")
    same, gap = sum(one["same_kv"] for one in told), max(one["gap"] for one in told)
    print(f"\nBit for bit the same on {same} of {count(layout.ranks, 'rank')}. "
          f"The layer's outputs differ by at most {gap:.0e} (rounding).")

    chapter(5, "Who sends how much")
    print("Elements sent to other ranks in one layer, average over the ranks (the MLP, not run "
          "here, ends in\none more all_reduce like o's):\n")
    print(sums(layout, tokens, dim, head_dim))
    right = 0
    for rank, one in enumerate(told):
        for name, way in (("base", layout), ("shift", layout.shift)):
            expected = elements_sent(way, rank, tokens, dim, head_dim)
            got = {op: one[name]["sent"].get(op, 0) for op in expected}
            right += all(got[op] == int(4 * expected[op]) for op in expected if "mlp" not in op)
    print(f"\nThe bytes that the links counted above are 4 times these, for "
          f"{right} of {2 * layout.ranks} ranks and modes.", flush=True)


def tell_when(layout, tokens, dim, head_dim, stored, switch):
    """Chapter 6: why there are two modes, and how a step picks one."""
    chapter(6, "When to switch")
    ways = layout, layout.shift
    read = [size(stored * way.sp // layout.sp) for way in ways]
    sent = [size(4 * formula(way, tokens, dim, head_dim) / tokens) for way in ways]
    names = [paint(f"{name:>12}", name) for name in ("base", "shift")]
    print(f"""Arithmetic is the same: T tokens times 1/{layout.ranks} of the layer on each rank. \
What differs:

{'':36}{names[0]}{names[1]}
    attention weights read, a step  {read[0]:>12}{read[1]:>12}   counts most with few tokens
    sent in the layer, a token      {sent[0]:>12}{sent[1]:>12}   counts most with many tokens

So few tokens (somebody waits for the next word) want shift mode; many (a long prompt, a crowd)
want base mode. The rule of the paper, applied anew to every step:

    {paint('tokens in the step <= N: shift mode, else base mode', 'bold')}""")
    if switch is None:
        print("\nWith sp 1 the two modes are one and the same.")
    else:
        print(f"""
N depends on the machine, so the server times both modes when it starts. This toy, on \
{count(layout.ranks, 'rank')} that
share {count(cores(), 'core')} and talk over gloo's sockets (no GPUs, so the answer can surprise),
{switch.why}:
""")
        print(textwrap.fill(str(switch), WIDTH, initial_indent="    ", subsequent_indent="    "))
    print("\nNext: `Layout`, `Mode` and `Link` in shift.py, then `Llama.run_layers` in model.py.",
          flush=True)


# --------------------------------------------------------------------------------------------------
# The command


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(message)                        # one line, without the usage


def arguments(argv):
    """(layout, tokens, dim, head_dim) from the command line, or a UserError."""
    parser = Parser(prog="shift.py", description="Shift Parallelism, on real ranks.",
                    allow_abbrev=False)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--sp", type=int, help="sequence-parallel degree of base mode")
    parser.add_argument("--tp", type=int, help="tensor-parallel degree of base mode")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dim", type=int, help="hidden size, default heads * head-dim")
    parser.add_argument("--tokens", type=int, default=100, help="tokens in the step")
    args = parser.parse_args(argv)
    if args.sp is args.tp is None and args.ranks > 2 and args.ranks % 2 == 0:
        args.tp = 2                                     # a mixed layout shows more
    sp, tp = split_ranks(args.ranks, args.sp, args.tp)
    layout = Layout(sp, tp, args.heads, args.kv_heads, ffn=args.heads)
    dim = args.heads * args.head_dim if args.dim is None else args.dim
    if min(args.tokens, args.head_dim, dim) < 1:
        raise UserError("--tokens, --head-dim and --dim must be at least 1")
    return layout, args.tokens, dim, args.head_dim


def main(argv=None):
    try:
        layout, tokens, dim, head_dim = arguments(argv)
    except UserError as e:
        print(f"shift.py: {e}", file=sys.stderr)
        return 2
    introduce(layout, tokens)
    return launch(rank_main, layout.ranks, layout, tokens, dim, head_dim)


if __name__ == "__main__":
    sys.exit(main())
