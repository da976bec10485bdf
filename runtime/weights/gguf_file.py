from dataclasses import dataclass
from pathlib import Path
from typing import Any
from hdtool.data.gguf_header import GGUFHeader


@dataclass
class T:
    name: str; shape: Any; kind: int; file: Path; offset: int; bytes: int


class GGUFFile:
    @classmethod
    def open(cls, path):
        from gguf import GGML_QUANT_SIZES
        s = cls(); s.path = path; s.header = h = GGUFHeader.read(path)
        s.architecture = h.architecture
        s.tensors = [T(t.name, t.shape, t.kind, path, h.data + t.offset, t.numbers // GGML_QUANT_SIZES[t.kind][0] * GGML_QUANT_SIZES[t.kind][1]) for t in h.tensors]
        return s
