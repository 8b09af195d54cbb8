"""Opens the status page of a server under load in headless Chromium.

Usage: check_status_page.py PATH_OF_MESHFILL OUT    (tests/deploy/check-status-page.sh calls it, and says more)
"""
import base64
import json
import pathlib
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

from demo_server import RANKS, DemoServer, get, wait_for

OUT = pathlib.Path(sys.argv[2])
WIDTHS = (320, 420, 1440)
SHOWN_SECONDS = 20
PAGE = "return document.documentElement.outerHTML"
NASTY_ID = "<img src=x onerror=alert(1)>"
NASTY_TENANT = "<b>team</b>"


# The words that a line's end cuts in two, and numbers that it parts from their unit. Names that others chose (class id) may be
# cut.
CUT_WORDS = """
const cut = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
for (let text; text = texts.nextNode();) {
  if (text.parentElement.closest(".id, script, style, noscript")) continue;
  for (const word of text.data.matchAll(/[\\d.,]+[ \\u00a0](?:ms|s|min|h|%|µs|[GM]B[/]s|TFLOP[/]s)(?!\\w)|[\\w.]+/g)) {
    const range = document.createRange();
    range.setStart(text, word.index);
    range.setEnd(text, word.index + word[0].length);
    if (new Set([...range.getClientRects()].map(each => Math.round(each.top))).size > 1) cut.push(word[0]);
  }
}
return cut"""


class Browser:
    """Chromium without a window, driven by chromedriver."""

    def __init__(self):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"
        wait_for("chromedriver", self.answers)
        options = {"args": ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]}
        self.url += "/session/" + self.ask("/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})["sessionId"]

    def answers(self):
        try:
            return urllib.request.urlopen(f"{self.url}/status", timeout=5)
        except OSError:
            return None

    def ask(self, path, value):
        request = urllib.request.Request(self.url + path, json.dumps(value).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)["value"]

    def command(self, name, **parameters):
        return self.ask("/goog/cdp/execute", {"cmd": name, "params": parameters})

    def run(self, script):
        return self.ask("/execute/sync", {"script": script, "args": []})

    def open(self, url, width=1280, night=False):
        self.command("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if night else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("/url", {"url": url})
        loaded = "const plan = document.getElementById('plan'); " \
                 "return document.getElementById('build').textContent !== '' && (plan.offsetParent === null || plan.complete)"
        wait_for("the page", lambda: self.run(loaded))
        return self.run(PAGE)

    def shoot(self, path):
        height = self.run("return document.documentElement.scrollHeight")
        width = self.run("return innerWidth")
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        request = urllib.request.Request(self.url, method="DELETE")  # or Chromium outlives its driver
        urllib.request.urlopen(request, timeout=120).close()
        self.driver.terminate()
        self.driver.wait(30)


# What shows a part of itself alone, and the rest to who scrolls it sideways.
CUT_OFF = """
return [...document.querySelectorAll("body *")].filter(each => each.scrollWidth > each.clientWidth + 1 &&
    getComputedStyle(each).display !== "inline" && !each.closest(".bar")).map(each => each.id || each.tagName)"""


def ill_fitting(browser, width):
    """What is wrong with the open page at this width."""
    wide = browser.run("return document.documentElement.scrollWidth")
    if wide > width:
        yield f"the page is {wide} px wide"
    right = browser.run("return document.getElementById('plan').getBoundingClientRect().right")
    if not 0 < right <= width:
        yield f"the plan's picture ends at {right} px"
    if cut := browser.run(CUT_WORDS):
        yield f"words are cut: {cut}"
    if cut := browser.run(CUT_OFF):
        yield f"parts are cut off: {cut}"


def problems(page, page_is_loaded_from, workers):
    page = page.replace("&nbsp;", " ")
    expected = {
        "the product's name": r"<h1>Meshfill</h1>",
        "the model's name": r'id="model">demo-model<',
        "the tokens, time and rest of what runs": r"400,000 tokens, layer \d of 2, [\d.]+ m?s, about (?:\d+ h )?(?:\d+ min)?(?: ?[\d.]+ m?s)? left",
        "who waits": r'class="id">waits-behind-it</p><p class="quiet">500,000 tokens, (waiting|uploading) for',
        "the state": r'class="ready">ready<',
        "the queue's depth": r"<dt>requests</dt><dd>[1-9]",
        "what runs": r"layer \d of 2",
        "the tokens of the last prefill": r"<dt>tokens</dt><dd>3,000</dd>",
        "the plan": r"<dd>2 × 2, striped</dd>",
        "the comm wait": r"<dt>comm wait of attention</dt><dd>[\d.]+ %</dd>",
        "the picture": r'src="last_prefill.svg\?number=1"',
        "idle in the legend": r"</i>idle</span>",
        "an id as text": "&lt;img src=x onerror=alert\\(1\\)&gt;",
        "a tenant as text": "of &lt;b&gt;team&lt;/b&gt;, 400,000 tokens",
    }
    if workers:
        expected["a worker"] = r"<td[^>]*>worker-2</td><td[^>]*>[^<]+</td><td[^>]*>running</td>"
        expected["links that nobody gave"] = r"<dt>on a host \(given, or the default\)</dt>"
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


def check_pool(browser, workers):
    """What is wrong with the page of a server with this kind of pool."""
    pool = "workers" if workers else "embedded"
    with tempfile.TemporaryDirectory() as name:
        server = DemoServer(sys.argv[1], pathlib.Path(name), workers)
        clients = []
        try:
            if server.prefill(3000, "--tile", "2x2") != 0:
                sys.exit("the first prefill failed")
            url = f"http://{server.pages}/"
            clients = [server.start_prefill(400_000, "--request-id", NASTY_ID, "--tenant", NASTY_TENANT)]
            wait_for("a prefill", lambda: '"phase":"running"' in get(url + "status.json"))
            clients.append(server.start_prefill(500_000, "--request-id", "waits-behind-it"))  # a shorter one would run first
            browser.open(url)
            found, until = ["nothing is shown"], time.monotonic() + SHOWN_SECONDS
            while found and time.monotonic() < until:  # the page asks every two seconds
                time.sleep(0.2)
                found = list(problems(browser.run(PAGE), url, workers))
            for width in WIDTHS:
                for night in (False, True):
                    browser.open(url, width, night)
                    found += [f"{width} px: {each}" for each in ill_fitting(browser, width)]
                    picture = OUT / f"{pool}-{width}{'-night' if night else ''}.png"
                    browser.shoot(picture)
                    print(f"Look at {picture}")
            end(clients)
            if workers:
                server.stop_workers()
                if "waits for workers" not in browser.open(url):
                    found.append("does not say that all workers have left")
            return [f"{pool}: {each}" for each in found]
        finally:
            end(clients)
            server.stop()


def main():
    browser = Browser()
    try:
        found = check_pool(browser, workers=False) + check_pool(browser, workers=True)
    finally:
        browser.close()
    for each in found:
        print("status page:", each, file=sys.stderr)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
