"""The gather kernel without a GPU: its arithmetic in Triton's interpreter, and what it compiles to.

The interpreter runs one program after the other with numpy. It shows that indices, masks and tails
are right; it says nothing of races, alignment faults or speed.
"""

import re

import pytest

from tests.cuda import fake

pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("what", ["layouts", "tails", "mixed"])
def test_arithmetic_in_the_interpreter(what):
    fake.run_code(f"from tests.cuda import kernel_run; kernel_run.{what}()", TRITON_INTERPRET=1)


@pytest.fixture(scope="module", params=[80, 90, 100])
def compiled(request):
    from ipc.cuda.kernels import compile_gather

    return {vectors: compile_gather(request.param, vectors) for vectors in (False, True)}


def test_cubin_is_made_without_a_gpu(compiled):
    for made in compiled.values():
        assert made.image.startswith(b"\x7fELF")
        assert made.name.encode() in made.image
        assert made.shared_bytes == 0


def test_vectors_are_sixteen_bytes_wide(compiled):
    """Loads and stores of data, main loop and tail; the three loads of a table row are single."""
    moves = re.findall(r"(?:ld|st)\.global\S*", compiled[True].ptx)
    wide = [m for m in moves if re.search(r"\.v2\.[bu]64|\.v4\.[bu]32|\.v4\.b64", m)]
    assert len(moves) - len(wide) == 3, moves
    assert {m[:2] for m in wide} == {"ld", "st"}
    assert len(wide) >= 16  # 64 bytes in flight per thread, loop and tail, loads and stores


def test_parameters_are_what_the_host_passes(compiled):
    """launch.py packs by hand: table, pieces, and two pointers that Triton adds."""
    for made in compiled.values():
        head = made.ptx[: made.ptx.index(")\n", made.ptx.index(".entry"))]
        assert re.findall(r"\.param \.(\w+)", head) == ["u64", "u32", "u64", "u64"]
        assert f".reqntid {made.threads}" in made.ptx


def test_sizes_agree_with_the_host_side():
    from ipc.cuda import kernels, launch

    assert launch._VECTOR_BYTES == kernels.VECTOR_BYTES
    assert launch._TILE_BYTES == kernels.TILE_BYTES
