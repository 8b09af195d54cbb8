#!/usr/bin/env python3
"""Writes meshfill.json, the Grafana dashboard, from the rows and queries below.

Usage: make_dashboard.py            write it beside this file
       make_dashboard.py --check    exit 1 where the file is not what this would write

A row is a question, most urgent first. Import the JSON into Grafana 9 or later and choose the Prometheus data source; the
rows about ratios use the recording rules of deploy/prometheus/recording.yml.
"""
import json
import pathlib
import sys

OUTPUT = pathlib.Path(__file__).with_name("meshfill.json")
POOL = 'namespace=~"$namespace",job=~"$pool"'
RANK = POOL + ',rank=~"$rank"'
SOURCE = {"type": "prometheus", "uid": "${source}"}
WIDTH = 24  # of Grafana's grid


def query(expression, legend, instant=False, form="time_series"):
    return {"datasource": SOURCE, "expr": expression, "legendFormat": legend, "instant": instant, "range": not instant,
            "format": form}


def panel(kind, title, unit, queries, width, height=8, about="", options=None, **defaults):
    return {"type": kind, "title": title, "description": about, "datasource": SOURCE,
            "targets": [dict(each, refId=chr(ord("A") + index)) for index, each in enumerate(queries)],
            "fieldConfig": {"defaults": {"unit": unit, **defaults}, "overrides": []},
            "options": options or {}, "gridPos": {"w": width, "h": height}}


def graph(title, unit, queries, width=8, about="", stacked=False, **defaults):
    style = {"lineWidth": 2, "fillOpacity": 30 if stacked else 8, "showPoints": "never", "spanNulls": True,
             "stacking": {"mode": "normal" if stacked else "none"}}
    return panel("timeseries", title, unit, queries, width, about=about, min=0, custom=style,
                 options={"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}, **defaults)


def number(title, unit, expression, about="", steps=(), width=4):
    thresholds = {"mode": "absolute", "steps": [{"color": "text", "value": None}] + [
        {"color": colour, "value": value} for value, colour in steps]}
    return panel("stat", title, unit, [query(expression, "")], width, height=4, about=about, thresholds=thresholds,
                 options={"colorMode": "value", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}})


def labels_table(title, metric, width):
    """One row for each series, of labels alone."""
    made = panel("table", title, "none", [query(f"{metric}{{{POOL}}}", "", instant=True, form="table")], width, height=4)
    hidden = {name: True for name in ("Time", "Value", "__name__")}
    return {**made, "transformations": [{"id": "organize", "options": {"excludeByName": hidden}}]}


def quantile(share, metric):
    return (f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket{{{POOL}}}[$__rate_interval])))")


