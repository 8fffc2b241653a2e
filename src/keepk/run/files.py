"""Files that are there whole or not at all: written, synced, hashed on the way.

Several processes may write into one folder. `alone` lets them in one after another, by a lock that the operating system
drops when its process dies. Not every network file system has locks; without them a writer uses names that no other
process uses, and deletes only the file that its own commit replaced and leftovers that are a day old.
"""

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import torch
from torch import Tensor

from keepk.errors import KeepkError
from keepk.run.packing import DTYPE_CODES

LOCK = ".keepk.lock"
PATIENCE = 600.0  # seconds to wait for a process that holds the lock and writes nothing
POLL = 0.02
LEFTOVER_AGE = 24 * 3600.0  # seconds after which a file that may belong to a running process is taken for abandoned
_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}


def place(given: object, verb: str, order: str, error: type[KeepkError]) -> Path:
    """The path that was given; anything else is usually arguments in the wrong order.

    >>> from keepk.errors import FileError
    >>> place(3, "save", "model, path", FileError)
    Traceback (most recent call last):
        ...
    keepk.errors.FileError: save: got int as the path. The order is model, path.
    """
    if not isinstance(given, str | os.PathLike):
        raise error(f"{verb}: got {type(given).__name__} as the path. The order is {order}.")
    path = os.fspath(given)
    if not isinstance(path, str) or not path or not _can_be_named(path):
        raise error(f"{verb}: got {path!r} as the path, which no file can have. Give a name, such as 'out/net'.")
    return Path(path)


def _can_be_named(path: str) -> bool:
    """Whether the system can have a file of that name: no character in it is NUL, or half of a surrogate pair."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Wait until no other process writes into the folder, and keep the others out; False if there are no locks."""
    handle = _acquired(folder)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            _release(handle, folder / LOCK)


def _acquired(folder: Path) -> IO[bytes] | None:
    path, seen, deadline = folder / LOCK, None, 0.0
    while True:
        handle = path.open("ab")
        locked = try_lock(handle)
        if locked and _is_at(handle, path):
            return handle
        handle.close()
        if locked is None:
            with suppress(OSError):
                path.unlink()
            return None
        if locked:  # the process that held it has deleted it
            continue
        # A large model takes long to write, and many ranks take turns: only a standstill is an error.
        if (sizes := _sizes(folder)) != seen:
            seen, deadline = sizes, time.monotonic() + PATIENCE
        elif time.monotonic() > deadline:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process holds {path} and has written nothing for {PATIENCE:.0f} seconds"
            )
        time.sleep(POLL)


@contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside a path, deleted in the end; those that killed processes left there are deleted too.

    A process holds a lock in its folder, so that others can see that it is still running.
    """
    with ExitStack() as stack:
        while True:
            made_here = TemporaryDirectory(
                prefix=f".{path.name}-", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
            )
            folder = Path(stack.enter_context(made_here))
            if _lock_for_life(folder / LOCK, stack):
                break  # else another process found the folder before it was locked, and deleted it
        _delete_abandoned(path, folder)
        (folder / "files").mkdir()
        yield folder / "files"


def _lock_for_life(lock: Path, stack: ExitStack) -> bool:
    try:
        handle = stack.enter_context(lock.open("ab"))
    except FileNotFoundError:
        return False
    return try_lock(handle) is not False and _is_at(handle, lock)


def _delete_abandoned(path: Path, own: Path) -> None:
    names = re.compile(rf"\.{re.escape(path.name)}-[a-z0-9_]{{8}}\.tmp")  # as tempfile makes them
    now = own.stat().st_mtime
    for folder in path.parent.iterdir():
        if names.fullmatch(folder.name) and folder != own and folder.is_dir():
            with suppress(OSError):
                _delete_if_abandoned(folder, is_old=folder.stat().st_mtime < now - LEFTOVER_AGE)


def _delete_if_abandoned(folder: Path, *, is_old: bool) -> None:
    if not (folder / LOCK).exists():  # made a moment ago, or by a keepk that locked nothing
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)
        return
    with (folder / LOCK).open("r+b") as handle:
        locked = try_lock(handle)
        if locked is False or (locked is None and not is_old):
            return
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # Windows deletes no open file


def try_lock(handle: IO[bytes]) -> bool | None:
    """Lock an open file until it is closed; False if another process has locked it, None where there are no locks."""
    try:
        try:
            import fcntl  # noqa: PLC0415 - not on Windows
        except ImportError:
            import msvcrt  # noqa: PLC0415 - only on Windows

            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # as seen from elsewhere
        else:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return None
    except OSError as error:
        return False if error.errno in _TAKEN else None
    return True


def _is_at(handle: IO[bytes], path: Path) -> bool:
    """Whether the path still names the file that was opened."""
    try:
        return os.path.samestat(os.fstat(handle.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _release(handle: IO[bytes], path: Path) -> None:
    # The lock is deleted while it is held: afterwards the name may be another process's lock. Windows deletes no open
    # file, which makes it safe to delete the name afterwards there.
    with suppress(OSError):
        path.unlink()
    handle.close()
    if os.name == "nt":
        with suppress(OSError):
            path.unlink()


def _sizes(folder: Path) -> dict[str, int]:
    sizes = dict[str, int]()
    for path in folder.iterdir():
        with suppress(OSError):
            sizes[path.name] = path.stat().st_size
    return sizes


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """The folder is there, with its parents; what was made for it goes again if the work in it fails."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)
    try:
        yield
    except BaseException:
        for empty in missing:
            with suppress(OSError):
                empty.rmdir()
        raise


def write_synced(path: Path, chunks: Iterator[Any]) -> tuple[int, str]:
    """Write a new file; its size and sha256."""
    digest = sha256()
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def safetensors_bytes(tensors: dict[str, Tensor]) -> Iterator[Any]:
    """A safetensors file, tensor by tensor: only one at a time is on the host if they live on a GPU."""
    header, end = {}, 0
    # Wide dtypes first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data


def sync_folder(folder: Path) -> None:
    """Make sure that a folder's names survive a power cut."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, ours: re.Pattern[str], *, keep: Path | None, locked: bool, done: set[Path | None]) -> None:
    """Delete what earlier writes left behind.

    Args:
        folder: Where.
        ours: The names of files that may be deleted.
        keep: The file that the index names.
        locked: Whether no other process can be writing. If one can, only `done` and old leftovers are deleted.
        done: Files that an index has named and none will name again, unless it is the one in place.
    """
    now = folder.stat().st_mtime  # of the last commit, by the clock of the file system, which may be another machine's
    for path in folder.iterdir():
        if ours.fullmatch(path.name) and path != keep:
            with suppress(OSError):
                if locked or path in done or path.stat().st_mtime < now - LEFTOVER_AGE:
                    path.unlink()


def not_written(folder: Path, tensors: Mapping[str, Tensor], error: OSError) -> str:
    """What to tell a user whose folder could not be written."""
    return (
        f"{folder}: cannot be written ({error}). Choose a folder that can be, with room for "
        f"{sum(tensor.nbytes for tensor in tensors.values()):,} bytes. What was there is as it was."
    )
