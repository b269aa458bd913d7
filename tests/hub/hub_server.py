"""A small Hub on localhost: the endpoints that huggingface_hub 2.4 uses to push and to load a model."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

TOKEN = "hf_local"
USER = "somebody"


@dataclass
class Commit:
    """One state of a repository."""

    sha: str
    title: str
    files: dict[str, bytes]


@dataclass
class Hub:
    """Repositories as branches of commits, and the large files that were uploaded."""

    repositories: dict[str, dict[str, list[Commit]]] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    url: str = ""

    def create(self, name: str, organization: str | None) -> tuple[int, dict]:
        repo_id = f"{organization or USER}/{name}"
        status = 409 if repo_id in self.repositories else 200
        first = Commit(hashlib.sha1(repo_id.encode()).hexdigest(), "initial commit", {})
        self.repositories.setdefault(repo_id, {"main": [first]})
        return status, {"url": f"{self.url}/{repo_id}"}

    def commit_at(self, repo_id: str, revision: str) -> Commit | None:
        branches = self.repositories[repo_id]
        if revision in branches:
            return branches[revision][-1]
        return next((c for commits in branches.values() for c in commits if c.sha == revision), None)

    def preupload(self, files: list[dict]) -> dict:
        """Weights go to large file storage, the rest into the commit."""
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in files
        ]
        return {"files": modes}

    def lfs_batch(self, objects: list[dict]) -> dict:
        answers: list[dict[str, Any]] = [{"oid": item["oid"], "size": item["size"]} for item in objects]
        for answer in answers:
            if answer["oid"] not in self.blobs:
                answer["actions"] = {"upload": {"href": f"{self.url}/lfs/{answer['oid']}"}}
        return {"transfer": "basic", "objects": answers}

    def commit(self, repo_id: str, branch: str, lines: list[dict]) -> dict:
        commits = self.repositories[repo_id][branch]
        files = dict(commits[-1].files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            else:
                raise NotImplementedError(line["key"])
        sha = hashlib.sha1(f"{commits[-1].sha} {branch} {sorted(files)}".encode()).hexdigest()
        commits.append(Commit(sha, lines[0]["value"]["summary"], files))
        return {"commitUrl": f"{self.url}/{repo_id}/commit/{sha}", "commitOid": sha}


def metadata_errors(content: str) -> list[dict[str, str]]:
    """What the Hub refuses in the metadata block of a README.md."""
    block = REGEX_YAML_BLOCK.search(content)
    if block is None:
        return [{"message": "empty or missing yaml metadata"}]
    metadata = yaml.safe_load(block[2])
    wanted = {"library_name": str, "pipeline_tag": str, "license": str, "tags": list}
    return [
        {"message": f'"{name}" must be a {kind.__name__}'}
        for name, kind in wanted.items()
        if name in metadata and not isinstance(metadata[name], kind)
    ]


class Handler(BaseHTTPRequestHandler):
    """Routes requests to the Hub of the server."""

    protocol_version = "HTTP/1.1"
    server: "HubServer"

    @property
    def hub(self) -> Hub:
        return self.server.hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(/.*)?)?", path):
            self._get_info(found[1], found[2], found[3] or "main", found[4])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._get_file(found[1], found[2], found[3])
        else:
            self._fail(404, "not an endpoint")

    def _find(self, repo_id: str, revision: str) -> Commit | None:
        if repo_id not in self.hub.repositories:
            self._fail(404, "RepoNotFound")
            return None
        commit = self.hub.commit_at(repo_id, revision)
        if commit is None:
            self._fail(404, "RevisionNotFound")
        return commit

    def _get_info(self, repo_id: str, kind: str | None, revision: str, folder: str | None) -> None:
        commit = self._find(repo_id, revision)
        if commit is None:
            return
        if kind != "tree":
            siblings = [{"rfilename": name} for name in sorted(commit.files)]
            self._answer({"id": repo_id, "sha": commit.sha, "siblings": siblings})
        elif folder:
            self._fail(404, "EntryNotFound")
        else:
            sizes = {name: len(content) for name, content in commit.files.items()}
            self._answer([{"type": "file", "path": n, "size": s, "oid": n} for n, s in sizes.items()])

    def _get_file(self, repo_id: str, revision: str, name: str) -> None:
        commit = self._find(repo_id, revision)
        if commit is None:
            return
        headers = {"X-Repo-Commit": commit.sha}
        if name not in commit.files:
            self._fail(404, "EntryNotFound", headers)
            return
        content = commit.files[name]
        self._send(200, content, {**headers, "ETag": f'"{hashlib.sha1(content).hexdigest()}"'})

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fail(401, "no valid token")
        elif path == "/api/repos/create":
            request = json.loads(body)
            status, answer = self.hub.create(request["name"], request["organization"])
            self._answer(answer, status)
        elif path == "/api/validate-yaml":
            errors = metadata_errors(json.loads(body)["content"])
            self._answer({"errors": errors, "warnings": []}, 400 if errors else 200)
        elif re.fullmatch(r"/api/models/[^/]+/[^/]+/preupload/.+", path):
            self._answer(self.hub.preupload(json.loads(body)["files"]))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._answer(self.hub.lfs_batch(json.loads(body)["objects"]))
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/branch/(.+)", path):
            branches = self.hub.repositories[found[1]]
            branches[found[2]] = list(branches["main"])
            self._answer({})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/(.+)", path):
            self._answer(self.hub.commit(found[1], found[2], [json.loads(x) for x in body.splitlines()]))
        else:
            self._fail(404, "not an endpoint")

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.removeprefix("/lfs/")
        if hashlib.sha256(body).hexdigest() != oid:
            self._fail(400, "content does not match the oid")
            return
        self.hub.blobs[oid] = body
        self._answer({})

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, content: object, status: int = 200) -> None:
        self._send(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _fail(self, status: int, code: str, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps({"error": code}).encode(), {**(headers or {}), "X-Error-Code": code})

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing on stderr."""


class HubServer(ThreadingHTTPServer):
    """A server with a Hub, on a free port of this machine."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = Hub(url=f"http://127.0.0.1:{self.server_port}")


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Serve an empty Hub until the block ends."""
    with HubServer() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield server.hub
        finally:
            server.shutdown()
            thread.join()
