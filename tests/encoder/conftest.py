"""A tiny checkpoint with random towers, and small media made on the spot."""

import functools
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import save_file

from encoder import passage, runner
from encoder.config import AudioConfig, AudioTokenizerConfig, EncoderConfig, VisionConfig
from encoder.towers.audio import AudioEncoder, AudioTokenizer
from encoder.towers.vit import VisionTower
from encoder.towers.weights import export_audio_state, export_tokenizer_state, export_vision_state
from tests.fakes.encoder_peer import Opener, opened_peer
from tests.fakes.media_parts import SMALL_PASS, RowsOf, clip_in_parts, damaged_clip, rows_of_the_whole

WIDTH = 192
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["MiMoV2ForCausalLM"],
    "model_type": "mimo_v2",
    "hidden_size": WIDTH,
    "vision_config": {
        "depth": 6,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 4,
        "num_key_value_heads": 2,
        "num_query_groups": 2,
        "qk_channels": 16,
        "kv_channels": 16,
        "in_chans": 3,
        "patch_size": 16,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "out_hidden_size": WIDTH,
        "hidden_act": "silu",
        "use_sink": True,
        "visual_token_window_size": 8,
        "fullatt_block_indexes": [0, 5],
        "vit_window_attn_types": [-1, 0, 1, 1, 0, -1],
    },
    "audio_config": {
        "audio_channels": 4,
        "group_size": 4,
        "audio_segment_size": 320,
        "input_full_attention": True,
        "input_local_dim": 32,
        "input_local_layers": 2,
        "input_local_attn_heads": 2,
        "input_local_head_dim": 16,
        "input_local_intermediate_size": 64,
        "input_local_hidden_dropout": 0.0,
        "rope_theta": 640000,
        "partial_rotary_factor": 1.0,
        "projection_layers": 2,
        "out_hidden_size": WIDTH,
        "add_post_norm": True,
        "speech_vocab_size": "80",
        "speech_zeroemb_idx": "64",
    },
    "processor_config": {
        "image_min_pixels": 8192,
        "image_max_pixels": 262144,
        "video_min_pixels": 8192,
        "video_max_pixels": 65536,
        "video_total_max_pixels": 1048576,
        "fps": 1.0,
        "max_frames": 64,
        "min_frames": None,
        "num_frames": None,
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "temporal_compression_ratio": 1,
        "use_video_timestamps": True,
        "use_per_grid_t_timestamps": False,
        "video_audio_interleave_length": 0.0,
        "audio_sampling_rate": 24000,
        "audio_nfft": 960,
        "audio_window_size": 960,
        "audio_hop_length": 240,
        "audio_n_mels": 128,
        "audio_group_size": 4,
        "audio_input_id_per_second": 25.0,
        "audio_fmin": 0,
        "audio_fmax": None,
    },
}
TINY_TOKENIZER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 4,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "encoder_skip_layer_id": 2,
    "encoder_causal": True,
    "encoder_attn_window_size": [16, 0],
    "hybrid_attention": True,
    "swa_per_block": 2,
    "kernel_size": 3,
    "stride_size": 2,
    "avg_pooler": 2,
    "n_mels": 128,
    "num_quantizers": 4,
    "codebook_size": [64, 64, 32, 32],
    "rope_theta": 10000,
    "ln_type": "LayerNorm",
    "scale_embedding": False,
}


def write_checkpoint(directory: Path, seed: int = 0) -> Path:
    """Random towers in Hugging Face layout."""
    generator = torch.Generator().manual_seed(seed)
    vision = VisionTower(VisionConfig.from_hf(TINY_CONFIG))
    tokenizer = AudioTokenizer(AudioTokenizerConfig.from_hf(TINY_TOKENIZER), 320)
    audio = AudioEncoder(AudioConfig.from_hf(TINY_CONFIG))
    for tower in (vision, tokenizer, audio):
        tower.init_weights(generator)
    (directory / "audio_tokenizer").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(TINY_CONFIG))
    (directory / "audio_tokenizer" / "config.json").write_text(json.dumps(TINY_TOKENIZER))
    save_file(export_vision_state(vision) | export_audio_state(audio), directory / "model.safetensors")
    save_file(export_tokenizer_state(tokenizer), directory / "audio_tokenizer" / "model.safetensors")
    return directory


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


def png_bytes(seed: int = 0, height: int = 96, width: int = 128) -> bytes:
    """A noisy picture; another seed is another picture."""
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def wav_bytes(seed: int = 0, seconds: float = 1.0) -> bytes:
    samples = np.random.RandomState(seed).uniform(-0.3, 0.3, int(24_000 * seconds)).astype(np.float32)
    buffer = io.BytesIO()
    soundfile.write(buffer, samples, 24_000, format="WAV")
    return buffer.getvalue()


def mp4_bytes(seed: int = 0, num_frames: int = 20, *, with_audio: bool = False) -> bytes:
    """A clip of 10 frames per second, 64 x 64, optionally with a sound track of the same length."""
    buffer = io.BytesIO()
    random = np.random.RandomState(seed)
    with av.open(buffer, "w", format="mp4") as container:
        video = container.add_stream("mpeg4", rate=10)
        video.width, video.height, video.pix_fmt = 64, 64, "yuv420p"
        audio = container.add_stream("aac", rate=24_000, layout="mono") if with_audio else None
        for _ in range(num_frames):
            frame = av.VideoFrame.from_ndarray(random.randint(0, 256, (64, 64, 3), dtype=np.uint8), format="rgb24")
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None:
            samples = random.uniform(-0.3, 0.3, (1, num_frames * 2400)).astype(np.float32)
            sound = av.AudioFrame.from_ndarray(samples, format="fltp", layout="mono")
            sound.sample_rate = 24_000
            container.mux(audio.encode(sound))
            container.mux(audio.encode(None))
    return buffer.getvalue()


@pytest.fixture
def open_peer(tiny_model_dir: Path) -> Opener:
    return functools.partial(opened_peer, tiny_model_dir)


@pytest.fixture
def make_png() -> Callable[..., bytes]:
    return png_bytes


@pytest.fixture
def make_wav() -> Callable[..., bytes]:
    return wav_bytes


@pytest.fixture
def make_mp4() -> Callable[..., bytes]:
    return mp4_bytes


@pytest.fixture(scope="session")
def clip() -> bytes:
    return clip_in_parts()


@pytest.fixture(scope="session")
def damaged() -> bytes:
    return damaged_clip()


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of the tower, and with them the parts of a video, are small."""
    for module in (runner, passage):
        monkeypatch.setattr(module, "PASS_PATCHES", SMALL_PASS)


@pytest.fixture
def whole_rows(tiny_model_dir: Path, small_parts: None) -> Iterator[RowsOf]:
    made = runner.TowerRunner.load(tiny_model_dir, EncoderConfig())
    yield rows_of_the_whole(made, tiny_model_dir)
    made.close()
