"""Files that are complete or absent, written by one process at a time and verified when read.

A file is written under a temporary name, hashed and synced, and then renamed, so that it is complete or absent.

Several processes may write into one folder. `alone` makes them take turns, with a lock that the operating system
releases when its process ends. Not every network file system has locks; without them, a writer uses names that no other
process uses, and deletes only the file that its commit replaced and leftovers that are a day old.

Both kinds of folders, checkpoints (`checkpoint.checkpoint`) and saved models (`deploy.folder`), are written in these
steps: `writing` creates and locks the folder, `write_synced` writes the tensors under a name that nothing reads yet,
`replace_index` commits, `sweep` deletes leftovers. A failure before the commit deletes the drafts
(`deleted_on_failure`); if the process is killed, a later `sweep` deletes them.

`Trusted` reads the files back: an index (JSON) and the tensor file that it names, verified by their hashes.
"""

import errno
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, NoReturn, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from keepk.errors import KeepkError
from keepk.storage.codec import DTYPE_CODES
from keepk.version import __version__

LOCK = ".keepk.lock"
PATIENCE = 600.0  # seconds to wait for a process that holds the lock and writes nothing
POLL = 0.02
LEFTOVER_AGE = 24 * 3600.0  # seconds after which a file that may belong to a running process counts as abandoned
# Errors of flock and msvcrt.locking that mean that another process has the lock. All others mean "no locks here".
_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK}


def place(given: object, verb: str, order: str, error: type[KeepkError]) -> Path:
    """Check an argument that should be a path; anything else usually means arguments in the wrong order.

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
        raise error(f"{verb}: got {path!r} as the path, which no file can have. Pass a name, such as 'out/net'.")
    return Path(path)


def _can_be_named(path: str) -> bool:
    """Whether a file can have this name: it contains no NUL and no lone surrogate."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


@contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Hold the folder's lock, after waiting for other writers; yields False on a file system without locks."""
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
        if locked:  # a file that its previous owner has deleted: another process would lock a different file
            continue
        # A large model takes long to write, and many ranks may take turns, so time out only if no file grows.
        if (sizes := _sizes(folder)) != seen:
            seen, deadline = sizes, time.monotonic() + PATIENCE
        elif time.monotonic() > deadline:
            raise TimeoutError(
                errno.ETIMEDOUT, f"another process holds {path} and has written nothing for {PATIENCE:.0f} seconds"
            )
        time.sleep(POLL)


