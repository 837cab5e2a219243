"""A small hub on this machine: the part of the protocol that huggingface_hub speaks to fetch and to publish a model.

    GET   /api/models/ID[/revision/R]          what is in a repository, and its commit
    GET   /api/models/ID/tree/R                its files with sizes and hashes
    HEAD  /ID/resolve/R/FILE, GET with Range   one file, from any byte on
    POST  /api/repos/create                    a new repository; 409 where there is one
    POST  /api/models/ID/preupload/R           which files travel by themselves (large), which in the commit
    POST  /ID.git/info/lfs/objects/batch       where large files go; PUT /lfs/OID takes them
    POST  /api/models/ID/commit/R              one commit, a JSON object per line

Without the token a private repository, like one that does not exist, is answered by 401, a gated one by 403 with
X-Error-Code: GatedRepo. `cut[path] = [n, m]` ends the connection after n bytes of that file, at the next
request after m, and then no more.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_of_the_test"
LARGE = 10_000  # bytes from which a file travels by itself


@dataclass
class Repo:
    files: dict[str, bytes] = field(default_factory=dict)
    private: bool = False
    gated: bool = False
    commits: int = 1

    @property
    def sha(self) -> str:
        return f"{self.commits:040x}"


class Hub:
    """Repositories by id, what was asked for, and faults to make."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.asked: list[tuple[str, str, str]] = []  # method, path, Range
        self.cut: dict[str, list[int]] = {}
        self.large: dict[str, bytes] = {}
        self.url = ""

    def add(self, name: str, directory: Path, **how: Any) -> Repo:
        files = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        self.repos[name] = Repo(files, **how)
        return self.repos[name]

    @property
    def env(self) -> dict[str, str]:
        """What a process needs that is to talk to this hub."""
        return {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "*"}


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def answer(self, code: int, body: Any = b"", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in ({"Content-Length": str(len(data))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def refuse(self, code: int, why: str, message: str) -> None:
        self.answer(code, {"error": message}, X_Error_Code=why, X_Error_Message=message)

    @property
    def knows_us(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    @property
    def brings_a_bad_token(self) -> bool:
        return "Authorization" in self.headers and not self.knows_us

    def repo(self, name: str, writing: bool = False) -> Repo | None:
        """The repository, or None after the answer that says why not."""
        found = self.hub.repos.get(name)
        if self.brings_a_bad_token:
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif found is None or (found.private and not self.knows_us):
            code = 404 if self.knows_us else 401
            self.refuse(code, "RepoNotFound", "Repository not found")
        elif found.gated and not self.knows_us:
            message = f"Access to model {name} is restricted and you are not in the authorized list."
            self.refuse(403, "GatedRepo", message)
        elif writing and not self.knows_us:
            self.refuse(401, "", "Invalid username or password.")
        else:
            return found
        return None

    def handle_any(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range", "")))
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) if self.command in ("POST", "PUT") else b""
        for pattern, act in ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                return act(self, body, *match.groups())
        self.refuse(404, "", f"no such page: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = handle_any

    # -- fetching --------------------------------------------------------------------------------------------------

    def info(self, body: bytes, name: str) -> None:
        if repo := self.repo(name):
            siblings = [{"rfilename": path} for path in repo.files]
            about = {"_id": "1", "id": name, "modelId": name, "sha": repo.sha, "private": repo.private}
            self.answer(200, about | {"siblings": siblings, "tags": [], "downloads": 0, "likes": 0})

    def tree(self, body: bytes, name: str) -> None:
        if repo := self.repo(name):
            self.answer(
                200, [{"type": "file", "path": p, "size": len(x), "oid": _oid(x)} for p, x in repo.files.items()]
            )

    def file(self, body: bytes, name: str, path: str) -> None:
        if (repo := self.repo(name)) is None:
            return
        if path not in repo.files:
            return self.refuse(404, "EntryNotFound", "Entry not found")
        data = repo.files[path]
        begin = int(re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range", "bytes=0-"))[1])
        part = data[begin:]
        self.send_response(206 if "Range" in self.headers else 200)
        for key, value in {"ETag": f'"{_oid(data)}"', "X-Repo-Commit": repo.sha, "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(part)))
        if "Range" in self.headers:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.hub.cut.get(path):
            self.wfile.write(part[: self.hub.cut[path].pop(0)])
            self.wfile.flush()
            self.connection.close()
            self.close_connection = True
            return
        self.wfile.write(part)

    # -- publishing ------------------------------------------------------------------------------------------------

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        if not self.knows_us:
            return self.refuse(401, "", "Invalid username or password.")
        if asked["organization"] == "someone-else":
            return self.refuse(403, "", "You don't have the rights to create a model under this namespace")
        name = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{name}", "name": name, "id": "1"}
        if name in self.hub.repos:
            return self.answer(409, url | {"error": "You already created this model repo"})
        private = asked.get("private") or asked.get("visibility") == "private"
        self.hub.repos[name] = Repo(private=bool(private), commits=0)
        self.answer(200, url)

    def preupload(self, body: bytes, name: str) -> None:
        if repo := self.repo(name, writing=True):
            mode = lambda size: "lfs" if size >= LARGE else "regular"  # noqa: E731
            found = [
                {"path": f["path"], "uploadMode": mode(f["size"]), "shouldIgnore": False}
                | ({"oid": _oid(repo.files[f["path"]])} if f["path"] in repo.files else {})
                for f in json.loads(body)["files"]
            ]
            self.answer(200, {"files": found})

    def batch(self, body: bytes, name: str) -> None:
        if self.repo(name, writing=True):
            where = lambda oid: {"upload": {"href": f"{self.hub.url}/lfs/{oid}"}}  # noqa: E731
            objects = [
                {"oid": o["oid"], "size": o["size"]}
                | ({} if o["oid"] in self.hub.large else {"actions": where(o["oid"])})
                for o in json.loads(body)["objects"]
            ]
            self.answer(200, {"transfer": "basic", "objects": objects})

    def put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.refuse(400, "", "the bytes are not those of the hash")
        self.hub.large[oid] = body
        self.answer(200)

    def commit(self, body: bytes, name: str) -> None:
        if (repo := self.repo(name, writing=True)) is None:
            return
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                repo.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                repo.files[value["path"]] = self.hub.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                repo.files.pop(value["path"], None)
        repo.commits += 1
        self.answer(
            200, {"success": True, "commitOid": repo.sha, "commitUrl": f"{self.hub.url}/{name}/commit/{repo.sha}"}
        )


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


ID = r"([^/]+/[^/]+?)"
ROUTES = [
    (rf"GET /api/models/{ID}(?:/revision/[^/]+)?", _Handler.info),
    (rf"GET /api/models/{ID}/tree/[^/]+", _Handler.tree),
    (rf"(?:GET|HEAD) /{ID}/resolve/[^/]+/(.+)", _Handler.file),
    (r"POST /api/repos/create", _Handler.create),
    (r"POST /api/validate-yaml", lambda self, body: self.answer(200, {"errors": [], "warnings": []})),
    (rf"POST /api/models/{ID}/preupload/[^/]+", _Handler.preupload),
    (rf"POST /{ID}\.git/info/lfs/objects/batch", _Handler.batch),
    (r"PUT /lfs/([0-9a-f]+)", _Handler.put),
    (rf"POST /api/models/{ID}/commit/[^/]+", _Handler.commit),
]


@contextmanager
def hub_here() -> Iterator[Hub]:
    """A context in which the hub answers on a free port of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)  # how often it looks for its end
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
