#!/usr/bin/env python3
"""Draws kv_holders.svg (who holds which tokens) and kv_messages.svg (what travels when), for docs/kv.md.

Usage: make_kv.py            write them beside this file
       make_kv.py --check    exit 1 where a file is not what this would write
"""
import pathlib
import sys

FOLDER = pathlib.Path(__file__).parent
RANKS, WORKERS = 4, 2
CELL, LEFT = 34, 150  # pixels of a stripe; of the words before it
COLOURS = ["#aecceb", "#df8699", "#aeecb4", "#a785e0"]
STYLE = """
text { font: 13px system-ui, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1c2128; }
.cell { fill: #1c2128; font-size: 12px; text-anchor: middle; } .middle { text-anchor: middle; }
.title { font-weight: 600; font-size: 15px; } .muted { fill: #59636e; } .page { fill: #ffffff; }
.line { stroke: #8b949e; } .shared { fill: none; stroke: #1c2128; stroke-width: 2; stroke-dasharray: 4 3; }
.arrow { stroke: #1c2128; stroke-width: 1.5; } .head { fill: #1c2128; } .data { stroke: #b0413e; stroke-width: 3; }
.data_head { fill: #b0413e; } .work { fill: #d8dee4; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .muted { fill: #9aa5b1; } .page { fill: #14181d; } .shared { stroke: #e6edf3; }
  .arrow { stroke: #e6edf3; } .head { fill: #e6edf3; } .work { fill: #30363d; }
}
"""


def text(x, y, words, kind=""):
    return f'<text x="{x}" y="{y}" class="{kind}">{words}</text>'


def rectangle(x, y, width, height, **attributes):
    names = "".join(f' {name.rstrip("_")}="{value}"' for name, value in attributes.items())
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}"{names}/>'


def page(title, width, height, shapes):
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
                      f'viewBox="0 0 {width} {height}">', f"<title>{title}</title>", f"<style>{STYLE}</style>",
                      rectangle(0, 0, width, height, class_="page"), *shapes, "</svg>"]) + "\n"


def stripes(x, y, numbers):
    for place, stripe in enumerate(numbers):
        yield rectangle(x + place * CELL, y, CELL - 2, 24, fill=COLOURS[stripe % RANKS])
        yield text(x + place * CELL + CELL // 2 - 1, y + 17, stripe, "cell")


def holders():
    computed = {"run 1": range(14), "run 2": range(8, 12)}  # run 2 follows 8 stripes of run 1
    shapes = [text(24, 34, "Two prompts in stripes of 64 tokens, on 4 ranks", "title"),
              text(24, 72, "prompt 1"), *stripes(LEFT, 55, computed["run 1"]),
              text(24, 112, "prompt 2"), *stripes(LEFT, 95, range(12)),
              rectangle(LEFT - 3, 92, 8 * CELL + 3, 30, class_="shared", rx=4),
              text(LEFT, 140, "8 stripes are cached: nobody computes them", "muted")]
    y = 180
    for worker in range(WORKERS):
        ranks = [worker * RANKS // WORKERS + place for place in range(RANKS // WORKERS)]
        shapes.append(text(24, y, f"Worker {worker} holds, of every layer and head", "title"))
        if worker == 0:
            y += 22
            shapes.append(text(LEFT, y, "run 1", "muted"))
            shapes.append(text(LEFT + 4 * CELL + 60, y, "run 2", "muted"))
            y -= 8
        for rank in ranks:
            y += 34
            shapes.append(text(24, y, f"rank {rank}"))
            own = {run: [stripe for stripe in numbers if stripe % RANKS == rank] for run, numbers in computed.items()}
            shapes.extend(stripes(LEFT, y - 17, own["run 1"]))
            right = LEFT + 4 * CELL + 60
            shapes.extend(stripes(right, y - 17, own["run 2"]))
        y += 44
    shapes.append(text(24, y, "A lease on prompt 2 holds both runs.", "muted"))
    return page("Who holds which tokens", LEFT + 14 * CELL + 24, y + 24, shapes)


LANES = ["client", "front-end", "worker 0", "worker 1"]
# From, to, words; of a lane alone: what it does. Data is drawn thick.
MESSAGES = [
    (0, 1, "Prefill: header with kv.keep, tokens", False),
    (1, 0, "Accepted: kv_lease", False),
    (1, 2, "Prepare: plan, lease, prefix; tokens", False), (1, 3, "Prepare: …", False),
    (2, 3, "layer 0 is computed and kept", None),
    (0, 1, "FetchKv", False), (1, 2, "FetchKv", False), (1, 3, "FetchKv", False),
    (2, 1, "K, V of its tokens", True), (3, 1, "K, V of its tokens", True),
    (1, 0, "layer 0, in the order of tokens", True),
    (2, 3, "the other layers, likewise", None),
    (1, 0, "Result: logits, manifest with holders", False),
    (0, 2, "FetchKv of the same lease, at kv.listen", False), (2, 0, "K, V of its tokens", True),
    (0, 1, "RenewKv", False), (1, 2, "KvLasts", False), (1, 3, "KvLasts", False),
    (0, 1, "ReleaseKv", False), (1, 2, "KvEnds", False), (1, 3, "KvEnds", False),
    (2, 3, "later prompts may begin with what is kept", None),
    (1, 2, "KvRunEnds: others need the room", False), (1, 3, "KvRunEnds", False),
]


def messages():
    step, lane_width, top = 30, 270, 84
    width, height = 48 + 3 * lane_width + 80, top + len(MESSAGES) * step + 24
    x_of = [64 + lane * lane_width for lane in range(len(LANES))]
    shapes = [text(24, 34, "A prefill whose K and V are kept, fetched, and cached", "title")]
    for x, lane in zip(x_of, LANES):
        shapes += [text(x, 64, lane, "middle"),
                   f'<line x1="{x}" y1="72" x2="{x}" y2="{height - 12}" class="line"/>']
    for place, (start, end, words, data) in enumerate(MESSAGES):
        y, left, right = top + place * step + 14, min(x_of[start], x_of[end]), max(x_of[start], x_of[end])
        if data is None:
            shapes += [rectangle(left - 30, y - 14, right - left + 60, 22, class_="work", rx=4),
                       text((left + right) // 2, y + 2, words, "middle")]
            continue
        direction = 1 if x_of[end] > x_of[start] else -1
        x, kind, head = x_of[end], "data" if data else "arrow", "data_head" if data else "head"
        shapes += [f'<line x1="{x_of[start]}" y1="{y}" x2="{x - 8 * direction}" y2="{y}" class="{kind}"/>',
                   f'<path d="M {x} {y} l {-10 * direction} -5 v 10 z" class="{head}"/>']
        # Words stand beside the arrow's far lane, where no other lane crosses them.
        first = x_of[end] - lane_width if direction > 0 else x_of[end]
        shapes.append(text(first + lane_width // 2, y - 5, words, "middle"))
    return page("What travels when", width, height, shapes)


def main():
    for name, svg in (("kv_holders.svg", holders()), ("kv_messages.svg", messages())):
        path = FOLDER / name
        if sys.argv[1:] != ["--check"]:
            path.write_text(svg)
        elif path.read_text() != svg:
            sys.exit(f"{path} is not what make_kv.py writes; run it")


if __name__ == "__main__":
    main()
