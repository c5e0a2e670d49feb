"""Loading: shards, names, refusals; and the fingerprint of what was loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig
from encoder.fingerprint import NUM_SAMPLES, SAMPLE_BYTES, WHOLE_FILE_BYTES, checkpoint_fingerprint
from encoder.towers.weights import CheckpointError, export_audio_state, export_vision_state, load_towers


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def rewrite(path: Path, **changes: torch.Tensor | None) -> None:
    state = load_file(path)
    for name, tensor in changes.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, path)


def test_export_gives_the_names_that_were_loaded(tiny_model_dir: Path) -> None:
    towers = load_towers(tiny_model_dir, torch.float32)
    assert towers.vision is not None
    assert towers.audio_encoder is not None
    assert towers.out_hidden_size == 192
    exported = export_vision_state(towers.vision) | export_audio_state(towers.audio_encoder)
    stored = load_file(tiny_model_dir / "model.safetensors")
    assert exported.keys() == stored.keys()
    assert all(torch.equal(exported[name], stored[name]) for name in stored)
    assert "speech_embeddings.0.weight" in stored
    assert "visual.blocks.1.attn.sinks" in stored
    assert "visual.blocks.0.attn.sinks" not in stored


def test_all_problems_are_named_at_once(model_dir: Path) -> None:
    rewrite(
        model_dir / "model.safetensors",
        **{
            "visual.merger.ln_q.weight": None,
            "visual.surplus": torch.zeros(1),
            "visual.patch_embed.proj.weight": torch.zeros(64, 3, 2, 16, 8),
            "visual.blocks.0.norm1.weight": torch.zeros(64, dtype=torch.int8),
            "audio_encoder.projection.mlp.0.weight": None,
            "speech_embeddings.4.weight": torch.zeros(80, 32),
        },
    )
    rewrite(
        model_dir / "audio_tokenizer" / "model.safetensors",
        **{
            "encoder.conv1.bias": None,
            "decoder.anything": torch.zeros(3),
            "encoder.quantizer.vq.layers.0._codebook.inited": torch.ones(1),
        },
    )
    with pytest.raises(CheckpointError) as caught:
        load_towers(model_dir, torch.float32)
    missing = "visual.merger.ln_q.weight", "audio_encoder.projection.mlp.0.weight", "audio_tokenizer/encoder.conv1.bias"
    assert str(caught.value).splitlines()[1:] == [
        f"3 missing: {', '.join(sorted(missing))}",
        "2 unexpected: speech_embeddings.4.weight, visual.surplus",
        "1 of the wrong shape: visual.patch_embed.proj.weight (expected [64, 3, 2, 16, 16], found [64, 3, 2, 16, 8])",
        "1 of a dtype that is not implemented: visual.blocks.0.norm1.weight (I8)",
    ]


def test_the_tokenizer_may_leave_its_prefix_away(tiny_model_dir: Path, model_dir: Path) -> None:
    path = model_dir / "audio_tokenizer" / "model.safetensors"
    state = {name.removeprefix("encoder."): tensor for name, tensor in load_file(path).items()}
    state |= {"decoder.conv.weight": torch.zeros(3), "quantizer.vq.layers.0._codebook.cluster_size": torch.ones(64)}
    save_file(state, path)
    bare, prefixed = (load_towers(folder, torch.float32).audio_tokenizer for folder in (model_dir, tiny_model_dir))
    assert bare is not None
    assert prefixed is not None
    torch.testing.assert_close(dict(bare.state_dict()), dict(prefixed.state_dict()), atol=0, rtol=0)
    save_file(state | {"encoder.conv1.bias": state["conv1.bias"].clone()}, path)
    with pytest.raises(CheckpointError, match=r"holds both .*conv1\.bias"):
        load_towers(model_dir, torch.float32)


def test_towers_take_the_dtype_asked_for_and_want_no_gradients(tiny_model_dir: Path) -> None:
    towers = load_towers(tiny_model_dir, torch.bfloat16)
    stored = load_file(tiny_model_dir / "model.safetensors")
    assert towers.vision is not None
    assert towers.audio_encoder is not None
    loaded = export_vision_state(towers.vision) | export_audio_state(towers.audio_encoder)
    assert {tensor.dtype for tensor in loaded.values()} == {torch.bfloat16}
    assert all(torch.equal(loaded[name], stored[name].bfloat16()) for name in stored)
    for module in (towers.vision, towers.audio_encoder, towers.audio_tokenizer):
        assert module is not None
        assert not module.training
        assert not any(parameter.requires_grad or parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("file", ["model.safetensors", "audio_tokenizer/model.safetensors"])
def test_a_file_cut_short_is_named(model_dir: Path, file: str) -> None:
    path = model_dir / file
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is cut short: [\w.]+ ends at byte"):
        load_towers(model_dir, torch.float32)


def test_shards_are_found_through_the_index(model_dir: Path) -> None:
    state = load_file(model_dir / "model.safetensors")
    names = sorted(state)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in shards.items():
        save_file({name: state[name] for name in members}, model_dir / file)
    save_file({"model.embed_tokens.weight": torch.zeros(2)}, model_dir / "text.safetensors")
    weight_map = {name: file for file, members in shards.items() for name in members}
    weight_map["model.embed_tokens.weight"] = "text.safetensors"
    (model_dir / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model_dir / "model.safetensors").unlink()
    (model_dir / "text.safetensors").unlink()  # holds no tower: it is never opened
    assert load_towers(model_dir, torch.float32).vision is not None
    (model_dir / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors is missing: .* says it holds "):
        load_towers(model_dir, torch.float32)


def test_merger_biases_are_used_if_present_and_normally_absent(model_dir: Path) -> None:
    plain = load_towers(model_dir, torch.float32).vision
    assert plain is not None
    bias = torch.full((192,), 3.0)
    zeros = torch.zeros(256)
    rewrite(model_dir / "model.safetensors", **{"visual.merger.mlp.0.bias": zeros, "visual.merger.mlp.2.bias": bias})
    biased = load_towers(model_dir, torch.float32).vision
    assert biased is not None
    pixels = torch.randn(24, 1536, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(biased(pixels, [(1, 4, 6)]), plain(pixels, [(1, 4, 6)]) + 3.0)


def test_a_text_checkpoint_has_no_towers(model_dir: Path) -> None:
    (model_dir / "config.json").write_text(json.dumps({"hidden_size": 8}))
    towers = load_towers(model_dir, torch.float32)
    assert (towers.vision, towers.audio_tokenizer, towers.audio_encoder) == (None, None, None)
    assert towers.out_hidden_size is None


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("vision_config", "hidden_act", "gelu"),
        ("vision_config", "spatial_merge_size", 4),
        ("vision_config", "fullatt_block_indexes", [0]),
        ("vision_config", "vit_window_attn_types", [2] * 6),
        ("vision_config", "depth", None),
        ("audio_config", "projection_layers", 3),
        ("audio_config", "input_local_hidden_dropout", 0.1),
        ("audio_config", "speech_vocab_size", "80-80"),
    ],
)
def test_unsupported_values_are_refused_by_name(tiny_model_dir: Path, section: str, key: str, value: object) -> None:
    config = json.loads((tiny_model_dir / "config.json").read_text())
    config[section][key] = value
    reader = VisionConfig if section == "vision_config" else AudioConfig
    with pytest.raises(ValueError, match=key):
        reader.from_hf(config)


def test_published_values_are_read() -> None:
    blocks = [-1, *[0] * 4, *[1] * 4] * 3 + [-1]
    vision = VisionConfig.from_hf(
        {
            "depth": 28,
            "hidden_size": 1280,
            "intermediate_size": 4608,
            "num_heads": 32,
            "num_key_value_heads": 8,
            "out_hidden_size": 4096,
            "visual_token_window_size": 64,
            "window_size": 128,
            "fullatt_block_indexes": [0, 9, 18, 27],
            "vit_window_attn_types": blocks,
        }
    )
    assert (vision.head_dim, vision.window_patches, vision.patch_width) == (64, 64, 1536)
    tokenizer = AudioTokenizerConfig.from_hf(
        {
            "d_model": 1024,
            "encoder_layers": 24,
            "encoder_attention_heads": 16,
            "encoder_ffn_dim": 4096,
            "num_quantizers": 20,
            "codebook_size": [1024, 1024, 256] + [128] * 17,
            "encoder_skip_layer_id": 3,
            "encoder_attn_window_size": [128, 0],
            "hybrid_attention": True,
            "swa_per_block": 2,
        }
    )
    assert tokenizer.skip_layer == 2
    assert tokenizer.windowed_layers[:4] == (True, False, True, False)
    assert tokenizer.num_quantizers == 20


def test_fingerprint_sees_weights_and_config(model_dir: Path) -> None:
    first = checkpoint_fingerprint(model_dir)
    assert first == checkpoint_fingerprint(model_dir)
    path = model_dir / "audio_tokenizer" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    second = checkpoint_fingerprint(model_dir)
    (model_dir / "config.json").write_text("{}")
    assert len({first, second, checkpoint_fingerprint(model_dir)}) == 3


def test_fingerprint_samples_large_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    header = b"{}      "
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(WHOLE_FILE_BYTES * 2)
    first = checkpoint_fingerprint(tmp_path)
    with path.open("r+b") as file:
        file.seek(WHOLE_FILE_BYTES)
        file.write(b"\1" * (WHOLE_FILE_BYTES // NUM_SAMPLES + SAMPLE_BYTES))
    assert checkpoint_fingerprint(tmp_path) != first
    path.unlink()
    with pytest.raises(FileNotFoundError):
        checkpoint_fingerprint(tmp_path)
