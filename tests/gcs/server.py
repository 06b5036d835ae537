"""A Google Cloud Storage in memory for tests: `python -m tests.gcs.server --port 0` prints its URL.

It speaks as much of the JSON and XML interfaces as obstore, gcsfs, TensorStore and Orbax use, and holds every kind of
upload to its conditions on generations. Under /_control it takes faults, and tells how many requests there were.
"""

import argparse
import json
import re
import threading
import time
from email.parser import BytesParser
from email.policy import HTTP
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.gcs.buckets import PAGE, Buckets, Item, Refused
from tests.gcs.faults import Fate, Faults

JSON, XML, BYTES = "application/json", "application/xml", "application/octet-stream"


class Reply(Exception):
    """An answer: raised where it is known, sent in one place."""

    def __init__(self, status: int, body: bytes | dict = b"", kind: str = JSON, **headers: object):
        super().__init__(status)
        self.status, self.kind = status, kind
        self.body = json.dumps(body).encode() if isinstance(body, dict) else body
        self.headers = {name.replace("_", "-"): str(value) for name, value in headers.items()}


class Uploads:
    """Resumable uploads and multipart ones of the XML interface that are not finished."""

    def __init__(self) -> None:
        self._lock, self._next = threading.Lock(), 0
        self.open: dict[str, dict] = {}

    def begin(self, **facts: object) -> str:
        with self._lock:
            self._next += 1
            self.open[str(self._next)] = {**facts, "data": bytearray(), "parts": {}}
            return str(self._next)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 20
    disable_nagle_algorithm = True
    server: "Server"

    def log_message(self, *_: object) -> None:
        pass

    def handle_expect_100(self) -> bool:
        # The answers are buffered, and TensorStore's client waits a second for this line.
        self.send_response_only(100)
        self.end_headers()
        self.wfile.flush()
        return True

    def answer(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        self.route = url.path
        self.sent = self._body()
        if self.route.startswith("/_control/"):
            return self._send(self._outcome(self._control))
        kind, bytes_in = self._kind(), len(self.sent)
        self.server.faults.count(requests=1, bytes_in=bytes_in, **{kind: 1})
        fate = self.server.faults.draw()
        if fate is None:
            return self._send(self._outcome(self._storage))
        self.server.faults.count(faults=1)
        return self._suffer(fate)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_PATCH = answer

    def _suffer(self, fate: Fate) -> None:
        if fate.kind in ("429", "503"):
            return self._send(Reply(int(fate.kind), {"error": {"code": int(fate.kind), "message": "try again"}}))
        reply = self._outcome(self._storage) if fate.after or fate.kind == "truncate" else None
        if fate.kind == "truncate" and reply is not None:
            self._send(reply, half=True)
        elif fate.kind == "hang":
            time.sleep(self.server.faults.hang_s)
        self.close_connection = True
        return None

    def _kind(self) -> str:
        if self.command in ("HEAD", "DELETE"):
            return self.command.lower()
        if self.command == "GET":
            listing = self.route.endswith("/o") or ("prefix" in self.query or "list-type" in self.query)
            return "list" if listing else "get"
        return "copy" if re.search("/(rewriteTo|copyTo|moveTo)/", self.route) else "put"

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _outcome(self, work) -> Reply:
        try:
            work()
        except Reply as reply:
            return reply
        except Refused as refused:
            code = {"code": refused.status, "message": refused.reason, "errors": [{"reason": refused.reason}]}
            xml = f"<Error><Code>{refused.reason}</Code><Message>{refused.reason}</Message></Error>".encode()
            is_json = "/storage/v1/" in self.route or self.route.startswith("/upload/")
            return Reply(refused.status, {"error": code}) if is_json else Reply(refused.status, xml, XML)
        raise AssertionError(f"{self.command} {self.path} was not answered")

    def _send(self, reply: Reply, half: bool = False) -> None:
        length = int(reply.headers.pop("Content-Length", len(reply.body)))
        self.send_response(reply.status)
        for name, value in {"Content-Type": reply.kind, **reply.headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            body = reply.body[: len(reply.body) // 2] if half else reply.body
            self.server.faults.count(bytes_out=len(body))
            self.wfile.write(body)
        self.wfile.flush()

    def _control(self) -> None:
        settings = json.loads(self.sent or b"{}")
        what = self.route.removeprefix("/_control/")
        buckets, faults = self.server.buckets, self.server.faults
        if what == "faults":
            faults.set(settings)
        elif what == "bucket":
            buckets.add(settings["name"], settings.get("forbidden", False))
        elif what == "fill":
            names = [settings["pattern"].format(number) for number in range(settings["count"])]
            buckets.fill(settings["bucket"], names, settings.get("data", "x").encode())
        elif what != "counts":
            raise Refused(404, "NoSuchControl")
        raise Reply(200, faults.taken() if what == "counts" else {})

    def _storage(self) -> None:
        if self.route.startswith("/upload/storage/v1/b/"):
            self._upload(unquote(self.route.split("/")[5]))
        if self.route.startswith("/upload/resumable/"):
            self._resume(self.route.rpartition("/")[2])
        if self.route == "/batch/storage/v1":
            self._batch()
        if self.route.rstrip("/") == "/storage/v1/b":
            self._all_buckets()
        if found := re.fullmatch(r"(?:/download)?/storage/v1/b/([^/]+)(?:/(o))?(?:/(.+))?", self.route):
            bucket, objects, name = (unquote(part or "") for part in found.groups())
            self._json(bucket, bool(objects), found[3] or "", name)
        bucket, _, name = self.route.lstrip("/").partition("/")
        self._xml(unquote(bucket), unquote(name))

    def _all_buckets(self) -> None:
        if self.command == "POST":
            self.server.buckets.add(json.loads(self.sent)["name"])
            raise Reply(200, {"kind": "storage#bucket", "name": json.loads(self.sent)["name"]})
        raise Reply(200, {"items": [{"name": name} for name in self.server.buckets.names()]})

    def _json(self, bucket: str, objects: bool, raw: str, name: str) -> None:
        buckets, condition = self.server.buckets, self.query.get("ifGenerationMatch")
        if not name:
            buckets.find(bucket)
            if not objects:
                raise Reply(200, {"kind": "storage#bucket", "name": bucket})
            self._list_json(bucket)
        if to := re.fullmatch(r"(.+)/(rewriteTo|copyTo|moveTo)/(?:b/([^/]+)/)?o/(.+)", raw):
            source = buckets.get(bucket, unquote(to[1]))
            target = unquote(to[3] or bucket)
            facts = self._facts(target, unquote(to[4]), buckets.put(target, unquote(to[4]), source.data, condition))
            if to[2] == "moveTo":
                buckets.delete(bucket, unquote(to[1]))
            done = {"kind": "storage#rewriteResponse", "done": True, "resource": facts}
            size = {"objectSize": facts["size"], "totalBytesRewritten": facts["size"]}
            raise Reply(200, done | size if to[2] == "rewriteTo" else facts)
        if self.command == "DELETE":
            buckets.delete(bucket, name, condition)
            raise Reply(204)
        item = buckets.get(bucket, name, condition)
        if self.query.get("ifGenerationNotMatch") == str(item.generation):
            raise Reply(304)
        if self.query.get("alt") == "media":
            raise self._content(item)
        raise Reply(200, self._facts(bucket, name, item))

    def _list_json(self, bucket: str) -> None:
        query = self.query
        most = min(int(query.get("maxResults", PAGE)), PAGE)
        after = unquote(query.get("pageToken", ""))
        prefix, start, end = query.get("prefix", ""), query.get("startOffset", ""), query.get("endOffset")
        page = self.server.buckets.list(bucket, prefix, query.get("delimiter", ""), after, most, start)
        items = [self._facts(bucket, name, item) for name, item in page.items if not end or name < end]
        answer: dict = {"kind": "storage#objects", "items": items, "prefixes": page.prefixes}
        raise Reply(200, answer | ({"nextPageToken": page.token} if page.token else {}))

    def _xml(self, bucket: str, name: str) -> None:
        buckets, condition = self.server.buckets, self.headers.get("x-goog-if-generation-match")
        buckets.find(bucket)
        if not name and self.command == "GET":
            self._list_xml(bucket)
        if self.command == "POST" and "uploads" in self.query:
            number = self.server.uploads.begin()
            raise Reply(200, f"<R><UploadId>{number}</UploadId></R>".encode(), XML)
        if self.command == "PUT" and "partNumber" in self.query:
            self.server.uploads.open[self.query["uploadId"]]["parts"][int(self.query["partNumber"])] = self.sent
            raise Reply(200, ETag=f'"{self.query["partNumber"]}"')
        if self.command == "POST" and "uploadId" in self.query:
            parts = self.server.uploads.open[self.query["uploadId"]]["parts"]
            made = buckets.put(bucket, name, b"".join(parts[number] for number in sorted(parts)), condition)
            raise Reply(200, f'<R><ETag>"{made.md5}"</ETag></R>'.encode(), XML, x_goog_generation=made.generation)
        if self.command == "PUT":
            data = self.sent
            if "x-goog-copy-source" in self.headers:
                source, _, path = unquote(self.headers["x-goog-copy-source"]).lstrip("/").partition("/")
                data = buckets.get(source, path).data
            made = buckets.put(bucket, name, data, condition)
            raise Reply(200, b"", XML, ETag=f'"{made.md5}"', x_goog_generation=made.generation)
        if self.command == "DELETE":
            buckets.delete(bucket, name, condition)
            raise Reply(204)
        raise self._content(buckets.get(bucket, name))

    def _list_xml(self, bucket: str) -> None:
        query = self.query
        after = unquote(query.get("continuation-token", "")) or query.get("start-after", "")
        most = min(int(query.get("max-keys", PAGE)), PAGE)
        page = self.server.buckets.list(bucket, query.get("prefix", ""), query.get("delimiter", ""), after, most)
        parts = [
            f"<Contents><Key>{escape(name)}</Key><LastModified>{item.updated}</LastModified>"
            f'<ETag>"{item.md5}"</ETag><Size>{len(item.data)}</Size><Generation>{item.generation}</Generation></Contents>'
            for name, item in page.items
        ]
        parts += [f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in page.prefixes]
        if page.token:
            parts.append(f"<NextContinuationToken>{escape(page.token)}</NextContinuationToken>")
        raise Reply(200, f"<ListBucketResult>{''.join(parts)}</ListBucketResult>".encode(), XML)

    def _upload(self, bucket: str) -> None:
        buckets, query, condition = self.server.buckets, self.query, self.query.get("ifGenerationMatch")
        name, data = query.get("name", ""), self.sent
        if query["uploadType"] == "resumable":
            name = name or json.loads(data)["name"]
            buckets.require(buckets.find(bucket).items.get(name), condition)
            number = self.server.uploads.begin(bucket=bucket, name=name, condition=condition)
            raise Reply(200, Location=f"http://{self.headers['Host']}/upload/resumable/{number}")
        if query["uploadType"] == "multipart":
            about, data = _parts(self.headers["Content-Type"], data)
            name = name or json.loads(about)["name"]
        raise Reply(200, self._facts(bucket, name, buckets.put(bucket, name, data, condition)))

    def _resume(self, number: str) -> None:
        upload = self.server.uploads.open.get(number)
        if upload is None:
            raise Refused(404, "NoSuchUpload")
        span, _, total = self.headers.get("Content-Range", "").removeprefix("bytes ").partition("/")
        if span[:1].isdigit():  # a part that is sent again takes the place of what came of it before
            del upload["data"][int(span.partition("-")[0]) :]
        upload["data"] += self.sent
        if total == "*" or (total and len(upload["data"]) < int(total)):
            raise Reply(308, **({"Range": f"bytes=0-{len(upload['data']) - 1}"} if upload["data"] else {}))
        if "made" not in upload:
            data = bytes(upload["data"])
            upload["made"] = self.server.buckets.put(upload["bucket"], upload["name"], data, upload["condition"])
        raise Reply(200, self._facts(upload["bucket"], upload["name"], upload["made"]))

    def _batch(self) -> None:
        answers = []
        for number, part in enumerate(re.findall(rb"DELETE (\S+) HTTP", self.sent), 1):
            found = re.search("/b/([^/]+)/o/([^?]+)", part.decode())
            status = "204 No Content"
            try:
                self.server.buckets.delete(unquote(found[1]), unquote(found[2]))
            except Refused as refused:
                status = f"{refused.status} {refused.reason}"
            answers.append(
                f"--batch\r\nContent-Type: application/http\r\nContent-ID: <response-{number}>\r\n\r\n"
                f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n\r\n"
            )
        raise Reply(200, f"{''.join(answers)}--batch--".encode(), "multipart/mixed; boundary=batch")

    def _content(self, item: Item) -> Reply:
        data, status, span = item.data, 200, {}
        if asked := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            first, last = asked.groups()
            low = int(first) if first else max(0, len(data) - int(last))
            high = min(int(last) + 1, len(data)) if first and last else len(data)
            if low >= len(data):
                return Reply(416, b"", XML, Content_Range=f"bytes */{len(data)}")
            data, status = data[low:high], 206
            span = {"Content_Range": f"bytes {low}-{high - 1}/{len(item.data)}"}
        when = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(item.generation / 1e6))
        return Reply(
            status, data, BYTES, x_goog_generation=item.generation, x_goog_metageneration=1, ETag=f'"{item.md5}"',
            x_goog_hash=f"crc32c={item.crc32c},md5={item.md5}", Last_Modified=when, Accept_Ranges="bytes",
            x_goog_stored_content_length=len(item.data), x_goog_stored_content_encoding="identity", **span,
        )  # fmt: skip

    def _facts(self, bucket: str, name: str, item: Item) -> dict:
        link = f"http://{self.headers['Host']}/download/storage/v1/b/{bucket}/o/{name}?alt=media"
        return {
            "kind": "storage#object", "id": f"{bucket}/{name}/{item.generation}", "name": name, "bucket": bucket,
            "generation": str(item.generation), "metageneration": "1", "size": str(len(item.data)),
            "contentType": BYTES, "md5Hash": item.md5, "crc32c": item.crc32c, "etag": item.md5, "mediaLink": link,
            "timeCreated": item.updated, "updated": item.updated, "storageClass": "STANDARD",
        }  # fmt: skip


class Server(ThreadingHTTPServer):
    """The whole store, on a port of this machine."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port: int = 0):
        super().__init__(("127.0.0.1", port), Handler)
        self.buckets, self.faults, self.uploads = Buckets(), Faults(), Uploads()

    def handle_error(self, *_: object) -> None:
        """A client that has gone is no news."""


def _parts(content_type: str, body: bytes) -> tuple[bytes, bytes]:
    """The two parts of a multipart upload: what is said about the object, and its bytes as they are."""
    header = f"Content-Type: {content_type}\r\n\r\n".replace("'", '"').encode()
    boundary = BytesParser(policy=HTTP).parsebytes(header).get_boundary().encode()
    about, rest = body.split(b"--" + boundary, 2)[1:]
    end = rest.rindex(b"--" + boundary)
    blank = re.compile(rb"\r?\n\r?\n")
    data = blank.split(rest[:end], 1)[1]
    return blank.split(about, 1)[1], data[:-2] if data.endswith(b"\r\n") else data[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--bucket", action="append", default=[])
    arguments = parser.parse_args()
    server = Server(arguments.port)
    for bucket in arguments.bucket:
        server.buckets.add(bucket)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
