"""explain.py: what the server prints: how it has started; with --explain each step in words, and
its collectives by shape and purpose.

    python serve.py --nproc 8 --explain            a line for each step
    python serve.py --nproc 8 --explain 2          and one for each collective of its first layer
"""
import sys
from collections import defaultdict

# The shapes in the legend's letters (model.py), and what the collective is for
LEGEND = {"qkv": ("(sp*t, C) -> (T, C)", "my tokens, all heads -> all tokens, my heads"),
          "attention": ("(T, h*Dh) -> (sp*t, h*Dh)", "all tokens, my heads -> mine, all heads"),
          "o": ("(t, D)", "the sum of all ranks' heads"),
          "mlp": ("(t, D)", "the sum of all ranks' MLP columns"),
          "swiftkv": ("(sp*t, D) -> (T, D)", "my tokens -> all tokens, for later layers' K and V"),
          "pool": ("(pools + 1, D)", "the sums of all slices' tokens, of texts to embed"),
          "logits": ("", "rows to all ranks, their slices of the vocabulary to rank 0")}


def announce(engine, name, flags, address, seconds):
    """Print what was started, when it switches, and where it listens."""
    host, port = address[:2]
    if not (flags.api_key or host.startswith("127.") or host == "::1"):
        print(f"serve.py: warning: no --api-key, and {host} is public", file=sys.stderr, flush=True)
    print(f"nanoshift: {name}, {engine.link.size} ranks (sp {engine.layout.sp} x tp "
          f"{engine.layout.tp}), {engine.link.backend} link{engine.remark}, context "
          f"{engine.max_model_len}, {engine.num_blocks} KV blocks\n"
          f"switch: {engine.switch} ({engine.switch.why})\n"
          f"ready in {seconds:.1f} s: http://{host}:{port}", flush=True)


def explain(engine, step, mode):
    """Print one Step of rank 0."""
    groups = defaultdict(list)
    for call in step.collectives:
        groups[call.what, call.op].append(call)
    sent = [f"{what} {op} {len(of)} x {sum(call.bytes for call in of) / len(of) / 1024:.1f} KB"
            for (what, op), of in groups.items()]
    emulated = ", emulated link" * bool(engine.link.emulate)
    drafts = (f" ({engine.accepted} of {engine.drafted} drafts accepted so far)"
              if engine.drafted else "")
    switch = engine.switch
    why = switch.why if switch.threshold is None else (
        f"{step.tokens} {'<=' if switch.shift[step.tokens] else '>'} threshold {switch.threshold}")
    lines = [f"step {step.number:4} | {step.tokens:4} tokens: {step.prefill} prefill, "
             f"{step.decode} decode{drafts} | {step.mode:5} sp {mode.sp} x tp {mode.tp}, {why} | "
             f"{step.milliseconds:.1f} ms{emulated} | rank 0 sent {', '.join(sent) or 'nothing'}"]
    for (what, op), (first, *others) in groups.items() if engine.options.explain > 1 else ():
        letters, purpose = LEGEND[what]
        lines.append(f"  {what:9} {op:10} {letters:26} {tuple(first.before)} -> "
                     f"{tuple(first.after)}, among {len(first.group)} ranks, "
                     f"{first.bytes / 1024:.1f} KB sent, {first.seconds * 1e6:.0f} us: {purpose}; "
                     f"{len(others)} more like it: "
                     f"{sum(call.seconds for call in others) * 1e6:.0f} us")
    # in one write, line ends included: another thread prints too
    print("".join(line + "\n" for line in lines), end="", flush=True)
