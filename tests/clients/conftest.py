"""The clients and the server they ask."""

from collections.abc import Iterator

import openai
import pytest

from tests.e2e.service import Service


@pytest.fixture
def client(served: Service) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client
