"""Download a published file: try mirrors in order, resume partial downloads, verify before the final rename."""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen
from uuid import uuid4

from keepk.errors import DataError

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress

Progress = Callable[[int, int], None]
"""A callback that gets (bytes_done, bytes_total) during a download."""

ATTEMPTS = 3  # per mirror; an attempt without any new bytes ends them early
CHUNK_BYTES = 1 << 16


class _MirrorError(Exception):
    """The reason why one mirror failed."""


@dataclass(frozen=True)
class _Wanted:
    """The file to download: its path, its size and checksums, and options of the download."""

    target: Path
    size: int
    checksums: Mapping[str, str]
    timeout: float
    progress: Progress | None

    def fault(self, path: Path) -> str | None:
        """How the file at `path` differs from the published one, or None if it does not."""
        size = path.stat().st_size
        if size != self.size:
            return f"expected {self.size:,} bytes, got {size:,}"
        for algorithm, expected in self.checksums.items():
            got = _digest(path, algorithm)
            if got != expected.lower():
                return f"expected {algorithm} {expected.lower()}, got {got}"
        return None

    def is_there(self) -> bool:
        """Whether the target exists and is correct. A different file of that name is refused, never overwritten."""
        if not self.target.exists():
            return False
        if fault := self.fault(self.target):
            raise DataError(f"{self.target}: is not the published file: {fault}. Move it away to download it again.")
        return True


def fetch(
    name: str,
    urls: Sequence[str],
    *,
    size: int,
    folder: str | Path,
    md5: str | None = None,
    sha256: str | None = None,
    progress: Progress | None = None,
    timeout: float = 30.0,
) -> Path:
    """Download `folder/name` from the first of `urls` that serves the published file.

    The bytes are written to `name.part`, from which a later call resumes. The file gets its final name only when its
    size and checksum are correct. A second process that needs the same file waits for the first.

    Args:
        name: The name of the file.
        urls: Mirrors, in order of preference.
        size: The number of bytes.
        folder: Where the file is written; created if missing.
        md5: The checksum in hexadecimal. At least one checksum is required.
        sha256: The checksum in hexadecimal.
        progress: Called as bytes arrive.
        timeout: The number of seconds without data after which a mirror is given up.

    Returns:
        The path of the file, which may have existed before.

    Raises:
        DataError: If there is no checksum, no mirror serves the file, it cannot be written, or a different file of that
            name exists.
    """
    checksums = {key: value for key, value in (("md5", md5), ("sha256", sha256)) if value is not None}
    if not checksums:
        raise DataError(f"{name}: cannot be verified after its download, got no checksum. Give md5= or sha256=.")
    target = Path(folder) / name
    wanted = _Wanted(target, size, checksums, timeout, progress)
    try:
        if wanted.is_there():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _own_part(target) as part:
            if not wanted.is_there():
                _download(urls, part, wanted)
                part.replace(target)
            return target
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written ({error}). Free disk space, or choose a writable folder."
        ) from error


@contextmanager
def progress_bar(name: str) -> Iterator[Progress]:
    """Yield a callback for `fetch`: a rich bar if rich is installed and stdout is a terminal, else a line on stderr.

    >>> with progress_bar("digits.gz") as progress:
    ...     progress(500, 1_000)
    """
    bars = _rich_bars() if sys.stdout.isatty() else None
    if bars is None:
        yield _one_line(name)
        return
    with bars:
        task = bars.add_task(name, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)


def _rich_bars() -> "RichProgress | None":
    """A rich progress display with bytes and speed, or None if rich is not installed."""
    try:
        from rich import progress  # noqa: PLC0415 - an extra
    except ImportError:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
    )


def _one_line(name: str) -> Progress:
    """A callback that prints the name and size of the download once."""
    said: list[str] = []

    def progress(_done: int, total: int) -> None:
        if not said:
            said.append(name)
            # To stderr, because stdout may be redirected into a file of results.
            print(f"downloading {name} ({total:,} bytes)", file=sys.stderr)

    return progress


@contextmanager
def _own_part(target: Path) -> Iterator[Path]:
    """A path that only this process writes: `name.part` under a lock, else a unique name that cannot be resumed."""
    # The lock file is never deleted: a process that waits on it would end up with a lock on a deleted file.
    with (target.parent / ".lock").open("ab") as lock:
        if _locked(lock):
            yield target.with_name(f"{target.name}.part")
            return
    own = target.with_name(f"{target.name}.{uuid4().hex}.part")
    try:
        yield own
    finally:
        own.unlink(missing_ok=True)


