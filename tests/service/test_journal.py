"""The journal: what is open outlives the process, whatever happens to the process, the file or the disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from structlog.testing import capture_logs

from extproc.core.values import Lane, Reservation
from extproc.demo.envoy_process import free_ports
from extproc.service import journal as module
from extproc.service.journal import Journal, JournalError
from tests.policies import document

NOW_NS = 10**15
BOOT = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
HEAD = b"\n= %b;" % BOOT


def _reservation(number: int, **changes: object) -> Reservation:
    values = {"replica": "chat-0", "lane": Lane.INTERACTIVE, "reserve_tokens": 100 + number, "admitted_ns": number}
    return Reservation(f"i-{number}", **{**values, **changes})  # type: ignore[arg-type]  # the fields as given


class _Errors:
    """Counts what a journal reports."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> None:
        self.count += 1


@contextmanager
def _journal(path: Path, errors: _Errors | None = None) -> Iterator[tuple[Journal, list[Reservation]]]:
    journal = Journal(path, errors or _Errors())
    try:
        yield journal, journal.read(NOW_NS)
    finally:
        journal.close()


def _found(path: Path, content: bytes) -> list[Reservation]:
    path.write_bytes(content)
    with _journal(path) as (_, found):
        return found


def test_what_is_open_is_found(tmp_path: Path) -> None:
    """The next owner finds what was made and not ended, in the order of admission and with every field."""
    made = [_reservation(1), _reservation(2, lane=Lane.BULK, replica="docs-0"), _reservation(3), _reservation(0)]
    with _journal(tmp_path / "j") as (journal, found):
        assert [] == found
        for reservation in made:
            journal.made(reservation)
        journal.ended("i-3")
        journal.ended("unknown")

    with _journal(tmp_path / "j") as (_, found):
        assert [made[3], made[0], made[1]] == found


def test_a_moved_reservation_is_found_where_it_is(tmp_path: Path) -> None:
    """The last record of a ticket says where it is counted."""
    with _journal(tmp_path / "j") as (journal, _):
        journal.made(_reservation(1))
        journal.made(_reservation(1, replica="chat-1"))

    with _journal(tmp_path / "j") as (_, found):
        assert [_reservation(1, replica="chat-1")] == found


@pytest.mark.parametrize("record", [b"\n+ i-2 chat-0 bulk 7000 12;", b"\n- i-1;", b"\n+ i-1 chat-1 interactive 101 1;"])
def test_a_torn_record_stands_for_nothing(tmp_path: Path, record: bytes) -> None:
    """Torn at any byte, the last record is as if never written, and what the next owner appends is whole."""
    before = HEAD + b"\n+ i-1 chat-0 interactive 101 1;"
    complete = _found(tmp_path / "j", before + record)
    assert [_reservation(1)] != complete
    for size in range(len(record)):
        path = tmp_path / "j"
        path.write_bytes(before + record[:size])
        journal = Journal(path, _Errors())
        assert [_reservation(1)] == journal.read(NOW_NS), record[:size]
        # A writer that goes on behind a torn record, as after a full disk.
        journal.close()
        with path.open("ab") as file:
            file.write(record[:size] + b"\n+ i-9 chat-0 bulk 9 9;")
        assert [_reservation(1), Reservation("i-9", "chat-0", Lane.BULK, 9, 9)] == _found(path, path.read_bytes())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b";",
        b"+;",
        b"-;",
        b"=;",
        b"garbage;",
        b"+ i-2 chat-0 bulk 10;",
        b"+ i-2 chat-0 bulk 10 2 3;",
        b"+ i-2 chat-0 fast 10 2;",
        b"+ i-2 chat-0 bulk ten 2;",
        b"+ i-2 chat-0 bulk 10 two;",
        b"+ i-2 chat-0 bulk 0 2;",
        b"+ i-2 chat-0 bulk -10 2;",
        b"+ i-2 \xff bulk 10 2;",
        b"+ \xff chat-0 bulk 10 2;",
        b"+ i-2 chat-0 bulk " + b"9" * 5000 + b" 2;",
        b"+ i-2 chat-0 bulk 10 2",
        b"+ i-2 chat-0 bulk 10 2; ",
        b"\0" * 100,
        b"- ;",
        b"- i-1 i-1;",
    ],
)
def test_a_damaged_line_stands_for_nothing(tmp_path: Path, line: bytes) -> None:
    """A line that is no record changes nothing, and the lines around it stand."""
    content = HEAD + b"\n+ i-1 chat-0 interactive 101 1;\n" + line + b"\n+ i-3 chat-0 interactive 103 3;"

    assert [_reservation(1), _reservation(3)] == _found(tmp_path / "j", content)


@pytest.mark.parametrize("head", [b"", b"\n= another-boot;"])
def test_times_of_another_boot_begin_anew(tmp_path: Path, head: bytes) -> None:
    """After a reboot the clock has restarted: what is open counts as admitted now, so it stands too long, not short."""
    content = head + b"\n+ i-1 chat-0 interactive 101 1;" + HEAD + b"\n+ i-2 chat-0 interactive 102 2;"

    assert [_reservation(2), _reservation(1, admitted_ns=NOW_NS)] == _found(tmp_path / "j", content)
    with _journal(tmp_path / "j") as (_, found):
        assert [_reservation(2), _reservation(1, admitted_ns=NOW_NS)] == found


