#!/usr/bin/env python3
"""Writes meshfill.json, the Grafana dashboard, from the rows and queries below.

Usage: make_dashboard.py            write it beside this file
       make_dashboard.py --check    exit 1 where the file is not what this would write

A row is a question, most urgent first. Import the JSON into Grafana 9 or later and choose the Prometheus data source; the
rows about ratios use the recording rules of deploy/prometheus/recording.yml.

A prefill counts when it ends, and may take minutes: a rate over Grafana's $__rate_interval, a minute, would be gaps and spikes.
So rates have a window of their own, the variable `window`; .lint tells Grafana's dashboard-linter.
"""
import json
import pathlib
import sys

OUTPUT = pathlib.Path(__file__).with_name("meshfill.json")
FRONT_END = "meshfill_queue_max_tokens"  # a series that no worker has
POOL = 'namespace=~"$namespace",job=~"$job",instance=~"$instance"'
RANK = POOL + ',rank=~"$rank"'
WINDOW = "$window"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24  # of Grafana's grid
SERVING = f'meshfill_ranks{{{POOL},state!~"loading|draining"}}'


def query(expression, legend, instant=False, form="time_series", **options):
    return {"datasource": SOURCE, "expr": expression, "legendFormat": legend, "instant": instant, "range": not instant,
            "format": form, **options}


def panel(kind, title, unit, queries, width, about, height=8, options=None, **defaults):
    return {"type": kind, "title": title, "description": about, "datasource": SOURCE,
            "targets": [dict(each, refId=chr(ord("A") + index)) for index, each in enumerate(queries)],
            "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": []},
            "options": options or {}, "gridPos": {"w": width, "h": height}}