def _locked(file: BinaryIO) -> bool:
    """Wait for the lock on `file`, which the system releases if its owner is killed; False if not supported."""
    try:
        import fcntl  # noqa: PLC0415 - not on Windows

        fcntl.flock(file, fcntl.LOCK_EX)
    except (ImportError, OSError):  # some network file systems have no locks
        return False
    return True


def _download(urls: Sequence[str], part: Path, wanted: _Wanted) -> None:
    """Fill `part` from the first mirror that serves the file."""
    reasons = []
    for url in urls:
        try:
            return _from_mirror(url, part, wanted)
        except _MirrorError as reason:
            reasons.append(f"\n  {url}: {reason}")
    raise DataError(
        f"{wanted.target}: no mirror served the published file:{''.join(reasons) or ' got no urls.'}\n"
        "Check the connection and try again, or put the file there yourself."
    )


def _from_mirror(url: str, part: Path, wanted: _Wanted) -> None:
    """Fill `part` from one mirror, and retry as long as each attempt makes progress."""
    reason = ""
    for _ in range(ATTEMPTS):
        start = _length(part)
        try:
            _append(url, part, wanted)
        except _MirrorError as error:
            if _length(part) == start:
                raise
            reason = str(error)
            continue
        fault = wanted.fault(part)
        if fault is None:
            return
        part.unlink()
        reason = fault
        if start == 0:  # else the bytes of an earlier download may be wrong, not the mirror's
            break
    raise _MirrorError(reason)


def _append(url: str, part: Path, wanted: _Wanted) -> None:
    """Append the missing bytes to `part`, or start over if the mirror does not support ranges."""
    done = _length(part)
    if done >= wanted.size:
        return
    with _open(url, done, wanted) as response:
        resumed = response.status == HTTPStatus.PARTIAL_CONTENT
        done = done if resumed else 0
        with part.open("ab" if resumed else "wb") as file:
            for chunk in _chunks(response, wanted.size + 1 - done):  # one byte more reveals a file that is too long
                file.write(chunk)
                done += len(chunk)
                if wanted.progress is not None:
                    wanted.progress(done, wanted.size)
    if done < wanted.size:
        raise _MirrorError(f"cut off after {done:,} of {wanted.size:,} bytes")


def _open(url: str, start: int, wanted: _Wanted) -> HTTPResponse:
    """The mirror's response: the bytes from `start` on, or the whole file if it does not support ranges."""
    headers = {"User-Agent": "keepk"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = cast("HTTPResponse", urlopen(Request(url, headers=headers), timeout=wanted.timeout))
    except HTTPError as error:
        error.close()
        if start and error.code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _open(url, 0, wanted)
        raise _MirrorError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, HTTPException) as error:
        raise _MirrorError(_reason(error)) from error
    if fault := _answer_fault(response, start, wanted.size):
        response.close()
        raise _MirrorError(fault)
    return response


def _answer_fault(response: HTTPResponse, start: int, size: int) -> str | None:
    """Why the headers rule a response out, before any of its bytes is written."""
    content_range = response.headers.get("Content-Range", "")
    if response.status == HTTPStatus.PARTIAL_CONTENT and not content_range.startswith(f"bytes {start}-"):
        return f"expected bytes from {start:,} on, got the range {content_range!r}"
    announced = content_range.rpartition("/")[2] or response.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced) != size:
        return f"expected {size:,} bytes, got a response of {int(announced):,}"
    return None


def _chunks(response: HTTPResponse, limit: int) -> Iterator[bytes]:
    """The body of the response as it arrives, at most `limit` bytes."""
    try:
        while limit and (chunk := response.read1(min(limit, CHUNK_BYTES))):
            limit -= len(chunk)
            yield chunk
    except (OSError, HTTPException) as error:
        raise _MirrorError(_reason(error)) from error


def _reason(error: Exception) -> str:
    """The text of a network error: `timed out` rather than `<urlopen error timed out>`."""
    inner = error.reason if isinstance(error, URLError) else error
    return str(inner).strip() or type(error).__name__


def _length(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _digest(path: Path, algorithm: str) -> str:
    # Some data sets publish only an MD5, which a FIPS build of OpenSSL refuses without this flag.
    digest = hashlib.new(algorithm, usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
