"""A tensor as a frame of bytes, and back: a header (dtype by name, shape), then the data.

No pickle: nothing a peer writes can make this process run code, and nothing is allocated before the
header's numbers agree with each other and with the limit.
"""

import ctypes
import math
import mmap
import struct

import torch

from ipc.errors import FrameTooLarge, PipeError, TensorUnsupported

MAGIC = 0x6D617266
MAX_DIMS = 64  # what torch allows
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
_HEAD = struct.Struct("=IIQQ24s")  # magic, ndim or NONE, frame number, nbytes, dtype
_NONE = 0xFFFFFFFF
_ALIGN = 64
_HUGE_BYTES = 2 << 20  # of a huge page on x86-64 and on arm64 with 4 KiB pages
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Frame:
    """`data` (contiguous, or None) and how much of it has been moved."""

    __slots__ = ("data", "moved", "nbytes")

    def __init__(self, data: torch.Tensor | None):
        self.data = data
        self.nbytes = 0 if data is None else data.numel() * data.element_size()
        self.moved = 0

    @property
    def address(self) -> int:
        """Of the next byte to move."""
        return self.data.data_ptr() + self.moved

    @property
    def left(self) -> int:
        return self.nbytes - self.moved


def outgoing(tensor: torch.Tensor | None) -> Frame:
    """Raises TensorUnsupported for what is more than its bytes, or not in host memory."""
    if tensor is None:
        return Frame(None)
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        raise TensorUnsupported(
            f"a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}: only dense tensors in "
            "host memory go through this pipe"
        )
    return Frame(tensor.detach().resolve_conj().resolve_neg().contiguous())


def encode(frame: Frame, number: int) -> bytes:
    """The header, padded so that the data behind it is aligned."""
    data = frame.data
    dims, dtype = (_NONE, "") if data is None else (data.dim(), str(data.dtype)[len("torch.") :])
    shape = () if data is None else data.shape
    raw = _HEAD.pack(MAGIC, dims, number, frame.nbytes, dtype.encode())
    raw += struct.pack(f"={len(shape)}Q", *shape)
    return raw + bytes(-len(raw) % _ALIGN)


def decode(
    raw: bytes, number: int, limit_bytes: int, out: torch.Tensor | None = None
) -> tuple[Frame, int]:
    """(a frame to fill, bytes of header). `raw`: the first slot, or its beginning.

    The frame lies in `out`, or in fresh memory. Raises PipeError when the header is damaged,
    FrameTooLarge, TensorUnsupported when `out` is not of its kind.
    """
    magic, dims, found, nbytes, name = _HEAD.unpack_from(raw)
    if magic != MAGIC or found != number or (dims > MAX_DIMS and dims != _NONE):
        raise PipeError(f"frame {number} is damaged: magic {magic:#x}, number {found}, {dims} dims")
    if nbytes > limit_bytes:
        raise FrameTooLarge(nbytes, limit_bytes)
    if dims == _NONE:
        return Frame(None), header_bytes(0)
    dtype = DTYPES.get(name.rstrip(b"\0").decode("ascii", "replace"))
    shape = struct.unpack_from(f"={dims}Q", raw, _HEAD.size)
    if dtype is None or math.prod(shape) * dtype.itemsize != nbytes:
        raise PipeError(f"frame {number} is damaged: {shape} of {name!r} in {nbytes} bytes")
    if out is not None:
        _check_out(out, shape, dtype)
    return Frame(_fresh(shape, dtype) if out is None else out), header_bytes(dims)


def _fresh(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """New memory, in huge pages where that is allowed: its first touch costs more than the copy."""
    tensor = torch.empty(shape, dtype=dtype)
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * dtype.itemsize
    first, last = -(-begin // _HUGE_BYTES) * _HUGE_BYTES, end // _HUGE_BYTES * _HUGE_BYTES
    if first < last:
        _libc.madvise(first, last - first, mmap.MADV_HUGEPAGE)  # An advice: refused is no error.
    return tensor


def _check_out(out: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    plain = out.layout is torch.strided and out.device.type == "cpu"
    lazy = plain and (out.requires_grad or out.is_conj() or out.is_neg())
    if (
        not plain
        or lazy
        or not out.is_contiguous()
        or (tuple(out.shape), out.dtype) != (shape, dtype)
    ):
        raise TensorUnsupported(
            f"a tensor of {dtype}, shape {shape}, cannot be received into one of {out.dtype}, "
            f"shape {tuple(out.shape)}: it takes a contiguous one of the same kind in host memory"
        )


def header_bytes(dims: int) -> int:
    return -(-(_HEAD.size + 8 * dims) // _ALIGN) * _ALIGN
