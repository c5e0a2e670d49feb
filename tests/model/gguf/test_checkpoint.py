"""A small file written by the format's own package becomes a checkpoint that means the same."""

import json
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from tokenizers import Tokenizer

from epd.gateway.render import Renderer
from epd.kernels.reference import DenseAttention
from epd.model.gguf.checkpoint import import_gguf
from epd.model.gguf.errors import CacheError, GgufError
from epd.model.gguf.tensors import half_order
from epd.model.weights import load_text_model
from tests.fakes.tiny_gguf import HEAD, HEADS, KINDS, KV_HEADS, LAYERS, TOKENS, WIDTH, interleaved, weights, write_gguf
from tests.oracles.gguf_blocks import dequantize_slowly

PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def imported(path: Path, cache: Path) -> Path:
    return import_gguf(path, cache, on_start=lambda _: None)


def meant(values: NDArray[np.float32], kind: str) -> NDArray[np.float32]:
    """What is left of weights after a round through a format, in their own order: blocks run along rows."""
    quantized = gguf.quantize(values, gguf.GGMLQuantizationType[kind])
    rounded = gguf.dequantize(quantized, gguf.GGMLQuantizationType[kind])
    assert np.abs(rounded - values).max() < 0.1
    return rounded


def test_weights_mean_what_they_meant(tmp_path: Path) -> None:
    folder = imported(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache")
    originals = weights()
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for part, ours in PARTS.items():
            for i in range(LAYERS):
                found = file.get_tensor(f"model.layers.{i}.{ours}.weight")
                expected = meant(originals[f"blk.{i}.{part}.weight"], KINDS[part])
                assert torch.equal(found.float(), torch.from_numpy(expected)), part
        dtypes = {part: file.get_tensor(f"model.layers.0.{ours}.weight").dtype for part, ours in PARTS.items()}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert (dtypes["attn_q"], dtypes["attn_output"], dtypes["ffn_gate"]) == (
        torch.float32, torch.float16, torch.bfloat16,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_dequantised_exactly(tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kinds={"attn_v": kind})
    folder = imported(path, tmp_path / "cache")
    raw = next(t.data for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_v.weight")
    with safe_open(folder / "model.safetensors", framework="np") as file:
        found = file.get_tensor("model.layers.0.self_attn.v_proj.weight")
    assert found.flatten().tolist() == [float(w) for w in dequantize_slowly(raw.tobytes(), kind)]


def test_rotary_rows_are_put_back() -> None:
    rows = np.arange(3 * 8, dtype=np.float32)[:, None]
    stored = interleaved(rows, 3)
    assert stored[:8, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert np.array_equal(stored[half_order(24, 3)], rows)


def plain_llama(config: dict[str, Any], tensors: dict[str, torch.Tensor], token_ids: list[int]) -> torch.Tensor:
    """The slow truth, [T, vocabulary] logits: a Llama written down from its definition, one head at a time."""

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * weight

    def turn(x: torch.Tensor) -> torch.Tensor:
        half = HEAD // 2
        angle = torch.arange(len(x))[:, None] * config["rope_theta"] ** (-torch.arange(half) / half)
        low, high = x[:, :half], x[:, half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)

    x = tensors["model.embed_tokens.weight"][token_ids]
    mask = torch.full((len(x), len(x)), float("-inf")).triu(1)
    for i in range(LAYERS):
        layer = {
            name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): value.float()
            for name, value in tensors.items()
            if name.startswith(f"model.layers.{i}.")
        }
        normed = norm(x, layer["input_layernorm"])
        heads = []
        for n in range(HEADS):
            kv = n // (HEADS // KV_HEADS)
            q = turn(normed @ layer["self_attn.q_proj"][n * HEAD : (n + 1) * HEAD].T)
            k = turn(normed @ layer["self_attn.k_proj"][kv * HEAD : (kv + 1) * HEAD].T)
            v = normed @ layer["self_attn.v_proj"][kv * HEAD : (kv + 1) * HEAD].T
            heads.append((q @ k.T / HEAD**0.5 + mask).softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ layer["self_attn.o_proj"].T
        normed = norm(x, layer["post_attention_layernorm"])
        gate = torch.nn.functional.silu(normed @ layer["mlp.gate_proj"].T)
        x = x + (gate * (normed @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return norm(x, tensors["model.norm.weight"]) @ head.T


@pytest.mark.parametrize("tied", [True, False])
@torch.inference_mode()
def test_the_model_computes_what_the_definition_says(tmp_path: Path, tied: bool) -> None:
    folder = imported(write_gguf(tmp_path / "tiny.gguf", tied=tied), tmp_path / "cache")
    token_ids = [(11 * i * i + i) % len(TOKENS) for i in range(40)]
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = plain_llama(json.loads((folder / "config.json").read_text()), tensors, token_ids)
    model = load_text_model(folder).eval()
    hidden = model(model.embed(torch.tensor(token_ids)), torch.arange(40), DenseAttention([40]))
    torch.testing.assert_close(model.logits(hidden), expected, rtol=1e-4, atol=1e-4)
    assert (model.lm_head is model.embed_tokens) is tied


def test_configuration_tokenizer_and_template(tmp_path: Path) -> None:
    folder = imported(write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache")
    renderer = Renderer.load(folder)
    assert renderer.eos_token_ids[0] == 2
    assert renderer.max_context_tokens == 256
    assert renderer.defaults.temperature == 0.0
    assert renderer.processor is None
    text = renderer.template.render([{"role": "user", "content": "hello 112"}], tools=None, options={})
    spelled = [TOKENS[token_id] for token_id in renderer.vocabulary.encode(text)]
    assert spelled[0] == "<|im_start|>"
    # "12" and "Ġ1" are merges, but digits stand alone before any merging.
    assert spelled[spelled.index("hello") :][:6] == ["hello", "Ġ", "1", "1", "2", "<|im_end|>"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for sample in ("hello world", "<|im_end|>x<note>", "a\n\n b\tc", "é🙂 0.5"):
        assert tokenizer.decode(tokenizer.encode(sample).ids, skip_special_tokens=False) == sample
    # Of the added tokens only the control ones are hidden from answers.
    assert renderer.vocabulary.token_bytes.visible(2) == b""
    assert renderer.vocabulary.token_bytes.visible(TOKENS.index("<note>")) == b"<note>"


def test_the_import_happens_once_whoever_asks(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "deep" / "cache"
    started: list[Path] = []
    folders: list[Path] = []

    def ask() -> None:
        folders.append(import_gguf(path, cache, on_start=started.append))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4
    assert started == folders[:1]
    assert [entry.name for entry in cache.iterdir()] == [folders[0].name]


def test_another_file_is_another_directory_and_remains_are_swept(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    first = imported(path, cache)
    write_gguf(path, keys={"llama.context_length": 128})
    cache.joinpath("stray").mkdir()
    second = imported(path, cache)
    assert first != second
    assert Renderer.load(second).max_context_tokens == 128
    third = cache / f"{second.name}.partial"
    second.rename(third)
    (third / "config.json").write_text("half")
    assert imported(path, cache) == second
    assert Renderer.load(second).max_context_tokens == 128
    assert not third.exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general.architecture": "qwen2"}, ["general.architecture", "qwen2"]),
        ({"general.quantization_version": 1}, ["general.quantization_version", "1"]),
        ({"llama.expert_count": 8}, ["llama.expert_count"]),
        ({"llama.rope.scaling.type": "yarn"}, ["llama.rope.scaling.type"]),
        ({"llama.rope.dimension_count": 8}, ["llama.rope.dimension_count", "8", "16"]),
        ({"llama.attention.value_length": 8}, ["llama.attention.value_length", "8"]),
        ({"llama.block_count": None}, ["llama.block_count"]),
        ({"llama.block_count": 2**31}, ["llama.block_count", "from 1 to 1,000", "2147483648"]),
        ({"llama.rope.freq_base": float("nan")}, ["llama.rope.freq_base", "above 0", "nan"]),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, ["llama.attention.layer_norm_rms_epsilon", "-1.0"]),
        ({"llama.attention.head_count": [6, 6, 6]}, ["llama.attention.head_count"]),
        ({"llama.vocab_size": 7}, ["llama.vocab_size", "7"]),
        ({"split.count": 2}, ["split.count"]),
        ({"tokenizer.ggml.model": "llama"}, ["tokenizer.ggml.model", "llama"]),
        ({"tokenizer.ggml.pre": "llama-bpe"}, ["tokenizer.ggml.pre", "llama-bpe", "smollm"]),
        ({"tokenizer.ggml.add_bos_token": True}, ["tokenizer.ggml.add_bos_token"]),
        ({"tokenizer.ggml.eos_token_id": None}, ["tokenizer.ggml.eos_token_id"]),
        ({"tokenizer.ggml.eos_token_id": 5000}, ["tokenizer.ggml.eos_token_id", "5000"]),
        ({"tokenizer.ggml.token_type": [1]}, ["tokenizer.ggml.token"]),
        ({"tokenizer.ggml.token_type": [6] * len(TOKENS)}, ["tokenizer.ggml.token_type", "6"]),
        ({"tokenizer.ggml.merges": ["q q"]}, ["tokenizer.ggml.merges", "q q"]),
        ({"tokenizer.chat_template": None}, ["tokenizer.chat_template"]),
        ({"tokenizer.chat_template.tool_use": "x"}, ["tokenizer.chat_template.tool_use"]),
    ],
)
def test_keys_are_refused_by_name(tmp_path: Path, changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(GgufError) as refused:
        imported(write_gguf(tmp_path / "tiny.gguf", keys=changes), tmp_path / "cache")
    for word in ["tiny.gguf", *words]:
        assert word in str(refused.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_tensors_are_refused_by_name(tmp_path: Path) -> None:
    bias = np.zeros(HEADS * HEAD, dtype=np.float32)
    wrong: dict[str, NDArray[np.float32] | None] = {
        "blk.0.attn_q.bias": bias,
        "rope_freqs.weight": bias,
        "blk.1.ffn_up.weight": None,
        "output_norm.weight": np.ones(WIDTH + 1, dtype=np.float32),
    }
    with pytest.raises(GgufError) as refused:
        imported(write_gguf(tmp_path / "tiny.gguf", tensors=wrong), tmp_path / "cache")
    for word in (*wrong, f"[{WIDTH}]", f"[{WIDTH + 1}]"):
        assert word in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [("model.safetensors", None), ("config.json", b"{"), ("tokenizer.json", b"[]"), ("tokenizer_config.json", None)],
)
def test_a_damaged_import_is_made_again(tmp_path: Path, name: str, content: bytes | None) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    folder = imported(path, cache)
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[:-1] if content is None else content)
    assert imported(path, cache) == folder
    assert (folder / name).read_bytes() == whole


def test_what_fails_its_check_is_not_kept(tmp_path: Path) -> None:
    def refuse(folder: Path) -> None:
        assert (folder / "model.safetensors").is_file()
        raise GgufError("no good")

    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    for _ in range(2):
        with pytest.raises(GgufError, match="no good"):
            import_gguf(path, cache, on_start=lambda _: None, check=refuse)
        assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path, cache = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    cache.write_text("a file where the directory should be")
    with pytest.raises(CacheError, match=r"cache cannot be written: File exists"):
        imported(path, cache)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf").read_bytes()
    for size in (0, 3, 100, 2000, len(whole) // 2, len(whole) - 100):
        path = tmp_path / f"cut-{size}.gguf"
        path.write_bytes(whole[:size])
        with pytest.raises(GgufError, match=path.name):
            imported(path, tmp_path / "cache")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK" + whole)
    with pytest.raises(GgufError, match=r"other\.gguf"):
        imported(other, tmp_path / "cache")
