"""`python -m tests.gcs.server [--port 0] [--bucket NAME ...]`: a server that speaks Google Cloud Storage, in memory.

The JSON interface (gcsfs, Orbax, TensorStore) and the XML one (obstore), with preconditions on every kind of upload, so
that "create if there is none" means it. Prints its URL. `POST /_control` sets faults, `GET /_control` returns counts.
"""

import argparse
import json
import re
import sys
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.gcs.bucket import Blob, Bucket, Refused
from tests.gcs.faults import Faults

PAGE = 1000


class Server(ThreadingHTTPServer):
    """Buckets behind a port of this machine."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int, buckets: list[str]):
        super().__init__(("127.0.0.1", port), Handler)
        self.buckets = {name: Bucket() for name in buckets}
        self.faults = Faults()
        self.uploads: dict[str, dict[str, Any]] = {}
        self.lock = threading.Lock()
        self.number = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news; the rest is said."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def bucket(self, name: str) -> Bucket:
        if name not in self.buckets:
            raise Refused(404, "notFound")
        if name.startswith("forbidden"):
            raise Refused(403, "forbidden")
        return self.buckets[name]

    def begin_upload(self, **upload: Any) -> str:
        with self.lock:
            self.number += 1
            self.uploads[str(self.number)] = upload
            return str(self.number)


class Handler(BaseHTTPRequestHandler):
    """One connection; the JSON interface in `_json_*`, the XML one in `_xml_*`."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, *_: Any) -> None:
        """Nothing."""

    def handle_expect_100(self) -> bool:
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()  # what is written here is buffered, and the client waits for this line
        return True

    def handle_any(self) -> None:
        body = self._body()
        parts = urlsplit(self.path)
        self.query = {name: values[0] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        if parts.path == "/_control":
            return self._control(body)
        fault = self.server.faults.draw(self._kind(parts.path))
        self.server.faults.count("bytes_in", len(body))
        self.cut = fault == "truncate"
        if fault in ("429", "503"):
            return self._error(int(fault), "fault")
        if fault == "hang":
            time.sleep(self.server.faults.hang_s)
        drops = fault in ("drop", "hang")
        if drops and self.server.faults.is_before:
            self.close_connection = True
            return None
        self.lost = drops
        try:
            self._answer(parts.path, body)
        except Refused as refused:
            self._error(refused.status, refused.reason)
        return None

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = handle_any

    def _kind(self, path: str) -> str:
        if self.command == "GET":
            is_list = "list-type" in self.query or path.endswith(("/o", "/o/")) or "prefix" in self.query
            if is_list:
                return "list"
            return "get" if self.query.get("alt") == "media" or not path.startswith("/storage/") else "head"
        return "put" if self.command in ("PUT", "POST") else self.command.lower()

    def _answer(self, path: str, body: bytes) -> None:
        if path.startswith("/upload/resumable/"):
            return self._json_resume(path, body)
        if found := re.fullmatch(r"/upload/storage/v1/b/([^/]+)/o", path):
            return self._json_upload(found[1], body)
        if path == "/storage/v1/b":
            return self._send(200, {"items": [{"name": name} for name in self.server.buckets]})
        if found := re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)(?:/o(?:/(.*))?)?", path):
            return self._json_object(unquote(found[1]), found[2], path)
        bucket, _, name = unquote(path).lstrip("/").partition("/")
        return self._xml(bucket, name, body)

    def _json_object(self, name: str, encoded: str | None, path: str) -> None:
        bucket = self.server.bucket(name)
        if encoded is None:
            return self._json_list(name) if "/o" in path else self._send(200, {"name": name, "kind": "storage#bucket"})
        if found := re.fullmatch(r"(.*)/(rewriteTo|copyTo)/b/([^/]+)/o/(.*)", encoded):
            source, how, target = unquote(found[1]), found[2], unquote(found[4])
            blob = self.server.bucket(unquote(found[3])).put(target, bucket.get(source).data, self._condition())
            meta = _meta(unquote(found[3]), target, blob)
            done = {"kind": "storage#rewriteResponse", "done": True, "objectSize": meta["size"]}
            done |= {"totalBytesRewritten": meta["size"], "resource": meta}
            return self._send(200, done if how == "rewriteTo" else meta)
        key = unquote(encoded)
        if self.command == "DELETE":
            bucket.delete(key, self._condition())
            return self._send(204)
        blob = bucket.get(key, self._condition())
        if self.query.get("ifGenerationNotMatch") == str(blob.generation):
            return self._send(304)
        return self._content(blob) if self.query.get("alt") == "media" else self._send(200, _meta(name, key, blob))

    def _json_list(self, name: str) -> None:
        ask = self.query.get
        after = ask("pageToken") or _just_before(ask("startOffset", ""))
        most = min(int(ask("maxResults", PAGE)), PAGE)
        names, prefixes, last = self.server.bucket(name).page(ask("prefix", ""), ask("delimiter", ""), after, most)
        end = ask("endOffset", "")
        items = [
            _meta(name, key, blob)
            for key in names
            if not end or key < end
            if (blob := self._still(name, key)) is not None
        ]
        answer: dict[str, Any] = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
        if last is not None:
            answer["nextPageToken"] = last
        self._send(200, answer)

    def _json_upload(self, name: str, body: bytes) -> None:
        bucket, kind = self.server.bucket(name), self.query.get("uploadType")
        if kind == "media":
            key = self.query["name"]
            return self._send(200, _meta(name, key, bucket.put(key, body, self._condition())))
        if kind == "multipart":
            described, data = _two_parts(body, self.headers["Content-Type"])
            key = self.query.get("name") or described["name"]
            return self._send(200, _meta(name, key, bucket.put(key, data, self._condition())))
        key = self.query.get("name") or json.loads(body)["name"]
        number = self.server.begin_upload(bucket=name, name=key, over=self._condition(), data=bytearray())
        return self._send(200, headers={"Location": f"{self.server.url}/upload/resumable/{number}"})

    def _json_resume(self, path: str, body: bytes) -> None:
        number = path.rsplit("/", 1)[-1]
        upload = self.server.uploads.get(number)
        if upload is None:
            raise Refused(404, "notFound")
        data, span = upload["data"], self.headers.get("Content-Range", "")
        start = re.match(r"bytes (\d+)-", span)
        data[int(start[1]) if start else len(data) :] = body  # a chunk that is sent again is the same chunk
        total = span.rsplit("/", 1)[-1] if span else str(len(data))
        if total == "*" or len(data) < int(total):
            return self._send(308, headers={"Range": f"bytes=0-{len(data) - 1}"} if data else {})
        name, key = upload["bucket"], upload["name"]
        blob = self.server.bucket(name).put(key, bytes(data), upload["over"])
        self.server.uploads.pop(number, None)
        return self._send(200, _meta(name, key, blob))

    def _xml(self, name: str, key: str, body: bytes) -> None:
        bucket, over = self.server.bucket(name), self.headers.get("x-goog-if-generation-match")
        if self.command == "GET" and not key:
            return self._xml_list(name)
        if self.command == "POST" and "uploads" in self.query:
            number = self.server.begin_upload(parts={})
            told = f"<InitiateMultipartUploadResult><UploadId>{number}</UploadId></InitiateMultipartUploadResult>"
            return self._send(200, told.encode(), kind="application/xml")
        if self.command == "PUT" and "partNumber" in self.query:
            self.server.uploads[self.query["uploadId"]]["parts"][int(self.query["partNumber"])] = body
            return self._send(200, headers={"ETag": f'"{self.query["partNumber"]}"'})
        if self.command in ("PUT", "POST"):
            if self.command == "POST":
                parts = self.server.uploads[self.query["uploadId"]]["parts"]
                body = b"".join(parts[number] for number in sorted(parts))
            elif source := self.headers.get("x-goog-copy-source"):
                theirs, _, theirs_key = unquote(source).lstrip("/").partition("/")
                body = self.server.bucket(theirs).get(theirs_key).data
            blob = bucket.put(key, body, None if over is None else int(over))
            etag = f'"{blob.md5}"'
            done = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>".encode()
            headers = {"ETag": etag, "x-goog-generation": str(blob.generation)}
            return self._send(200, done if self.command == "POST" else b"", headers, "application/xml")
        if self.command == "DELETE":
            bucket.delete(key)
            return self._send(204)
        return self._content(bucket.get(key))

    def _xml_list(self, name: str) -> None:
        ask = self.query.get
        after = ask("continuation-token") or ask("start-after", "")
        names, prefixes, last = self.server.bucket(name).page(ask("prefix", ""), ask("delimiter", ""), after, PAGE)
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{blob.time}</LastModified><ETag>&quot;{blob.md5}&quot;</ETag>"
            f"<Size>{len(blob.data)}</Size><Generation>{blob.generation}</Generation></Contents>"
            for key in names
            if (blob := self._still(name, key)) is not None
        )
        common = "".join(f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>" for prefix in prefixes)
        more = "" if last is None else f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
        text = f"<?xml version='1.0'?><ListBucketResult>{items}{common}{more}</ListBucketResult>"
        self._send(200, text.encode(), kind="application/xml")

    def _still(self, name: str, key: str) -> Blob | None:
        try:
            return self.server.bucket(name).get(key)
        except Refused:
            return None

    def _content(self, blob: Blob) -> None:
        data, status = blob.data, 200
        headers = {
            "x-goog-generation": str(blob.generation),
            "x-goog-metageneration": "1",
            "ETag": f'"{blob.md5}"',
            "x-goog-hash": f"crc32c={blob.crc32c},md5={blob.md5}",
            "Last-Modified": formatdate(blob.created, usegmt=True),
            "x-goog-stored-content-length": str(len(data)),
            "x-goog-stored-content-encoding": "identity",
            "Accept-Ranges": "bytes",
        }
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if found and data:
            first = int(found[1]) if found[1] else max(0, len(data) - int(found[2]))
            end = min(int(found[2]) + 1, len(data)) if found[1] and found[2] else len(data)
            if first >= len(data):
                return self._send(416, headers={"Content-Range": f"bytes */{len(data)}"})
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
            data, status = data[first:end], 206
        return self._send(status, data, headers, "application/octet-stream")

    def _control(self, body: bytes) -> None:
        faults = self.server.faults
        if self.command == "POST":
            faults.set(json.loads(body))
        self.cut = self.lost = False
        self._send(200, dict(faults.requests))

    def _condition(self) -> int | None:
        given = self.query.get("ifGenerationMatch")
        return None if given is None else int(given)

    def _error(self, status: int, reason: str) -> None:
        self.cut = self.lost = False
        told = {"code": status, "message": reason, "errors": [{"reason": reason, "message": reason}]}
        self._send(status, {"error": told})

    def _send(
        self, status: int, body: Any = b"", headers: dict[str, str] | None = None, kind: str = "application/json"
    ) -> None:
        if self.lost:
            self.close_connection = True  # it was done, and nobody hears of it
            return
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.server.faults.count("bytes_out", len(data))
        if self.cut and len(data) > 1:
            data = data[: len(data) // 2]
            self.close_connection = True
        self.wfile.write(data)

    lost = cut = False

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)


def _meta(bucket: str, name: str, blob: Blob) -> dict[str, str]:
    return {
        "kind": "storage#object",
        "id": f"{bucket}/{name}/{blob.generation}",
        "name": name,
        "bucket": bucket,
        "generation": str(blob.generation),
        "metageneration": "1",
        "size": str(len(blob.data)),
        "contentType": "application/octet-stream",
        "md5Hash": blob.md5,
        "crc32c": blob.crc32c,
        "etag": blob.md5,
        "timeCreated": blob.time,
        "updated": blob.time,
        "storageClass": "STANDARD",
    }


def _two_parts(body: bytes, content_type: str) -> tuple[dict[str, Any], bytes]:
    """The description and the data of a multipart upload."""
    found = re.search(r"""boundary=["']?([^"';]+)""", content_type)
    assert found, content_type
    line = b"--" + found[1].encode()
    _, first, rest = body.split(line, 2)
    data = rest.rsplit(line, 1)[0]
    cut = b"\r\n\r\n" if b"\r\n\r\n" in first else b"\n\n"
    end = b"\r\n" if data.endswith(b"\r\n") else b"\n"
    return json.loads(first.split(cut, 1)[1]), data.split(cut, 1)[1].removesuffix(end)


def _just_before(name: str) -> str:
    return name[:-1] + chr(ord(name[-1]) - 1) + "\U0010ffff" if name else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", nargs="+", default=["m2po-tests"])
    given = parser.parse_args()
    server = Server(given.port, given.bucket)
    print(server.url, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
