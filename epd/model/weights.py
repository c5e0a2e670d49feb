"""Weight files in the Hugging Face layout: reading them into a `HybridModel`, and a model's tensors for writing.

What each file tensor is part of is `epd.model.slots`' business; how it is stored is decided by the tensor itself: its
dtype and whether it has scales, never a list of names. Reading streams: the model is laid out without touching its
memory, headers are compared with it, then bytes go from the files into place, a few megabytes at a time where they
have to be converted on the way. Memory in use is the final tensors and that piece.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from encoder.checkpoint import (
    INDEX_FILE,
    CheckpointError,
    FileTensor,
    Scan,
    TensorReader,
    mismatches,
    read_json_object,
    scan_tensors,
    shown,
)
from epd.config import QkvLayout, WeightStorage
from epd.kernels.few_rows import load_few_rows
from epd.kernels.native import prefer_huge_pages
from epd.kernels.quantized import dequantize_fp8, dequantize_mxfp4
from epd.model.config import TextConfig
from epd.model.hybrid import HybridModel
from epd.model.inventory import stored_mtp_layers
from epd.model.packed import Fp8Rows, Mxfp4Rows, PackedMatrix, PlainRows, Rows
from epd.model.slots import (
    FileSlot,
    Fused,
    file_slots,
    is_router,
    mxfp4_scale_name,
    scale_name,
    scale_shape,
)

Form = Literal["plain", "fp8", "mxfp4"]

_TOWER_PREFIXES = ("visual.", "audio_encoder.", "speech_embeddings.")
_PLAIN_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_EXPONENT_DTYPES = {"U8": torch.uint8, "F8_E8M0": torch.uint8}
_DTYPES = _PLAIN_DTYPES | _EXPONENT_DTYPES | {"F8_E4M3": torch.float8_e4m3fn}
_STORAGE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Elements converted at a time, 16 MiB in fp32.
_PIECE_ELEMENTS = 4 << 20


class WeightsError(CheckpointError):
    """A checkpoint does not hold exactly the tensors the configuration calls for. The message names them."""


@dataclass(frozen=True, slots=True)
class _Source:
    """One file tensor on its way: where it lies, where it belongs, how it is stored and, if quantised, its scales."""

    slot: FileSlot
    tensor: FileTensor
    form: Form
    scale: FileTensor | None


def load_text_model(
    model_dir: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    window_left: int | None = None,
    with_mtp: bool = True,
    qkv_layout: QkvLayout = "auto",
    weights: WeightStorage | None = None,
) -> HybridModel:
    """Load the text model and, with `with_mtp`, as many draft heads as the files hold. Tower tensors are passed over.

    `dtype` is that of the arithmetic, of norms and sinks, and of matrices unless `weights` says otherwise: "bfloat16"
    and "float32" are what matrices are dequantised to on load, "keep" leaves quantised ones as they are in the files,
    to be dequantised each time they are used. Routers are fp32 in any case.
    `qkv_layout` says how fused q, k, v rows lie in the files: shard by shard ("interleaved", what "auto" means for
    them) or as plain [Q; K; V], as some re-exports hold under the same name and shape. It is never guessed.
    Raises ConfigError, CheckpointError for files that are missing or damaged, or WeightsError naming every tensor that
    is missing, unexpected, of the wrong shape or of a dtype that is not implemented.
    """
    config = TextConfig.from_hf(read_json_object(model_dir / "config.json"), window_left)
    fused = _fused(config, qkv_layout)
    passed_over = _TOWER_PREFIXES if with_mtp else (*_TOWER_PREFIXES, "model.mtp.")
    scan = scan_tensors(model_dir, lambda name: not name.startswith(passed_over))
    model = HybridModel(config, stored_mtp_layers(scan.tensors), dtype=dtype, device="meta")
    sources = _sources(scan, dict(file_slots(model, fused)), config)
    pieces = _pack(sources.values(), config, dtype, device) if weights == "keep" else {}
    matrix_dtype = dtype if weights is None or weights == "keep" else _STORAGE_DTYPES[weights]
    _allocate(model, sources, matrix_dtype, device)
    with TensorReader() as reader:
        for name, source in sorted(sources.items(), key=lambda item: (item[1].tensor.file, item[1].tensor.offset)):
            if name in pieces:
                _fill_piece(reader, source, pieces[name], config)
            else:
                _copy_rows(reader, source.slot, source.tensor, source.slot.target, _converter(reader, source, config))
    if torch.device(device).type == "cpu":
        # Compiled once per machine, which takes seconds: now, not within the first answer.
        load_few_rows()
    return model


def export_text_state(model: HybridModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Return contiguous CPU copies under Hugging Face names: q, k, v apart, one tensor per expert matrix.

    Everything is `dtype` but routers and correction biases, which stay fp32. The `config.json` beside them must name
    the "split" `attention_projection_layout`. The model must not have been loaded with weights kept packed.
    """
    return {
        name: slot.target.to("cpu", torch.float32 if is_router(name) else dtype, copy=True).contiguous()
        for name, slot in file_slots(model, None)
    }


