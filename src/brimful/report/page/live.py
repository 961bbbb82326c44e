"""A page on a port of this machine, for a browser on it, that follows a run.

Whoever has its address sees it: the address has a random token. What asks under another name than
127.0.0.1 or localhost is refused, so that no web page reaches it by a name that it makes point here.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock, Thread
from typing import Any, Self

from brimful.errors import UsageError
from brimful.report.layout import Remark
from brimful.report.page.document import Page, Section, page_html, security_policy

_ADDRESS = "127.0.0.1"
_OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:\d+)?")
"""Values of the header `Host` that are answered; a tunnel has another port."""

_LEAST_RESTS = 20
"""Multiple of the processor time of making a page after which it is made again. A choice: 5%."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": f"{security_policy(is_live=True)}; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _encoded(page: Page) -> bytes:
    return page_html(page, is_live=True).encode(errors="backslashreplace")  # names of files may not be text


class LivePage:
    """Serves the latest page while it is entered, from a daemon thread that handles no signals.

    The port is taken at once; None takes a free one. UsageError if it cannot be taken.
    """

    def __init__(self, title: str, port: int | None = None) -> None:
        self._lock, self._not_before = Lock(), 0.0
        waiting = Page(title=title, sections=(_WAITING,))
        self._shown: Callable[[], Page] = lambda: waiting
        self._made, self._html = self._shown, _encoded(waiting)
        self._path = f"/{secrets.token_urlsafe(24)}/"
        try:
            self._server = _Server((_ADDRESS, port or 0), self._handler())
        except OSError as error:
            raise UsageError(
                f"port {port} of {_ADDRESS} cannot be used: {error.strerror}. Name another with --live-port, "
                "or give --live alone, which takes a free one."
            ) from None
        self._thread = Thread(target=self._serve, name="brimful live page", daemon=True)
        self._is_closed = False
        if hasattr(os, "register_at_fork"):  # a copy of the socket would keep the port
            os.register_at_fork(after_in_child=self._server.socket.close)

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_ADDRESS}:{self._server.server_address[1]}{self._path}"

    def show(self, make: Callable[[], Page]) -> None:
        """Show another page, which is made when a browser asks for it."""
        self._shown = make

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._server.fileno() < 0:
            return  # in a forked process
        self._is_closed = True
        self._lock.acquire(timeout=5)  # no page is being made when Python exits
        with suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=1)
        self._server.server_close()

    def _serve(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the run's
        while not self._is_closed:
            self._server.handle_request()

    def _latest(self) -> bytes:
        """The page; where making it takes long, one from before."""
        with self._lock:
            make = self._shown
            if make is not self._made and time.monotonic() >= self._not_before:
                began = time.thread_time()
                try:
                    self._html = _encoded(make())
                except Exception as error:
                    text = f"making this page failed, the run is not affected: {type(error).__name__}: {error}"
                    section = Section(title="Error", content=(Remark("", text),))
                    self._html = _encoded(Page(title="brimful", sections=(section,)))
                self._made = make
                self._not_before = time.monotonic() + _LEAST_RESTS * (time.thread_time() - began)
            return self._html

    def _handler(live) -> type[BaseHTTPRequestHandler]:  # noqa: N805 - the handler's own self is within
        class Handler(BaseHTTPRequestHandler):
            timeout = 10
            server_version, sys_version = "brimful", ""
            error_content_type, error_message_format = "text/plain", "%(message)s\n"

            def do_GET(self) -> None:
                hosts = self.headers.get_all("Host", [])
                if len(hosts) != 1 or not _OWN_HOST.fullmatch(hosts[0]):
                    self._answer(HTTPStatus.FORBIDDEN, b"this page answers to 127.0.0.1 and localhost alone\n")
                elif not secrets.compare_digest(self.path.encode(), live._path.encode()):
                    self._answer(HTTPStatus.NOT_FOUND, b"open the whole address that brimful printed\n")
                else:
                    page = live._latest()
                    tag = f'"{sha256(page).hexdigest()}"'
                    is_known = self.headers.get("If-None-Match") == tag
                    self._answer(HTTPStatus.NOT_MODIFIED if is_known else HTTPStatus.OK, page, tag)

            def _answer(self, status: HTTPStatus, content: bytes, tag: str = "") -> None:
                self.send_response(status)
                if tag:
                    self.send_header("ETag", tag)
                if status is not HTTPStatus.NOT_MODIFIED:
                    self.send_header("Content-Type", f"text/{'html' if tag else 'plain'}; charset=utf-8")
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if status is not HTTPStatus.NOT_MODIFIED:
                    self.wfile.write(content)

            def end_headers(self) -> None:
                for name, value in _HEADERS.items():
                    self.send_header(name, value)
                super().end_headers()

            def log_message(self, *_args: object) -> None:
                """Print nothing: standard error is the run's."""

        return Handler


class _Server(ThreadingHTTPServer):
    """A server that looks up no name and prints nothing."""

    daemon_threads = True
    allow_reuse_address = os.name == "posix"  # on Windows two processes would share a port

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # that of HTTPServer asks the network for a name

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing where a browser leaves before it has its answer."""


_WAITING = Section(title="Waiting", content=(Remark("", "No step has ended yet."),))
