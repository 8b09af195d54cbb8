"""Runs the script of the Job that fills the model's claim, here, against a hub that this file plays.

Usage: check_model_job.py    (tests/deploy/check-kubernetes.sh calls it; it installs the Job's client from PyPI)
"""
import hashlib
import http.server
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import threading

from manifests import KUBERNETES, named, render

SHA = "0123456789abcdef0123456789abcdef01234567"
WANTED = {"config.json": b'{"model_type": "llama"}', "model-00001-of-00002.safetensors": os.urandom(300_000),
          "model-00002-of-00002.safetensors": os.urandom(200_000), "tokenizer.json": b"{}"}
UNWANTED = {"original/consolidated.00.pth": b"x" * 1000, "README.md": b"# A model"}
FILES = {**WANTED, **UNWANTED}


OTHER_SHA = "fedcba9876543210fedcba9876543210fedcba98"


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks for: the list of files, and each file. `broken` ends in the middle of a file."""
    asked, broken, commit = [], None, SHA

    def log_message(self, *_):
        pass

    def answer(self, body, **headers):
        self.send_response(200)
        for name, value in {"Content-Length": len(body), "X-Repo-Commit": self.commit, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        return body if self.command == "GET" else b""

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            self.asked.append(path)
            info = {"id": "some/model", "sha": self.commit, "siblings": [{"rfilename": name} for name in FILES]}
            self.wfile.write(self.answer(json.dumps(info).encode(), Content_Type="application/json"))
            return
        name = path.partition(f"/resolve/{self.commit}/")[2]
        if self.command == "GET":
            self.asked.append(name)
        body = self.answer(FILES[name], ETag=f'"{hashlib.sha1(FILES[name]).hexdigest()}"')
        self.wfile.write(body[:len(body) // 2] if name == self.broken else body)

    do_HEAD = do_GET


def main():
    job = named(render(KUBERNETES / "base"), "Job", "meshfill-model")
    container, = job["spec"]["template"]["spec"]["containers"]
    refused, = job["spec"]["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]  # after it, no pod tries again
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        models, tmp = pathlib.Path(folder) / "models", pathlib.Path(folder) / "tmp"
        models.mkdir()
        script = container["args"][0].replace("/tmp/", f"{tmp}/").replace("/models/", f"{models}/")
        values = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"  # it has pip and python, as the Job's image
        environment = {**os.environ, **values, "PATH": path, "HOME": str(tmp), "MODEL_REPOSITORY": "some/model",
                       "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_DISABLE_XET": "1",
                       "HF_HUB_DOWNLOAD_TIMEOUT": "2"}

        def run(**changed):
            Hub.asked.clear()
            return subprocess.run([*container["command"], script], env={**environment, **changed}, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False)

        def files():
            return {str(path.relative_to(models / "model")): path.read_bytes()
                    for path in models.glob("model/**/*") if path.is_file()}

        # A broken download of another commit, with a file that this one lacks; then a broken one of this; then all of it.
        Hub.commit, Hub.broken, FILES["old.json"] = OTHER_SHA, "model-00002-of-00002.safetensors", b"{}"
        result = run(MODEL_REVISION=OTHER_SHA)
        assert result.returncode not in (0, refused) and Hub.broken in Hub.asked and any(models.glob("*/old.json")), result.stdout
        Hub.commit = SHA
        del FILES["old.json"]
        result = run()
        assert result.returncode not in (0, refused) and Hub.broken in Hub.asked and not (models / "model").exists(), result.stdout
        Hub.broken = None
        result = run()
        assert result.returncode == 0, result.stdout
        assert [path.name for path in models.iterdir()] == ["model"], result.stdout
        source = f"some/model@{values['MODEL_REVISION']}"
        assert files() == {**WANTED, ".source": f"{source}\n".encode()}, files().keys()
        assert f"/api/models/some/model/revision/{values['MODEL_REVISION']}" in Hub.asked and not UNWANTED.keys() & set(Hub.asked), Hub.asked

        result = run()
        assert result.returncode == 0 and not Hub.asked, result.stdout
        for changed in ({"MODEL_REVISION": OTHER_SHA}, {"MODEL_REPOSITORY": "other/model"}):
            result = run(**changed)
            wanted = "{MODEL_REPOSITORY}@{MODEL_REVISION}".format(**{**environment, **changed})
            assert result.returncode == refused and not Hub.asked, result.stdout
            assert f"model is {source}, not {wanted}; delete Job and claim" in result.stdout, result.stdout
        (models / "model/.source").unlink()  # as one that was filled by hand
        result = run(MODEL_REVISION=OTHER_SHA)
        assert result.returncode == 0 and not Hub.asked and files() == WANTED, result.stdout
    print(f"the model's Job: {len(WANTED)} files after broken downloads, at once, only what a model needs, and of one commit")


if __name__ == "__main__":
    main()
