"""The journal: open reservations in a file, so that a killed process leaves them to its successor.

The responses of a dead gateway go on, and so must their reservations. Each record is one write to the page cache,
which outlives the process; nothing is synced, because a machine that loses power takes its Envoy along.

Rules:

1. A record starts with a newline and ends with a semicolon. A line without its semicolon was torn, by a crash or a
   full disk, and stands for nothing.
2. A reservation is written before its admission is sent, and its end after the response has ended: what is lost
   between the two is counted too long, never too short.
3. A write that fails is counted and said once; the service goes on, since refusing all work would be worse. Every
   second the file is tried anew, with all that is open, until one holds it.
4. One process owns the file. Times are of the monotonic clock, which a reboot restarts: records of another boot are
   taken as admitted now, so they stand longer than needed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog

from extproc.core.values import Lane, Reservation

COMPACT_BYTES_MIN = 16 * 2**20
"""The file is rewritten with what is open once it has grown to this: some 200,000 requests, a few milliseconds."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = structlog.get_logger()


class JournalError(RuntimeError):
    """The journal cannot be used at start; the text says why."""


class Journal:
    """Append-only file of reservations made and ended. `read` comes first, once.

    `on_error` is called for every write that failed; while `failing`, the file does not say all that is open.
    """

    def __init__(self, path: Path, on_error: Callable[[], None]) -> None:
        self.failing = False
        self._on_error = on_error
        self._path = path
        self._size_bytes = 0
        self._file = -1
        self._lock = -1
        try:
            if path.exists() and not path.is_file():
                raise JournalError(f"{path}: the journal must be a regular file")
            self._lock = os.open(_beside(path, ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.close()
            raise JournalError(f"{path}: another process uses this journal, and two would end each other's") from error
        except FileNotFoundError as error:
            raise JournalError(f"{path}: its directory does not exist") from error
        except OSError as error:
            raise JournalError(f"{path}: {error.strerror}") from error

    def read(self, now_ns: int) -> list[Reservation]:
        """The reservations that the last owner left open, oldest first; starts a fresh file with them.

        JournalError when there is no file to write to. A disk that is full is no such error (rule 3).
        """
        try:
            content = self._path.read_bytes() if self._path.exists() else b""
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise JournalError(f"{self._path}: {error.strerror}") from error
        self._size_bytes = len(content)
        found = _replay(content, _boot_id(), now_ns)
        self._rewrite(found)
        return found

    def made(self, reservation: Reservation) -> None:
        """Record a reservation, or where one has moved."""
        self._append(_made(reservation))

    def ended(self, ticket: str) -> None:
        """Record the end of a reservation."""
        self._append(b"\n- %b;" % ticket.encode())

    def compact(self, open_reservations: Iterable[Reservation]) -> None:
        """Rewrite the file with what is open, if it has grown large or lacks records."""
        if self._size_bytes >= COMPACT_BYTES_MIN or self.failing:
            self._rewrite(open_reservations)

    def close(self) -> None:
        """Give the file up; what is open in it is the next owner's, and nothing is written any more."""
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1

    def _append(self, record: bytes) -> None:
        if self._file < 0:
            return
        try:
            written = os.write(self._file, record)
        except OSError as error:
            self._failed(error.strerror)
            return
        self._size_bytes += written
        if written < len(record):
            self._failed(f"{written} of {len(record)} bytes written")

    def _failed(self, why: str | None) -> None:
        self._on_error()
        if not self.failing:
            self.failing = True
            _log.error("journal_failing", path=str(self._path), error=why)

    def _rewrite(self, open_reservations: Iterable[Reservation]) -> None:
        content = b"\n= %b;" % _boot_id() + b"".join(map(_made, open_reservations))
        fresh = _beside(self._path, ".new")
        try:
            fresh.write_bytes(content)
            file = os.open(fresh, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            fresh.replace(self._path)
        except OSError as error:
            self._failed(error.strerror)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)  # what fits of it takes the room of records
            return
        os.close(self._file)
        self._file, self._size_bytes = file, len(content)
        if self.failing:
            self.failing = False
            _log.info("journal_recovered", path=str(self._path))


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _made(reservation: Reservation) -> bytes:
    text = (
        f"\n+ {reservation.ticket} {reservation.replica} {reservation.lane.value} "
        f"{reservation.reserve_tokens} {reservation.admitted_ns};"
    )
    return text.encode()


def _replay(content: bytes, boot_id: bytes, now_ns: int) -> list[Reservation]:
    """What is open after all whole records, in the order of admission."""
    found: dict[bytes, Reservation] = {}
    same_boot = False
    for line in content.split(b"\n"):
        match line.removesuffix(b";").split(b" ") if line.endswith(b";") else []:
            case [b"=", boot]:
                same_boot = boot == boot_id
            case [b"+", ticket, *fields] if len(fields) == 4:
                with contextlib.suppress(ValueError):  # a damaged record stands for nothing either
                    found[ticket] = _reservation(ticket, *fields, latest_ns=now_ns, same_boot=same_boot)
            case [b"-", ticket]:
                found.pop(ticket, None)
    return sorted(found.values(), key=lambda reservation: reservation.admitted_ns)


def _reservation(  # noqa: PLR0913 (the fields of a record)
    ticket: bytes,
    replica: bytes,
    lane: bytes,
    reserve_tokens: bytes,
    admitted_ns: bytes,
    *,
    latest_ns: int,
    same_boot: bool,
) -> Reservation:
    tokens = int(reserve_tokens)
    if tokens <= 0:
        raise ValueError("a reservation of nothing")
    return Reservation(
        ticket.decode(),
        replica.decode(),
        Lane(lane.decode()),
        tokens,
        min(int(admitted_ns), latest_ns) if same_boot else latest_ns,
    )


def _boot_id() -> bytes:
    try:
        return _BOOT_ID.read_bytes().strip()
    except OSError:
        return b"unknown-%d" % os.getpid()
