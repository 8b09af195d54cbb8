"""Draws a dashboard's panels as one HTML page of SVGs, without Grafana: for a person who wants to see what it shows."""
import html
import math

COLUMN, LINE = 60, 34  # pixels of Grafana's grid
LEFT, RIGHT, ABOVE, BELOW = 84, 10, 8, 18  # of a plot, around the lines
PALETTE = ["#2f6fd6", "#f08c2e", "#18794e", "#8e4ec6", "#0c9bb3", "#e5484d", "#7a6a00", "#c9377f", "#5b6875", "#8a4b1f"]
PREFIXES = [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""), (1e-3, "m"), (1e-6, "µ")]
UNITS = {"none": "", "short": "", "s": "s", "bytes": "B", "Bps": "B/s", "flops": "FLOP/s"}


def format_value(value, unit):
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    scale, prefix = next(((s, p) for s, p in PREFIXES if abs(value) >= s), (1, ""))
    if value == 0:
        scale, prefix = 1, ""
    return f"{value / scale:.3g} {prefix}{UNITS[unit]}".strip()


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
    defaults = panel["fieldConfig"]["defaults"]
    if not lines:
        return '<p class="number">no data</p>'
    value = lines[0][1][-1][1]
    colour = [step["color"] for step in defaults["thresholds"]["steps"] if step["value"] is None or value >= step["value"]][-1]
    return f'<p class="number {colour}">{html.escape(format_value(value, defaults["unit"]))}</p>'


def stack(lines):
    """Adds to each line those below it; returns [(name, points, the points below)], the highest first."""
    below, drawn = {}, []
    for name, points in lines:
        floor = [(t, below.get(t, 0)) for t, _ in points]
        points = [(t, below.get(t, 0) + v) for t, v in points]
        below.update(points)
        drawn.insert(0, (name, points, floor))
    return drawn


def time_axis(begin, span, width, height):
    return "".join(f'<text x="{LEFT + share * (width - LEFT - RIGHT):.0f}" y="{height - 3}" text-anchor="middle">'
                   f"{share * span:.0f} s</text>" for share in (0.25, 0.5, 0.75)) if span else ""