def graph(title, unit, queries, about, width=8, stacked=False, **defaults):
    style = {"lineWidth": 2, "fillOpacity": 30 if stacked else 8, "showPoints": "never", "spanNulls": True,
             "stacking": {"mode": "normal" if stacked else "none"}}
    return panel("timeseries", title, unit, queries, width, about, min=0, custom=style,
                 options={"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}, **defaults)


def number(title, unit, expression, about, steps=(), width=4):
    thresholds = {"mode": "absolute", "steps": [{"color": "text", "value": None}] + [
        {"color": colour, "value": value} for value, colour in steps]}
    return panel("stat", title, unit, [query(expression, "")], width, about, height=4, thresholds=thresholds,
                 options={"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}})


def labels_table(title, metric, about, width):
    """One row for each series, of labels alone."""
    made = panel("table", title, "none", [query(f"{metric}{{{POOL}}}", "", instant=True, form="table")], width, about, height=4)
    hidden = {name: True for name in ("Time", "Value", "__name__")}
    return {**made, "transformations": [{"id": "organize", "options": {"excludeByName": hidden}}]}


def rate(metric, labels=POOL):
    return f"rate({metric}{{{labels}}}[{WINDOW}])"


def increase(metric):
    return f"sum(increase({metric}{{{POOL}}}[{WINDOW}]))"


def quantile(share, metric):
    return f"histogram_quantile({share}, sum by (le) ({rate(metric + '_bucket')}))"


def rows():
    return [
        ("Is the pool there, and does it answer?", [
            number("Ranks that serve", "short", f"sum({SERVING})",
                   "Ranks that are neither loading nor draining. 0: nothing is answered.", steps=[(0, "red"), (1, "green")]),
            number("Tokens/s (30 min)", "short", f"sum(meshfill:prompt_tokens:rate{{{POOL}}})",
                   "Prompt tokens of prefills that ended within 30 minutes."),
            number("Tokens in the queue", "short", f"sum(meshfill_queue_tokens{{{POOL}}})",
                   "Of requests that wait or upload. KEDA scales on this."),
            number("Oldest in the queue", "s", f"max(meshfill_queue_oldest_seconds{{{POOL}}})",
                   "Since its upload was complete.", steps=[(600, "orange"), (3600, "red")]),
            number("Comm wait of attention", "percentunit", f"avg(meshfill:comm_wait_ratio:pool{{{POOL}}})",
                   "Share of attention in which ranks stood still for a chunk.", steps=[(0.2, "orange"), (0.4, "red")]),
            number("MFU", "percentunit", f"avg(meshfill_mfu{{{POOL}}})", "Whole model, of the last prefill."),
            graph("Requests that ended, by status", "short",
                  [query(f"sum by (code) (increase(meshfill_requests_total{{{POOL}}}[{WINDOW}])) > 0", "{{code}}")],
                  "In the window, refused ones too. RESOURCE_EXHAUSTED: the queue was full, or the deadline could not be met.",
                  stacked=True),
            graph("Ranks by state", "short", [query(f"sum by (state) (meshfill_ranks{{{POOL}}})", "{{state}}")],
                  "All ranks of the pool. A worker that is lost takes its ranks with it until it joins again.", stacked=True),
            graph("Pool: epochs, losses, retries", "short",
                  [query(increase(f"meshfill_{what}_total"), name) for what, name in (
                      ("epochs", "epochs"), ("worker_joins", "joins"), ("worker_losses", "losses"),
                      ("worker_refusals", "refusals"), ("requests_retried", "retries"))],
                  "In the window. A worker that joins, leaves or is lost begins an epoch; a run that it breaks is retried."),
        ]),
        ("How long do clients wait for the first token?", [
            graph("TTFT", "s", [query(quantile(0.5, "meshfill_ttft_seconds"), "median"),
                                query(quantile(0.95, "meshfill_ttft_seconds"), "95 %"),
                                query(quantile(0.99, "meshfill_ttft_seconds"), "99 %", exemplar=True)],
                  "From a request's begin to its result, of requests that ended in the window, short and long prompts together: "
                  "see the mean prompt beside it. Dots are requests whose traces are recorded, where Prometheus keeps exemplars."),
            graph("TTFT by prompt length", "s",
                  [query("histogram_quantile(0.95, sum by (le, up_to) "
                         f"({rate('meshfill_ttft_by_prompt_seconds_bucket')}))", "up to {{up_to}} tokens")],
                  "95 % of the requests that ended in the window. Each class has the prompts that are longer than the class before."),
            graph("Slowdown by prompt length", "none",
                  [query("histogram_quantile(0.99, sum by (le, up_to) "
                         f"({rate('meshfill_slowdown_bucket')}))", "up to {{up_to}} tokens")],
                  "99 % of the requests that ended in the window: wait and prefill over the prediction for the prompt alone. 1: as if nobody else were there."),
            graph("Prompt length", "short", [query(quantile(share, "meshfill_request_prompt_tokens"), name)
                                             for share, name in ((0.5, "median"), (0.95, "95 %"))],
                  "Tokens of the prompts of requests that were answered in the window."),
            graph("Mean prompt", "short",
                  [query(f"sum({rate('meshfill_prompt_tokens_total')}) / sum({rate('meshfill_prefill_seconds_count')})", "tokens")],
                  "Tokens of a finished prefill, on average in the window. TTFT grows faster than this: attention is quadratic."),
            graph("Refused requests", "percentunit", [query(f"meshfill:refused_ratio{{{POOL}}}", "{{instance}}")],
                  "Share of requests in 30 minutes that ended with RESOURCE_EXHAUSTED or UNAVAILABLE.", max=1),
            graph("Refused requests, by reason", "short",
                  [query(f"sum by (reason) (increase(meshfill_requests_refused_total{{{POOL}}}[{WINDOW}])) > 0", "{{reason}}")],
                  "In the window: which bound it was, or what was wrong with the request. docs/metrics.md explains each.", stacked=True),
            graph("Results that nobody read", "short", [query(increase("meshfill_results_dropped_total"), "dropped")],
                  "In the window. They count as OK, and their clients got CANCELLED: limits.result_timeout, limits.unread_bytes."),
            graph("Slower than the objective", "percentunit",
                  [query(f"meshfill:ttft_slow_ratio:1h{{{POOL}}}", "1 h {{instance}}"),
                   query(f"meshfill:ttft_slow_ratio:6h{{{POOL}}}", "6 h {{instance}}")],
                  "Share of answers whose TTFT was above 10 minutes. The objective, and an alert, is 5 %.", max=1),
            graph("Upload and queue before it", "s",
                  [query(quantile(share, f"meshfill_{metric}_seconds"), f"{what}, {name}")
                   for metric, what in (("queue_wait", "queue"), ("upload", "upload"))
                   for share, name in ((0.5, "median"), (0.95, "95 %"))],
                  "The queue: from the complete upload to the prefill's begin, of prefills that began in the window. The upload: of "
                  "requests that ended in it."),
            graph("Queue", "short", [query(f"sum(meshfill_queue_tokens{{{POOL}}})", "tokens waiting"),
                                     query(f"sum(meshfill_running_tokens{{{POOL}}})", "tokens running")],
                  "Tokens of prompts that wait or upload, and of the prefill that runs."),
            graph("Prefills that gave way", "short", [query(increase("meshfill_preemptions_total"), "times")],
                  "In the window: how often a prefill stood still for a shorter or a more urgent one."),
            graph("Prefill: predicted and real", "s",
                  [query(f"meshfill_predicted_seconds{{{POOL}}}", "predicted {{instance}}"),
                   query(f"meshfill_predicted_seconds{{{POOL}}} * meshfill_prediction_ratio{{{POOL}}}", "real {{instance}}")],
                  "The last prefill, without its wait in the queue."),
            graph("Real seconds per predicted one", "none", [query(f"meshfill:prediction_ratio{{{POOL}}}", "{{instance}}")],
                  "1 is right. Admission and planning rest on it."),
            graph("Queue, share of its bound", "percentunit",
                  [query(f"meshfill_queue_tokens{{{POOL}}} / meshfill_queue_max_tokens{{{POOL}}}", "tokens {{instance}}"),
                   query(f"meshfill_queue_requests{{{POOL}}} / meshfill_queue_max_requests{{{POOL}}}", "requests {{instance}}"),
                   query(f"meshfill_queue_oldest_seconds{{{POOL}}} / meshfill_queue_max_wait_seconds{{{POOL}}}",
                         "oldest {{instance}}")],
                  "At 100 % of the tokens or the requests new prompts are refused. The oldest may wait as long as queue.max_wait."),
        ]),
        ("How much of attention is communication that nothing hides?", [
            panel("status-history", "Comm wait of each rank", "percentunit",
                  [query(f"meshfill:comm_wait_ratio:rank{{{RANK}}}", "{{instance}} rank {{rank}}")], 12,
                  "A red column: all wait, so the links bind. A red row: one rank waits for another.",
                  color={"mode": "continuous-GrYlRd"}, min=0, max=0.6, options={"rowHeight": 0.9, "showValue": "never"}),
            graph("Comm wait by operation", "percentunit",
                  [query(f"avg by (op) (meshfill:comm_wait_ratio:op{{{POOL}}})", "{{op}}")],
                  "Share of attention in which ranks stood still, by what they waited for.", width=6, stacked=True),
            graph("Overlap of the last prefill", "percentunit", [query(f"meshfill_overlap_ratio{{{POOL}}}", "{{instance}}")],
                  "1: all communication was hidden under compute.", width=6, max=1),
            graph("Attention of all ranks", "short",
                  [query(f"sum({rate('meshfill_attention_compute_seconds_total', RANK)})", "compute"),
                   query(f"sum by (op) ({rate('meshfill_comm_wait_seconds_total', RANK)})", "wait {{op}}")],
                  "Ranks that are in attention, on average over the window: those that compute, and those that wait.", width=12,
                  stacked=True),
            graph("Bytes sent, all ranks", "Bps", [query(f"sum by (op) ({rate('meshfill_comm_bytes_total')})", "{{op}}")],
                  "On average over the window, of prefills that ended in it.", width=6, stacked=True),
            graph("Bytes sent per byte of the formula", "none", [query(f"meshfill:comm_bytes_ratio{{{POOL}}}", "{{instance}}")],
                  "Of the rank that sends most. Anything but 1 is a bug.", width=6),
        ]),
        ("Are the devices used, and evenly?", [
            graph("MFU", "percentunit", [query(f"meshfill_mfu{{{POOL}}}", "whole model {{instance}}"),
                                         query(f"meshfill_attention_mfu{{{POOL}}}", "attention {{instance}}")],
                  "Model FLOPs of the last prefill over seconds times peak. Short prompts have less.", max=1),
            graph("Peak FLOP/s, and what is reached", "flops",
                  [query(f"meshfill_peak_flops_per_second{{{POOL}}}", "peak {{instance}}"),
                   query(f"meshfill_peak_flops_per_second{{{POOL}}} * meshfill_mfu{{{POOL}}}", "reached {{instance}}")],
                  "The sum of the ranks' peaks, from data sheets or measured at start. More ranks than cores add up to too much."),
            graph("Straggler spread of the last prefill", "s", [query(f"meshfill_straggler_spread_seconds{{{POOL}}}", "{{instance}}")],
                  "Busy seconds of the busiest rank less those of the least busy."),
            graph("How busy each rank is, against the mean", "none",
                  [query(f"meshfill:busy_ratio:rank{{{RANK}}}", "{{instance}} rank {{rank}}")],
                  "1 is even. A rank at 1.25 makes all others wait."),
            graph("Busiest expert against the mean", "none",
                  [query(quantile(share, "meshfill_expert_imbalance"), name)
                   for share, name in ((0.5, "median layer"), (0.95, "95 % of layers"))] +
                  [query(f"meshfill_expert_worst_imbalance{{{POOL}}}", "worst layer of the last prefill {{instance}}")],
                  "1 is even. Of layers with experts, of prefills that ended in the window; short prompts are uneven."),
            graph("Experts without tokens", "percentunit",
                  [query(f"sum({rate('meshfill_expert_idle_ratio_sum')}) / sum({rate('meshfill_expert_idle_ratio_count')})",
                         "of a layer's experts")],
                  "On average over the layers of prefills that ended in the window.", max=1),
            graph("Tokens/s", "short", [query(f"meshfill:prompt_tokens:rate{{{POOL}}}", "{{instance}}")],
                  "Prompt tokens of finished prefills, over 30 minutes."),
            graph("Memory", "bytes", [query(f"meshfill_peak_memory_bytes{{{POOL}}}", "largest so far {{instance}}"),
                                      query(f"meshfill_predicted_peak_bytes{{{POOL}}}", "memory of a plan {{instance}}")],
                  "Resident in the front-end's process, and what the last plan predicted for activations and weights of all ranks."),
        ]),
        ("Who keeps K and V?", [
            graph("Kept K and V", "bytes", [query(f"meshfill_kv_bytes{{{POOL}}}", "kept or reserved {{instance}}"),
                                            query(f"meshfill_kv_max_bytes{{{POOL}}}", "bound {{instance}}")],
                  "Bytes under leases, those of unfinished prefills too, and kv.memory_bytes."),
            graph("Leases", "short", [query(f"sum(meshfill_kv_leases{{{POOL}}})", "live"),
                                      query(increase("meshfill_kv_leases_lapsed_total"), "lapsed in the window"),
                                      query(increase("meshfill_kv_refused_total"), "refused in the window")],
                  "Many that lapse: clients die, or kv.lease is too short for them. Refused: there was no room for their K and V."),
            graph("K and V fetched", "Bps", [query(f"sum({rate('meshfill_kv_fetched_bytes_total')})", "bytes/s")],
                  "By clients, on average over the window."),
            graph("Tokens from the cache", "percentunit",
                  [query(f"sum({rate('meshfill_kv_cache_hit_tokens_total')}) / (sum({rate('meshfill_kv_cache_hit_tokens_total')})"
                         f" + sum({rate('meshfill_kv_cache_miss_tokens_total')}))", "of looked-up tokens")],
                  "Share of prompts' tokens that an earlier prompt had computed, in the window.", max=1),
            graph("Cached prompts that made room", "short", [query(increase("meshfill_kv_cache_evictions_total"), "evicted")],
                  "In the window. Many, and few tokens from the cache: there is too little room (kv.memory_bytes)."),
        ]),
        ("What runs here?", [
            labels_table("Plan of the last prefill", "meshfill_plan_info", "Its tile, head groups and layout.", 14),
            labels_table("Builds", "meshfill_build_info", "A front-end and its workers have the same version. Compare the commits, too: the pool does not.", 10),
        ]),
    ]


def place(panels, top):
    """Puts panels side by side from `top` on; returns the first free line."""
    left = height = 0
    for each in panels:
        grid = each["gridPos"]
        if left + grid["w"] > WIDTH:
            top, left, height = top + height, 0, 0
        grid.update(x=left, y=top)
        left, height = left + grid["w"], max(height, grid["h"])
    return top + height


def label_values(name, source, all_value=".+"):
    return {"type": "query", "name": name, "label": name.title(), "datasource": SOURCE, "query": f"label_values({source}, {name})",
            "refresh": 2, "includeAll": True, "allValue": all_value, "multi": True,
            "current": {"text": "All", "value": "$__all"}, "sort": 3}


def window(*choices):
    """An interval to choose; the one in the middle is the default."""
    default = choices[len(choices) // 2]
    return {"type": "interval", "name": "window", "label": "Window", "query": ",".join(choices), "auto": False, "refresh": 2,
            "current": {"text": default, "value": default},
            "options": [{"text": each, "value": each, "selected": each == default} for each in choices]}


def dashboard():
    panels, line = [], 0
    for question, members in rows():
        panels.append({"type": "row", "title": question, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": line, "w": WIDTH, "h": 1}})
        line = place(members, line + 1)
        panels.extend(members)
    for count, each in enumerate(panels, 1):
        each["id"] = count
    return {"id": None, "uid": "meshfill", "title": "Meshfill", "version": 1, "tags": ["meshfill"], "timezone": "browser",
            "schemaVersion": 37, "editable": False, "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "graphTooltip": 1,
            "links": [{"type": "dashboards", "title": "Meshfill", "tags": ["meshfill"], "asDropdown": True}],
            "templating": {"list": [
                {"type": "datasource", "name": "datasource", "label": "Data source", "query": "prometheus", "current": {}},
                # A label that only Kubernetes adds: elsewhere All must match series that lack it.
                label_values("namespace", FRONT_END, all_value=".*"),
                label_values("job", f'{FRONT_END}{{namespace=~"$namespace"}}'),
                label_values("instance", f'{FRONT_END}{{namespace=~"$namespace",job=~"$job"}}'),
                label_values("rank", f"meshfill_attention_seconds_total{{{POOL}}}"),
                window("5m", "15m", "30m", "1h", "6h")]},
            "annotations": {"list": [{"datasource": SOURCE, "enable": True, "name": "alerts", "iconColor": "red",
                                      "expr": f'ALERTS{{alertstate="firing",alertname=~"Meshfill.*",job=~"$job"}}',
                                      "titleFormat": "{{alertname}}"}]},
            "panels": panels}


def main():
    text = json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"
    if sys.argv[1:] == ["--check"]:
        if OUTPUT.read_text() != text:
            sys.exit(f"{OUTPUT} is not what make_dashboard.py writes; run it")
    else:
        OUTPUT.write_text(text)


if __name__ == "__main__":
    main()
