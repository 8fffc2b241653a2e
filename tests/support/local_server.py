"""A local web server for tests of downloads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the server's address, which ends in a slash, and a list to which it appends the path of every request."""
    asked: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            super().do_GET()

        def log_message(self, *_args):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder))
    thread = threading.Thread(target=partial(httpd.serve_forever, 0.01))
    thread.start()
    try:
        yield f"http://127.0.0.1:{httpd.server_port}/", asked
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
