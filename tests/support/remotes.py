"""Remotes for tests: artifacts that are small and signed, and an S3 server that misbehaves on demand."""

from __future__ import annotations

import dataclasses
import io
import random
import socket
import struct
import threading
import time
import zipfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from aot.fingerprint import Fingerprint
from aot.remote import Place, Remote
from aot.signing import SIGNATURE_SUFFIX, Keyring, sign
from aot.trace import key_inputs
from aot.transport import Patience
from tests.support.toy import SMALL, ToyStep

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from aot.buckets import Bucket
    from aot.manifest import Manifest
    from aot.store import Store

BUCKET = "artifacts"
#: Seconds, not minutes; still far more than a loopback answer takes.
IMPATIENT = Patience(answer_s=1.0, bytes_per_second=float(1 << 20))
FINGERPRINT = Fingerprint(**{entry.name: "2.13" for entry in dataclasses.fields(Fingerprint)})


def fake_package(seed: int = 0, size: int = 300_000) -> bytes:
    """What passes for a package until somebody loads it."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        # With a date of its own, a member makes the package another one every two seconds.
        file.writestr(zipfile.ZipInfo("model/archive_format"), "pt2")
        library = random.Random(seed).randbytes(size)
        file.writestr(zipfile.ZipInfo("model/data/aotinductor/model/x.so"), library)
    return archive.getvalue()


def publish(store: Store, *, bucket: Bucket = SMALL, seed: int = 0, **environment: str) -> Manifest:
    """Publish a fake package of the toy program."""
    store.root.mkdir(parents=True, exist_ok=True)
    package = store.root.parent / f"{store.root.name}.pt2"
    package.write_bytes(fake_package(seed))
    return store.publish(package, key_inputs(ToyStep(), bucket, FINGERPRINT), "0" * 64, environment)


def sign_in(store: Store, manifest: Manifest, keyring: Keyring, key: str | None = None) -> None:
    """Sign a manifest of a store beside it."""
    path = store.root / Place.of(manifest).name(SIGNATURE_SUFFIX)
    path.write_bytes(sign(manifest.to_bytes(), keyring.private_key(key)))


def new_keyring(folder: Path, *names: str) -> Keyring:
    """A keyring with private keys of these names, all trusted."""
    for name in names:
        Keyring.load(folder).create(name)
    return Keyring.load(folder)


def fetch(remote: Remote, place: Place, store: Store) -> Manifest | None:
    """Look up and install, as `build` and `pull` do."""
    found = remote.find(place)
    return None if found is None else remote.fetch(found, store)


def files_of(store: Store) -> dict[str, bytes]:
    """What a store shows to its readers."""
    return {
        str(path.relative_to(store.root)): path.read_bytes()
        for folder in (store.blobs, store.manifest_root)
        for path in folder.rglob("*")
        if path.is_file()
    }


@dataclass
class Faults:
    """What the server does to requests for names that end with `suffix`, `times` times."""

    mode: str | None = None
    suffix: str = ""
    method: str = "GET"
    times: int = 1_000_000
    #: Of a body that is cut short or reset.
    cut: int = 100
    seen: list[tuple[str, str, str]] = field(default_factory=list)
    sent: int = 0

    def hits(self, method: str, path: str) -> bool:
        if self.mode is None or self.times <= 0 or method != self.method or not path.endswith(self.suffix):
            return False
        self.times -= 1
        return True


class MisbehavingServer:
    """moto's S3 server behind a layer that breaks chosen answers; `faults` may be changed at any time."""

    def __init__(self) -> None:
        from moto.moto_server.threaded_moto_server import (
            DomainDispatcherApplication,
            MotoRequestHandler,
            create_backend_app,
        )
        from werkzeug.serving import make_server

        class Quiet(MotoRequestHandler):
            def log(self, *args: Any) -> None:
                pass

            def log_error(self, *args: Any) -> None:
                pass

        self.faults = Faults()
        self._application = DomainDispatcherApplication(create_backend_app)
        # moto looks and then writes; S3's condition is atomic.
        self._write_lock = threading.Lock()
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Quiet)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        faults = self.faults
        faults.seen.append((method, path, environ.get("HTTP_RANGE", "")))
        if faults.hits(method, path):
            return getattr(self, f"_{faults.mode}")(environ, start_response)
        if method == "PUT":
            with self._write_lock:
                return self._application(environ, start_response)
        return self._application(environ, start_response)

    def _body(self, environ: dict[str, Any]) -> bytes:
        """The honest answer."""
        return b"".join(self._application(environ, lambda *_: None))

    def _endless(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Connection", "close")])
        while True:
            self.faults.sent += 1 << 16
            yield bytes(1 << 16)

    def _slow(self, environ: dict[str, Any], start_response: Any) -> Iterator[bytes]:
        """Drips: no single wait is long."""
        body = self._body(environ)
        start_response("200 OK", [("Content-Length", str(len(body)))])
        for byte in body:
            yield bytes([byte])
            time.sleep(0.05)

    def _silent(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        time.sleep(4)
        return self._http500(environ, start_response)

    def _short(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Breaks off before the length that it announced."""
        body = self._body(environ)
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body[: self.faults.cut]]

    def _cut(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Announces and sends less than there is."""
        body = self._body(environ)[: self.faults.cut]
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    def _whole(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        """Ignores the range that was asked for."""
        environ.pop("HTTP_RANGE", None)
        body = self._body(environ)
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    def _html(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/html")])
        return [b"<html><body>Please log in</body></html>"]

    def _http500(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("500 Internal Server Error", [])
        return [b"<Error><Code>InternalError</Code><Message>broken</Message></Error>"]

    def _http503(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        start_response("503 Service Unavailable", [])
        return [b"<Error><Code>ServiceUnavailable</Code><Message>busy</Message></Error>"]

    def _conflict(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start_response("409 Conflict", [])
        return [b"<Error><Code>ConditionalRequestConflict</Code><Message>wait</Message></Error>"]

    def _reset(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        connection = environ["werkzeug.socket"]
        # Closing with a zero linger sends a reset.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RD)
        connection.close()
        raise ConnectionError("reset")


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MisbehavingServer]:
    """Run the server, with an empty bucket, and point this process's S3 clients at it."""
    server = MisbehavingServer()
    variables = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/dev/null",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "NO_PROXY": "127.0.0.1",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    import boto3
    from moto.core.models import DEFAULT_ACCOUNT_ID
    from moto.s3.models import s3_backends

    # Of the whole process.
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].reset()
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    try:
        yield server
    finally:
        server.close()
