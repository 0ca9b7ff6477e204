"""metrics.py: what the server tells Prometheus, and the line of a finished request in the log.

    curl localhost:8000/metrics

It knows the engine's counters, and nothing of how they come about.
"""
from collections import Counter

import prometheus_client as prometheus
from starlette.responses import Response


class Metrics:
    """What /metrics shows, under vLLM's names where it has them. Only the histograms are kept here;
    the rest is read from the engine when asked for."""

    def __init__(self, engine):
        self.engine, self.registry = engine, prometheus.CollectorRegistry()
        self.requests, self.prompt_tokens, self.generation_tokens = Counter(), 0, 0
        names = "time_to_first_token", "request_time_per_output_token", "e2e_request_latency"
        self.histograms = [prometheus.Histogram(
            f"nanoshift:{name}_seconds", name.replace("_", " "), registry=self.registry,
            buckets=[1e-3 * 2 ** i for i in range(18)]) for name in names]           # to 2 minutes
        self.registry.register(self)

    def response(self):
        return Response(prometheus.generate_latest(self.registry),
                        media_type=prometheus.CONTENT_TYPE_LATEST)

    def finished(self, output, finish):
        """Count a request that has ended; returns its line for the log."""
        count, first = len(output.tokens), output.first or output.arrived
        ttft, tpot = first - output.arrived, (output.last - first) / max(1, count - 1)
        times = (ttft, tpot, output.last - output.arrived) if count else ()
        self.requests[finish] += 1
        self.prompt_tokens += len(output.prompt)
        for histogram, seconds in zip(self.histograms, times):
            histogram.observe(seconds)
        spent = f"ttft_ms={ttft * 1e3:.1f} tpot_ms={tpot * 1e3:.2f}" if count else (
            f"seconds={output.last - output.arrived:.3f}")   # embedded, or cancelled early
        return (f"request {output.queue.name}/{output.index} prompt_tokens={len(output.prompt)} "
                f"completion_tokens={count} {spent} finish={finish}")

    def collect(self):
        """Called by prometheus_client: (kind, name, what it is, value or values, their labels)."""
        engine, scheduler, families = self.engine, self.engine.scheduler, prometheus.metrics_core
        sent = [*engine.link.counts.items()]                 # the engine's thread adds to it
        gauge, counter = families.GaugeMetricFamily, families.CounterMetricFamily
        used = 1 - scheduler.blocks.available / engine.num_blocks
        for kind, name, text, values, *labels in (
                (gauge, "num_requests_running", "Requests with a seat", len(scheduler.running)),
                (gauge, "num_requests_waiting", "Requests without one", len(scheduler.waiting)),
                (gauge, "kv_cache_usage_perc", "KV blocks in use, 1 = all", used),
                (counter, "prompt_tokens", "Tokens of finished prompts", self.prompt_tokens),
                (counter, "generation_tokens", "Tokens sampled", self.generation_tokens),
                (counter, "prefix_cache_queries", "Tokens looked up", scheduler.prompt_tokens),
                (counter, "prefix_cache_hits", "Tokens found", scheduler.cached_tokens),
                (counter, "spec_decode_num_draft_tokens", "Tokens drafted", engine.drafted),
                (counter, "spec_decode_num_accepted_tokens", "Of those, accepted", engine.accepted),
                (counter, "request_success", "Requests ended", self.requests, "finished_reason"),
                (counter, "steps", "Steps", engine.steps, "mode"),
                (counter, "step_tokens", "Tokens computed", engine.step_tokens, "mode"),
                (counter, "switches", "Changes of mode", engine.switches),
                *((counter, f"collective_{field}", f"{field} of rank 0's collectives", {
                    key: getattr(count, field) for key, count in sent}, "op", "what")
                  for field in ("calls", "bytes", "seconds"))):
            family = kind(f"nanoshift:{name}", text, labels=labels)
            for key, value in [*values.items()] if labels else [((), values)]:
                family.add_metric([key] if len(labels) == 1 else key, value)
            yield family
