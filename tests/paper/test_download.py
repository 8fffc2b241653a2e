"""Downloads from a local server: the files on disk after each way in which a mirror can fail."""

import hashlib
import io
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepk.errors import DataError
from keepk_paper.download import fetch, progress_bar

CONTENT = bytes(range(256)) * 800
HALF = len(CONTENT) // 2
NAME = "digits.gz"
WRONG = CONTENT[:-1] + b"?"


class Mirror(ThreadingHTTPServer):
    """A server that answers requests by the entries of `script`; the last entry is repeated."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.ranges: list[str | None] = []
        self.released = threading.Event()
        self.together = threading.Barrier(2)
        self.says("whole")

    def says(self, *script: str) -> "Mirror":
        self.script = list(script)
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{NAME}"


class Handler(BaseHTTPRequestHandler):
    server: Mirror

    def do_GET(self):
        script = self.server.script
        word = script.pop(0) if len(script) > 1 else script[0]
        self.server.ranges.append(self.headers["Range"])
        getattr(self, f"say_{word}")()

    def log_message(self, *_args):
        pass

    def answer(self, status: int, body: bytes, *, announced: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if announced is not None:
            self.send_header("Content-Length", str(announced))
        self.end_headers()
        self.wfile.write(body)

    def part(self, stop: int | None = None, content: bytes = CONTENT) -> None:
        """Send the requested bytes up to `stop`, with headers that announce all requested bytes."""
        start = int(self.headers["Range"][6:-1]) if self.headers["Range"] else 0
        span = f"bytes {start}-{len(content) - 1}/{len(content)}"
        headers = {"Content_Range": span} if start else {}
        self.answer(206 if start else 200, content[start:stop], announced=len(content) - start, **headers)

    def say_whole(self):
        self.part()

    def say_wrong(self):
        self.part(content=WRONG)

    def say_cut(self):
        start = int(self.headers["Range"][6:-1]) if self.headers["Range"] else 0
        self.part((start + len(CONTENT)) // 2)

    def say_no_range(self):
        self.answer(200, CONTENT, announced=len(CONTENT))

    def say_no_range_cut(self):
        self.answer(200, CONTENT[:HALF], announced=len(CONTENT))

    def say_unsatisfiable(self):
        if self.headers["Range"]:
            self.answer(416, b"", announced=0)
        else:
            self.say_whole()

    def say_other_range(self):
        self.answer(206, CONTENT, announced=len(CONTENT), Content_Range=f"bytes 7-9/{len(CONTENT)}")

    def say_missing(self):
        self.answer(404, b"not here", announced=8)

    def say_portal(self):
        self.answer(200, b"<html>log in</html>", announced=19)

    def say_portal_unannounced(self):
        self.answer(200, b"<html>log in</html>")

    def say_long_unannounced(self):
        self.answer(200, CONTENT + b"more")

    def say_nonsense(self):
        self.wfile.write(b"this is no http\r\n\r\n")

    def say_late(self):
        time.sleep(0.05)
        self.part()

    def say_silence(self):
        self.server.released.wait()

    def say_stall(self):
        self.part(HALF)
        self.wfile.flush()
        self.server.released.wait()

    def say_together(self):
        self.server.together.wait(timeout=20)
        self.part()


@pytest.fixture
def mirrors(monkeypatch):
    """Two servers that serve the whole file by default."""
    monkeypatch.setenv("no_proxy", "*")
    servers = Mirror(), Mirror()
    threads = [threading.Thread(target=partial(server.serve_forever, 0.01)) for server in servers]
    for thread in threads:
        thread.start()
    yield servers
    for server, thread in zip(servers, threads, strict=True):
        server.released.set()
        server.shutdown()
        thread.join()
        server.server_close()


def gone() -> str:
    """An address without a server."""
    server = Mirror()
    server.server_close()
    return server.url


def get(folder: Path, *mirrors: Mirror | str, **options) -> Path:
    urls = [mirror if isinstance(mirror, str) else mirror.url for mirror in mirrors]
    defaults: dict[str, Any] = {"md5": hashlib.md5(CONTENT).hexdigest(), "size": len(CONTENT), "timeout": 10.0}
    return fetch(NAME, urls, folder=folder, **defaults | options)


def on_disk(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


FINISHED = {NAME: CONTENT}


def test_a_whole_answer_is_a_finished_file(tmp_path, mirrors):
    folder = tmp_path / "made" / "for it"
    assert get(folder, mirrors[0]) == folder / NAME
    assert on_disk(folder) == FINISHED
    assert mirrors[0].ranges == [None]


def test_a_finished_file_is_not_asked_for_again(tmp_path):
    (tmp_path / NAME).write_bytes(CONTENT)
    assert get(tmp_path, gone()) == tmp_path / NAME


def test_another_file_of_that_name_is_refused_and_left_alone(tmp_path, mirrors):
    (tmp_path / NAME).write_bytes(WRONG)
    with pytest.raises(DataError, match=r"digits.gz: is not the published file: expected md5 .* Move it away"):
        get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == {NAME: WRONG}
    assert mirrors[0].ranges == []


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_either_checksum_refuses_a_wrong_body(tmp_path, mirrors, algorithm):
    mirrors[0].says("wrong")
    right, wrong = (hashlib.new(algorithm, body).hexdigest() for body in (CONTENT, WRONG))
    sums = {"md5": None, "sha256": None} | {algorithm: right.upper()}
    with pytest.raises(DataError, match=f"expected {algorithm} {right}, got {wrong}"):
        get(tmp_path, mirrors[0], **sums)
    assert on_disk(tmp_path) == {}
    mirrors[0].says("whole")
    get(tmp_path, mirrors[0], **sums)
    assert on_disk(tmp_path) == FINISHED


def test_no_checksum_is_refused_before_anything_is_asked(tmp_path, mirrors):
    with pytest.raises(DataError, match=r"digits.gz: .* got no checksum. Give md5= or sha256=."):
        get(tmp_path, mirrors[0], md5=None)
    assert mirrors[0].ranges == []
    assert on_disk(tmp_path) == {}


def test_a_cut_off_download_goes_on_where_it_stopped(tmp_path, mirrors):
    mirrors[0].says("cut", "whole")
    get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == FINISHED
    assert mirrors[0].ranges == [None, f"bytes={HALF}-"]


def test_the_next_mirror_goes_on_where_the_first_gave_up(tmp_path, mirrors):
    mirrors[0].says("cut", "missing")
    get(tmp_path, *mirrors)
    assert on_disk(tmp_path) == FINISHED
    assert mirrors[1].ranges == [f"bytes={HALF}-"]


def test_the_next_call_goes_on_where_the_last_one_gave_up(tmp_path, mirrors):
    mirrors[0].says("cut", "missing")
    with pytest.raises(DataError, match="HTTP 404"):
        get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == {f"{NAME}.part": CONTENT[:HALF]}
    get(tmp_path, mirrors[1])
    assert on_disk(tmp_path) == FINISHED
    assert mirrors[1].ranges == [f"bytes={HALF}-"]


@pytest.mark.parametrize("word", ["no_range", "unsatisfiable"])
def test_a_mirror_that_cannot_resume_starts_over(tmp_path, mirrors, word):
    (tmp_path / f"{NAME}.part").write_bytes(b"x" * HALF)
    mirrors[0].says(word)
    get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == FINISHED


def test_a_mirror_that_always_stops_at_the_same_byte_is_given_up(tmp_path, mirrors):
    mirrors[0].says("no_range_cut")
    with pytest.raises(DataError, match=f"cut off after {HALF:,} of {len(CONTENT):,} bytes"):
        get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == {f"{NAME}.part": CONTENT[:HALF]}


def test_a_part_that_lacks_nothing_needs_no_mirror(tmp_path):
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT)
    get(tmp_path, gone())
    assert on_disk(tmp_path) == FINISHED


@pytest.mark.parametrize("left", [b"?" * 10, b"?" * len(CONTENT), CONTENT + b"?"], ids=["head", "full", "long"])
def test_a_rotten_part_is_not_held_against_the_mirror(tmp_path, mirrors, left):
    (tmp_path / f"{NAME}.part").write_bytes(left)
    get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == FINISHED


@pytest.mark.parametrize(
    ("word", "reason", "left"),
    [
        ("wrong", "expected md5 [0-9a-f]{32}, got [0-9a-f]{32}", None),
        ("missing", "HTTP 404 Not Found", None),
        ("portal", f"expected {len(CONTENT):,} bytes, got a response of 19", None),
        ("portal_unannounced", f"cut off after 19 of {len(CONTENT):,} bytes", b"<html>log in</html>"),
        ("long_unannounced", f"expected {len(CONTENT):,} bytes, got {len(CONTENT) + 1:,}", None),
        ("other_range", "expected bytes from 0 on, got the range 'bytes 7-9/", None),
        ("nonsense", "this is no http\nCheck", None),
    ],
)
def test_a_bad_mirror_is_named_and_the_next_one_serves(tmp_path, mirrors, word, reason, left):
    mirrors[0].says(word)
    with pytest.raises(DataError, match=f"digits.gz: no mirror served the published file:\n  http.*: {reason}"):
        get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == ({} if left is None else {f"{NAME}.part": left})
    get(tmp_path, *mirrors)
    assert on_disk(tmp_path) == FINISHED


def test_when_all_mirrors_fail_each_is_listed_with_its_reason(tmp_path, mirrors):
    nobody = gone()
    mirrors[0].says("missing")
    mirrors[1].says("wrong")
    with pytest.raises(DataError, match="Check the connection and try again, or put the file there") as caught:
        get(tmp_path, mirrors[0], nobody, mirrors[1])
    reasons = str(caught.value).splitlines()[1:-1]
    assert reasons[0] == f"  {mirrors[0].url}: HTTP 404 Not Found"
    assert re.fullmatch(rf"  {nobody}: .*refused.*", reasons[1])
    assert reasons[2].startswith(f"  {mirrors[1].url}: expected md5")
    assert on_disk(tmp_path) == {}


def test_no_mirror_at_all_is_said(tmp_path):
    with pytest.raises(DataError, match="no mirror served the published file: got no urls"):
        get(tmp_path)


def test_a_slow_mirror_is_waited_for(tmp_path, mirrors):
    mirrors[0].says("late")
    get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == FINISHED


def test_a_silent_mirror_is_left_for_the_next(tmp_path, mirrors):
    mirrors[0].says("silence")
    with pytest.raises(DataError, match=r"http.*: timed out"):
        get(tmp_path, mirrors[0], timeout=0.1)
    assert on_disk(tmp_path) == {}
    get(tmp_path, *mirrors, timeout=1.0)
    assert on_disk(tmp_path) == FINISHED


def test_a_mirror_that_falls_silent_is_asked_for_the_rest(tmp_path, mirrors):
    mirrors[0].says("stall", "whole")
    get(tmp_path, mirrors[0], timeout=1.0)
    assert on_disk(tmp_path) == FINISHED
    assert mirrors[0].ranges == [None, f"bytes={HALF}-"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path, mirrors):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"file.digits.gz: cannot be written .* choose a writable folder"):
        get(tmp_path / "file", mirrors[0])
    assert mirrors[0].ranges == []


WORDS = sorted(
    name[4:] for name in vars(Handler) if name.startswith("say_") and name[4:] not in ("silence", "stall", "together")
)


@given(
    left=st.none() | st.integers(0, len(CONTENT)).map(lambda n: CONTENT[:n]) | st.binary(max_size=9),
    script=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
)
@settings(
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the servers have no state between examples
)
def test_whatever_happens_a_file_with_the_name_is_the_published_one(tmp_path, mirrors, left, script):
    """For any leftover and any answers there is the file or an error, and a good mirror repairs any leftover."""
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    if left is not None:
        (folder / f"{NAME}.part").write_bytes(left)
    mirrors[0].says(*script)
    try:
        get(folder, mirrors[0])
    except DataError:
        assert set(on_disk(folder)) <= {f"{NAME}.part"}
        get(folder, mirrors[1])
    assert on_disk(folder) == FINISHED


KILLED = """
import sys
from keepk_paper.download import fetch

