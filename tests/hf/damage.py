"""Damage to the files of saved contexts: what an accident or somebody with a grudge leaves in place of a file."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

METADATA = "keepset_context"
_DTYPES = {"BOOL": torch.bool, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F32": torch.float32}
_DTYPES |= {"F16": torch.float16, "BF16": torch.bfloat16, "U8": torch.uint8, "F64": torch.float64}
_ODD_NUMBERS = [-1, 0, 1, 2, 7, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**18, 10**30, 0.5, -0.0, 1e308]
_ODD_NUMBERS += [float("inf"), float("-inf"), float("nan"), True]
_ODD = [*_ODD_NUMBERS, None, False, "", "x", "0" * 64, "\ud800", "a\nb\x1b[2J", [], [1], [-1], [[]], {}, {"a": 1}]
_ODD += ["knorm(keep=0.5)", "snapkv(keep=12, every=4)", "int8(knorm, keep=0.5)", "(" * 300, "adakv(" * 40, [10**30] * 3]


@dataclass(frozen=True)
class File:
    """A file in parts, which need not fit together."""

    tensors: dict[str, tuple[str, list[int], bytes]]
    metadata: Any
    sealed: bool = False

    @classmethod
    def of(cls, content: bytes) -> File:
        (size,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        metadata = json.loads(header.pop("__metadata__")[METADATA])
        return cls(
            {
                name: (location["dtype"], location["shape"], data[slice(*location["data_offsets"])])
                for name, location in header.items()
            },
            metadata,
        )

    @property
    def content(self) -> bytes:
        """The file's bytes."""
        header, data, metadata = {}, b"", self.metadata
        for name, (dtype, shape, part) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(part)]}
            data += part
        if self.sealed and isinstance(metadata, dict):
            digests = {
                name: hashlib.sha256(f"{tuple(shape)} {_DTYPES.get(dtype)}".encode() + part).hexdigest()
                for name, (dtype, shape, part) in self.tensors.items()
            }
            metadata = {**metadata, "tensors": digests}
            metadata.pop("digest", None)
            text = json.dumps(metadata, sort_keys=True)
            metadata["digest"] = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        text = metadata if isinstance(metadata, str) else json.dumps(metadata)
        head = json.dumps({"__metadata__": {METADATA: text}, **header}).encode()
        head += b" " * (-len(head) % 8)
        return struct.pack("<Q", len(head)) + head + data


def flipped(content: bytes, name: str) -> bytes:
    """The content with the last bit of a tensor flipped."""
    (size,) = struct.unpack("<Q", content[:8])
    end = 8 + size + json.loads(content[8 : 8 + size])[name]["data_offsets"][1]
    return content[: end - 1] + bytes([content[end - 1] ^ 1]) + content[end:]


def damaged(content: bytes, draw: random.Random) -> tuple[str, bytes, bool]:
    """A whole file's content, damaged: what was done, the content, and whether its digests were made anew."""
    if draw.random() < 0.3:
        name, damage = draw.choice(list(_BYTES.items()))
        return name, damage(content, draw), False
    file, names = File.of(content), []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        name, change = draw.choice(list(_PARTS.items()))
        file = change(file, draw)
        names.append(name)
    file = replace(file, sealed=draw.random() < 0.8)
    return " and ".join(names) + (", sealed" if file.sealed else ""), file.content, file.sealed


# --- bytes


def _bits(content: bytes, draw: random.Random) -> bytes:
    out = bytearray(content)
    for _ in range(draw.choice([1, 1, 3, 20])):
        # The header is short beside the tensors, and says more.
        index = draw.randrange(len(out)) if draw.random() < 0.5 else draw.randrange(min(len(out), 6000))
        out[index] ^= 1 << draw.randrange(8)
    return bytes(out)


def _zeroed(content: bytes, draw: random.Random) -> bytes:
    start, size = draw.randrange(len(content)), draw.choice([1, 64, 4096])
    part = content[start : start + size]
    return content[:start] + bytes(len(part)) + content[start + size :]


def _header_text(content: bytes, draw: random.Random) -> bytes:
    (size,) = struct.unpack("<Q", content[:8])
    head, data = content[8 : 8 + size].decode().strip(), content[8 + size :]
    texts = ["[" * 50_000, "null", "[]", "{}", '{"__metadata__": 7}', '{"__metadata__": {"keepset_context": "{}"}}']
    texts += [head[:-1], head[:-1] + ', "a": {"dtype": "F32"}}', head[:-1] + ', "a": null}', head + head]
    texts += [head.replace(*change, 1) for change in (('"I64"', '"I128"'), ("data_offsets", "data"), ("[0,", "[-8,"))]
    texts += [head[:-1] + ', "a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 0]}}']
    texts += [head.replace('"shape"', '"dtype": "BOOL", "shape"', 1), "\ud800".encode(errors="surrogatepass")]
    text = draw.choice(texts)
    new = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(new)) + new + data