@contextmanager
def own_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside a path. It is deleted at the end, together with folders of processes that were killed.

    The process holds a lock in its folder, which tells other processes that it is still running.
    """
    with ExitStack() as stack:
        while True:
            made_here = TemporaryDirectory(
                prefix=f".{path.name}-", suffix=".tmp", dir=path.parent, ignore_cleanup_errors=True
            )
            folder = Path(stack.enter_context(made_here))
            if _lock_for_life(folder / LOCK, stack):
                break  # otherwise another process has deleted the folder before it was locked
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
    now = own.stat().st_mtime  # by the clock of the file system, which may be on another machine
    for folder in path.parent.iterdir():
        if names.fullmatch(folder.name) and folder != own and folder.is_dir():
            with suppress(OSError):
                _delete_if_abandoned(folder, is_old=folder.stat().st_mtime < now - LEFTOVER_AGE)


def _delete_if_abandoned(folder: Path, *, is_old: bool) -> None:
    if not (folder / LOCK).exists():  # just created, or left by an early version of keepk without locks
        if is_old:
            shutil.rmtree(folder, ignore_errors=True)
        return
    with (folder / LOCK).open("r+b") as handle:
        locked = try_lock(handle)
        if locked is False or (locked is None and not is_old):
            return
        shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # again: Windows does not delete an open file


def try_lock(handle: IO[bytes]) -> bool | None:
    """Lock an open file until it is closed.

    Returns:
        False if another process has locked it, None if the file system or the platform has no locks.
    """
    try:
        try:
            import fcntl  # noqa: PLC0415 - not on Windows
        except ImportError:
            import msvcrt  # noqa: PLC0415 - only on Windows

            msvcrt.locking(handle.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]  # only on Windows
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
    # Delete the file while it is locked: afterwards, its name may belong to another process's lock. Windows does not
    # delete an open file, so the name cannot be reused there, and deleting it afterwards is safe.
    with suppress(OSError):
        path.unlink()
    handle.close()
    if os.name == "nt":
        with suppress(OSError):
            path.unlink()


def _sizes(folder: Path) -> dict[str, int]:
    sizes = dict[str, int]()
    for path in folder.iterdir():
        with suppress(OSError):  # deleted meanwhile
            sizes[path.name] = path.stat().st_size
    return sizes


@contextmanager
def writing(folder: Path, tensors: Mapping[str, Tensor], error: type[KeepkError]) -> Iterator[bool]:
    """Create the folder and hold its lock; an `OSError` becomes an error that says what to do.

    Args:
        folder: The folder.
        tensors: The tensors to be written; the error states their total size.
        error: The class of the error.

    Yields:
        Whether the folder is locked; False on a file system without locks.
    """
    try:
        with made(folder), alone(folder) as locked:
            yield locked
    except OSError as problem:
        room = sum(tensor.nbytes for tensor in tensors.values())
        raise error(
            f"{folder}: cannot be written ({problem}). Choose a writable folder with room for {room:,} bytes. "
            f"Its previous contents are unchanged."
        ) from problem


@contextmanager
def made(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; those that were created are removed again if the block fails."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in missing:
            sync_folder(path.parent)
        yield
    except BaseException:
        for empty in missing:
            with suppress(OSError):
                empty.rmdir()
        raise


def write_synced(path: Path, chunks: Iterator[Any]) -> tuple[int, str]:
    """Write a new file and sync it to disk; returns its size and sha256."""
    digest = sha256()
    with path.open("xb") as file:
        for chunk in chunks:
            digest.update(chunk)
            file.write(chunk)
        size = file.tell()
        file.flush()
        os.fsync(file.fileno())
    return size, digest.hexdigest()


@contextmanager
def deleted_on_failure(drafts: list[Path], named: Callable[[], Path | None]) -> Iterator[None]:
    """Delete drafts if the block fails; the list may grow meanwhile.

    Args:
        drafts: The files.
        named: Finds the file that the index names.
    """
    try:
        yield
    except BaseException:
        # An interrupt may arrive just after the commit, so the file that the index names must not be deleted.
        for leftover in set(drafts) - {named()}:
            leftover.unlink(missing_ok=True)
        raise


def replace_index(draft: Path, index: Path, text: str, named: Callable[[], Path | None]) -> Path | None:
    """Commit: replace the index by a new one, atomically.

    Args:
        draft: Where to write the new index first, in the same folder.
        index: The index.
        text: Its new contents.
        named: Finds the file that the index names.

    Returns:
        The file that the old index named, which can be deleted now.
    """
    write_synced(draft, iter([text.encode("ascii")]))
    sync_folder(index.parent)  # the tensors must be on disk before an index that names them
    before = named()
    os.replace(draft, index)  # noqa: PTH105 - also if the file exists, on every system
    return before


def safetensors_bytes(tensors: dict[str, Tensor]) -> Iterator[Any]:
    """The bytes of a safetensors file, tensor by tensor, so that only one at a time is copied from a GPU.

    The safetensors package would take a second copy of all tensors, refuse shared ones, and order metadata at random.
    """
    header, end = {}, 0
    # Wide dtypes first, so that every tensor is aligned to its element size.
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": "U16" if tensor.dtype == torch.uint16 else DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode("ascii")
    text += b" " * (-len(text) % 8)  # the format pads its header, so that the data begins aligned
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        yield tensor.cpu().reshape(-1).view(torch.uint8).numpy().data


def sync_folder(folder: Path) -> None:
    """Make sure that the names in a folder survive a power cut."""
    if os.name != "posix":  # Windows cannot open a folder
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sweep(folder: Path, ours: re.Pattern[str], *, keep: Path | None, locked: bool, done: set[Path | None]) -> None:
    """Delete the files that earlier writes left behind.

    Args:
        folder: The folder.
        ours: The names of files that may be deleted.
        keep: The file that the index names.
        locked: Whether this process holds the lock. Without it another process may be writing, so only `done` and old
            leftovers are deleted.
        done: Files that an index has named and no later one will name, unless it is the one in place.
    """
    now = folder.stat().st_mtime  # time of the commit, by the clock of the file system, which may be on another machine
    for path in folder.iterdir():
        if ours.fullmatch(path.name) and path != keep:
            with suppress(OSError):
                if locked or path in done or path.stat().st_mtime < now - LEFTOVER_AGE:
                    path.unlink()


Document = dict[str, Any]
Contents = TypeVar("Contents")


@dataclass(frozen=True)
class Trusted:
    """A kind of folder: the name and format of its index, and the words for its errors.

    Attributes:
        name: The index's file name.
        noun: The kind of thing that the index describes, for errors.
        format: The value of its entry "format".
        versions: The values of its entry "version" that this keepk reads.
        digest: Computes the sha256 of a document, without its entry "sha256".
        error: The class of the errors that are raised.
        source: The sentence that tells users what to pass instead.
        remedy: The sentence that tells users what to do about a damaged file.
    """

    name: str
    noun: str
    format: str
    versions: tuple[int, ...]
    digest: Callable[[Document], str]
    error: type[KeepkError]
    source: str
    remedy: str

    def head(self, version: int) -> Document:
        """The entries that every index of this kind begins with."""
        return {"format": self.format, "version": version, "keepk": __version__}

    def unverified(self, folder: Path, key: str) -> Any:
        """One entry of the index as it is on disk, without any check; None if it cannot be read.

        Writers use this to see which tensor file the index names at the moment; it may be damaged or in flux.
        """
        try:
            return json.loads((folder / self.name).read_bytes())[key]
        except (OSError, ValueError, LookupError, TypeError, RecursionError):
            return None

    def whole(self, folder: Path, read: Callable[[Document], Contents]) -> tuple[Document, Contents]:
        """The index of a folder, and the contents that `read` returns for it, both from the same write.

        Another process may replace the index and its files in the meantime, so that a file that the index names no
        longer exists. An error is raised only if it occurs twice with the same index.
        """
        failed = None
        while True:
            version = self._version(folder)
            document = self.document(folder)
            try:
                return document, read(document)
            except self.error:
                if failed == version == self._version(folder):
                    raise
                failed = version

    def document(self, folder: Path) -> Document:
        """The index of a folder.

        Raises:
            KeepkError: It is missing, not JSON, of another format or version, or was changed after it was written.
        """
        path = folder / self.name
        try:
            document = json.loads(_regular_bytes(path), parse_constant=_refuse_constant)
        except OSError as error:
            wanted = f"there is no {self.noun} to read ({error}). {self.source}{_meant(folder, self.name)}"
            raise self.error(f"{path}: {wanted}") from error
        except (ValueError, RecursionError) as error:
            raise self.error(
                f"{path}: is not valid JSON: the file is truncated or was edited ({error}). {self.remedy}"
            ) from error
        if not isinstance(document, dict) or document.get("format") != self.format:
            raise self.error(f"{path}: is not a {self.format!r}. {self.source}")
        if document.get("version") not in self.versions:
            known = " and ".join(map(str, self.versions))
            raise self.error(
                f"{path}: has version {document.get('version')!r}, this keepk reads version {known}. "
                f"Read it with keepk {document.get('keepk')}."
            )
        try:
            digest = self.digest(document)
        except (ValueError, RecursionError) as error:  # 1e999 is valid JSON, but Python reads it as inf
            raise self.error(f"{path}: holds a value that {self.name} never has ({error}). {self.remedy}") from error
        if document.get("sha256") != digest:
            raise self.error(f"{path}: was edited or damaged after it was written: its sha256 differs. {self.remedy}")
        return document

    def tensors(self, path: Path, named: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors in a file; refuses a file whose size or sha256 differs from the index."""
        size, digest = named["size"], named["sha256"]
        if type(size) is not int or size < 0 or not isinstance(digest, str):
            raise self.error(
                f"{path.parent / self.name}: says that {path.name} has size {size!r} and sha256 {digest!r}, which is "
                f"impossible. {self.remedy}"
            )
        try:
            data = _regular_bytes(path, size)
        except OSError as error:
            raise self.error(f"{path}: cannot be read ({error}), but {self.name} names it. {self.remedy}") from error
        except _OtherSizeError as error:
            raise self.error(f"{path}: has {error} bytes, {self.name} says {size:,}. {self.remedy}") from error
        if sha256(data).hexdigest() != digest:
            raise self.error(f"{path}: its sha256 is not the one in {self.name}: it is damaged. {self.remedy}")
        try:
            return safetensors.torch.load(data)
        except Exception as error:  # a forged file can make safetensors and torch raise any error
            raise self.error(f"{path}: is not a safetensors file ({error}). {self.remedy}") from error

    def _version(self, folder: Path) -> tuple[int, ...] | None:
        # Every write replaces the index by a new file, so the inode changes even within the clock's resolution.
        try:
            found = (folder / self.name).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size