name, url, folder, size, md5 = sys.argv[1:]
fetch(name, [url], size=int(size), folder=folder, md5=md5, progress=lambda done, _: print(done, flush=True))
"""


def test_a_killed_process_leaves_its_part_to_the_one_that_waits(tmp_path, mirrors):
    mirrors[0].says("stall")
    arguments = [NAME, mirrors[0].url, str(tmp_path), str(len(CONTENT)), hashlib.md5(CONTENT).hexdigest()]
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, *arguments],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout is not None
        while int(process.stdout.readline()) < HALF:
            pass
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(get, tmp_path, mirrors[1])
            process.kill()
            process.wait()
            assert waiting.result(timeout=20) == tmp_path / NAME
    assert on_disk(tmp_path) == FINISHED
    (resumed,) = mirrors[1].ranges
    assert resumed is not None


def test_two_at_once_download_once(tmp_path, mirrors):
    mirrors[0].says("late")
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: get(tmp_path, mirrors[0]), range(4)))
    assert paths == [tmp_path / NAME] * 4
    assert on_disk(tmp_path) == FINISHED
    assert mirrors[0].ranges == [None]


def test_two_at_once_without_locks_do_not_meet(tmp_path, mirrors, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    mirrors[0].says("together")
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: get(tmp_path, mirrors[0]), range(2)))
    assert paths == [tmp_path / NAME] * 2
    assert on_disk(tmp_path) == FINISHED
    assert mirrors[0].ranges == [None, None]


def test_without_locks_a_failure_leaves_nothing(tmp_path, mirrors, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    mirrors[0].says("no_range_cut")
    with pytest.raises(DataError, match="cut off"):
        get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == {}


def test_progress_rises_to_the_end_and_counts_what_was_there(tmp_path, mirrors):
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT[:HALF])
    calls: list[tuple[int, int]] = []
    get(tmp_path, mirrors[0], progress=lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert {total for _, total in calls} == {len(CONTENT)}
    assert done == sorted(done)
    assert done[0] > HALF
    assert done[-1] == len(CONTENT)


def test_an_interrupted_download_can_be_resumed(tmp_path, mirrors):
    def interrupt(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, mirrors[0], progress=interrupt)
    (left,) = on_disk(tmp_path).items()
    assert left[0] == f"{NAME}.part"
    assert 0 < len(left[1]) < len(CONTENT)
    get(tmp_path, mirrors[0])
    assert on_disk(tmp_path) == FINISHED
    assert mirrors[0].ranges == [None, f"bytes={len(left[1])}-"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(monkeypatch, stdout: io.StringIO) -> str:
    """The text that `progress_bar` writes to `stdout`."""
    monkeypatch.setattr(sys, "stdout", stdout)
    with progress_bar(NAME) as progress:
        progress(500, 1_000)
        progress(1_000, 1_000)
    return stdout.getvalue()


def test_a_terminal_shows_a_bar(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    pytest.importorskip("rich")
    shown = show(monkeypatch, Terminal())
    assert NAME in shown
    assert "1.0/1.0 kB" in shown
    assert capsys.readouterr().err == ""


def test_a_terminal_without_rich_shows_a_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert show(monkeypatch, Terminal()) == ""
    assert capsys.readouterr().err == f"downloading {NAME} (1,000 bytes)\n"


def test_a_pipe_stays_clean(monkeypatch, capsys):
    assert show(monkeypatch, io.StringIO()) == ""
    assert capsys.readouterr().err == f"downloading {NAME} (1,000 bytes)\n"
