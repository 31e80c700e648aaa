"""The header of a GGUF file, compared with the `gguf` package's own reader; and the tokenizer in it."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from server.compiler.checkpoints.gguf_file import GgufFile
from shared.errors import UnreadableCheckpoint


def assert_same(path: Path) -> None:
    """Both readers find the same metadata and the same tensors."""
    ours, theirs = GgufFile.read(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields
    assert [tensor.name for tensor in ours.tensors] == [tensor.name for tensor in theirs.tensors]
    for own, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (own.type, own.offset, own.elements) == (other.tensor_type, other.data_offset, other.n_elements)
        assert own.shape == tuple(reversed(other.shape.tolist()))


def write_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_custom_alignment(64)
    for kind in (8, 16, 32, 64):
        getattr(writer, f"add_uint{kind}")(f"u{kind}", 2**kind - 1)
        getattr(writer, f"add_int{kind}")(f"i{kind}", -(2 ** (kind - 1)))
    writer.add_float32("f32", 0.25)
    writer.add_float64("f64", -0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "größer")
    for name, values in {
        "words": ["", "a", "日本"],
        "numbers": [-1, 2],
        "reals": [0.5, 1.5],
        "flags": [True, False],
    }.items():
        writer.add_array(name, values)
    matrix = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    writer.add_tensor("matrix", matrix)
    writer.add_tensor("half", matrix.astype(np.float16))
    blocks = gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_kind_of_value(tmp_path: Path) -> None:
    path = write_file(tmp_path / "all.gguf")
    assert_same(path)
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for tensor in GgufFile.read(path).tensors:
        expected = gguf.dequantize(theirs[tensor.name].data, tensor.type)
        np.testing.assert_array_equal(tensor.values(), expected)


def test_a_cut_or_changed_file_is_refused(tmp_path: Path) -> None:
    path = write_file(tmp_path / "all.gguf")
    whole = path.read_bytes()
    end = max(tensor.offset + tensor.values().nbytes for tensor in GgufFile.read(path).tensors[-1:])
    for size in range(0, end, 7):
        path.write_bytes(whole[:size])
        with pytest.raises(UnreadableCheckpoint, match=r"all\.gguf is not a complete GGUF file"):
            GgufFile.read(path)
    for at, damage in {0: b"GGML", 4: b"\x09", 8: b"\xff" * 8, 16: b"\xff" * 8, 24: b"\xff" * 8}.items():
        path.write_bytes(whole[:at] + damage + whole[at + len(damage) :])
        with pytest.raises(UnreadableCheckpoint, match="copy or download it again"):
            GgufFile.read(path)


@pytest.mark.slow
def test_the_real_model(smollm2_gguf: Path) -> None:
    assert_same(smollm2_gguf)
