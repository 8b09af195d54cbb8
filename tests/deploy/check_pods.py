"""Runs the manifests' processes in network namespaces. Usage: check_pods.py PATH_OF_MESHFILL

    namespace   meshfill-pods-0          -1 … -4                  -5
    pod         front-end 10.199.0.10    worker-0 … 3, .11 … .14  client, .20
    bridge      meshfill-br
"""
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import yaml

MESHFILL = str(pathlib.Path(sys.argv[1]).resolve())
BASE = pathlib.Path(__file__).parent.parent.parent / "deploy/kubernetes/base"
BRIDGE, PREFIX, SUBNET = "meshfill-br", "meshfill-pods", "10.199.0"
FRONT_END, FIRST_WORKER, CLIENT = 10, 11, 20
API = "meshfill.meshfill.svc.cluster.local"
WORKERS = 4
SECONDS = 60
TOKENS = 60_000


def run(*command, **options):
    return subprocess.run([str(each) for each in command], check=True, capture_output=True, text=True, **options).stdout


def wait_for(what, condition):
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError(f"{what}: not within {SECONDS} s")


class Network:
    """Namespaces on one bridge. All of them know the Services' names, the API's as clients in other namespaces say it."""

    def __init__(self):
        self.namespaces = []
        run("ip", "link", "add", BRIDGE, "type", "bridge")
        run("ip", "link", "set", BRIDGE, "up")

    def add(self, host):
        name = f"{PREFIX}-{host}"
        self.namespaces.append(name)
        hosts = pathlib.Path("/etc/netns") / name
        hosts.mkdir(parents=True)
        (hosts / "hosts").write_text("127.0.0.1 localhost\n" + f"{SUBNET}.{FRONT_END} {API} meshfill-control\n")
        run("ip", "netns", "add", name)
        run("ip", "link", "add", f"mfpod{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", f"mfpod{host}", "master", BRIDGE, "up")
        for command in (f"addr add {SUBNET}.{host}/24 dev eth0", "link set eth0 up", "link set lo up"):
            run("ip", "-n", name, *command.split())
        return name

    def close(self):
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "del", name], check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False)


class Certificates:
    """One authority, and a certificate for each role, as cert-manager lays them out."""

    def __init__(self, folder):
        self.folder = folder
        run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=meshfill-test-ca", "-keyout",
            folder / "ca.key", "-out", folder / "ca.crt")

    def issue(self, role, name):
        to = self.folder / role
        to.mkdir()
        run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", to / "tls.key", "-out",
            to / "request")
        (to / "names").write_text(f"subjectAltName=DNS:{name}")
        run("openssl", "x509", "-req", "-in", to / "request", "-CA", self.folder / "ca.crt", "-CAkey", self.folder / "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", to / "names", "-out", to / "tls.crt")
        shutil.copy(self.folder / "ca.crt", to / "ca.crt")
        return to


class Manifests:
    """The pods' commands, with the files of their volumes where they are here."""

    def __init__(self, folder, certificates, model):
        self.model = model
        documents = [each for each in yaml.safe_load_all(run("kubectl", "kustomize", BASE)) if each]
        self.pods, self.files = {}, {}
        for document in documents:
            if document["kind"] in ("Deployment", "StatefulSet"):
                role = document["metadata"]["labels"]["app.kubernetes.io/component"]
                self.pods[role] = document["spec"]["template"]["spec"]["containers"][0]
            if document["kind"] == "ConfigMap":
                for file, text in document["data"].items():
                    (folder / file).write_text(text)
                    self.files[f"/etc/meshfill/{file}"] = str(folder / file)
        self.certificates = {"front-end": certificates.issue("front-end", "meshfill-control"),
                             "worker": certificates.issue("worker", "meshfill-worker")}

    def command(self, role, **environment):
        arguments = [re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], each) for each in self.pods[role]["args"]]
        arguments = [self.files.get(each, each) for each in arguments]
        tls = self.certificates[role]
        threads = ["--set", "pool.worker.threads=1"] if role == "worker" else []  # this machine is smaller than the pods'
        return [MESHFILL, *arguments, "--set", f"model.path={self.model}", "--set", f"pool.tls.cert={tls}/tls.crt", "--set",
                f"pool.tls.key={tls}/tls.key", "--set", f"pool.tls.ca={tls}/ca.crt", "--set", "plan.profile_path=", *threads]


