#!/usr/bin/env python3
"""Draws causal_balance.svg: which rank computes what of a causal mask, in the contiguous and in the striped layout.

Usage: make_causal_balance.py            write it beside this file
       make_causal_balance.py --check    exit 1 where the file is not what this would write
"""
import pathlib
import sys

OUTPUT = pathlib.Path(__file__).with_name("causal_balance.svg")
RANKS, STRIPES = 4, 16
CELL, GAP, BAR = 16, 90, 140  # pixels; BAR: of the busiest rank's bar
COLOURS = ["#aecceb", "#df8699", "#aeecb4", "#a785e0"]
LAYOUTS = {"contiguous": lambda stripe: stripe * RANKS // STRIPES, "striped": lambda stripe: stripe % RANKS}
STYLE = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1c2128; }
.title { font-weight: 600; font-size: 15px; } .muted { fill: #59636e; } .page { fill: #ffffff; } .absent { fill: #eef1f4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .muted { fill: #9aa5b1; } .page { fill: #14181d; } .absent { fill: #20262d; }
}
"""


def rectangle(x, y, width, height, **attributes):
    names = "".join(f' {name.rstrip("_")}="{value}"' for name, value in attributes.items())
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}"{names}/>'


def text(x, y, words, kind=""):
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def draw(name, rank_of, left, top):
    yield text(left, top - 30, name, "title")
    yield text(left, top - 10, "keys →  queries ↓", "muted")
    for query in range(STRIPES):
        for key in range(STRIPES):
            x, y = left + key * CELL, top + query * CELL
            if key <= query:
                yield rectangle(x, y, CELL - 1, CELL - 1, fill=COLOURS[rank_of(query)])
            else:
                yield rectangle(x, y, CELL - 1, CELL - 1, class_="absent")
    work = [sum(query + 1 for query in range(STRIPES) if rank_of(query) == rank) for rank in range(RANKS)]
    most = STRIPES * RANKS  # of both layouts
    right = left + STRIPES * CELL + 24
    yield text(right, top - 10, "work of each rank", "muted")
    for rank, cells in enumerate(work):
        y = top + rank * 34
        yield rectangle(right, y, round(BAR * cells / most), 20, fill=COLOURS[rank])
        yield text(right + round(BAR * cells / most) + 6, y + 15, f"rank {rank}: {cells}")


def picture():
    part = STRIPES * CELL + 24 + BAR + GAP
    width, height = 2 * part + 24, STRIPES * CELL + 76
    shapes = [rectangle(0, 0, width, height, class_="page")]
    for index, (name, rank_of) in enumerate(LAYOUTS.items()):
        shapes.extend(draw(name, rank_of, 24 + index * part, 60))
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
                      f'viewBox="0 0 {width} {height}">', "<title>A causal mask, shared out in two layouts</title>",
                      f"<style>{STYLE}</style>", *shapes, "</svg>"]) + "\n"


def main():
    if sys.argv[1:] == ["--check"]:
        if OUTPUT.read_text() != picture():
            sys.exit(f"{OUTPUT} is not what make_causal_balance.py writes; run it")
    else:
        OUTPUT.write_text(picture())


if __name__ == "__main__":
    main()
