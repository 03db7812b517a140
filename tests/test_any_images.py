"""Images other than RGB files: arrays of any channels, Pillow images, a data set of one's own."""

import io
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from test_data import dataset_of, noise_image, sample_at, saved
from torchvision.transforms.v2 import functional as v2

import data
import plan
import train_fsdp
import vit
from planner import dry_run

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

STATS = data.ChannelStats((5000.0,) * 12, (2500.0,) * 12, "uint16")


def noise_array(seed, channels=12, height=48, width=64, dtype="uint16"):
    draw = np.random.default_rng(seed)
    if dtype == "float32":
        return draw.normal(300, 20, (channels, height, width)).astype(dtype)
    top = 256 if dtype == "uint8" else 10_000
    return draw.integers(0, top, (channels, height, width)).astype(dtype)


@dataclass
class Own:
    """A data set of images in memory, as a user would write it."""

    images: list

    def __len__(self):
        return len(self.images)

    def path(self, index):
        return str(index)

    def read(self, index):
        return self.images[index]


def encoded(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def array_tree(root, count=24, **kind):
    """Arrays in two classes."""
    for i in range(count):
        folder = root / f"class{i % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / f"{i:03}.npy", noise_array(i, **kind))


# --- one image

KINDS = [
    ("uint8", 5, np.asfortranarray),
    ("uint16", 12, lambda a: a.astype(">u2")),
    ("float32", 1, lambda a: a[:, ::-1]),
]


@pytest.mark.parametrize(("dtype", "channels", "change"), KINDS)
def test_augmentation_of_arrays_equals_torchvisions(dtype, channels, change):
    """From a hook and from a .npy file: the same pixels as by v2 on the same draws."""
    arrays = [change(noise_array(i, channels, dtype=dtype)) for i in range(6)]
    stats = data.ChannelStats((0.0,) * channels, (1.0,) * channels, dtype)
    for images in (arrays, [encoded(array) for array in arrays]):
        dataset = dataset_of(Own(images), 32, 16, seed=3, global_batch=6, stats=stats)
        for position in range(12):
            sample = sample_at(dataset, position)
            whole = arrays[sample.image_id].astype(dtype, order="C")
            _, flip, crop = data.draw_augmentation(3, position, 16, 64, 48)
            pixels = torch.from_numpy(whole if dtype == "uint8" else whole.astype(np.float32))
            expected = v2.resized_crop(pixels, *crop, [32, 32], v2.InterpolationMode.BICUBIC)
            expected = v2.horizontal_flip(expected) if flip else expected
            assert not sample.bad and torch.equal(sample.image, expected), position
            assert sample.image.dtype == (torch.uint8 if dtype == "uint8" else torch.float32)


def test_a_pillow_image_is_treated_as_its_file():
    pictures = [noise_image(i, 300, 200).convert(mode) for i, mode in enumerate(("RGB", "L", "P"))]
    files = [saved("PNG", picture) for picture in pictures]
    files.append(saved("JPEG", noise_image(3, 640, 640)))
    pictures.append(Image.open(io.BytesIO(files[3])))  # not decoded yet: by us, and whole
    mine = dataset_of(Own(pictures), 32, 16, 0, 4)
    same = dataset_of(Own(files), 32, 16, 0, 4, exact=True)
    for position in range(12):
        a, b = sample_at(mine, position), sample_at(same, position)
        assert torch.equal(a.image, b.image) and a.image_id == b.image_id and not a.bad


WHOLE = encoded(noise_array(0))
INT32, FLAT, EMPTY = noise_array(0).astype(np.int32), noise_array(0)[0], noise_array(0)[:, :0]
NAN, PICKLE = np.full((12, 8, 8), np.nan, np.float32), np.array([{}], object)
BROKEN = [WHOLE[:-100], WHOLE[:6], *map(encoded, (INT32, FLAT, EMPTY, NAN, PICKLE))]
OTHER = [(4, "uint16"), (12, "float32"), (3, "uint8")]


def test_broken_arrays_and_those_of_another_kind_are_replaced_and_say_why():
    images = [*BROKEN, noise_array(2, 4), noise_array(3, dtype="float32"), noise_image(6), WHOLE]
    dataset = dataset_of(Own(images), 32, 16, 0, len(images), stats=STATS)
    found = {i: r for p in range(len(images)) for i, r in sample_at(dataset, p).bad}
    assert found.keys() == set(range(10))
    for i, (channels, dtype) in enumerate(OTHER, start=len(BROKEN)):
        what = f"{channels} channels of {dtype}, not 12 of uint16: see `prepare.py stats`"
        assert found[i] == f"ValueError: {what}"


# --- normalisation and statistics


@pytest.mark.parametrize(("channels", "dtype"), [(3, "uint8"), (12, "float32")])
def test_normalize_equals_numpy(channels, dtype):
    pixels = noise_array(0, channels, dtype=dtype)[None]
    mean, std = np.arange(channels) + 0.4, np.arange(channels) + 0.2
    stats = data.ChannelStats(tuple(mean.tolist()), tuple(std.tolist()), dtype)
    images = torch.from_numpy(pixels.copy())
    scaled = pixels / (255 if dtype == "uint8" else 1)
    expected = (scaled - mean[:, None, None]) / std[:, None, None]
    x = data.normalize(images, stats)
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(images.numpy(), pixels)  # --run-mode syn takes them again
    with pytest.raises(ValueError):
        data.normalize(images, data.ChannelStats((0.0,), (1.0,)))


# --- the model and the scripts


SMALL = ["--model", "tiny", "--img-size", "32", "--device", "cpu", "--precision", "fp32"]
SMALL += ["--workers", "0", "--channels", "12"]


def test_plan_and_dry_run_know_the_channels(capsys, monkeypatch):
    found = []
    simulate = dry_run.simulate
    monkeypatch.setattr(dry_run, "simulate", lambda *a: found.append(simulate(*a)) or found[-1])
    flags = [*SMALL, "--batch", "2", "--mode", "full_shard", "--world-size", "4"]
    assert train_fsdp.main([*flags, "--data", "synthetic", "--dry-run"]) == 0
    capsys.readouterr()
    inputs = 2 * (12 * 32 * 32 + 4 * 16)  # uint8 images, fp32 noise
    assert found[0].after["Inputs"] == inputs
    assert plan.main([*flags, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    model = vit.ViTMAE(replace(vit.MODELS["tiny"], channels=12), 32)
    with pytest.raises(ValueError, match=r"\(3, 32, 32\) do not fit .* \(12, 32, 32\)"):
        model(torch.zeros(1, 3, 32, 32))
    assert planned["params"] == sum(p.numel() for p in model.parameters())
    for kind in ("all_gather", "reduce_scatter"):
        simulated = sum(c.size for c in found[0].collectives if c.kind == kind)
        assert planned["payload_bytes"][kind] == simulated, kind


WRONG = {
    "no statistics": (["--data", "root"], "needs their mean and deviation: type `python"),
    "of other channels": (["--data", "four"], "of images with 4 channels, not 12: give --ch"),
    "forgotten": (["--data", "arrays", "--channels", "3"], "has 12 channels of uint16: type"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_uses_get_a_sentence(case, tmp_path, monkeypatch, capfd):
    argv, sentence = WRONG[case]
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("root", "four"):
        Path(name).mkdir()
        for i in range(20):
            noise_image(i).save(f"{name}/{i:02}.png")
    array_tree(Path("arrays"), 20)
    four = {"mean": [0.0] * 4, "std": [1.0] * 4, "dtype": "uint16"}
    Path("four.stats.json").write_text(json.dumps(four))
    try:
        found = train_fsdp.main([*SMALL, "--batch", "4", "--steps", "1", *argv])
    except SystemExit as refused:
        found = refused.code
    text = capfd.readouterr().err
    assert found == 2 and sentence in text and text.count("error:") == 1, text


@pytest.mark.full
def test_own_images_need_data_py_alone(tmp_path):
    for name in ("data.py", "examples/own_images.py"):
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "own_images.py"]
    options = {"cwd": tmp_path, "env": {"PATH": ""}, "capture_output": True, "text": True}
    done = subprocess.run(command, timeout=240, **options)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and all("(8, 12, 32, 32)" in line for line in lines)
