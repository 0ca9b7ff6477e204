"""trace_file.py: the file that `--trace` writes, in Chrome's trace-event format.

    python serve.py --nproc 8 --trace trace.json          then open it in ui.perfetto.dev

A process for each rank, with lanes for steps, layers, compute and collectives; requests as spans,
and counters. All ranks append whole steps to one file, ten times a second: if the server is killed,
only the last tenth of a second and the "]" at the end are missing. The ranks' clocks are compared
at the start; the times are rank 0's.
"""
import json
import os
import time
from pathlib import Path

from shift import UserError

LANES = "steps", "layers", "compute", "collectives"


class TraceFile:
    """Writes the first `trace_steps` steps of all ranks; does nothing without `--trace`.

    This happens between two steps, so it must be cheap: a step is only kept, and the steps of a
    tenth of a second are formatted and written together. Most differ only in their times: what they
    have in common is formatted once, as a template with a place for each time.
    """

    def __init__(self, link, options):
        self.link, self.left, self.file, self.templates = link, options.trace_steps, None, {}
        self.events, self.steps, self.flushed = [], [], 0.0
        if not options.trace:
            return
        with link.together():
            try:
                Path(options.trace).write_text("[\n") if link.rank == 0 else None
            except OSError as e:
                raise UserError(f"--trace {options.trace}: {e.strerror}") from None
        link.marked = True
        self.file = os.open(options.trace, os.O_WRONLY | os.O_APPEND)
        self.offset, error = self._compare_clocks()
        self.events = [self._event("M", 0, 0, "process_name", args={"name": f"rank {link.rank}"})]
        self.events += (self._event("M", lane, 0, "thread_name",
                                    args={"name": name, "clock_error": error})
                        for lane, name in enumerate(LANES))

    def _compare_clocks(self):
        """(seconds to add to this rank's clock to have rank 0's, seconds that may be wrong)."""
        found = []
        for _ in range(21):
            self.link.barrier()
            times = self.link.gather(time.perf_counter())
            found.append(times[0] - times[self.link.rank])
        return sorted(found)[10], max(found) - min(found)

    def _at(self, seconds):
        return int((seconds + self.offset) * 1e6)

    def _event(self, kind, lane, at, name, **more):
        return json.dumps({"ph": kind, "pid": self.link.rank, "tid": lane, "name": name, "ts": at,
                           **more}) + ",\n"

    def flush(self):
        """Write what there is. (A write for each step would let the ranks wait for each other.)"""
        self.events += (self._events_of(*step) for step in self.steps)
        try:
            if self.file is not None:
                os.write(self.file, "".join(self.events).encode())
        except OSError as e:                                    # the server goes on without it
            print(f"serve.py: rank {self.link.rank}: --trace ends here: {e.strerror}\n", end="",
                  flush=True)
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file)
        self.events, self.steps, self.flushed = [], [], time.perf_counter()

    def request(self, id, start, end):
        """A request, from its arrival to its last token."""
        if self.file is not None:
            self.events += [self._event(kind, 0, self._at(at), f"request {id}", cat="request",
                                        id=id) for kind, at in (("b", start), ("e", end))]

    def step(self, step, engine):
        """A Step, and the counters after it: kept, to be written with the next ones."""
        if self.file is None:
            return
        self.steps.append((step, engine.switch.threshold or 0, len(engine.scheduler.waiting),
                           engine.num_blocks - engine.scheduler.blocks.available))
        self.left -= 1
        if not self.left:
            self.close()
        elif step.end - self.flushed > 0.1:
            self.flush()

    def _events_of(self, step, threshold, waiting, used):
        """The events of a Step, as text; of the counters only rank 0's."""
        key = step.tokens, step.mode, *[call[:6] for call in step.calls]
        if key not in self.templates:
            if len(self.templates) > 4096:
                self.templates.clear()
            self.templates[key] = self._template(step)
        last, end = self._at(step.start), self._at(step.end)
        times, layers, number = [last, end - last], [], step.number
        for call in step.calls:
            start = self._at(call[6])
            if call[0] == "mark":
                layers.append(start)
                continue
            stop = self._at(call[6] + call[7])
            times += last, start - last, start, stop - start, number
            last = stop
        times += last, end - last
        for start, stop in zip(layers, [*layers[1:], end]):
            times += start, stop - start
        if self.link.rank == 0:
            times += end, step.tokens, threshold, end, waiting, end, used
        return self.templates[key] % tuple(times)

    def _template(self, step):
        """The events of such a step; %d for its times, and for what else changes."""
        hole = "%d"
        span = lambda lane, name, **args: self._event("X", lane, hole, name.replace("%", "%%"),
                                                      dur=hole, args=args)
        events = [span(0, f"{step.mode} {step.tokens} tokens")]
        for call in step.collectives:
            events += span(2, "compute"), span(
                3, f"{call.what} {call.op}", step=hole, group=[*call.group], before=[*call.before],
                after=[*call.after], bytes=call.bytes)
        events += [span(2, "compute")] + [span(1, call[1]) for call in step.calls
                                          if call[0] == "mark"]
        if self.link.rank == 0:
            counter = lambda name, *values: self._event("C", 0, hole, name,
                                                        args=dict.fromkeys(values, hole))
            events += (counter("tokens", "tokens", "threshold"), counter("waiting", "requests"),
                       counter("KV blocks", "used"))
        return "".join(events).replace(f'"{hole}"', hole)

    def close(self):
        """The end of the file; all ranks come here at the same point."""
        if self.file is not None:
            self.flush()
            self.link.barrier()
            if self.link.rank == 0:
                self.events = ['{"ph": "M", "pid": 0, "name": "end"}]\n']
                self.flush()
            os.close(self.file)
            self.file = None