def rows():
    return [
        ("Is the pool there, and does it answer?", [
            number("Ranks that serve", "none", f'sum(meshfill_ranks{{{POOL},state!~"loading|draining"}})', steps=[(0, "red"), (1, "green")]),
            number("Tokens/s (30 min)", "none", f"sum(meshfill:prompt_tokens:rate{{{POOL}}})"),
            number("Tokens in the queue", "short", f"sum(meshfill_queue_tokens{{{POOL}}})", about="KEDA scales on this."),
            number("Oldest in the queue", "s", f"max(meshfill_queue_oldest_seconds{{{POOL}}})",
                   about="Since its upload was complete.", steps=[(600, "orange"), (3600, "red")]),
            number("Comm wait of attention", "percentunit", f"avg(meshfill:comm_wait_ratio:pool{{{POOL}}})",
                   about="Share of attention in which ranks stood still for a chunk.", steps=[(0.2, "orange"), (0.4, "red")]),
            number("MFU", "percentunit", f"avg(meshfill_mfu{{{POOL}}})", about="Whole model, of the last prefill."),
            graph("Requests by status", "reqps",
                  [query(f"sum by (code) (rate(meshfill_requests_total{{{POOL}}}[$__rate_interval])) > 0", "{{code}}")], stacked=True),
            graph("Ranks by state", "none", [query(f"sum by (state) (meshfill_ranks{{{POOL}}})", "{{state}}")], stacked=True),
            graph("Pool: epochs, losses, retries", "none",
                  [query(f"sum(increase(meshfill_{what}_total{{{POOL}}}[30m]))", name) for what, name in (
                      ("epochs", "epochs"), ("worker_joins", "joins"), ("worker_losses", "losses"),
                      ("worker_refusals", "refusals"), ("requests_retried", "retries"))],
                  about="In 30 minutes. A worker that joins, leaves or is lost begins an epoch."),
        ]),
        ("How long do clients wait for the first token?", [
            graph("TTFT", "s", [query(quantile(share, "meshfill_ttft_seconds"), name)
                                for share, name in ((0.5, "median"), (0.95, "95 %"), (0.99, "99 %"))]),
            graph("In the queue before it", "s", [query(quantile(share, "meshfill_queue_wait_seconds"), name)
                                                  for share, name in ((0.5, "median"), (0.95, "95 %"))]),
            graph("Queue", "short", [query(f"sum(meshfill_queue_tokens{{{POOL}}})", "tokens waiting"),
                                     query(f"sum(meshfill_running_tokens{{{POOL}}})", "tokens running")]),
            graph("Prefill: predicted and real", "s",
                  [query(f"meshfill_predicted_seconds{{{POOL}}}", "predicted {{instance}}"),
                   query(f"meshfill_predicted_seconds{{{POOL}}} * meshfill_prediction_ratio{{{POOL}}}", "real {{instance}}")]),
            graph("Real seconds per predicted one", "none", [query(f"meshfill:prediction_ratio{{{POOL}}}", "{{instance}}")],
                  about="1 is right; admission and planning rest on it."),
            graph("Queue, share of its bound", "percentunit",
                  [query(f"meshfill_queue_tokens{{{POOL}}} / meshfill_queue_max_tokens{{{POOL}}}", "tokens {{instance}}"),
                   query(f"meshfill_queue_oldest_seconds{{{POOL}}} / meshfill_queue_max_wait_seconds{{{POOL}}}",
                         "oldest {{instance}}")]),
        ]),
        ("How much of attention is communication that nothing hides?", [
            panel("status-history", "Comm wait of each rank", "percentunit",
                  [query(f"meshfill:comm_wait_ratio:rank{{{RANK}}}", "{{instance}} rank {{rank}}")], 12,
                  about="A red column: all wait, so the links bind. A red row: one rank waits for another.",
                  color={"mode": "continuous-GrYlRd"}, min=0, max=0.6, options={"rowHeight": 0.9, "showValue": "never"}),
            graph("Comm wait by operation", "percentunit",
                  [query(f"avg by (op) (meshfill:comm_wait_ratio:op{{{POOL}}})", "{{op}}")], width=6, stacked=True),
            graph("Overlap of the last prefill", "percentunit", [query(f"meshfill_overlap_ratio{{{POOL}}}", "{{instance}}")],
                  width=6, about="1: all communication was hidden under compute.", max=1),
            graph("Attention of all ranks", "s",
                  [query(f"sum(rate(meshfill_attention_compute_seconds_total{{{RANK}}}[$__rate_interval]))", "compute"),
                   query(f"sum by (op) (rate(meshfill_comm_wait_seconds_total{{{RANK}}}[$__rate_interval]))", "wait {{op}}")],
                  width=12, stacked=True, about="Rank seconds in each second."),
            graph("Bytes sent, all ranks", "Bps",
                  [query(f"sum by (op) (rate(meshfill_comm_bytes_total{{{POOL}}}[$__rate_interval]))", "{{op}}")], width=6,
                  stacked=True),
            graph("Bytes sent per byte of the formula", "none", [query(f"meshfill:comm_bytes_ratio{{{POOL}}}", "{{instance}}")],
                  width=6, about="Of the rank that sends most. Anything but 1 is a bug."),
        ]),
        ("Are the devices used, and evenly?", [
            graph("MFU", "percentunit", [query(f"meshfill_mfu{{{POOL}}}", "whole model {{instance}}"),
                                         query(f"meshfill_attention_mfu{{{POOL}}}", "attention {{instance}}")], max=1),
            graph("Peak FLOP/s, and what is reached", "FLOP/s",
                  [query(f"meshfill_peak_flops_per_second{{{POOL}}}", "peak {{instance}}"),
                   query(f"meshfill_peak_flops_per_second{{{POOL}}} * meshfill_mfu{{{POOL}}}", "reached {{instance}}")]),
            graph("Straggler spread of the last prefill", "s", [query(f"meshfill_straggler_spread_seconds{{{POOL}}}", "{{instance}}")],
                  about="Busy seconds of the busiest rank less those of the least busy."),
            graph("How busy each rank is, against the mean", "none",
                  [query(f"meshfill:busy_ratio:rank{{{RANK}}}", "{{instance}} rank {{rank}}")]),
            graph("Tokens/s", "none", [query(f"meshfill:prompt_tokens:rate{{{POOL}}}", "{{instance}}")]),
            graph("Memory", "bytes", [query(f"meshfill_peak_memory_bytes{{{POOL}}}", "largest so far {{instance}}"),
                                      query(f"meshfill_predicted_peak_bytes{{{POOL}}}", "activations of a plan {{instance}}")],
                  about="Resident in the front-end's process, and what the last plan took for a process's ranks."),
        ]),
        ("What runs here?", [
            labels_table("Plan of the last prefill", "meshfill_plan_info", 14),
            labels_table("Builds", "meshfill_build_info", 10),
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


def label_values(name, label, source):
    return {"type": "query", "name": name, "label": name, "datasource": SOURCE, "query": f"label_values({source}, {label})",
            "refresh": 2, "includeAll": True, "allValue": ".*", "multi": True,
            "current": {"text": "All", "value": "$__all"}, "sort": 3}


def dashboard():
    panels, line = [], 0
    for question, members in rows():
        panels.append({"type": "row", "title": question, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": line, "w": WIDTH, "h": 1}})
        line = place(members, line + 1)
        panels.extend(members)
    for count, each in enumerate(panels, 1):
        each["id"] = count
    return {"uid": "meshfill", "title": "Meshfill", "tags": ["meshfill"], "timezone": "browser", "schemaVersion": 37,
            "editable": True, "refresh": "30s", "time": {"from": "now-3h", "to": "now"}, "graphTooltip": 1,
            "templating": {"list": [
                {"type": "datasource", "name": "source", "label": "source", "query": "prometheus", "current": {}},
                label_values("namespace", "namespace", "meshfill_build_info"),
                label_values("pool", "job", 'meshfill_build_info{namespace=~"$namespace"}'),
                label_values("rank", "rank", f"meshfill_attention_seconds_total{{{POOL}}}")]},
            "annotations": {"list": [{"datasource": SOURCE, "enable": True, "name": "alerts", "iconColor": "red",
                                      "expr": f'ALERTS{{alertstate="firing",alertname=~"Meshfill.*",job=~"$pool"}}',
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
