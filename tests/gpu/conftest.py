import pytest
import torch


@pytest.fixture(autouse=True)
def _cuda(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")
