"""Object stores on this machine, over HTTP, that break on demand."""

import io
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import unquote

from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


class Sent(NamedTuple):
    """A request that arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]


class Breakage(NamedTuple):
    """What goes wrong with the next request of a kind."""

    method: str
    part: str
    """Of the path and query."""
    status: int
    done: bool
    """Whether the request is carried out all the same."""


class Unreliable:
    """A server in front of another: records what is sent, loses answers, repeats old listings,
    and forgets conditions."""

    def __init__(self, application: Application) -> None:
        self.sent: list[Sent] = []
        self.breakages: list[Breakage] = []
        self.stale = False
        self.ignores_conditions = False
        self._application = application
        self._listings: dict[str, Response] = {}

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = Request(environ)
        if self.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        environ["wsgi.input"] = io.BytesIO(request.get_data())
        target = f"{unquote(request.path)}?{request.query_string.decode()}"
        self.sent.append(
            Sent(request.method, unquote(request.path), dict(request.args), dict(request.headers))
        )
        broken = next((b for b in self.breakages if self._matches(b, request, target)), None)
        if broken is None:
            return self._answer(request, target)(environ, start_response)
        self.breakages.remove(broken)
        if broken.done:
            self._forward(request)
        error = _ERRORS.get(broken.status, "ServiceUnavailable")
        return Response(f"<Error><Code>{error}</Code></Error>", broken.status)(
            environ, start_response
        )

    def matching(self, method: str, part: str) -> list[Sent]:
        """Requests of a method with this part in their path."""
        return [sent for sent in self.sent if sent.method == method and part in sent.path]

    def _answer(self, request: Request, target: str) -> Response:
        is_listing = request.method == "GET" and "list-type=2" in target
        if is_listing and self.stale and target in self._listings:
            return self._listings[target]
        response = self._forward(request)
        if is_listing and not self.stale:
            self._listings[target] = response
        return response

    def _forward(self, request: Request) -> Response:
        response = Response.from_app(self._application, request.environ, buffered=True)
        response.get_data()
        return response

    @staticmethod
    def _matches(breakage: Breakage, request: Request, target: str) -> bool:
        return breakage.method == request.method and breakage.part in target


_ERRORS = {409: "ConditionalRequestConflict", 429: "SlowDown", 501: "NotImplemented"}


@contextmanager
def serving(application: Application) -> Iterator[str]:
    """Serve an application in threads of this process; yields its URL."""
    server = make_server("127.0.0.1", 0, application, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class TinyGcs:
    """The part of the Google Cloud Storage JSON interface that a store needs."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self._generations: dict[str, int] = {}
        self._lock = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = Request(environ)
        with self._lock:
            response = self._respond(request, request.args.to_dict())
        return response(environ, start_response)

    def _respond(self, request: Request, query: dict[str, str]) -> Response:
        key = unquote(request.path.partition("/o/")[2])
        if request.method == "POST" and request.path.startswith("/upload/"):
            return self._upload(query, request.get_data())
        if request.method == "GET" and not key:
            return self._list(query.get("prefix", ""))
        if key not in self.contents:
            return Response("{}", 404)
        if request.method == "DELETE":
            del self.contents[key]
            return Response(status=204)
        if query.get("alt") == "media":
            return self._media(self.contents[key], request.headers.get("Range", ""))
        return _as_json(self._resource(key))

    def _upload(self, query: dict[str, str], body: bytes) -> Response:
        if query["uploadType"] == "media":
            key, payload = query["name"], body
        else:
            _, head, rest = body.split(b"\n\n", 2)
            key = json.loads(head.split(b"\n--")[0])["name"]
            payload = rest.rsplit(b"\n--", 1)[0]
        expected = query.get("ifGenerationMatch")
        generation = self._generations.get(key, 0) if key in self.contents else 0
        if expected is not None and int(expected) != generation:
            return Response('{"error": {"code": 412, "message": "conditionNotMet"}}', 412)
        self.contents[key] = payload
        self._generations[key] = 1 + max(self._generations.values(), default=100)
        return _as_json(self._resource(key))

    def _list(self, prefix: str) -> Response:
        items = [self._resource(k) for k in sorted(self.contents) if k.startswith(prefix)]
        return _as_json({"kind": "storage#objects", "items": items})

    def _resource(self, key: str) -> dict[str, Any]:
        return {
            "name": key,
            "bucket": "bucket",
            "size": str(len(self.contents[key])),
            "generation": str(self._generations[key]),
        }

    @staticmethod
    def _media(content: bytes, wanted: str) -> Response:
        if not wanted:
            return Response(content)
        first, last = wanted.removeprefix("bytes=").split("-")
        return Response(content[int(first) : int(last) + 1], 206)


def _as_json(value: object) -> Response:
    return Response(json.dumps(value), content_type="application/json")
