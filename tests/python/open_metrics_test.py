"""/metrics in OpenMetrics' text format, read by Prometheus' own Python client: the same series, and exemplars of traces."""

import math
import time
import urllib.request

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import meshfill
from real_server import SECONDS, RealServerTest

TRACE_ID, OTHER_TRACE_ID = "0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736"
ACCEPT = {  # what Prometheus sends
    "2.42": "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "3.0": "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
}
MOVES = {"meshfill_peak_memory_bytes"}  # from scrape to scrape, beside what is of the process


def series(families) -> dict:
    """{(name, labels): value}; bounds of buckets as numbers."""
    found = {}
    for family in families:
        for sample in family.samples:
            if sample.name not in MOVES and not sample.name.startswith("process_"):
                labels = {name: float(value) if name == "le" else value for name, value in sample.labels.items()}
                found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


class OpenMetricsTest(RealServerTest):
    def setUp(self):
        super().setUp()
        model = self.make_model("model", layers=2, hidden=64, heads=4, kv_heads=2, vocab=97)
        own = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "pool__embedded__ranks": 2}
        server = self.start("serve", *self.settings(model, pool__embedded__peak_flops="1e11", **own))
        server.wait_for(r" (ready): ")
        self.address = server.wait_for(r"(?<!metrics) listening on (\S+:\d+)")
        self.pages = server.wait_for(r"metrics listening on (\S+:\d+)")

    def prefill(self, trace_id=None, sampled=True) -> None:
        traceparent = f"00-{trace_id}-b7ad6b7169203331-0{int(sampled)}"
        metadata = [("traceparent", traceparent)] if trace_id is not None else []
        with meshfill.Client(self.address, timeout=SECONDS, metadata=metadata) as client:
            client.prefill([1, 2, 3])

    def get(self, accept: str):
        request = urllib.request.Request(f"http://{self.pages}/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return answer.headers["Content-Type"], answer.read().decode()

    def settled(self) -> tuple:
        """The page in plain text, once it stays: what a prefill held is given back behind its answer."""
        deadline = time.monotonic() + SECONDS
        page = self.get("*/*")
        while True:
            time.sleep(0.1)
            later = self.get("*/*")
            if series(parse_text(later[1])) == series(parse_text(page[1])):
                return page
            self.assertLess(time.monotonic(), deadline, "the page never stays")
            page = later

    def exemplars(self) -> list:
        content_type, text = self.get(ACCEPT["2.42"])
        self.assertEqual(content_type, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        samples = [sample for family in parse_open_metrics(text) for sample in family.samples]
        return [(sample, sample.exemplar) for sample in samples if sample.exemplar is not None]

    def test_it_has_the_same_series(self):
        self.prefill()
        content_type, text = self.settled()
        self.assertEqual(content_type, "text/plain; version=0.0.4; charset=utf-8")
        expected = series(parse_text(text))
        self.assertGreater(len(expected), 200)
        for version, accept in ACCEPT.items():
            found = series(parse_open_metrics(self.get(accept)[1]))
            self.assertEqual(found.keys(), expected.keys(), version)
            for name, value in found.items():
                self.assertTrue(math.isclose(value, expected[name], rel_tol=1e-12), (name, value, expected[name]))

    def test_a_bucket_has_the_trace_of_its_latest_request(self):
        self.prefill()
        self.prefill(OTHER_TRACE_ID, sampled=False)
        self.assertEqual(self.exemplars(), [])
        before = time.time()
        self.prefill(TRACE_ID)
        after = time.time()
        ((sample, exemplar),) = self.exemplars()
        self.assertEqual(sample.name, "meshfill_ttft_seconds_bucket")
        self.assertEqual(exemplar.labels, {"trace_id": TRACE_ID})
        self.assertLess(0, exemplar.value)
        self.assertLessEqual(exemplar.value, float(sample.labels["le"]))
        self.assertLess(before - 0.01, float(exemplar.timestamp))
        self.assertLess(float(exemplar.timestamp), after + 0.01)
        self.prefill(OTHER_TRACE_ID)
        self.assertIn(OTHER_TRACE_ID, [exemplar.labels["trace_id"] for _, exemplar in self.exemplars()])