class _OtherSizeError(Exception):
    """A file is longer or shorter than its index says."""


def _regular_bytes(path: Path, size: int | None = None) -> bytes:
    """The bytes of a regular file of the given size; a pipe, which may never end, is not opened."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path.name} is not a regular file")
    if size is not None and found.st_size != size:
        raise _OtherSizeError(f"{found.st_size:,}")
    return path.read_bytes()


def _refuse_constant(name: str) -> NoReturn:
    # Python's parser accepts NaN and Infinity although JSON has neither; keepk never writes them.
    raise ValueError(f"it holds {name}")


READ_BY = {
    "checkpoint.json": ("a checkpoint", "keepk.load_checkpoint"),
    "arch.json": ("a model that keepk.save wrote", "keepk.load"),
}


def _meant(given: Path, name: str) -> str:
    """A hint for a user who passed a folder of the other kind or a file inside a folder; otherwise empty."""
    try:
        folder = given.parent if given.is_file() else given
    except OSError:  # a path that the system refuses
        return ""
    if given.is_file() and (folder / name).is_file():
        return f" {given.name} is a file inside one: pass {folder}."
    for other, (what, function) in READ_BY.items():
        if other != name and (folder / other).is_file():
            return f" {folder} has {what}: read it with {function}."
    return ""
