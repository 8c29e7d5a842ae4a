"""The ledger under kills, a full disk, a folder that cannot be written, and several processes at once."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest
from private_rlhf.core.errors import UserError
from private_rlhf.privacy.keys import PrivacyKey, keygen, load_key
from private_rlhf.privacy.ledger import Budget, Ledger
from support.ledger_releases import events_of, merge, plan, release
from support.other_machines import move_to

pytestmark = pytest.mark.usefixtures("quick_disk")
SECOND = [event._replace(tag=b"\7" + event.tag[1:]) for event in events_of("ann", 3)]  # one partition: fewer steps
FIRST = SECOND[:2]
KILLED, DONE = 9, 0


@pytest.fixture
def key(tmp_path: Path) -> PrivacyKey:
    """A key that has released FIRST at 0.5."""
    key = load_key(keygen(tmp_path / "label.key"))
    release(Ledger.open(key), FIRST, 0.5)
    return key


@contextmanager
def failing(step: int, action: Callable[[str], None], calls: tuple[str, ...], last: float = 0) -> Iterator[None]:
    """`action` runs before the calls number step to step + last (from 0) to these functions of `os`."""
    counter = itertools.count()

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if step <= next(counter) <= step + last:
                action(str(arguments[0]))
            return original(*arguments, **options)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in calls:
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


def forked(work: Callable[[], object]) -> int:
    """The exit code of a child that does the work: DONE, or 5 after an exception."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(DONE)
        except BaseException:
            os._exit(5)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def copy_of(key: PrivacyKey, folder: Path) -> PrivacyKey:
    """The key with its state, in a folder of its own, on a machine of its own, where no anchor knows another place."""
    assert key.path is not None
    folder.mkdir()
    move_to(folder)
    shutil.copy2(key.path, folder / "label.key")
    shutil.copytree(key.state.folder, folder / "label.key.state")
    return load_key(folder / "label.key")


def finishes(key: PrivacyKey, output: Path) -> None:
    """The plan run again ends as one entry with the right totals, intact, and with nothing left behind."""
    before = Ledger.open(key).show()["releases"]
    done = len(before) == 2 and before[1]["status"] == "released"
    assert release(Ledger.open(key), SECOND, 1.0, output=output) is done
    ledger = Ledger.open(key)
    shown = ledger.show()
    assert [(e["epsilon"], e["status"]) for e in shown["releases"]] == [(0.5, "released"), (1.0, "released")]
    assert (shown["epsilon_total"], shown["events"], shown["labelers"]["max_epsilon"]) == (1.0, 3, 3.0)
    assert ledger.verify() == []
    assert len(list(ledger.store.folder.iterdir())) == 2
    assert not [path for path in key.state.folder.iterdir() if path.name.startswith(".")]


def test_a_kill_at_any_step_loses_nothing(key: PrivacyKey, tmp_path: Path) -> None:
    """Before every file operation of a release in turn."""
    calls = ("open", "replace", "fsync", "pwrite", "unlink")
    seen = set()
    for step in itertools.count():
        folder = tmp_path / str(step)
        own = copy_of(key, folder)

        def work(own: PrivacyKey = own, step: int = step, output: Path = folder / "out") -> None:
            with failing(step, lambda _: os._exit(KILLED), calls):
                release(Ledger.open(own), SECOND, 1.0, output=output)

        code = forked(work)
        assert code in (KILLED, DONE)
        ledger = Ledger.open(own)
        shown = ledger.show()
        spent = shown["epsilon_total"] == 1.0
        assert spent or not (folder / "out").exists()
        assert len(shown["releases"]) == 1 + spent
        assert shown["events"] == 2 + spent
        assert ledger.verify() == []
        seen.add((shown["releases"][-1]["status"] if spent else "free", (folder / "out").exists()))
        finishes(own, folder / "out")
        if code == DONE:
            break
    assert step > 20
    assert seen == {("free", False), ("written", False), ("written", True), ("released", True)}


@pytest.mark.parametrize(
    ("calls", "last"),
    [(("open", "replace", "fsync", "pwrite"), 0), (("open",), float("inf"))],
    ids=["once", "for good"],
)
def test_a_full_disk_costs_nothing_unless_output_began(
    key: PrivacyKey, tmp_path: Path, calls: tuple[str, ...], last: float
) -> None:
    def full(path: str) -> None:
        if not Path(path).is_dir():  # a folder is opened to be synced, which needs no space
            raise OSError(errno.ENOSPC, "No space left on device", path)

    for step in itertools.count():
        folder = tmp_path / str(step)
        own, failed = copy_of(key, folder), None
        with failing(step, full, calls, last):
            try:
                release(Ledger.open(own), SECOND, 1.0, output=folder / "out")
            except OSError as error:
                failed = error.errno
        assert failed in (None, errno.ENOSPC)
        shown = Ledger.open(own).show()
        if not (folder / "out").exists():
            assert (len(shown["releases"]), shown["epsilon_total"], shown["events"]) == (1, 0.5, 2)
        assert Ledger.open(own).verify() == []
        finishes(own, folder / "out")
        if failed is None and (folder / "out").exists() and step > 20:
            break