class Pods:
    def __init__(self, folder):
        self.network = Network()
        self.processes, self.namespaces, self.log = {}, {}, (folder / "pods.log").open("w+")
        model = folder / "model"
        run(MESHFILL, "make-model", "--arch", "llama", "--out", model, "--layers", "2", "--hidden", "128", "--vocab", "256")
        self.manifests = Manifests(folder, Certificates(folder), model)
        self.client = self.network.add(CLIENT)
        self.prompt, self.logits = folder / "prompt", folder / "logits"
        self.prompt.write_bytes(random.randbytes(TOKENS))

    def start(self, role, host, name):
        command = self.manifests.command(role, POD_NAME=name, NODE_NAME=f"node-{host}")
        self.namespaces[name] = self.network.add(host)
        self.processes[name] = subprocess.Popen(["ip", "netns", "exec", self.namespaces[name], *command], stderr=self.log,
                                                stdout=self.log)

    def ready(self, name):
        """What the kubelet would find with the worker's readiness probe."""
        pod = self.manifests.pods["worker"]
        probe = pod["readinessProbe"]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in pod["ports"]}
        ask = "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)"
        address = f"{SUBNET}.{self.namespaces[name].rsplit('-', 1)[1]}:{ports[probe['port']]}"
        command = ["ip", "netns", "exec", self.namespaces[name], sys.executable, "-c", ask, f"http://{address}{probe['path']}"]
        return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0

    def start_prefill(self):
        """One that computes all tokens, though the pool has them cached: it writes all logits."""
        return subprocess.Popen(["ip", "netns", "exec", self.client, MESHFILL, "prefill", "--server", f"{API}:50051",
                                 "--tokens", self.prompt, "--format", "bytes", "--json", "--top-k", "3", "--logits-out", self.logits],
                                text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def prefill(self):
        return self.answer(self.start_prefill())

    def start_run(self):
        """The same, once its ranks compute."""
        client = self.start_prefill()
        wait_for("a run", lambda: self.metric(r"meshfill_running_tokens ") > 0)
        return client

    @staticmethod
    def answer(client):
        out, error = client.communicate(timeout=2 * SECONDS)
        assert client.returncode == 0, error
        return json.loads(out)

    def metric(self, pattern):
        """The sum over the series that match, as Prometheus would hear it; 0 where nobody answers yet."""
        fetch = f"import urllib.request as u; print(u.urlopen('http://{API}:9464/metrics', timeout=5).read().decode())"
        answer = subprocess.run(["ip", "netns", "exec", self.client, "python3", "-c", fetch], capture_output=True, text=True,
                                check=False)
        return sum(float(line.rsplit(" ", 1)[1]) for line in answer.stdout.splitlines() if re.match(pattern, line))

    def wait_for_ranks(self, count):
        serving = r'meshfill_ranks\{state="(ready|preparing|running|stopping)"\}'
        wait_for(f"{count} ranks", lambda: self.metric(serving) == count)

    def signal(self, name, number):
        self.processes[name].send_signal(number)

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.network.close()


def check_same(answers):
    """All answers have one first token, and those of one plan the same bits."""
    assert len({answer["first_token"] for answer in answers}) == 1, answers
    by_plan = {}
    for answer in answers:
        assert answer["top"] == by_plan.setdefault(str(answer["plan"]), answer["top"]), answers


def main():
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        pods = Pods(pathlib.Path(name))
        try:
            workers = [f"meshfill-worker-{index}" for index in range(WORKERS)]
            for index, worker in enumerate(workers):
                pods.start("worker", FIRST_WORKER + index, worker)
            time.sleep(1)
            assert not any(map(pods.ready, workers)), "ready, and nobody to join"
            pods.start("front-end", FRONT_END, "front-end")
            pods.wait_for_ranks(WORKERS)
            assert all(map(pods.ready, workers)), "joined, and not ready"
            answers = [pods.prefill()]
            print(f"{WORKERS} workers over TLS: first token {answers[0]['first_token']}, plan {answers[0]['plan']}")

            running = pods.start_run()
            pods.signal("meshfill-worker-2", signal.SIGKILL)
            answers.append(pods.answer(running))
            pods.wait_for_ranks(WORKERS - 1)
            assert pods.metric("meshfill_requests_retried_total") == 1, "the kill came too late to hit the prefill"
            answers.append(pods.prefill())
            print(f"one killed: {answers[-1]['plan']['ranks']} ranks answer")

            pods.start("worker", FIRST_WORKER + WORKERS, "meshfill-worker-2")  # as a pod that was rescheduled
            pods.wait_for_ranks(WORKERS)
            answers.append(pods.prefill())
            print(f"back under its name, at another address: {answers[-1]['plan']['ranks']} ranks answer")

            running = pods.start_run()
            pods.signal("meshfill-worker-1", signal.SIGTERM)
            answers.append(pods.answer(running))
            assert pods.processes["meshfill-worker-1"].wait(SECONDS) == 0, "the drained worker failed"
            pods.wait_for_ranks(WORKERS - 1)
            answers.append(pods.prefill())
            print(f"one drained: {answers[-1]['plan']['ranks']} ranks answer")
            check_same(answers)

            pods.signal("front-end", signal.SIGTERM)
            assert pods.processes["front-end"].wait(SECONDS) == 0, "the front-end did not drain"
            print(f"{len(answers)} prefills, all answered, all with the same first token, those of one plan with the same bits")
        except BaseException:
            pods.log.seek(0)
            print(pods.log.read()[-6000:], file=sys.stderr)
            raise
        finally:
            pods.close()


if __name__ == "__main__":
    main()
