"""Draws a dashboard's panels as one HTML page of SVGs, without Grafana: for a person who wants to see what it shows."""
import html
import math

COLUMN, LINE = 60, 34  # pixels of Grafana's grid
PALETTE = ["#2f6fd6", "#e5484d", "#18794e", "#f08c2e", "#8e4ec6", "#0c9bb3", "#c9377f", "#7a6a00", "#5b6875", "#8a4b1f"]
PREFIXES = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")]
UNITS = {"percentunit": "%", "s": "s", "bytes": "B", "Bps": "B/s", "FLOP/s": "FLOP/s", "reqps": "/s"}


def format_value(value, unit):
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    scale, prefix = next(((s, p) for s, p in PREFIXES if abs(value) >= s), (1, ""))
    if value == 0:
        scale, prefix = 1, ""
    return f"{value / scale:.3g} {prefix}{UNITS.get(unit, '')}".strip()


def legend(target, labels):
    text = target["legendFormat"]
    for name, value in labels.items():
        text = text.replace("{{" + name + "}}", value)
    return text or ", ".join(f"{k}={v}" for k, v in labels.items() if not k.startswith("__"))


def lines_of(panel):
    """[(name, [(time, value)])] of what is a number."""
    found = []
    for target in panel["targets"]:
        for series in target["series"]:
            points = [(t, float(v)) for t, v in series.get("values") or [series["value"]]]
            points = [(t, v) for t, v in points if math.isfinite(v)]
            if points:
                found.append((legend(target, series["metric"]), points))
    return found


def stat(panel):
    lines = lines_of(panel)
    text = format_value(lines[0][1][-1][1], panel["fieldConfig"]["defaults"]["unit"]) if lines else "no data"
    return f'<p class="number">{html.escape(text)}</p>'


def timeseries(panel, width, height):
    lines = lines_of(panel)
    if not lines:
        return "<p>no data</p>"
    unit = panel["fieldConfig"]["defaults"]["unit"]
    if panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking", {}).get("mode") == "normal":
        below = {}
        for _, points in lines:
            points[:] = [(t, below.setdefault(t, 0) + v) for t, v in points]
            below.update(points)
    times = [t for _, points in lines for t, _ in points]
    top = max(v for _, points in lines for _, v in points) or 1
    begin, span = min(times), (max(times) - min(times)) or 1
    paths = []
    for index, (_, points) in enumerate(lines):
        spots = " ".join(f"{50 + (t - begin) / span * (width - 60):.1f},{height - 8 - v / top * (height - 20):.1f}"
                         for t, v in points)
        paths.append(f'<polyline points="{spots}" fill="none" stroke="{PALETTE[index % len(PALETTE)]}" stroke-width="2"/>')
    ticks = "".join(f'<text x="46" y="{height - 4 - share * (height - 20):.0f}" text-anchor="end">'
                    f"{html.escape(format_value(share * top, unit))}</text>" for share in (0, 0.5, 1))
    names = "".join(f'<span><i style="background:{PALETTE[index % len(PALETTE)]}"></i>{html.escape(name)}</span>'
                    for index, (name, _) in enumerate(lines))
    return f'<svg width="{width}" height="{height}">{ticks}{"".join(paths)}</svg><div class="legend">{names}</div>'


def heat_map(panel, width, height):
    lines = lines_of(panel)
    most = panel["fieldConfig"]["defaults"]["max"]
    begin = min(points[0][0] for _, points in lines)
    span = max(points[-1][0] for _, points in lines) - begin + 1
    row = min(28, (height - 10) / len(lines))
    cells = []
    for index, (name, points) in enumerate(lines):
        cells.append(f'<text x="0" y="{row * (index + 0.7):.0f}">{html.escape(name)}</text>')
        for t, v in points:
            hue = 120 * (1 - min(1, v / most))
            cells.append(f'<rect x="{150 + (t - begin) / span * (width - 160):.1f}" y="{row * index:.1f}" height="{row - 2:.1f}" '
                         f'width="{(width - 160) / span + 0.5:.1f}" fill="hsl({hue:.0f} 65% 50%)"/>')
    return f'<svg width="{width}" height="{height}">{"".join(cells)}</svg>'


def table(panel):
    rows = [series["metric"] for target in panel["targets"] for series in target["series"]]
    keys = sorted({key for row in rows for key in row})
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(row.get(key, ''))}</td>" for key in keys) + "</tr>" for row in rows)
    return f'<table><tr>{"".join(f"<th>{html.escape(key)}</th>" for key in keys)}</tr>{cells}</table>'


def draw(panel):
    grid = panel["gridPos"]
    place = f'left:{grid["x"] * COLUMN}px;top:{grid["y"] * LINE}px;width:{grid["w"] * COLUMN - 8}px;height:{grid["h"] * LINE - 8}px'
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f'<h2 style="{place}">{title}</h2>'
    width, height = grid["w"] * COLUMN - 36, grid["h"] * LINE - 92
    body = {"stat": lambda: stat(panel), "table": lambda: table(panel),
            "timeseries": lambda: timeseries(panel, width, height),
            "status-history": lambda: heat_map(panel, width, height)}[panel["type"]]()
    return f'<section style="{place}" title="{html.escape(panel["description"])}"><h3>{title}</h3>{body}</section>'


STYLE = """
body { margin: 16px; font: 13px system-ui, sans-serif; background: #f4f5f7; position: relative; }
section, h2 { position: absolute; box-sizing: border-box; margin: 0; }
section { background: #fff; border: 1px solid #dde2e8; border-radius: 6px; padding: 8px 12px; overflow: hidden; }
h2 { font-size: 16px; } h3 { font-size: 13px; margin: 0 0 6px; } .number { font-size: 30px; margin: 10px 0; }
svg text { font-size: 11px; fill: #5b6875; } .legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 11px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; } td, th { padding: 2px 10px 2px 0; text-align: left; }
"""


def draw_panels(dashboard):
    title = html.escape(dashboard["title"])
    return (f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style>"
            + "".join(draw(panel) for panel in dashboard["panels"]))
