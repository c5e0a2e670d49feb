"""One real server for all clients."""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.service import SAMPLES, Service, running_service


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    log_dir = tmp_path_factory.mktemp("clients")
    files_dir = tmp_path_factory.mktemp("clients-files")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIMO_GATEWAY__FILES_DIR", str(files_dir))
        with running_service(log_dir, "--mode", "unified", "--media-root", str(SAMPLES)) as service:
            yield service


@pytest.fixture
def client(server: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client