def timeseries(panel, width, height):
    lines = lines_of(panel)
    if not lines:
        return "<p>no data</p>"
    defaults = panel["fieldConfig"]["defaults"]
    colours = {name: PALETTE[index % len(PALETTE)] for index, (name, _) in enumerate(lines)}
    stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
    drawn = stack(lines) if stacked else [(name, points, None) for name, points in lines]
    times = [t for _, points, _ in drawn for t, _ in points]
    top = max(v for _, points, _ in drawn for _, v in points) or 1
    begin, span = min(times), (max(times) - min(times)) or 1

    def spot(point):
        return (f"{LEFT + (point[0] - begin) / span * (width - LEFT - RIGHT):.1f},"
                f"{height - BELOW - point[1] / top * (height - ABOVE - BELOW):.1f}")

    marks = []
    for share in (0, 0.5, 1):
        y = height - BELOW - share * (height - ABOVE - BELOW)
        marks.append(f'<line x1="{LEFT}" x2="{width - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/><text x="{LEFT - 6}" y="{y + 4:.1f}" '
                     f'text-anchor="end">{html.escape(format_value(share * top, defaults["unit"]))}</text>')
    paths = []
    for name, points, floor in drawn:
        if floor:
            paths.append(f'<polygon points="{" ".join(map(spot, points + floor[::-1]))}" fill="{colours[name]}" opacity="0.85"/>')
        else:
            paths.append(f'<polyline points="{" ".join(map(spot, points))}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
    names = "".join(f'<span><i style="background:{colour}"></i>{html.escape(name)}</span>' for name, colour in colours.items())
    return (f'<svg width="{width}" height="{height}">{"".join(marks)}{"".join(paths)}{time_axis(begin, span, width, height)}'
            f'</svg><div class="legend">{names}</div>')


def heat_map(panel, width, height):
    lines = lines_of(panel)
    if not lines:
        return "<p>no data</p>"
    defaults, names = panel["fieldConfig"]["defaults"], 150
    begin = min(points[0][0] for _, points in lines)
    span = max(points[-1][0] for _, points in lines) - begin + 1
    row, column = height / len(lines), (width - names) / span
    cells = []
    for index, (name, points) in enumerate(lines):
        cells.append(f'<text x="0" y="{row * (index + 0.5) + 4:.0f}">{html.escape(name)}</text>')
        for t, v in points:
            hue = 120 * (1 - min(1, v / defaults["max"]))
            cells.append(f'<rect x="{names + (t - begin) * column:.1f}" y="{row * index:.1f}" height="{row - 2:.1f}" '
                         f'width="{column + 0.5:.1f}" fill="hsl({hue:.0f} 65% 50%)"/>')
    scale = "".join(f'<span><i style="background:hsl({120 * (1 - share):.0f} 65% 50%)"></i>'
                    f'{html.escape(format_value(share * defaults["max"], defaults["unit"]))}</span>' for share in (0, 0.5, 1))
    return f'<svg width="{width}" height="{height}">{"".join(cells)}</svg><div class="legend">{scale}</div>'


def table(panel):
    rows = [series["metric"] for target in panel["targets"] for series in target["series"]]
    keys = sorted({key for row in rows for key in row if key != "__name__"})
    cells = "".join("<tr>" + "".join(f"<td>{html.escape(row.get(key, ''))}</td>" for key in keys) + "</tr>" for row in rows)
    return f'<table><tr>{"".join(f"<th>{html.escape(key)}</th>" for key in keys)}</tr>{cells}</table>'


def draw(panel):
    grid = panel["gridPos"]
    place = f'left:{grid["x"] * COLUMN}px;top:{grid["y"] * LINE}px;width:{grid["w"] * COLUMN - 8}px;height:{grid["h"] * LINE - 8}px'
    title = html.escape(panel["title"])
    if panel["type"] == "row":
        return f'<h2 style="{place}">{title}</h2>'
    width, height = grid["w"] * COLUMN - 36, grid["h"] * LINE - 76
    body = {"stat": lambda: stat(panel), "table": lambda: table(panel),
            "timeseries": lambda: timeseries(panel, width, height),
            "status-history": lambda: heat_map(panel, width, height)}[panel["type"]]()
    return f'<section style="{place}" title="{html.escape(panel["description"])}"><h3>{title}</h3>{body}</section>'


DAY = "--page: #f4f5f7; --card: #fff; --edge: #dde2e8; --text: #000; --quiet: #5b6875; --grid: #e6e9ee; --good: #18794e; " \
      "--warn: #ad5700; --bad: #c62a2f;"
NIGHT = "--page: #111217; --card: #181b1f; --edge: #2c3235; --text: #d8d9da; --quiet: #9fa7b3; --grid: #2c3235; --good: #4cc38a; " \
        "--warn: #f1a10d; --bad: #ff6369;"
STYLE = """
body { margin: 16px; font: 13px system-ui, sans-serif; background: var(--page); color: var(--text); position: relative; }
section, h2 { position: absolute; box-sizing: border-box; margin: 0; }
section { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 12px; overflow: hidden; }
h2 { font-size: 16px; } h3 { font-size: 13px; margin: 0 0 6px; } .number { font-size: 34px; margin: 14px 0; }
.green { color: var(--good); } .orange { color: var(--warn); } .red { color: var(--bad); }
svg { display: block; } svg text { font-size: 11px; fill: var(--quiet); } svg line { stroke: var(--grid); } .legend { display: flex; flex-wrap: wrap; gap: 2px 12px; font-size: 11px; }
.legend i { display: inline-block; width: 10px; height: 10px; margin-right: 4px; } td, th { padding: 2px 10px 2px 0; text-align: left; }
"""


def size(dashboard):
    """(width, height) of the page, in pixels."""
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    return 40 + COLUMN * max(each["x"] + each["w"] for each in places), 32 + LINE * max(each["y"] + each["h"] for each in places)


def draw_panels(dashboard, night=False):
    title = html.escape(dashboard["title"])
    return (f"<!doctype html><meta charset=utf-8><title>{title}</title><style>:root {{ {NIGHT if night else DAY} }}{STYLE}</style>"
            + "".join(draw(panel) for panel in dashboard["panels"]))
