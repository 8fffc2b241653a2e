"""Child processes that are killed at a reproducible point: with SIGKILL, at their n-th function call.

One process forks every child, so torch is imported once. Calls are counted by `sys.setprofile`.
"""

import json
import os
import random
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

FILE_CODE = (
    "keepk.checkpoint.checkpoint",
    "keepk.storage.files",
    "keepk.deploy.folder",
    "pathlib",
)
Counts = Callable[[FrameType, str, Any], bool]


def in_child(work: Callable[[], Any]) -> tuple[int, Any]:
    """Run `work` in a forked child: the signal that ended it (0 if none), and the result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            answer = json.dumps(work()).encode()
            sys.setprofile(None)
            os.write(writer, answer)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status not in (0, -signal.SIGKILL):
        raise RuntimeError(f"a child ended with {status}")
    return -status, json.loads(answer) if status == 0 else None


def in_two_ranks(work: Callable[[], Any]) -> list[Any]:
    """Run `work` in two forked children with the environment that torchrun sets; the results of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def as_rank(rank):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "OMP_NUM_THREADS": "1"}
        return work()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(in_child, lambda: as_rank(1))
        first = in_child(lambda: as_rank(0))
        return [first[1], other.result()[1]]


def kill_after(calls: int, counts: Counts) -> None:
    """Kill this process at its n-th function call (or return) that `counts`."""
    left = calls

    def count(frame, event, called):
        nonlocal left
        left -= counts(frame, event, called)
        if left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def every_call(_: FrameType, event: str, __: Any) -> bool:
    return event in ("call", "c_call")


def file_step(frame: FrameType, event: str, called: Any) -> bool:
    """Whether the code that reads and writes folders calls the operating system, directly or through pathlib."""
    if event not in ("c_call", "c_return") or not frame.f_globals["__name__"].startswith(FILE_CODE):
        return False
    if called.__name__ in ("stat", "fspath", "tell", "fileno"):
        return False
    owner = getattr(called, "__self__", None)
    return getattr(owner, "__name__", None) in ("posix", "_io") or type(owner).__module__ == "_io"


def count_calls(work: Callable[[], Any]) -> int:
    calls = 0

    def count(*call):
        nonlocal calls
        calls += every_call(*call)
        return False

    kill_after(1, count)
    work()
    sys.setprofile(None)
    return calls


def killed(work: Callable[[], Any], calls: int, counts: Counts) -> Any:
    kill_after(calls, counts)
    return work()


def sweep(
    folder: Path, old: int, save: Callable[..., None], what_is_left: Callable[[Path, int], tuple[int, Any]]
) -> dict[str, list[Any]]:
    """Kill a save over an `old` value (0 if the folder is empty) at each of its file-system steps.

    `save(folder, value, step)` is killed at that step. `what_is_left` then returns the value in the folder, and its
    files after one more save; both are reported for every step.
    """
    in_child(lambda: save(folder, max(old, 1)))
    found, files = list[Any](), list[Any]()
    while True:
        if not old:
            shutil.rmtree(folder)
        if not in_child(lambda: save(folder, old + 1, len(found) + 1))[0]:
            return {"found": found, "files": files}
        held, left = in_child(lambda: what_is_left(folder, old))[1]
        found.append(held)
        files.append(left)


def race(
    folder: Path, save: Callable[[Path, int], None], read: Callable[[Path], int], *, rounds: int, seed: int
) -> dict[str, Any]:
    """Processes that save into one folder at the same time, some of which are killed at a random moment.

    First four ranks save the value 3. Then, in each round, three processes save the values 1, 2 and 3 while a fourth
    reads the folder, which is not cleared between rounds. `read` returns the value in the folder, and raises if it is
    incomplete.
    """
    ranks = [_forked(partial(_save_often, folder, save, 3)) for _ in range(4)]
    same = [_ended(rank) for rank in ranks] + [in_child(lambda: read(folder))[1]]
    chance = random.Random(seed)
    save(folder, 1)
    began = time.monotonic()
    save(folder, 1)
    usual = time.monotonic() - began
    report: dict[str, Any] = {"found": [], "killed": 0, "same": same}
    for _ in range(rounds):
        watching = _forked(partial(_keep_reading, folder, read))
        writers = [_forked(partial(_save_often, folder, save, value)) for value in chance.sample((1, 2, 3), 3)]
        for writer in chance.sample(writers, chance.randrange(len(writers))):
            time.sleep(chance.uniform(0, 3 * usual))
            os.kill(writer, signal.SIGKILL)
        codes = list(map(_ended, writers))
        os.kill(watching, signal.SIGTERM)
        codes.append(_ended(watching))
        if set(codes) - {0, -signal.SIGKILL}:
            raise RuntimeError(f"a process failed without being killed: {codes}")
        report["killed"] += codes.count(-signal.SIGKILL)
        report["found"].append(in_child(lambda: read(folder))[1])
    save(folder, 1)
    return report | {"files": sorted(path.name for path in folder.iterdir())}


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # the parent sees only the exit code
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def _ended(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _save_often(folder: Path, save: Callable[[Path, int], None], value: int) -> None:
    for _ in range(3):
        save(folder, value)


def _keep_reading(folder: Path, read: Callable[[Path], int]) -> None:
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    while not told:
        read(folder)
