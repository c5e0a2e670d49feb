"""How many floating point operations a tower needs for a medium: two per multiply-add of every matrix product.

What is needed, not what is done: no padding of tiles, and of a band only the pairs that see each other. Norms,
activations and softmax are left out. The steps of a convolution beyond the ends of a sound count, as its product does.
"""

from encoder.config import AudioConfig, AudioTokenizerConfig, VisionConfig


def vision_flops(config: VisionConfig, grid_thw: tuple[int, int, int]) -> int:
    """Of one picture or video of `(t, h, w)` patches."""
    t, h, w = grid_thw
    length = h * w
    width, q_width = config.hidden_size, config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    per_patch = width * (q_width + 2 * kv_width) + q_width * width + 3 * width * config.intermediate_size
    products = config.patch_width * width + config.depth * per_patch
    pairs = 0
    for kind in config.block_types:
        if kind == -1:
            pairs += length * length
        else:
            pairs += band_pairs(length, config.window_patches, config.window_patches)
    unit_width = width * config.patches_per_unit
    merger = length // config.patches_per_unit * unit_width * (unit_width + config.out_hidden_size)
    return 2 * t * (length * products + 2 * pairs * q_width + merger)


def tokenizer_flops(config: AudioTokenizerConfig, num_frames: int, segment_frames: int) -> int:
    """Of a log-mel of so many frames, up to its codes."""
    whole, rest = divmod(num_frames, segment_frames)
    total = whole * _segment_flops(config, segment_frames)
    return total + (_segment_flops(config, rest) if rest else 0)


def _segment_flops(config: AudioTokenizerConfig, num_frames: int) -> int:
    width = config.d_model
    length = (num_frames - 1) // config.stride + 1
    pooled = -(-length // config.pool)
    convolutions = config.kernel_size * width * (num_frames * config.num_mels + length * width)
    layers = config.num_layers * length * (4 * width * width + 2 * width * config.ffn_dim)
    pairs = 0
    for windowed in config.windowed_layers:
        left = config.window_left if windowed and config.window_left is not None else length
        right = config.window_right if windowed and config.window_right is not None else length
        pairs += band_pairs(length, left, 0 if config.causal else right)
    pooling = pooled * config.pool * width * width
    quantizer = pooled * width * sum(config.codebook_sizes)
    return 2 * (convolutions + layers + 2 * pairs * width + pooling + quantizer)


def audio_encoder_flops(config: AudioConfig, num_codes: int) -> int:
    """Of so many code frames, up to their rows."""
    size, hidden, width = config.group_size, config.hidden_size, config.num_heads * config.head_dim
    groups = -(-num_codes // size)
    layers = config.num_layers * groups * size * (4 * hidden * width + 3 * hidden * config.intermediate_size)
    seen = band_pairs(size, size, size if config.full_attention else 0)
    pairs = config.num_layers * groups * 2 * seen * width
    flat = size * hidden
    if config.projection_layers == 1:
        projection = groups * flat * config.out_hidden_size
    else:
        projection = groups * 4 * flat * (flat + config.out_hidden_size)
    return 2 * (layers + pairs + projection)


def audio_flops(tokenizer: AudioTokenizerConfig, encoder: AudioConfig, num_frames: int) -> int:
    """Of a sound of so many mel frames, up to its rows."""
    codes = 0
    for start in range(0, num_frames, encoder.segment_frames):
        length = (min(encoder.segment_frames, num_frames - start) - 1) // tokenizer.stride + 1
        codes += -(-length // tokenizer.pool)
    return tokenizer_flops(tokenizer, num_frames, encoder.segment_frames) + audio_encoder_flops(encoder, codes)


def band_pairs(length: int, left: int, right: int) -> int:
    """Pairs of query i and key j of a sequence with i - left <= j <= i + right."""
    left, right = min(left, length - 1), min(right, length - 1)
    return length + _one_side(length, left) + _one_side(length, right)


def _one_side(length: int, reach: int) -> int:
    return reach * length - reach * (reach + 1) // 2