def _swapped(content: bytes, draw: random.Random) -> bytes:
    a, b = sorted(draw.sample(range(len(content)), 2))
    return content[b:] + content[a:b] + content[:a]


_ODD_SIZES = [0, 1, 2**63, 2**64 - 1, 10**8]
_BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bits": _bits,
    "cut": lambda content, draw: content[: draw.choice([0, 1, 7, 8, 9, draw.randrange(len(content)), -1])],
    "grown": lambda content, draw: content + draw.randbytes(draw.choice([1, 8, 1000])),
    "zeroed": _zeroed,
    "swapped": _swapped,
    "size of the header": lambda content, draw: (
        struct.pack("<Q", draw.choice([*_ODD_SIZES, len(content)])) + content[8:]
    ),
    "header": _header_text,
    "other": lambda content, draw: draw.choice([b"", b"words", draw.randbytes(5000), bytes(5000)]),
}


# --- parts


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON object."""
    below: list[Any] = []
    if isinstance(value, dict):
        below = list(value.items())
    elif isinstance(value, list):
        below = list(enumerate(value))
    return [at, *(path for name, part in below for path in _places(part, (*at, name)))]


def _metadata(file: File, draw: random.Random) -> File:
    if not isinstance(file.metadata, dict):
        return file
    metadata = json.loads(json.dumps(file.metadata))
    paths = [path for path in _places(metadata) if path and path[0] not in ("digest", "tensors")]
    *way, last = draw.choice(paths or [("progress",)])
    inside = metadata
    for name in way:
        inside = inside[name]
    kind = draw.choice(["odd", "odd", "odd", "near", "gone", "more"])
    if kind == "odd":
        inside[last] = draw.choice(_ODD)
    elif kind == "near" and type(inside.get(last) if isinstance(inside, dict) else inside[last]) is int:
        inside[last] += draw.choice([-1, 1, 1000])
    elif kind == "gone" and isinstance(inside, dict):
        del inside[last]
    elif isinstance(inside, dict):
        inside["more"] = draw.choice(_ODD)
    return replace(file, metadata=metadata)


def _metadata_text(file: File, draw: random.Random) -> File:
    text = json.dumps(file.metadata) if not isinstance(file.metadata, str) else file.metadata
    texts = [text[:-1], text[:-1] + ', "layers": 1}', "[" * 50_000, "null", "7", "[]", '"x"', text.replace("0", "1", 1)]
    return replace(file, metadata=draw.choice([*texts, json.dumps(json.dumps(file.metadata)), "9" * 5000]))


def _values(file: File, draw: random.Random) -> File:
    """Other numbers in a tensor of the same shape."""
    name = draw.choice(list(file.tensors))
    dtype, shape, part = file.tensors[name]
    if dtype not in _DTYPES or not part or len(part) % _DTYPES[dtype].itemsize:
        return file
    tensor = torch.frombuffer(bytearray(part), dtype=_DTYPES[dtype])
    kind = draw.choice(["one", "one", "all", "reversed", "near"])
    odd = draw.choice([-1, 0, 1, 2**31 - 1, -(2**31), 10**18, 127])
    odd = draw.choice([float("nan"), float("inf"), 1e30]) if tensor.is_floating_point() else odd
    if tensor.dtype != torch.int64 and not tensor.is_floating_point():
        odd = max(min(odd, torch.iinfo(tensor.dtype).max if tensor.dtype != torch.bool else 1), 0)
    if kind == "all":
        tensor[:] = odd
    elif kind == "one":
        tensor[draw.randrange(len(tensor))] = odd
    elif kind == "near" and tensor.dtype in (torch.int64, torch.int32):
        tensor[draw.randrange(len(tensor))] += draw.choice([-1, 1])
        if draw.random() < 0.5 and len(tensor) > 1:  # so that their sum stays
            a, b = draw.sample(range(len(tensor)), 2)
            tensor[a], tensor[b] = tensor[a] + 1, tensor[b] - 1
    else:
        tensor = tensor.flip(0)
    return replace(
        file, tensors={**file.tensors, name: (dtype, shape, tensor.contiguous().view(torch.uint8).numpy().tobytes())}
    )


def _shape(file: File, draw: random.Random) -> File:
    """Another shape, with as many bytes as that needs or as there are."""
    name = draw.choice(list(file.tensors))
    dtype, shape, part = file.tensors[name]
    if not all(type(axis) is int for axis in shape):
        return file
    product = math.prod(shape)
    options: list[Any] = [[], [product], [1, *shape], [*shape, 1], [0, *shape[1:]], shape[::-1], shape[1:], [1] * 70]
    options += [[axis + 1 for axis in shape], [max(axis - 1, 0) for axis in shape], [-1, *shape[1:]], [0.5], ["x"]]
    options += [[2**32, 2**32], [10**30]]
    new = draw.choice(options)
    size = _DTYPES[dtype].itemsize if dtype in _DTYPES else 1
    fits = draw.random() < 0.8 and all(type(axis) is int and 0 <= axis < 10**6 for axis in new)
    if fits and (count := size * math.prod(new)) < 10**7:
        part = (part * (count // max(len(part), 1) + 1))[:count] if part else bytes(count)
    return replace(file, tensors={**file.tensors, name: (dtype, new, part)})


def _type(file: File, draw: random.Random) -> File:
    """Other types of numbers."""
    name = draw.choice(list(file.tensors))
    dtype, shape, part = file.tensors[name]
    new = draw.choice([*_DTYPES, "F8_E4M3", "U64", "C64", "", 7])
    if dtype in _DTYPES and new in _DTYPES and not len(part) % _DTYPES[dtype].itemsize:
        tensor = torch.frombuffer(bytearray(part), dtype=_DTYPES[dtype]) if part else torch.zeros(0)
        part = tensor.to(_DTYPES[new]).view(torch.uint8).numpy().tobytes() if part else b""
    return replace(file, tensors={**file.tensors, name: (new, shape, part)})


def _without(file: File, gone: str) -> File:
    remaining = {name: tensor for name, tensor in file.tensors.items() if name != gone}
    return replace(file, tensors=remaining or file.tensors)


def _columns_gone(file: File, draw: random.Random) -> File:
    """One column less in all layers, or one more."""
    ends = {name.split(".", 2)[2] for name in file.tensors if name.count(".") > 1}
    gone = draw.choice(sorted(ends) or ["counts"])
    if draw.random() < 0.5:
        return replace(file, tensors={name: tensor for name, tensor in file.tensors.items() if not name.endswith(gone)})
    columns = [f"columns.{name}" for name in ("key_scale", "bias", "state", "x")]
    new = draw.choice([*columns, "passing.added", "kept.counts"])
    added = {name.replace(gone, new): tensor for name, tensor in file.tensors.items() if name.endswith(gone)}
    return replace(file, tensors={**file.tensors, **added})


def _renamed(file: File, draw: random.Random) -> File:
    old = draw.choice(list(file.tensors))
    odd = ["x", "", "layers.9.counts", "layers.01.counts", "layers.-1.x", "layers.1", "layers.0.columns."]
    new = draw.choice([*file.tensors, *odd, old.replace("layers.0", "layers.999999999999"), old + "\ud800", "seen"])
    return replace(file, tensors={(new if name == old else name): tensor for name, tensor in file.tensors.items()})


def _fewer_layers(file: File, draw: random.Random) -> File:
    """A layer less, or more, in the metadata too."""
    if not isinstance(file.metadata, dict) or type(file.metadata.get("layers")) is not int:
        return file
    layers = file.metadata["layers"]
    first = {
        name.removeprefix("layers.0."): tensor for name, tensor in file.tensors.items() if name.startswith("layers.0.")
    }
    tensors = file.tensors
    if draw.random() < 0.5 and layers > 1:
        layers -= 1
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"layers.{layers}.")}
    elif 0 <= layers < 100:
        tensors = {**tensors, **{f"layers.{layers}.{name}": tensor for name, tensor in first.items()}}
        layers += 1
    return replace(file, tensors=tensors, metadata={**file.metadata, "layers": layers})


_PARTS: dict[str, Callable[[File, random.Random], File]] = {
    "metadata": _metadata,
    "text of the metadata": _metadata_text,
    "values": _values,
    "shape": _shape,
    "type": _type,
    "tensor gone": lambda file, draw: _without(file, draw.choice(list(file.tensors))),
    "columns": _columns_gone,
    "renamed": _renamed,
    "layers": _fewer_layers,
}
