"""Read files of weights that others wrote: nothing in them is run, copied or trusted.

Files of torch.save (`.pth`) and of safetensors are mapped into memory; a folder of transformers has
config.json and one or several of the latter.
"""

import argparse
import json
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from downstream.layouts import about_transformers, from_transformers

NOTE = "pretrained"  # the key of what convert.py says of a model
JSON_LIMIT = 2**22  # bytes
KEEPS = ("model", "state_dict")  # under which the official code and timm save the weights


def read_weights(path: Path) -> tuple[Mapping[str, Tensor], dict[str, Any]]:
    """Read a file or a folder -> the weights by the names of vit.ViTMAE, and what is said of them.

    ValueError, one sentence, where it is no such file; OSError where it cannot be read.
    """
    try:
        about: dict[str, Any] = {}
        if path.is_dir():
            about = about_transformers(_read_json(path / "config.json"))
        files = _files_of(path) if path.is_dir() else [path]
        weights: dict[str, Tensor] = {}
        for file in files:
            safe = file.suffix == ".safetensors"
            tensors, said = _read_safetensors(file) if safe else _read_torch(file)
            _check_tensors(tensors, file)
            weights |= tensors
            about = said | about
        weights = {n: t for n, t in weights.items() if n not in ("head.weight", "head.bias")}
        if any(name.endswith("embeddings.cls_token") for name in weights):
            return from_transformers(weights), about
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return weights, about


def _files_of(folder: Path) -> list[Path]:
    """List the files of weights of a folder of transformers."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = _read_json(index).get("weight_map")
        names = {*places.values()} if isinstance(places, dict) else {""}
        for name in names:
            if not re.fullmatch(r"[\w-]+\.safetensors", str(name)):
                raise ValueError(f"{index.name} names {name!r:.60}, no file of this folder")
        return [folder / name for name in sorted(names)]
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
    raise ValueError("it contains config.json, but no model.safetensors")


def _read_json(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        text = file.read(JSON_LIMIT + 1)
    try:
        found = json.loads(text if len(text) <= JSON_LIMIT else b"")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


def _read_safetensors(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise ValueError("this needs the package safetensors: pip install safetensors") from None
    _check_regular(path)
    try:
        with safe_open(path, "pt") as file:
            note = (file.metadata() or {}).get(NOTE, "{}")
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"safetensors cannot read it ({error})") from None
    try:
        about = json.loads(note)
    except (ValueError, RecursionError):
        about = None
    if not isinstance(about, dict):
        raise ValueError(f"{NOTE} in its metadata is no JSON object")
    return tensors, about


def _read_torch(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    _check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [entry.filename for entry in archive.infolist() if entry.compress_type]
    except (zipfile.BadZipFile, ValueError, NotImplementedError):
        raise ValueError("truncated, or not written by torch.save of torch 1.6 or newer") from None
    if packed:
        raise ValueError(f"{packed[0]!r:.60} in it is compressed, which torch.save never does")
    try:  # the official training code saves its arguments, a Namespace
        with torch.serialization.safe_globals([argparse.Namespace]):
            found = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of any kind: the pickle may contain anything
        code = re.search(r"GLOBAL ([\w.]+)", str(error))
        why = f"it asks for {code[1]}" if code else f"{type(error).__name__}: {error!s:.120}"
        why = " ".join(why.split())
        raise ValueError(f"no tensors that load without running code ({why})") from None
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}, not weights by name")
    note, arguments = found.get(NOTE), found.get("args")
    about = dict(note) if isinstance(note, dict) else {}
    if isinstance(arguments, argparse.Namespace) and hasattr(arguments, "norm_pix_loss"):
        about.setdefault("norm_pix_loss", arguments.norm_pix_loss)
    if isinstance(found.get("step"), int):
        about.setdefault("step", found["step"])
    return next((found[key] for key in KEEPS if isinstance(found.get(key), dict)), found), about


def _check_regular(path: Path) -> None:
    if not path.is_file():  # a pipe would block
        raise ValueError(f"{path.name} is no regular file")


def _check_tensors(tensors: Mapping[Any, Any], path: Path) -> None:
    """Raise ValueError for what is no dense tensor of numbers that lie in the file."""
    left = path.stat().st_size
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"{name!r:.60} is a {type(tensor).__name__}, not a tensor")
        where = tensor.device.type, tensor.layout
        if where != ("cpu", torch.strided) or not tensor.is_floating_point():
            raise ValueError(f"{name:.60} is not a dense tensor of floating-point numbers")
        left -= tensor.numel() * tensor.itemsize
        if left < 0:
            raise ValueError(f"{name:.60} {tuple(tensor.shape)} does not fit into the file's size")
