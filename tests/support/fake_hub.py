"""A stand-in for the Hugging Face hub: as much of it as `hf upload`, `hf download` and `load_dataset` ask for."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40
TOKEN = "fake"


class FakeHub:
    """Repositories in memory; a new one holds `.gitattributes`, as the hub makes it.

    Attributes:
        url: its address, while it runs.
        files: of each repository (`OWNER/NAME` or `datasets/OWNER/NAME`), by path.
        objects: large files by their SHA-256, which come before the commit that names them.
    """

    def __init__(self) -> None:
        self.url = ""
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}

    def environment(self, cache: str) -> dict[str, str]:
        """Variables that send `hf` here, and by plain HTTP: `hf_xet` talks to a store of its own."""
        here = {"HF_ENDPOINT": self.url, "HF_TOKEN": TOKEN, "HF_HOME": cache, "HF_HUB_OFFLINE": "0"}
        return here | {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Within, it answers at `url`."""
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body, path = self.body(), self.path.partition("?")[0]
                found = fake.file(path)
                if path.startswith("/objects/"):
                    fake.objects[path.removeprefix("/objects/")] = body
                    self.send(b"")
                elif found is not None:
                    self.send(found)
                elif self.headers["Authorization"] != f"Bearer {TOKEN}":
                    self.send(b"", 401)
                else:
                    try:
                        self.send(json.dumps(fake.call(path, body)).encode())
                    except KeyError:
                        self.send(b"", 404)

            do_GET = do_HEAD = do_POST = do_PUT = answer

            def body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length", 0)))
                parts = []
                while size := int(self.rfile.readline(), 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def send(self, body: bytes, status: int = 200) -> None:
                self.send_response(status)
                if status == 404:
                    self.send_header("X-Error-Code", "EntryNotFound")
                self.send_header("Content-Length", str(len(body)))
                self.send_header("X-Repo-Commit", COMMIT)
                self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, daemon=True)
            thread.start()
            try:
                yield self
            finally:
                server.shutdown()
                thread.join()

    def file(self, path: str) -> bytes | None:
        """A file by its address."""
        match = re.fullmatch(rf"/(.+)/resolve/(?:main|{COMMIT})/(.+)", path)
        return self.files.get(match[1], {}).get(match[2]) if match else None

    def call(self, path: str, body: bytes) -> Any:
        """The answer to a call of the hub's interface; KeyError where there is no such call or repository."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            prefix = "datasets/" if asked["type"] == "dataset" else ""
            name = f"{prefix}{asked['organization']}/{asked['name']}"
            self.files.setdefault(name, {".gitattributes": b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"})
            return {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if path.endswith(".git/info/lfs/objects/batch"):
            return {"objects": [self._upload(each) for each in json.loads(body)["objects"]]}
        match = re.fullmatch(rf"/api/(models|datasets)/([^/]+/[^/]+)/([\w-]+)/(?:main|{COMMIT})/?(.*)", path)
        if not match:
            raise KeyError(path)
        kind, name, call, folder = match.groups()
        files = self.files[name if kind == "models" else f"datasets/{name}"]
        if call == "preupload":
            return {"files": [{"path": each["path"], "uploadMode": mode(each["path"]), "shouldIgnore": False}
                              for each in json.loads(body)["files"]]}  # fmt: skip
        if call == "commit":
            files |= dict(self._added(json.loads(line)) for line in body.splitlines() if b'"header"' not in line)
            return {"success": True, "commitOid": COMMIT, "commitUrl": f"{self.url}/{name}/commit/{COMMIT}"}
        if call == "tree":
            return list(tree(files, folder))
        if call == "revision":
            return {"id": name, "sha": COMMIT, "siblings": [{"rfilename": path} for path in files]}
        raise KeyError(path)

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {**asked, "actions": {"upload": {"href": f"{self.url}/objects/{asked['oid']}"}}}

    def _added(self, operation: dict[str, Any]) -> tuple[str, bytes]:
        value = operation["value"]
        large = operation["key"] == "lfsFile"
        return value["path"], self.objects[value["oid"]] if large else base64.b64decode(value["content"])


def mode(path: str) -> str:
    """The way in which a file is sent: large ones apart from the commit."""
    return "lfs" if path.endswith((".safetensors", ".parquet")) else "regular"


def tree(files: dict[str, bytes], folder: str) -> Iterator[dict[str, Any]]:
    """The files below `folder`, at any depth; clients pass over what they did not ask for."""
    for path, content in files.items():
        if path.startswith(folder):
            yield {"type": "file", "path": path, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
    for path in {path.rpartition("/")[0] for path in files} - {"", folder}:
        yield {"type": "directory", "path": path, "oid": COMMIT}
