"""Bytes to and from a shared folder: `file://`, `memory://` and `s3://`, the latter two through fsspec.

Three verbs: `read` a name, `create` a name that is not there yet, list `names`. Nothing is believed and
nothing is remembered: a read stops at its cap and its deadline, a name is never overwritten, and no answer,
least of all "not there", outlives the call. What the bytes mean is `aot.remote`'s business.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
import uuid
from abc import ABC, abstractmethod
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from aot.errors import EXIT_ENVIRONMENT, ConfigError, EnvironmentFault, UserError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

CHUNK_BYTES = 1 << 18
MAX_NAMES = 100_000
CONFLICT_RETRIES = 5
_memory_lock = threading.Lock()


class RemoteFault(UserError):
    """The remote did not answer, or not as it should. Says nothing about what it holds."""

    exit_code = EXIT_ENVIRONMENT


class OversizedRead(RemoteFault):
    """The remote sent more than the object may have."""


@dataclass(frozen=True)
class Patience:
    """How long to wait: `answer_s` for each answer, and for the whole as if by `bytes_per_second`."""

    answer_s: float = 30.0
    bytes_per_second: float = 64 * 1024


class Transport(ABC):
    """One folder at a remote. Names are relative, with `/`."""

    def __init__(self, url: str, patience: Patience):
        self.url, self.patience = url.rstrip("/"), patience

    def read(self, name: str, limit: int, start: int = 0) -> Iterator[bytes]:
        """Yield an object's bytes from `start` on.

        Raises FileNotFoundError if there is no such object, OversizedRead if it has more than `limit` bytes,
        RemoteFault if it does not come, or not in time.
        """
        deadline = _Deadline(self, name, limit - start)
        total = start
        with self._faults(name), closing(self._chunks(name, start, deadline)) as chunks:
            for chunk in chunks:
                total += len(chunk)
                if total > limit:
                    raise OversizedRead(f"{self.url}/{name}: more than {limit} bytes")
                yield chunk

    def create(self, name: str, content: bytes) -> bool:
        """Write an object; False, and nothing is changed, if the name is taken. Raises RemoteFault."""
        with self._faults(name):
            return self._create(name, content, _Deadline(self, name, len(content)))

    def names(self, prefix: str) -> list[str]:
        """List the names under a folder, sorted. Raises RemoteFault."""
        with self._faults(prefix):
            return sorted(self._names(prefix, _Deadline(self, prefix, 0)))

    @abstractmethod
    def _chunks(self, name: str, start: int, deadline: _Deadline) -> Generator[bytes]: ...

    @abstractmethod
    def _create(self, name: str, content: bytes, deadline: _Deadline) -> bool: ...

    @abstractmethod
    def _names(self, prefix: str, deadline: _Deadline) -> list[str]: ...

    @contextmanager
    def _faults(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, UserError):
            raise
        except TimeoutError as error:
            raise RemoteFault(
                f"{self.url}/{name}: no answer in {self.patience.answer_s:.0f} s", "try again later"
            ) from error
        # The layers below (fsspec, botocore, aiohttp) share no base class; all of it is the remote's fault.
        except Exception as error:
            what = str(error).strip().partition("\n")[0] or type(error).__name__
            raise RemoteFault(f"{self.url}/{name}: {what}", _hint(error)) from error


def _hint(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some space at the remote, or name another one"
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return "the remote cannot be written from here: name another one"
    return "check the address and your access"


class _Deadline:
    """The end of one transfer, from its size: a remote that drips is as useless as one that is silent."""

    def __init__(self, transport: Transport, name: str, size: int):
        patience = transport.patience
        self._name, self._answer_s = f"{transport.url}/{name}", patience.answer_s
        self._seconds = patience.answer_s + size / patience.bytes_per_second
        self._end = time.monotonic() + self._seconds

    def left(self) -> float:
        """Seconds that the next answer may take. Raises RemoteFault if there are none."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise RemoteFault(f"{self._name}: not done in {self._seconds:.0f} s", "try again later")
        return min(left, self._answer_s)


def open_transport(url: str, patience: Patience | None = None) -> Transport:
    """Return the transport of a URL; nothing is contacted yet.

    Raises ConfigError for a URL of another kind, EnvironmentFault if s3fs is not installed.
    """
    parts = urlsplit(url)
    kind = _KINDS.get(parts.scheme)
    if kind is None or not (parts.netloc or parts.path.strip("/")) or parts.query or parts.username:
        raise ConfigError(
            f"'{url}' names no remote",
            "e.g. `file:///shared/artifacts`, `s3://bucket/artifacts`; credentials come from the environment",
        )
    return kind(url, patience or Patience())


