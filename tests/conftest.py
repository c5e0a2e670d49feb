import faulthandler
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from epd.cache.l3.open import hot_root

if TYPE_CHECKING:
    from tests.e2e.service import Service

# Examples have no time limit each: tests that compute run at a low priority beside others (see scripts/check).
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Set before anything is imported and for every process that the tests start: no store of a test is where the user's own
# servers keep theirs.
_KV_STORE_DIR = tempfile.TemporaryDirectory(prefix="mimo-tests-kv-")
os.environ["MIMO_KV_STORE_DIR"] = _KV_STORE_DIR.name

# A shell without job control starts what runs in its background with Ctrl-C ignored, which whatever the tests start
# would inherit: then no test could interrupt anything.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# How long after its last line a run may take to end.
_LEAVE_S = 60.0

# Files whose tests ask `epd` below, and those that ask `served`.
_ONE_SERVER = {
    "epd": re.compile(r"tests/(page/|e2e/test_(answers|api|bad_input|chat_command|files|media_options)\.py)"),
    "served": re.compile(r"tests/(api|clients)/"),
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile` files that share a server are one process's, too: it is started once."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class ByServer(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((name for name, files in _ONE_SERVER.items() if files.match(nodeid)), nodeid.partition("::")[0])

    return ByServer(config, log)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """A thread or process that a failed test left must not keep this one for ever, with its last line printed: it is
    shown where they stand, and the run has failed."""
    faulthandler.dump_traceback_later(_LEAVE_S, exit=True, file=sys.__stderr__)


@pytest.fixture
def kv_store_dir(tmp_path: Path) -> Iterator[Path]:
    """A directory for a local store of KV, whose part in shared memory goes with the test."""
    directory = tmp_path / "kv"
    yield directory
    shutil.rmtree(hot_root(directory), ignore_errors=True)


@pytest.fixture(scope="session", autouse=True)
def _no_store_is_left() -> Iterator[None]:
    """The one of servers of tests, should any have made it."""
    yield
    shutil.rmtree(hot_root(Path(_KV_STORE_DIR.name)), ignore_errors=True)


@pytest.fixture(autouse=True)
def _priority_as_it_was() -> Iterator[None]:
    """A test that leaves its process a real-time one starves every process it starts, and all others."""
    yield
    policy = os.sched_getscheduler(0)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert policy == os.SCHED_OTHER, "use tests.fakes.media.priority around encoders"


@pytest.fixture(scope="session")
def epd(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Service"]:
    """One epd deployment for all tests that only ask; tests that break things start their own."""
    from tests.e2e.service import SAMPLES, running_service

    with running_service(tmp_path_factory.mktemp("epd"), "--mode", "epd", "--media-root", str(SAMPLES)) as service:
        yield service


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Service"]:
    """One real server, `mimo serve` in one process, for all tests that only ask it as clients do."""
    from tests.e2e.service import SAMPLES, running_service

    log_dir, files_dir = tmp_path_factory.mktemp("served"), tmp_path_factory.mktemp("served-files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIMO_GATEWAY__FILES_DIR", str(files_dir))
        # Enough for every known answer, and no more where a tester asks for nothing in particular.
        patch.setenv("MIMO_GATEWAY__DEFAULT_MAX_TOKENS", "96")
        # Every URL that a tester makes up is tried, and most lead nowhere.
        patch.setenv("MIMO_FETCH__TIMEOUT_S", "2")
        with running_service(log_dir, "--mode", "unified", "--media-root", str(SAMPLES)) as service:
            yield service
