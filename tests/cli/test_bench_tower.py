"""The tower's bench cases: they run, and tell GFLOP/s of the work that was done."""

from pathlib import Path

import pytest
import torch

from cli.bench_case import Case, Setting
from cli.bench_tower import CASES


class Quiet:
    """Progress that nobody watches."""

    def begin(self, what: str, total: int) -> None: ...

    def advance(self, amount: int = 1) -> None: ...


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_quick_tower(case: Case, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    with case.open(Setting(cache_dir=tmp_path, num_threads=before + 1, quick=True), Quiet()) as contest:
        assert torch.get_num_threads() == before + 1
        assert "GFLOP" in contest.detail
        for contender in (contest.ours, contest.baseline, contest.limit):
            assert callable(contender)
            assert 0 < contender() < 100_000
    assert torch.get_num_threads() == before


def test_the_two_forms_of_a_trial_agree() -> None:
    from encoder import audio_trial, vision_trial

    for make in (vision_trial, audio_trial):
        trial = make(quick=True)
        fast, plain = trial.fast(), trial.plain()
        assert isinstance(fast, list)
        assert isinstance(plain, torch.Tensor)
        torch.testing.assert_close(torch.cat(fast), plain, atol=1e-4, rtol=1e-4)
        assert trial.flops > 10**7
