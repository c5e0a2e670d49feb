"""One real server for all tests of this folder, whose answers are short unless a client asks for more."""

from collections.abc import Iterator

import pytest

from tests.e2e.service import SAMPLES, Service, running_service


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log_dir = tmp_path_factory.mktemp("api")
    files_dir = tmp_path_factory.mktemp("api-files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIMO_GATEWAY__FILES_DIR", str(files_dir))
        patch.setenv("MIMO_GATEWAY__DEFAULT_MAX_TOKENS", "8")
        # Every URL that a tester makes up is tried, and most lead nowhere.
        patch.setenv("MIMO_FETCH__TIMEOUT_S", "2")
        with running_service(log_dir, "--mode", "unified", "--media-root", str(SAMPLES)) as service:
            yield service
