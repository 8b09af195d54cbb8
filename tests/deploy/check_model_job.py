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


class Hub(http.server.BaseHTTPRequestHandler):
    """What huggingface_hub asks for: the list of files, and each file. `broken` ends in the middle of a file."""
    asked, broken = [], None

    def log_message(self, *_):
        pass

    def answer(self, body, **headers):
        self.send_response(200)
        for name, value in {"Content-Length": len(body), "X-Repo-Commit": SHA, **headers}.items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        return body if self.command == "GET" else b""

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path.startswith("/api/models/"):
            self.asked.append(path)
            info = {"id": "some/model", "sha": SHA, "siblings": [{"rfilename": name} for name in FILES]}
            self.wfile.write(self.answer(json.dumps(info).encode(), Content_Type="application/json"))
            return
        name = path.partition(f"/resolve/{SHA}/")[2]
        if self.command == "GET":
            self.asked.append(name)
        body = self.answer(FILES[name], ETag=f'"{hashlib.sha1(FILES[name]).hexdigest()}"')
        self.wfile.write(body[:len(body) // 2] if name == self.broken else body)

    do_HEAD = do_GET


def main():
    job = named(render(KUBERNETES / "base"), "Job", "meshfill-model")
    container, = job["spec"]["template"]["spec"]["containers"]
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

        def run():
            return subprocess.run([*container["command"], script], env=environment, text=True, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, timeout=300, check=False)

        Hub.broken = "model-00002-of-00002.safetensors"
        result = run()
        assert result.returncode != 0 and Hub.broken in Hub.asked and not (models / "model").exists(), result.stdout
        Hub.broken = None
        result = run()
        assert result.returncode == 0, result.stdout
        assert [path.name for path in models.iterdir()] == ["model"], result.stdout
        found = {str(path.relative_to(models / "model")): path.read_bytes() for path in models.glob("model/**/*") if path.is_file()}
        assert found == WANTED, found.keys()
        assert f"/api/models/some/model/revision/{values['MODEL_REVISION']}" in Hub.asked and not UNWANTED.keys() & set(Hub.asked), Hub.asked
        Hub.asked.clear()
        result = run()
        assert result.returncode == 0 and not Hub.asked, result.stdout
    print(f"the model's Job: {len(WANTED)} files after a broken download, at once, and only what a model needs")


if __name__ == "__main__":
    main()
