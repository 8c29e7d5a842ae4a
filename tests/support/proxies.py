"""Real proxies in front of the labelling page's server: nginx and HAProxy, which keep connections to it and share them
among people."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HOST = "label.example.org"
CONFIGURATIONS = {
    "nginx": """daemon off; pid {folder}/pid; error_log {folder}/log; worker_processes 1; events {{}}
http {{ access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
upstream page {{ server 127.0.0.1:{port}; keepalive 2; }}
server {{ listen unix:{folder}/socket; location / {{ proxy_pass http://page; proxy_http_version 1.1;
proxy_set_header Connection ""; proxy_set_header Host $http_host; }} }} }}
""",
    "haproxy": """defaults
  mode http
  timeout connect 5s
  timeout client 5s
  timeout server 5s
frontend people
  bind unix@{folder}/socket
  default_backend page
backend page
  http-reuse always
  server one 127.0.0.1:{port}
""",
}
COMMANDS = {"nginx": ["-e", "{folder}/log", "-c"], "haproxy": ["-db", "-f"]}


@contextmanager
def proxy(name: str, port: int) -> Iterator[Path]:
    """The socket of a proxy in front of a port; skips, saying so, where it is not installed."""
    program = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if program is None:
        pytest.skip(f"{name} is not installed: the server is not tried behind it")
    with tempfile.TemporaryDirectory(prefix=name) as folder:  # a socket's path has at most 107 bytes
        file = Path(folder, "configuration")
        file.write_text(CONFIGURATIONS[name].format(folder=folder, port=port), encoding="utf-8")
        options = [each.format(folder=folder) for each in COMMANDS[name]]
        process = subprocess.Popen([program, *options, str(file)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + 10
            while not connects(Path(folder, "socket")):
                assert process.poll() is None
                assert time.monotonic() < until
                time.sleep(0.02)
            yield Path(folder, "socket")
        finally:
            process.terminate()
            process.wait()


def connects(path: Path) -> bool:
    """Somebody listens there."""
    with socket.socket(socket.AF_UNIX) as connection:
        return connection.connect_ex(str(path)) == 0
