"""Images other than RGB files: arrays of any channels, Pillow images, a data set of one's own."""

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from images import by_torchvision, dataset_of, noise_image, sample_at, saved
from PIL import Image
from ranks import TINY_ARGV, python

import data
import plan
import train_fsdp
import vit
from runtime import eval_images

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

STATS = data.ChannelStats((5000.0,) * 12, (2500.0,) * 12, "uint16")


def noise_array(seed, channels=12, dtype="uint16"):
    return np.random.default_rng(seed).integers(0, 10_000, (channels, 48, 64)).astype(dtype)


class Own(list):
    """A data set of images in memory, as a user would write it."""

    def path(self, index):
        return str(index)

    def read(self, index):
        return self[index]


def encoded(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


# --- one image


@pytest.mark.parametrize(
    ("dtype", "channels", "change"),
    [
        ("uint8", 5, np.asfortranarray),
        ("uint16", 12, lambda a: a.astype(">u2")),
        ("float32", 1, lambda a: a[:, ::-1]),
    ],
)
def test_augmentation_of_arrays_equals_torchvisions(dtype, channels, change):
    """From a hook and from a .npy file: the same pixels as by v2 on the same draws."""
    arrays = [change(noise_array(i, channels, dtype=dtype)) for i in range(6)]
    stats = data.ChannelStats(tuple(np.zeros(channels)), tuple(np.ones(channels)), dtype)
    for images in (arrays, [encoded(array) for array in arrays]):
        dataset = dataset_of(Own(images), 32, 16, seed=3, global_batch=6, stats=stats)
        for position in range(12):
            sample = sample_at(dataset, position)
            whole = arrays[sample.image_id].astype("uint8" if dtype == "uint8" else "float32")
            expected = by_torchvision(torch.from_numpy(whole.copy()), 3, position, 32)
            assert not sample.bad and torch.equal(sample.image, expected), position


def test_a_pillow_image_is_treated_as_its_file():
    pictures = [noise_image(i, 300, 200).convert(mode) for i, mode in enumerate(("RGB", "L", "P"))]
    files = [saved("PNG", picture) for picture in pictures]
    files.append(saved("JPEG", noise_image(3, 640, 640)))
    pictures.append(Image.open(io.BytesIO(files[3])))  # not decoded yet: by us, and whole
    mine = dataset_of(Own(pictures), 32, 16, 0, 4)
    same = dataset_of(Own(files), 32, 16, 0, 4, exact=True)
    for position in range(12):
        sample = sample_at(mine, position)
        expected = sample_at(same, position)
        assert torch.equal(sample.image, expected.image) and not sample.bad
        assert sample.image_id == expected.image_id
    pictures[3].load()  # for example to look at it: it is larger than what draft() asks for
    for index in range(4):
        mine = eval_images.EvalImages(Own(pictures), 32, data.IMAGENET)[[index]]
        expected = eval_images.EvalImages(Own(files), 32, data.IMAGENET, exact=True)[[index]]
        assert torch.equal(mine.images, expected.images) and not mine.bad


GOOD = noise_array(0)
WHOLE = encoded(GOOD)
BROKEN = [
    WHOLE[:-100],
    WHOLE[:6],
    encoded(GOOD.astype(np.int32)),
    encoded(GOOD[0]),  # two dimensions
    encoded(GOOD[:, :0]),  # no rows
    encoded(np.full((12, 8, 8), np.nan, np.float32)),
    encoded(np.array([{}], object)),  # a pickle
]
OTHER = [(4, "uint16"), (12, "float32"), (3, "uint8")]


def test_broken_arrays_and_those_of_another_kind_are_replaced_and_say_why():
    images = [*BROKEN, noise_array(2, 4), noise_array(3, dtype="float32"), noise_image(6), WHOLE]
    dataset = dataset_of(Own(images), 32, 16, 0, len(images), stats=STATS)
    found = {}
    for position in range(len(images)):
        found |= dict(sample_at(dataset, position).bad)
    assert found.keys() == set(range(10))
    for i, (channels, dtype) in enumerate(OTHER, start=len(BROKEN)):
        what = f"{channels} channels of {dtype}, not 12 of uint16: see `prepare.py stats`"
        assert found[i] == f"ValueError: {what}"


# --- normalisation and statistics


@pytest.mark.parametrize(("channels", "dtype"), [(3, "uint8"), (12, "float32")])
def test_normalize_equals_numpy(channels, dtype):
    pixels = np.expand_dims(noise_array(0, channels, dtype=dtype), 0)
    mean = np.arange(channels) + 0.4
    std = np.arange(channels) + 0.2
    stats = data.ChannelStats(tuple(mean.tolist()), tuple(std.tolist()), dtype)
    images = torch.from_numpy(pixels.copy())
    scaled = pixels / (255 if dtype == "uint8" else 1)
    expected = (scaled - mean[:, None, None]) / std[:, None, None]
    x = data.normalize(images, stats)
    assert x.dtype == torch.float32
    np.testing.assert_allclose(x.numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(images.numpy(), pixels)  # --run syn takes them again
    with pytest.raises(ValueError):
        data.normalize(images, data.ChannelStats((0.0,), (1.0,)))


# --- the model and the scripts


SMALL = [*TINY_ARGV, "--batch", "4", "--steps", "1"]


def test_the_model_and_its_plan_know_the_channels(capsys):
    assert plan.main([*SMALL, "--channels", "12", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    model = vit.ViTMAE(replace(vit.MODELS["tiny"], channels=12), 32)
    assert planned["params"] == sum(p.numel() for p in model.parameters())
    with pytest.raises(ValueError, match=r"of shape \(12, 32, 32\), not \(3, 32, 32\)"):
        model(torch.zeros(1, 3, 32, 32))


def test_wrong_uses_get_a_sentence(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("root").mkdir()
    for i in range(4):
        np.save(f"root/{i}.npy", noise_array(i))
    four = json.dumps({"mean": [0.0] * 4, "std": [1.0] * 4, "dtype": "uint16"})
    for channels, stats, sentence in (
        ("12", None, "needs statistics: type `python"),
        ("12", four, "is of 4 channels, not 12: see --channels"),
    ):
        if stats:
            Path("root.stats.json").write_text(stats)
        assert train_fsdp.main([*SMALL, "--data", "root", "--channels", channels]) == 2
        text = capfd.readouterr().err
        assert sentence in text and text.count("error:") == 1, text


@pytest.mark.full
def test_own_images_need_data_py_alone(tmp_path):
    for name in ("data.py", "examples/own_images.py"):
        shutil.copy(ROOT / name, tmp_path)
    lines = python("own_images.py", cwd=tmp_path, alone=True).splitlines()
    assert len(lines) == 5 and all("(8, 12, 32, 32)" in line for line in lines)