class _Folder(Transport):
    """A folder of this machine or of a network file system."""

    def __init__(self, url: str, patience: Patience):
        super().__init__(url, patience)
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"'{url}' names a host", f"three slashes: `file:///{parts.netloc}{parts.path}`")
        self._root = Path(unquote(parts.path))

    def _chunks(self, name: str, start: int, deadline: _Deadline) -> Generator[bytes]:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        descriptor = os.open(self._root / name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise RemoteFault(f"{self.url}/{name} is not a regular file")
            file.seek(start)
            while chunk := file.read(CHUNK_BYTES):
                yield chunk

    def _create(self, name: str, content: bytes, deadline: _Deadline) -> bool:
        target = self._root / name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise RemoteFault(f"{self.url}: no folder can be made there", "check the address") from error
        # Written aside: a name that is there is there whole, and a link never replaces one.
        temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
        try:
            with temporary.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, target)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def _names(self, prefix: str, deadline: _Deadline) -> list[str]:
        paths = (self._root / prefix).rglob("*")
        return [path.relative_to(self._root).as_posix() for path in paths if path.is_file()]


class _Memory(Transport):
    """fsspec's file system of this process, for tests and trials."""

    def __init__(self, url: str, patience: Patience):
        from fsspec.implementations.memory import MemoryFileSystem

        super().__init__(url, patience)
        self._files = MemoryFileSystem(skip_instance_cache=True)

    def _chunks(self, name: str, start: int, deadline: _Deadline) -> Generator[bytes]:
        yield self._files.cat_file(f"{self.url}/{name}", start=start)

    def _create(self, name: str, content: bytes, deadline: _Deadline) -> bool:
        # Its own exclusive mode looks and then writes.
        with _memory_lock:
            if self._files.exists(f"{self.url}/{name}"):
                return False
            self._files.pipe_file(f"{self.url}/{name}", content)
            return True

    def _names(self, prefix: str, deadline: _Deadline) -> list[str]:
        root = self._files._strip_protocol(self.url)
        return [path.removeprefix(f"{root}/") for path in self._files.find(f"{self.url}/{prefix}")]


class _S3(Transport):
    """A bucket, or a folder of one. Access and endpoint come from the environment, as for every AWS client.

    Objects are asked for by name, never looked up in s3fs's listings, which it caches.
    """

    def __init__(self, url: str, patience: Patience):
        super().__init__(url, patience)
        try:
            from s3fs import S3FileSystem
        except ImportError:
            raise EnvironmentFault("s3:// remotes need s3fs", "`pip install 'dflash-aot[s3]'`") from None
        wait = max(1, round(patience.answer_s))
        options = {"connect_timeout": min(10, wait), "read_timeout": wait}
        self._s3: Any = S3FileSystem(
            skip_instance_cache=True,
            use_listings_cache=False,
            config_kwargs={**options, "retries": {"mode": "standard", "total_max_attempts": 2}},
        )
        # On top of botocore's own.
        self._s3.retries = 1
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    def _call(self, method: str, deadline: _Deadline, **arguments: Any) -> dict[str, Any]:
        try:
            return self._s3.call_s3(method, Bucket=self._bucket, timeout=deadline.left(), **arguments)
        except FileNotFoundError as error:
            if _answer(error, "Error", "Code") == "NoSuchBucket":
                raise RemoteFault(f"{self.url}: no such bucket", "check the address") from error
            raise

    def _chunks(self, name: str, start: int, deadline: _Deadline) -> Generator[bytes]:
        from fsspec.asyn import sync

        rest = {"Range": f"bytes={start}-"} if start else {}
        try:
            body = self._call("get_object", deadline, Key=self._key(name), **rest)["Body"]
        except OSError as error:
            # There is nothing from `start` on.
            if _answer(error, "ResponseMetadata", "HTTPStatusCode") == 416:
                return
            raise
        try:
            while chunk := sync(self._s3.loop, body.read, CHUNK_BYTES, timeout=deadline.left()):
                yield chunk
        finally:
            sync(self._s3.loop, body.aclose)

    def _create(self, name: str, content: bytes, deadline: _Deadline) -> bool:
        pause = 0.1
        for _ in range(CONFLICT_RETRIES):
            try:
                self._call("put_object", deadline, Key=self._key(name), Body=content, IfNoneMatch="*")
                return True
            except OSError as error:
                status = _answer(error, "ResponseMetadata", "HTTPStatusCode")
                if status == 412:
                    return False
                # 409: another write of the same name is under way, and may yet fail.
                if status != 409:
                    raise
            time.sleep(min(pause, deadline.left()))
            pause *= 2
        raise RemoteFault(f"{self.url}/{name}: somebody else keeps writing it", "try again")

    def _names(self, prefix: str, deadline: _Deadline) -> list[str]:
        names: list[str] = []
        page: dict[str, str] = {}
        while len(names) < MAX_NAMES:
            answer = self._call("list_objects_v2", deadline, Prefix=self._key(prefix) + "/", **page)
            names += [item["Key"] for item in answer.get("Contents", ())]
            if not answer.get("IsTruncated"):
                break
            page = {"ContinuationToken": answer["NextContinuationToken"]}
        cut = len(self._prefix) + 1 if self._prefix else 0
        return [name[cut:] for name in names]


def _answer(error: BaseException, part: str, field: str) -> object:
    """A field of the S3 answer that an error of s3fs was made from."""
    response: dict[str, Any] = getattr(error.__cause__, "response", {})
    return response.get(part, {}).get(field)


_KINDS: dict[str, type[Transport]] = {"file": _Folder, "memory": _Memory, "s3": _S3}
