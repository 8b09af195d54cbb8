"""Opens the status page of a server under load in headless Chromium.

Usage: check_status_page.py PATH_OF_MESHFILL OUT    (tests/deploy/check-status-page.sh calls it, and says more)
"""
import pathlib
import re
import subprocess
import sys
import tempfile

from demo_server import RANKS, DemoServer

OUT = pathlib.Path(sys.argv[2])
DEVICES = {"phone": ["--window-size=500,2000"],  # headless Chromium makes no window narrower
           "desk": ["--window-size=1280,1600"],
           "desk-at-night": ["--window-size=1280,1600", "--blink-settings=preferredColorScheme=0"]}
NASTY_ID = "<img src=x onerror=alert(1)>"


def chromium(*arguments):
    return subprocess.run(["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu",
                           "--virtual-time-budget=6000", *arguments], capture_output=True, text=True, check=True,
                          timeout=180).stdout


def problems(page, page_is_loaded_from, workers):
    expected = {
        "the model's name": r'<h1 id="model">demo-model</h1>',
        "the state": r'class="ready">ready<',
        "the queue's depth": r"<dt>requests</dt><dd>[1-9]",
        "what runs": r"layer \d of 2",
        "the tokens of the last prefill": r"<dt>tokens</dt><dd>3,000</dd>",
        "the plan": r"<dd>2 × 2, striped</dd>",
        "the comm wait": r"<dt>comm wait of attention</dt><dd>[\d.]+ %</dd>",
        "the picture": r'src="last_prefill.svg\?number=1"',
        "an id as text": "&lt;img src=x onerror=alert\\(1\\)&gt;",
    }
    if workers:
        expected["a worker"] = r"<td>worker-2</td><td>[^<]+</td><td>running</td>"
    for what, pattern in expected.items():
        if not re.search(pattern, page):
            yield f"{what} is not there ({pattern})"
    ranks = page.count('class="rank"')
    if ranks != RANKS:
        yield f"{ranks} ranks are drawn instead of {RANKS}"
    outside = set(re.findall(r"https?://[^\s\"'<>]+", page)) - {page_is_loaded_from}
    if outside:
        yield f"asks others: {outside}"


def end(clients):
    for client in clients:
        client.kill()
        client.wait()


def check_pool(workers):
    """What is wrong with the page of a server with this kind of pool."""
    pool = "workers" if workers else "embedded"
    with tempfile.TemporaryDirectory() as name:
        server = DemoServer(sys.argv[1], pathlib.Path(name), workers)
        clients = []
        try:
            if server.prefill(3000, "--tile", "2x2") != 0:
                sys.exit("the first prefill failed")
            clients = [server.start_prefill(400_000, "--request-id", NASTY_ID), server.start_prefill(1000)]
            url = f"http://{server.pages}/"
            found = list(problems(chromium("--dump-dom", url), url, workers))
            for device, options in DEVICES.items():
                picture = OUT / f"{pool}-{device}.png"
                chromium(*options, f"--screenshot={picture}", url)
                print(f"Look at {picture}")
            end(clients)
            if workers:
                server.stop_workers()
                if "waits for workers" not in chromium("--dump-dom", url):
                    found.append("does not say that all workers have left")
            return [f"{pool}: {each}" for each in found]
        finally:
            end(clients)
            server.stop()


def main():
    found = check_pool(workers=False) + check_pool(workers=True)
    for each in found:
        print("status page:", each, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
