"""HTTP server with the interface of the Hugging Face hub, which serves models from a folder."""

from __future__ import annotations

import hashlib
import json
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.http_server import serving

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REFUSED = {
    "gated": (403, "GatedRepo"),
    "private": (401, "RepoNotFound"),
    "revision": (404, "RevisionNotFound"),
    "disabled": (403, "DisabledRepo"),
    "busy": (429, ""),
    "down": (503, ""),
}
"""HTTP status and error code for the models of each of these owners."""


class FakeHub(ThreadingHTTPServer):
    """HTTP server that serves the model ``OWNER/MODEL`` from the subfolder of that name."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.sent: list[str] = []
        """Names of the files sent, with repetitions."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


def fake_hub(folder: Path) -> AbstractContextManager[FakeHub]:
    return serving(FakeHub(folder))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_GET(self) -> None:
        self._answer(send=True)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, send: bool) -> None:
        assert isinstance(self.server, FakeHub)
        parts = self.path.partition("?")[0].strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self._api(*parts[2:])
            return
        if len(parts) < 4:
            self._refuse(404, "")
            return
        owner, model, _, _, *path = parts
        file = self.server.folder.joinpath(owner, model, *path)
        if owner in REFUSED or not file.is_file():
            self._refuse(*REFUSED.get(owner, (404, "EntryNotFound")))
            return
        content = file.read_bytes()
        if send:
            self.server.sent.append(file.name)
        self._send(200, content if send else b"", size=len(content), etag=hashlib.sha256(content).hexdigest())

    def _api(self, owner: str, model: str, kind: str = "revision", revision: str = "main", *path: str) -> None:
        assert isinstance(self.server, FakeHub)
        folder = self.server.folder / owner / model
        if owner in REFUSED or not folder.is_dir():
            self._refuse(*REFUSED.get(owner, (404, "RepoNotFound")))
        elif revision not in ("main", COMMIT):
            self._refuse(404, "RevisionNotFound")
        elif kind == "tree":
            rows = [
                {
                    "type": "file",
                    "path": file.relative_to(folder).as_posix(),
                    "size": file.stat().st_size,
                    "oid": "0" * 40,
                }
                for file in folder.rglob("*")
                if file.is_file()
            ]
            self._send(200, json.dumps(rows).encode())
        else:
            row = {"_id": "1", "id": f"{owner}/{model}", "sha": COMMIT, "private": False, "siblings": [], "tags": []}
            self._send(200, json.dumps(row).encode())

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"", code=code)

    def _send(self, status: int, content: bytes, *, size: int | None = None, etag: str = "", code: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content) if size is None else size))
        self.send_header("X-Repo-Commit", COMMIT)
        message = "Access to this resource is disabled." if code == "DisabledRepo" else ""
        for name, value in (
            ("X-Error-Message", message),
            ("ETag", f'"{etag}"' if etag else ""),
            ("X-Error-Code", code),
        ):
            if value:
                self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
