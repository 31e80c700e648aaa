"""The methods as graphs for PyTorch on CPU or CUDA: one `.pt2` archive, and the base's tensors in a separate file.

The archive has torch.export's format with one model per method and two differences. Tensors in the weights file, and B,
which all methods share, have empty records, which torch reads as zeros; `extra/state.json` lists the names of B. A
record is named by its content, so that methods share it. The archive contains no pickle and no data of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file
from torch import Tensor
from torch._export.serde.serialize import _dataclass_to_dict as to_dict
from torch._export.serde.serialize import serialize, serialize_tensor_meta
from torch.export import ExportedProgram
from torch.export.pt2_archive import PT2ArchiveWriter, constants

from server.compiler.export.backends import Backend
from server.compiler.export.emission import Emitted, Signature
from server.compiler.export.weights import Stored, StoredKeys
from server.compiler.methods.estimators import STATE
from shared.errors import CompileFailed
from shared.program import Role


class TorchExport(Backend):
    """Exports whole methods as graphs with unchanged layers."""

    files: Mapping[Role, str] = {
        "program": "program.pt2",
        "weights": "weights.safetensors",
        "tokenizer": "tokenizer.json",
    }

    def write_weights(self, tensors: Iterable[Stored], path: Path) -> StoredKeys:
        """Writes a safetensors file of the tensors by name; see `Backend.write_weights`."""
        named_tensors = [stored for stored in tensors if stored.name is not None]
        save_file({str(stored.name): stored.tensor.numpy() for stored in named_tensors}, path)
        return StoredKeys(named_tensors)

    def emit(self, methods: Mapping[str, Signature], stored: StoredKeys, path: Path) -> Emitted:
        """Writes the `.pt2`; see `Backend.emit`. torch does not plan memory ahead of time."""
        nodes, state, written = 0, set[str](), set[str]()
        with PT2ArchiveWriter(str(path)) as archive:
            for method, signature in methods.items():
                program = _exported(signature)
                nodes += sum(node.op == "call_function" for node in program.graph.nodes)
                state |= {name for name in program.state_dict if name.startswith(f"{STATE}.")}
                for folder, config, tensors in (
                    (constants.WEIGHTS_DIR, constants.WEIGHTS_CONFIG_FILENAME_FORMAT, program.state_dict),
                    (constants.CONSTANTS_DIR, constants.CONSTANTS_CONFIG_FILENAME_FORMAT, program.constants),
                ):
                    entries = {}
                    for name, tensor in tensors.items():
                        data = b"" if name in stored | state else bytes(tensor.contiguous().numpy().data)
                        key = constants.TENSOR_CONSTANT_FILENAME_PREFIX + (sha256(data).hexdigest() if data else name)
                        entries[name] = _entry(key, tensor)
                        if folder + key not in written:
                            archive.write_bytes(folder + key, data)
                            written.add(folder + key)
                    archive.write_string(config.format(method), json.dumps({"config": entries}))
                graph = serialize(program).exported_program
                archive.write_bytes(constants.MODELS_FILENAME_FORMAT.format(method), graph)
                archive.write_bytes(constants.SAMPLE_INPUTS_FILENAME_FORMAT.format(method), b"")
            archive.write_string(f"{constants.EXTRA_DIR}state.json", json.dumps(sorted(state)))
        return Emitted(planned_bytes=0, delegates=0, nodes=nodes)


def _exported(signature: Signature) -> ExportedProgram:
    """Returns a method's graph of ATen operators, without source locations."""
    program = signature.export()
    for node in program.graph.nodes:
        if node.op == "call_function" and not str(node.target).startswith("aten."):
            raise CompileFailed(f"the graph contains {node.target}, which is not an ATen operator")
        node.meta = {"val": node.meta["val"]} if "val" in node.meta else {}
    return program


def _entry(key: str, tensor: Tensor) -> dict[str, Any]:
    """Returns the archive's metadata of a tensor whose bytes are the record `key`."""
    return {
        "path_name": key,
        "is_param": False,
        "use_pickle": False,
        "tensor_meta": to_dict(serialize_tensor_meta(tensor.contiguous())),
    }