def test_no_time_is_later_than_now(tmp_path: Path) -> None:
    """A time to come would keep a reservation beyond the longest response."""
    content = HEAD + b"\n+ i-1 chat-0 interactive 101 %d;" % (NOW_NS + 1)

    assert [_reservation(1, admitted_ns=NOW_NS)] == _found(tmp_path / "j", content)


def test_a_large_file_is_rewritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it has grown large, the file is rewritten with exactly what is open, and appended to from there."""
    path = tmp_path / "j"
    monkeypatch.setattr(module, "COMPACT_BYTES_MIN", 600)
    with _journal(path) as (journal, _):
        for number in range(10):
            journal.made(_reservation(number))
        journal.compact([])
        size = path.stat().st_size
        for number in range(9):
            journal.ended(f"i-{number}")
            journal.made(_reservation(20 + number))
            journal.ended(f"i-{20 + number}")
        journal.compact([_reservation(9)])

        assert 300 < size < 600
        assert len(HEAD) + 40 > path.stat().st_size
        journal.made(_reservation(10))
    with _journal(path) as (_, found):
        assert [_reservation(9), _reservation(10)] == found
    assert ["j", "j.lock"] == sorted(file.name for file in tmp_path.iterdir())


def test_a_closed_journal_writes_nothing(tmp_path: Path) -> None:
    """A stream that ends after the journal is given up leaves its record to the next owner, and is no error."""
    errors = _Errors()
    journal = Journal(tmp_path / "j", errors)
    journal.read(NOW_NS)
    journal.made(_reservation(1))
    journal.close()
    journal.ended("i-1")

    assert 0 == errors.count
    with _journal(tmp_path / "j") as (_, found):
        assert [_reservation(1)] == found


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tokenlane-test", str(tmp_path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system needs the right to mount: {mounted.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):  # noqa: PT012 (the last write fails)
        while file.write(b"x" * 4096):
            pass


def test_full_disk(small_disk: Path) -> None:
    """A full disk is counted a record and said once; with room again the file gets all that is open, said once."""
    errors, filler = _Errors(), small_disk / "filler"
    with _journal(small_disk / "j", errors) as (journal, _), capture_logs() as logs:
        journal.made(_reservation(0))
        _fill(filler)
        made = [_reservation(number) for number in range(1, 400)]
        for reservation in made:
            journal.made(reservation)
        lost = errors.count
        journal.ended("i-0")
        journal.compact(made)

        assert 0 < lost < len(made)
        assert lost + 2 == errors.count
        assert journal.failing
        filler.unlink()
        journal.made(_reservation(400))
        assert journal.failing
        journal.compact([*made, _reservation(400)])
        assert not journal.failing
        journal.made(_reservation(401))
    assert ["journal_failing", "journal_recovered"] == [entry["event"] for entry in logs]
    with _journal(small_disk / "j") as (_, found):
        assert [*made, _reservation(400), _reservation(401)] == found


def test_start_on_a_full_disk(small_disk: Path) -> None:
    """A service that starts on a full disk takes over what is open, serves, and says so."""
    with _journal(small_disk / "j") as (journal, _):
        journal.made(_reservation(1))
    _fill(small_disk / "filler")
    errors = _Errors()
    with _journal(small_disk / "j", errors) as (journal, found):
        assert [_reservation(1)] == found
        assert (True, 1) == (journal.failing, errors.count)
        (small_disk / "filler").unlink()
        journal.compact(found)
        assert not journal.failing
    with _journal(small_disk / "j") as (_, found):
        assert [_reservation(1)] == found


def test_a_write_that_stops_halfway(tmp_path: Path) -> None:
    """A record that is written in part is counted as lost, and does not spoil the next one."""
    errors, write = _Errors(), os.write
    with _journal(tmp_path / "j", errors) as (journal, _):
        with patch("os.write", lambda file, record: write(file, record[:10])):
            journal.made(_reservation(1))
        journal.made(_reservation(2))

        assert (True, 1) == (journal.failing, errors.count)
    with _journal(tmp_path / "j") as (_, found):
        assert [_reservation(2)] == found


class JournalMachine(RuleBasedStateMachine):
    """Any order of records, rewrites, crashes and a full disk, against a dictionary as the model."""

    path: Path

    @initialize()
    def start(self) -> None:
        """An empty journal."""
        self.path.unlink(missing_ok=True)
        self.model: dict[str, Reservation] = {}
        self.made = 0
        self.full = False
        self._open()

    def _open(self) -> None:
        self.journal = Journal(self.path, _Errors())
        self.found = self.journal.read(NOW_NS)

    @contextmanager
    def _disk(self) -> Iterator[None]:
        if not self.full:
            yield
            return
        error = OSError(errno.ENOSPC, "No space left on device")
        with patch("os.write", side_effect=error), patch.object(Path, "write_bytes", side_effect=error):
            yield

    @rule(replica=st.sampled_from(["chat-0", "chat-1"]), lane=st.sampled_from([Lane.INTERACTIVE, Lane.BULK]))
    def make(self, replica: str, lane: Lane) -> None:
        """A reservation is made."""
        self.made += 1
        reservation = _reservation(self.made, replica=replica, lane=lane)
        self.model[reservation.ticket] = reservation
        with self._disk():
            self.journal.made(reservation)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0))
    def move(self, number: int) -> None:
        """One that is open moves."""
        ticket = sorted(self.model)[number % len(self.model)]
        old = self.model[ticket]
        self.model[ticket] = Reservation(ticket, "chat-9", old.lane, old.reserve_tokens, old.admitted_ns)
        with self._disk():
            self.journal.made(self.model[ticket])

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0))
    def end(self, number: int) -> None:
        """One that is open ends."""
        ticket = sorted(self.model)[number % len(self.model)]
        del self.model[ticket]
        with self._disk():
            self.journal.ended(ticket)

    @rule(large=st.booleans())
    def compact(self, large: bool) -> None:
        """A second passes; a rewrite that succeeds makes the file whole."""
        with self._disk(), patch.object(module, "COMPACT_BYTES_MIN", 0 if large else 2**30):
            self.journal.compact(self.model.values())
        if not self.full:
            assert not self.journal.failing

    @rule(full=st.booleans())
    def fill(self, full: bool) -> None:
        """The disk gets full, or has room again."""
        self.full = full

    @rule(torn=st.binary(max_size=30))
    def crash(self, torn: bytes) -> None:
        """The process dies, perhaps in the middle of a record; the next owner finds what is open."""
        whole = not self.journal.failing
        self.journal.close()
        with self.path.open("ab") as file:
            file.write(b"\n" + torn.replace(b";", b","))
        with self._disk():
            self._open()
        if whole:
            assert sorted(self.model.values(), key=lambda r: r.admitted_ns) == self.found
        self.model = {reservation.ticket: reservation for reservation in self.found}

    def teardown(self) -> None:
        """Give the file up."""
        if hasattr(self, "journal"):
            self.journal.close()


@pytest.fixture
def machine(tmp_path: Path) -> type[JournalMachine]:
    """The machine over a file of this test."""
    return type("JournalMachineHere", (JournalMachine,), {"path": tmp_path / "j"})


def test_any_history(machine: type[JournalMachine]) -> None:
    """Whatever happens, a journal that does not say it fails holds exactly what is open."""
    run_state_machine_as_test(machine, settings=settings(max_examples=60))


def _refusal(tmp_path: Path, journal: Path) -> str:
    """What `tokenlane serve` says when it does not start."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(document()))
    listen, admin = (f"127.0.0.1:{port}" for port in free_ports(2))
    command = [sys.executable, "-m", "extproc", "serve", str(policy), f"--journal={journal}"]
    command += [f"--listen={listen}", f"--admin={admin}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert 1 == done.returncode
    return done.stderr.strip()


def test_one_owner(tmp_path: Path) -> None:
    """A second process on the journal does not start and says why, and leaves the first one's records alone."""
    path = tmp_path / "j"
    with _journal(path) as (journal, _):
        journal.made(_reservation(1))
        said = _refusal(tmp_path, path)
        with pytest.raises(JournalError, match="another process"):
            Journal(path, _Errors())
        journal.made(_reservation(2))

    assert f"Error: {path}: another process uses this journal, and two would end each other's" == said
    with _journal(path) as (_, found):
        assert [_reservation(1), _reservation(2)] == found


def test_start_without_its_directory(tmp_path: Path) -> None:
    """A directory that is missing, as of a volume that is not mounted, ends the start with one sentence."""
    path = tmp_path / "missing" / "j"

    assert f"Error: {path}: its directory does not exist" == _refusal(tmp_path, path)
    assert not path.parent.exists()


def _in_a_file(directory: Path) -> Path:
    (directory / "file").touch()
    return directory / "file" / "j"


def _a_directory(directory: Path) -> Path:
    (directory / "j").mkdir()
    return directory / "j"


def _a_pipe(directory: Path) -> Path:
    os.mkfifo(directory / "j")
    return directory / "j"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (_in_a_file, "Not a directory"),
        (_a_directory, "the journal must be a regular file"),
        (_a_pipe, "the journal must be a regular file"),
        (lambda _: Path("/dev/full"), "the journal must be a regular file"),
        (lambda _: Path("/proc/tokenlane-journal"), "its directory does not exist"),
    ],
)
def test_what_is_no_place_for_a_journal(tmp_path: Path, make: Callable[[Path], Path], sentence: str) -> None:
    """A path that cannot hold a file is refused in a sentence that names it."""
    path = make(tmp_path)

    with pytest.raises(JournalError, match=f"^{path}: {sentence}$"):
        Journal(path, _Errors())


def test_a_directory_without_permission(tmp_path: Path) -> None:
    """A directory that this user may not write to is refused."""
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)

    with pytest.raises(JournalError, match="Permission denied"):
        Journal(tmp_path / "j", _Errors())
