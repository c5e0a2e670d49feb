"""All generated files, with what each must come out as."""

from __future__ import annotations

from tests.fakes.media.animation_cases import animation_cases
from tests.fakes.media.case import Case
from tests.fakes.media.image_cases import image_cases
from tests.fakes.media.image_fault_cases import image_fault_cases
from tests.fakes.media.sound_cases import sound_cases
from tests.fakes.media.video_cases import video_cases
from tests.fakes.media.video_fault_cases import video_fault_cases


def corpus() -> list[Case]:
    return [
        *image_cases(),
        *image_fault_cases(),
        *video_cases(),
        *animation_cases(),
        *video_fault_cases(),
        *sound_cases(),
    ]