def _fused(config: TextConfig, qkv_layout: QkvLayout) -> Fused:
    if config.projection_layout == "split":
        if qkv_layout != "auto":
            raise WeightsError(f"qkv_layout {qkv_layout!r} applies to fused projections, the files hold q, k, v apart")
        return None
    return "interleaved" if qkv_layout == "auto" else qkv_layout


def _sources(scan: Scan, slots: dict[str, FileSlot], config: TextConfig) -> dict[str, _Source]:
    """Compare the headers with what the model needs, before any tensor is read. Raises WeightsError."""
    tensors = scan.tensors
    needed: dict[str, tuple[int, ...]] = {}
    dtypes = []
    sources = {}
    for name, slot in slots.items():
        shape = tuple(slot.target.shape)
        needed[name] = shape
        tensor = tensors.get(name)
        if tensor is None:
            continue
        form, scale, scale_dtypes = _form(tensor, len(shape), config), None, _PLAIN_DTYPES
        if form == "fp8":
            assert config.quant_block is not None
            scale, needed[scale_name(name)] = scale_name(name), scale_shape(slot, config.quant_block)
        elif form == "mxfp4":
            assert config.mxfp4_block is not None
            needed[name] = shape[0], shape[1] // 2
            scale, scale_dtypes = mxfp4_scale_name(name), _EXPONENT_DTYPES
            needed[scale] = shape[0], -(-shape[1] // config.mxfp4_block)
        if form is None:
            dtypes.append(f"{name} ({tensor.dtype})")
        if scale in tensors and tensors[scale].dtype not in scale_dtypes:
            dtypes.append(f"{scale} ({tensors[scale].dtype})")
        sources[name] = _Source(slot, tensor, form or "plain", None if scale is None else tensors.get(scale))
    # Of a file that cannot be read the file is at fault, not its tensors.
    known = {name: shape for name, shape in needed.items() if name in tensors or _is_known(scan, name)}
    lines = [
        *scan.faults,
        *scan.conflicts,
        *mismatches(known, {name: tensor.shape for name, tensor in tensors.items()}, dtypes),
    ]
    if needless := [name for names in scan.absent.values() for name in names if name not in needed]:
        lines.append(f"{INDEX_FILE} lists tensors that no file holds and nothing calls for: {shown(needless)}")
    if lines:
        raise WeightsError("weight files do not match the configuration\n" + "\n".join(lines))
    return sources


def _is_known(scan: Scan, name: str) -> bool:
    """Whether a tensor that was not found is missing, rather than in a file that cannot be read."""
    return scan.knows_all and name not in scan.unread


def _form(tensor: FileTensor, num_dims: int, config: TextConfig) -> Form | None:
    """How a tensor is stored, by its dtype; None for one that is not implemented, or not with this configuration."""
    if tensor.dtype in _PLAIN_DTYPES:
        return "plain"
    if tensor.dtype == "F8_E4M3" and config.quant_block is not None and num_dims == 2:
        return "fp8"
    if tensor.dtype == "U8" and config.mxfp4_block is not None and num_dims == 2:
        return "mxfp4"
    return None


def _pack(
    sources: Iterable[_Source], config: TextConfig, dtype: torch.dtype, device: torch.device | str
) -> dict[str, Rows]:
    """Replace every matrix of which some part is quantised by packed ones; return their empty pieces by file name."""
    matrices: dict[tuple[nn.Module, str], dict[int | None, list[_Source]]] = {}
    for source in sources:
        if source.slot.may_pack:
            parts = matrices.setdefault((source.slot.owner, source.slot.attribute), {})
            parts.setdefault(source.slot.expert, []).append(source)
    pieces: dict[str, Rows] = {}
    for (owner, attribute), experts in matrices.items():
        if all(source.form == "plain" for source in chain.from_iterable(experts.values())):
            continue
        packed: dict[int | None, PackedMatrix] = {}
        for expert, parts_of in experts.items():
            rows = {source.tensor.name: _empty_piece(source, config, dtype, device) for source in parts_of}
            packed[expert] = PackedMatrix(list(rows.values()))
            pieces |= rows
        delattr(owner, attribute)
        setattr(owner, attribute, packed[None] if None in packed else nn.ModuleList(packed.values()))
    return pieces


def _empty_piece(source: _Source, config: TextConfig, dtype: torch.dtype, device: torch.device | str) -> Rows:
    shape = source.tensor.shape
    if source.scale is None:
        return PlainRows(torch.empty(shape, dtype=dtype, device=device))
    weight = torch.empty(shape, dtype=_DTYPES[source.tensor.dtype], device=device)
    if source.form == "mxfp4":
        assert config.mxfp4_block is not None
        exponents = torch.empty(source.scale.shape, dtype=torch.uint8, device=device)
        return Mxfp4Rows(weight, exponents, block_columns=config.mxfp4_block)
    assert config.quant_block is not None
    scale = torch.empty(source.scale.shape, dtype=torch.float32, device=device)
    scale_row = torch.empty(shape[0], dtype=torch.int32, device=device)
    return Fp8Rows(weight, scale, scale_row, block_columns=config.quant_block[1])


def _allocate(
    model: HybridModel, sources: dict[str, _Source], matrix_dtype: torch.dtype, device: torch.device | str
) -> None:
    """Give everything that is not packed memory, untouched. What is shared under two names stays shared."""
    routers = {(s.slot.owner, s.slot.attribute) for name, s in sources.items() if is_router(name)}
    made: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for attribute, old in chain(module._parameters.items(), module._buffers.items()):
            if old is None or not old.is_meta:
                continue
            if old not in made:
                is_matrix = old.dim() > 1 and (module, attribute) not in routers
                new = torch.empty(old.shape, dtype=matrix_dtype if is_matrix else old.dtype, device=device)
                if new.device.type == "cpu":
                    prefer_huge_pages(new.data_ptr(), new.nbytes)
                made[old] = nn.Parameter(new) if isinstance(old, nn.Parameter) else new
            setattr(module, attribute, made[old])


def _fill_piece(reader: TensorReader, source: _Source, piece: Rows, config: TextConfig) -> None:
    slot, tensor = source.slot, source.tensor
    _copy_rows(reader, slot, tensor, piece.weight, None)
    if isinstance(piece, Mxfp4Rows):
        assert source.scale is not None
        _copy_rows(reader, slot, source.scale, piece.scale, None)
    elif isinstance(piece, Fp8Rows):
        assert source.scale is not None
        assert config.quant_block is not None
        piece.scale.copy_(_read_rows(reader, source.scale, 0, source.scale.shape[0]))
        for run in slot.runs(tensor.shape[0]):
            scale_row = slot.scale_rows(
                run.file_row, run.num_rows, rows=tensor.shape[0], block_rows=config.quant_block[0]
            )
            piece.scale_row[run.slot_row : run.slot_row + run.num_rows].copy_(scale_row)


def _converter(reader: TensorReader, source: _Source, config: TextConfig) -> Callable[[Tensor, int], Tensor] | None:
    """What to do with rows of a quantised tensor, given the number of the first; None for a plain one."""
    if source.scale is None:
        return None
    slot, num_rows = source.slot, source.tensor.shape[0]
    scale = _read_rows(reader, source.scale, 0, source.scale.shape[0])
    if source.form == "mxfp4":
        mxfp4_block = config.mxfp4_block
        assert mxfp4_block is not None
        return lambda rows, start: dequantize_mxfp4(rows, scale[start : start + len(rows)], block_columns=mxfp4_block)
    assert config.quant_block is not None
    block_rows, block_columns = config.quant_block

    def from_fp8(rows: Tensor, start: int) -> Tensor:
        scale_row = slot.scale_rows(start, len(rows), rows=num_rows, block_rows=block_rows)
        return dequantize_fp8(rows, scale.float().index_select(0, scale_row), block_columns=block_columns)

    return from_fp8


def _copy_rows(
    reader: TensorReader,
    slot: FileSlot,
    tensor: FileTensor,
    target: Tensor,
    convert: Callable[[Tensor, int], Tensor] | None,
) -> None:
    """Read a file tensor into the rows of `target` where the slot puts them."""
    row_elements = max(1, target[:1].numel())
    rows_at_once = max(1, _PIECE_ELEMENTS // row_elements)
    is_as_stored = convert is None and target.dtype == _DTYPES[tensor.dtype] and target.device.type == "cpu"
    row_bytes = tensor.size_bytes // tensor.shape[0]
    for run in slot.runs(tensor.shape[0]):
        rows = target[run.slot_row : run.slot_row + run.num_rows]
        if is_as_stored and rows.is_contiguous():
            reader.read_into(tensor, _bytes_of(rows), start_byte=run.file_row * row_bytes)
            continue
        for done in range(0, run.num_rows, rows_at_once):
            start = run.file_row + done
            piece = _read_rows(reader, tensor, start, min(rows_at_once, run.num_rows - done))
            converted = piece if convert is None else convert(piece, start)
            rows[done : done + len(piece)].copy_(converted)


def _read_rows(reader: TensorReader, tensor: FileTensor, start: int, num_rows: int) -> Tensor:
    """Return rows of a tensor on the CPU, as they are stored."""
    rows = torch.empty((num_rows, *tensor.shape[1:]), dtype=_DTYPES[tensor.dtype])
    reader.read_into(tensor, _bytes_of(rows), start_byte=start * (tensor.size_bytes // tensor.shape[0]))
    return rows


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
