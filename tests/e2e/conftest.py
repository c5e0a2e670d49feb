"""One epd deployment for all tests that only ask; tests that break things start their own."""

from collections.abc import Iterator

import pytest

from tests.e2e.service import SAMPLES, Service, running_service


@pytest.fixture(scope="session")
def epd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log_dir = tmp_path_factory.mktemp("epd")
    with running_service(log_dir, "--mode", "epd", "--media-root", str(SAMPLES)) as service:
        yield service
