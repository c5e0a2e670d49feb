"""Sound bytes to log-mel frames: decode, resample every channel, average the channels, transform."""

from preprocess.audio.decode import audio_mel, decode_audio, decode_track, log_mel, no_deadline, track_mel
from preprocess.audio.mel import mel_filter_bank
from preprocess.audio.resample import resample

__all__ = [
    "audio_mel",
    "decode_audio",
    "decode_track",
    "log_mel",
    "mel_filter_bank",
    "no_deadline",
    "resample",
    "track_mel",
]