def test_a_write_that_fails_half_way_costs_nothing(key: PrivacyKey) -> None:
    """A real limit on the size of files, as on a full disk: 600 rows do not fit."""

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        with pytest.raises(OSError):
            release(Ledger.open(key), events_of("bob", 600), 1.0)

    assert forked(work) == DONE
    ledger = Ledger.open(key)
    assert (len(ledger.show()["releases"]), ledger.show()["events"]) == (1, 2)
    assert ledger.verify() == []
    assert len(list(ledger.store.folder.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_readable_and_releases_nothing(key: PrivacyKey) -> None:
    def denied(path: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    with failing(0, denied, ("open",), float("inf")):
        ledger = Ledger.open(key)
        assert ledger.show()["epsilon_total"] == 0.5
        assert ledger.verify() == []
        with pytest.raises(PermissionError) as caught:
            ledger.reserve(plan(SECOND, 1.0))
    assert str(caught.value.filename) == f"{key.state.folder}/ledger.lock"
    assert len(Ledger.open(key).show()["releases"]) == 1


# --- several processes ------------------------------------------------------------------------------------------------


def racer(path: Path, number: int, start: Barrier, said: Queue[str]) -> None:
    """Releases three events of one person within a budget that has room for one racer alone."""
    start.wait()
    try:
        events = events_of("eve", 3, start=3 * number)
        release(Ledger.open(load_key(path)), events, 1.0, Budget(5.0, "person"))
        said.put("released")
    except UserError as error:
        said.put(str(error))


def test_two_processes_cannot_spend_a_budget_twice(key: PrivacyKey, tmp_path: Path) -> None:
    """Three rounds of three racers: one is let through, the others see its spending and are refused."""
    context = multiprocessing.get_context("fork")
    for round_number in range(3):
        own = copy_of(key, tmp_path / str(round_number))
        start, said = context.Barrier(3), context.Queue()
        racers = [context.Process(target=racer, args=(own.path, number, start, said)) for number in range(3)]
        for process in racers:
            process.start()
        answers = sorted(said.get(timeout=120) for _ in racers)
        for process in racers:
            process.join()
        assert [answer == "released" for answer in answers] == [True, False, False]
        assert all("labeller under this key is 3 and this release would make it 6" in text for text in answers[1:])
        shown = Ledger.open(own).show()
        assert (shown["labelers"]["max_epsilon"], shown["events"], len(shown["releases"])) == (3.0, 5, 2)


def test_a_release_under_way_is_left_alone_and_said(key: PrivacyKey) -> None:
    ledger = Ledger.open(key)
    with ledger.reserve(plan(SECOND, 1.0)) as reservation:
        merge(ledger, SECOND, 1.0, reservation.generation)
        with pytest.raises(UserError, match="another release under this key is under way; run again when it has ended"):
            Ledger.open(key).reserve(plan(SECOND, 2.0), wait=0.05)
        with pytest.raises(UserError, match="is under way"):
            Ledger.open(key).verify(wait=0.0)
        assert [entry["status"] for entry in Ledger.open(key).show()["releases"]] == ["released", "reserved"]
        reservation.commit(None)
    assert Ledger.open(key).show()["epsilon_total"] == 1.0


def test_workers_that_outlive_a_killed_run_do_not_keep_the_lock(key: PrivacyKey, tmp_path: Path) -> None:
    ledger = Ledger.open(key)

    def work() -> None:
        held = ledger.reserve(plan(SECOND, 1.0))
        worker = os.fork()
        if worker == 0:
            signal.pause()
        assert not held.already
        (tmp_path / "worker").write_text(str(worker))
        os.kill(os.getpid(), signal.SIGKILL)

    assert forked(work) == -signal.SIGKILL
    try:  # the worker lets go as soon as it is scheduled; one that kept the lock would keep it for good
        assert not release(Ledger.open(key), SECOND, 1.0, wait=20.0)
    finally:
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


def test_a_staged_generation_goes_to_other_processes(key: PrivacyKey) -> None:
    ledger = Ledger.open(key)
    with ledger.reserve(plan(SECOND, 1.0)) as reservation:
        sent = pickle.loads(pickle.dumps((ledger.store, reservation.generation)))
        assert sent[1] == reservation.generation

        def work() -> None:
            merge(Ledger.open(key), SECOND, 1.0, sent[1])

        assert forked(work) == DONE
        reservation.commit(None)
    assert Ledger.open(key).show()["events"] == 3


def test_a_forgotten_reservation_lets_go(key: PrivacyKey) -> None:
    Ledger.open(key).reserve(plan(SECOND, 1.0))
    assert not release(Ledger.open(key), SECOND, 1.0, wait=0.0)
