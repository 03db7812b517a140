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
from ranks import Run, run_ranks
from test_data import dataset_of, flat_folder, noise_image, sample_at, stream
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from torchvision.transforms.v2 import functional as v2

import checkpoint
import data
import plan
import prepare
import train_fsdp
import vit
from planner import dry_run
from runtime import image_source
from runtime.image_source import SyntheticImages
from storage import channel_stats, image_list

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
    return image_list.list_images(str(root))


# --- one image


@pytest.mark.parametrize(
    ("dtype", "channels", "change"),
    [
        ("uint8", 3, np.asarray),
        ("uint8", 5, np.asfortranarray),
        ("uint16", 12, np.asarray),
        ("uint16", 2, lambda a: a.astype(">u2")),
        ("float32", 1, lambda a: a[:, ::-1]),
    ],
)
def test_augmentation_of_arrays_equals_torchvisions(dtype, channels, change):
    """From a hook and from a .npy file: the same pixels as by v2 on the same draws."""
    arrays = [change(noise_array(i, channels, dtype=dtype)) for i in range(6)]
    stats = data.ChannelStats((0.0,) * channels, (1.0,) * channels, dtype)
    for images in (arrays, [encoded(array) for array in arrays]):
        dataset = dataset_of(Own(images), 32, 16, seed=3, global_batch=6, stats=stats)
        for position in range(18):
            sample = sample_at(dataset, position)
            whole = arrays[sample.image_id].astype(dtype, order="C")
            _, flip, crop = data.draw_augmentation(3, position, 16, 64, 48)
            pixels = torch.from_numpy(whole if dtype == "uint8" else whole.astype(np.float32))
            expected = v2.resized_crop(pixels, *crop, [32, 32], v2.InterpolationMode.BICUBIC)
            expected = v2.horizontal_flip(expected) if flip else expected
            assert not sample.bad and sample.image.is_contiguous()
            assert torch.equal(sample.image, expected), position
            assert sample.image.dtype == (torch.uint8 if dtype == "uint8" else torch.float32)


def test_a_pillow_image_is_treated_as_its_file():
    pictures = [noise_image(i, 300, 200).convert(mode) for i, mode in enumerate(("RGB", "L", "P"))]
    files = []
    for picture in pictures:
        files.append(io.BytesIO())
        picture.save(files[-1], "PNG")
    opened = noise_image(3, 640, 640)
    file = io.BytesIO()
    opened.save(file, "JPEG")
    pictures.append(Image.open(file))  # not decoded yet: by us, and whole
    files.append(file)
    before = np.asarray(pictures[0]).copy()
    mine = dataset_of(Own(pictures), 32, 16, 0, 4)
    same = dataset_of(Own([file.getvalue() for file in files]), 32, 16, 0, 4, exact=True)
    for position in range(12):
        a, b = sample_at(mine, position), sample_at(same, position)
        assert torch.equal(a.image, b.image) and a.image_id == b.image_id and not a.bad
    np.testing.assert_array_equal(before, pictures[0])


def header(text):
    """A .npy file with this header and 100 bytes of pixels."""
    body = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(body).to_bytes(2, "little") + body + bytes(100)


def described(shape, descr="<u2"):
    return header(str({"descr": descr, "fortran_order": False, "shape": shape}))


WHOLE = encoded(noise_array(0))
BROKEN = {
    "cut": (WHOLE[:-100], "damaged .npy file: cannot reshape array"),
    "cut in a pixel": (WHOLE[:-1], "damaged .npy file: buffer size"),
    "longer": (WHOLE + bytes(2), "damaged .npy file: cannot reshape array"),
    "magic alone": (WHOLE[:6], "damaged .npy file"),
    "huge": (described((2**20, 2**20, 2**20)), "damaged .npy file: cannot reshape array"),
    "larger than numbers": (described((2**80, 1, 1)), "damaged .npy file"),
    "negative": (described((-5, -5, 2)), "damaged .npy file"),
    "objects": (described((1, 5, 10), "|O"), "damaged .npy file"),
    "a pickle": (encoded(np.array([{}], object)), "damaged .npy file"),
    "fields": (described((1, 5, 10), [("a", "<u1"), ("b", "<u1")]), "an array must be (C, H, W)"),
    "nested": (header("-" * 9000 + "1"), "damaged .npy file"),
    "nested less": (header("-" * 900 + "1"), "damaged .npy file"),
    "brackets": (header("[" * 9000), "damaged .npy file"),
    "no header": (header("{}"), "damaged .npy file"),
    "int32": (encoded(noise_array(0).astype(np.int32)), "uint8 or uint16 or float32, not int32"),
    "two dimensions": (encoded(noise_array(0)[0]), "must be (C, H, W)"),
    "empty": (encoded(noise_array(0)[:, :0]), "must be (C, H, W)"),
    "NaN": (encoded(np.full((12, 8, 8), np.nan, np.float32)), "NaN or infinite pixels"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_array_is_an_unreadable_image(how):
    content, reason = BROKEN[how]
    with pytest.raises(ValueError) as error:
        data.open_image(content)
    assert reason in str(error.value)


def test_arrays_have_a_budget_of_memory():
    array = np.zeros((12, 100, 100), np.uint16)
    assert data.open_image(array, 4 * 120_000)[1] == (100, 100)
    with pytest.raises(ValueError, match=r"100 x 100 pixels take .* to decode"):
        data.open_image(encoded(array), 4 * 120_000 - 1)


def test_images_of_other_channels_or_types_are_replaced():
    images = [noise_array(i) for i in range(8)]
    images[2] = noise_array(2, channels=4)
    images[3] = noise_array(3, dtype="float32")
    images[5] = np.moveaxis(noise_array(5), 0, 2)  # (H, W, C)
    images[6] = noise_image(6)
    dataset = dataset_of(Own(images), 32, 16, 0, 8, stats=STATS)
    reasons = {i: r for position in range(8) for i, r in sample_at(dataset, position).bad}
    assert reasons == {
        2: "ValueError: 4 channels of uint16, not 12 of uint16: see `prepare.py stats`",
        3: "ValueError: 12 channels of float32, not 12 of uint16: see `prepare.py stats`",
        5: "ValueError: 48 channels of uint16, not 12 of uint16: see `prepare.py stats`",
        6: "ValueError: 3 channels of uint8, not 12 of uint16: see `prepare.py stats`",
    }
    rgb = dataset_of(Own([noise_array(0)] * 20), 32, 16, 0, 8)
    with pytest.raises(RuntimeError, match="12 channels of uint16, not 3 of uint8"):
        sample_at(rgb, 0)


def test_the_stream_of_arrays_is_that_of_one_process(tmp_path):
    files = array_tree(tmp_path, 24)
    alone = stream(files, global_batch=12, steps=range(4), stats=STATS)
    assert len({row.pixels for row in alone}) == 48
    for ranks, workers in ((2, 0), (3, 1)):
        same = stream(
            files, ranks=ranks, workers=workers, global_batch=12, steps=range(4), stats=STATS
        )
        assert same == alone
    assert stream(files, global_batch=12, steps=range(2, 4), stats=STATS) == alone[24:]


# --- normalisation and statistics


def test_normalize_of_arrays_equals_numpy():
    pixels = noise_array(0).astype(np.float32)[None]
    mean, std = np.arange(12) + 100.0, np.arange(12) + 2.0
    stats = data.ChannelStats(tuple(mean.tolist()), tuple(std.tolist()), "uint16")
    images = torch.from_numpy(pixels.copy())
    found = data.normalize(images, stats)
    expected = (pixels - mean[:, None, None]) / std[:, None, None]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    np.testing.assert_array_equal(images.numpy(), pixels)  # --run-mode syn takes them again
    with pytest.raises(ValueError, match="images of 12 channels, statistics of 3"):
        data.normalize(images)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_stats_are_those_of_numpy(dtype, tmp_path, capsys):
    root = tmp_path / "root"
    array_tree(root, 70, channels=4, dtype=dtype, height=20, width=30)
    every = np.stack([np.load(path) for path in sorted(root.rglob("*.npy"))]).astype(np.float64)
    (root / "class0/cut.npy").write_bytes(WHOLE[:500])
    np.save(root / "class0/other.npy", noise_array(0))
    for workers in ("1", "3"):
        assert prepare.main(["stats", str(root), "--workers", workers]) == 0
        found = json.loads((tmp_path / "root.stats.json").read_text())
        scale = 255 if dtype == "uint8" else 1
        np.testing.assert_allclose(found["mean"], every.mean((0, 2, 3)) / scale, rtol=1e-5)
        np.testing.assert_allclose(found["std"], every.std((0, 2, 3)) / scale, rtol=1e-5)
    assert found["dtype"] == dtype and found["images"] == 70
    printed = capsys.readouterr().out
    assert f"70 of 72 images, 4 channels of {dtype}" in printed
    assert "left out: 1 images (12 channels of uint16)" in printed
    assert "left out: 1 images (cannot be read)" in printed
    stats = image_source.find_stats(f"{root}/", 4)
    assert stats == (tuple(found["mean"]), tuple(found["std"]), dtype)
    assert prepare.main(["index", str(root)]) == 0
    assert image_list.outdated(image_list.load_index(f"{root}.index", str(root))) is None


def test_stats_of_pictures_are_those_of_their_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr(channel_stats, "LARGE", 2**12)
    root = tmp_path / "root"
    root.mkdir()
    noise_image(0, 30, 20).save(root / "a.png")
    noise_image(1, 300, 200).save(root / "b.png")  # every third row and column is enough
    Image.new("RGB", (10, 10), (0, 0, 255)).save(root / "c.png")
    assert prepare.main(["stats", str(root), "--workers", "1"]) == 0
    pixels = [np.asarray(Image.open(path)).reshape(-1, 3) / 255 for path in sorted(root.iterdir())]
    mean = np.mean([p.mean(0) for p in pixels], 0)  # every image has the same weight
    square = np.mean([(p**2).mean(0) for p in pixels], 0)
    found = image_source.find_stats(str(root), 3)
    np.testing.assert_allclose(found.mean, mean, atol=5e-3)
    np.testing.assert_allclose(found.std, np.sqrt(square - mean**2), atol=5e-3)
    assert found.dtype == "uint8"


def test_a_constant_channel_is_not_divided_by_zero(tmp_path):
    (tmp_path / "root").mkdir()
    np.save(tmp_path / "root/x.npy", np.full((2, 8, 8), 7, np.uint16))
    assert prepare.main(["stats", str(tmp_path / "root"), "--workers", "1"]) == 0
    assert image_source.find_stats(str(tmp_path / "root"), 2).std == (1.0, 1.0)


def test_rgb_without_a_file_has_imagenets(tmp_path):
    assert image_source.find_stats(str(tmp_path), 3) == data.IMAGENET
    assert image_source.find_stats("synthetic", 3) == data.IMAGENET


# --- the model


def test_a_model_of_other_channels():
    config = replace(vit.MODELS["tiny"], channels=12, depth=2, decoder_depth=2)
    model, plain = vit.ViTMAE(config, 32), vit.ViTMAE(replace(config, channels=3), 32)
    shapes = [{n: p.shape for n, p in m.named_parameters()} for m in (model, plain)]
    differ = {name for name in shapes[0] if shapes[0][name] != shapes[1][name]}
    ends = {"patch_embed.proj.weight", "decoder_pred.weight", "decoder_pred.bias"}
    assert differ == ends and shapes[0]["decoder_pred.bias"] == (12 * 64,)
    bound = (6 / (192 + 12 * 64)) ** 0.5  # Xavier, of the kernel as a matrix (D, C*P*P)
    kernel = model.patch_embed.proj.weight
    assert 0.95 * bound < kernel.abs().max() <= bound
    assert model.patch_embed.proj.bias.abs().max() <= (12 * 64) ** -0.5
    images = torch.randn(2, 12, 32, 32)
    every = torch.arange(16).expand(2, -1)
    embedded = model.patch_embed(vit.patchify(images, 8))  # against the convolution itself
    expected = torch.conv2d(images, kernel, model.patch_embed.proj.bias, stride=8)
    expected = expected.flatten(2).transpose(1, 2)
    torch.testing.assert_close(embedded, expected, atol=1e-5, rtol=1e-5)
    assert model.encode(vit.patchify(images, 8), every).shape == (2, 17, 192)
    loss, pred, _ = model(images)
    assert pred.shape == (2, 16, 12 * 64) and 0.5 < loss < 2
    with pytest.raises(ValueError, match=r"\(2, 3, 32, 32\) do not fit .* \(B, 12, 32, 32\)"):
        model(images[:, :3])


def test_flops_of_other_channels_agree_with_torchs_counter():
    config = replace(vit.MODELS["tiny"], channels=12)
    with torch.device("meta"):
        model, images = vit.ViTMAE(config, 32), torch.empty(2, 12, 32, 32)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images)[0].backward()
    expected = counter.get_total_flops() / 2
    assert vit.flops_per_image(config, 32) == pytest.approx(expected, rel=0.01)


def test_synthetic_images_of_other_channels():
    images = SyntheticImages(1, channels=5)
    stats = image_source.find_stats("synthetic", 5)
    (batch,) = data.build_loader(
        images,
        img_size=32,
        patches=16,
        seed=1,
        global_batch=4,
        local_batch=4,
        steps=range(1),
        stats=stats,
    )
    assert batch.image.shape == (4, 5, 32, 32) and batch.image.dtype == torch.uint8
    assert not batch.bad and data.normalize(batch.image, stats).std() > 0.3


# --- the scripts

SMALL = ["--model", "tiny", "--img-size", "32", "--device", "cpu", "--precision", "fp32"]
SMALL += ["--workers", "0", "--channels", "12"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """A 12-channel tree, scanned, packed (one array made smaller), with statistics of both."""
    folder = tmp_path_factory.mktemp("any")
    root, pack = folder / "root", folder / "pack"
    array_tree(root, 32)
    np.save(root / "class0/large.npy", noise_array(99, height=96, width=128))
    (root / "class1/cut.npy").write_bytes(WHOLE[:1000])
    scan = ["scan", str(root), "--out", str(folder / "bad.csv"), "--workers", "1"]
    assert prepare.main(scan) == 1
    assert 'cut.npy,"ValueError: damaged .npy file' in (folder / "bad.csv").read_text()
    command = ["pack", str(root), str(pack), "--max-side", "64", "--workers", "1"]
    assert prepare.main(command) == 0
    for made in (root, pack):
        assert prepare.main(["stats", str(made), "--workers", "1"]) == 0
    assert (pack / "stats.json").exists() and (folder / "root.stats.json").exists()
    return folder


def test_a_pack_of_arrays(packed):
    files = image_list.list_images(str(packed / "root"))
    pack = image_list.list_images(str(packed / "pack"))
    assert [pack.name(i) for i in range(34)] == [files.name(i) for i in range(34)]
    for i in range(34):
        if files.name(i) == "class1/cut.npy":
            assert pack.read(i) == b""
        elif files.name(i) == "class0/large.npy":
            array, size = data.open_image(pack.read(i))
            whole = torch.from_numpy(noise_array(99, height=96, width=128).astype(np.float32))
            half = v2.resize(whole, [48, 64], v2.InterpolationMode.BICUBIC)
            np.testing.assert_allclose(array, half.clamp(0, 65535), atol=0.51)
            assert size == (64, 48) and array.dtype == np.uint16
        else:
            assert pack.read(i) == files.read(i)


@pytest.mark.slow
def test_a_tree_of_twelve_channels_trains_and_resumes(packed, tmp_path, capsys):
    """On 2 ranks to step 4, from step 2 on again by 1: as by 1 rank without a stop."""
    shared, changed = tmp_path / "shared", tmp_path / "changed"
    shutil.copytree(packed / "root", changed)  # the same images with other statistics
    stats = json.loads((packed / "root.stats.json").read_text())
    stats["mean"][3] += 1
    (tmp_path / "changed.stats.json").write_text(json.dumps(stats))
    flat_folder(tmp_path / "rgb", 20)
    flags = [*SMALL, "--global-batch", "8", "--log-every", "1", "--mode", "full_shard"]
    flags += ["--steps", "4", "--save-every", "2", "--max-bad", "0.05"]

    def run(root, out, *more):
        return Run([*flags, "--data", str(root), *more], params=False, to=str(out))

    (first,) = run_ranks(2, [run(packed / "root", shared)], tmp_path / "two")
    assert first.status == [0, 0], first.errors
    shutil.rmtree(shared / "step_00000004")
    runs = [
        run(packed / "root", tmp_path / "whole"),
        run(packed / "root", shared),
        run(changed, shared),
        run(tmp_path / "rgb", shared, "--channels", "3"),
        run(packed / "pack", tmp_path / "packed"),
    ]
    whole, again, other, three, pack = run_ranks(1, runs, tmp_path / "one")
    assert whole.status == again.status == pack.status == [0], again.errors
    assert first.start["channels"] == 12 and first.start["image_dtype"] == "uint16"
    assert "pixels: 12 channels of uint16, mean and deviation of the images" in first.output
    assert "at step 2;" in again.output and 0.5 < whole.steps[0]["loss"] < 1.5
    for mine in (first.steps[:4], again.steps[-2:]):
        for step, expected in zip(mine, whole.steps[-len(mine) :], strict=True):
            assert step["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert step["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    assert other.status == [2] and "other flags (channel_mean changed)" in other.errors
    assert three.status == [2] and "channels 12 -> 3" in three.errors

    out = tmp_path / "model.pth"
    assert checkpoint.main(["consolidate", str(shared / "step_00000004"), str(out)]) == 1
    assert "images with 12 channels" in capsys.readouterr().err and not out.exists()


def test_plan_and_dry_run_know_the_channels(packed, capsys, monkeypatch):
    found = []
    simulate = dry_run.simulate
    monkeypatch.setattr(dry_run, "simulate", lambda run: found.append(simulate(run)) or found[-1])
    flags = [*SMALL, "--batch", "2", "--mode", "full_shard", "--world-size", "4"]
    pack = ["--data", str(packed / "pack")]
    assert train_fsdp.main([*flags, *pack, "--dry-run", "--out", str(packed / "never")]) == 0
    printed = capsys.readouterr().out
    assert "pixels: 12 channels of uint16" in printed
    config = replace(vit.MODELS["tiny"], channels=12)
    count = sum(p.numel() for p in vit.ViTMAE(config, 32).parameters())
    assert f"tiny: {count:,} parameters" in printed
    inputs = 2 * (4 * 12 * 32 * 32 + 4 * 16)  # float32 images, fp32 noise
    assert found[0].after["Inputs"] == inputs
    assert plan.main([*flags, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["params"] == count
    tables = 4 * (1 + 16) * (192 + 128)
    kept = next(m for m in planned["moments"] if m["name"] == "optimizer step")["gib"]["inputs"]
    assert kept * 2**30 == pytest.approx(inputs + tables)
    for kind in ("all_gather", "reduce_scatter"):
        simulated = sum(c.size for c in found[0].collectives if c.kind == kind)
        assert planned["payload_bytes"][kind] == simulated, kind


# what was typed -> exit status and what is said
WRONG = {
    "no statistics": (["--data", "root"], 2, "needs their mean and deviation: type `python"),
    "of other channels": (["--data", "four"], 2, "of images with 4 channels, not 12: give --ch"),
    "damaged": (["--data", "damaged"], 2, "damaged.stats.json is damaged: write it again by"),
    "of arrays": (["--data", "twelve", "--channels", "3"], 2, "of images with 12 channels, not 3"),
    "forgotten": (["--data", "arrays", "--channels", "3"], 2, "has 12 channels of uint16: type"),
    "zero channels": (["--channels", "0"], 2, "argument --channels"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_uses_get_a_sentence(case, tmp_path, monkeypatch, capfd):
    argv, status, sentence = WRONG[case]
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    good = {"mean": [0.0] * 12, "std": [1.0] * 12, "dtype": "uint16"}
    four = {"mean": [0.0] * 4, "std": [1.0] * 4, "dtype": "uint16"}
    for name in ("root", "four", "twelve", "damaged"):
        Path(name).mkdir()
        for i in range(20):
            noise_image(i).save(f"{name}/{i:02}.png")
    array_tree(Path("arrays"), 20)
    Path("four.stats.json").write_text(json.dumps(four))
    Path("damaged.stats.json").write_text(json.dumps(good | {"std": [0.0] * 12}))
    Path("twelve.stats.json").write_text(json.dumps(good))
    command = [*SMALL, "--batch", "4", "--steps", "1", *argv]
    try:
        found = train_fsdp.main(command)
    except SystemExit as refused:
        found = refused.code
    text = capfd.readouterr().err
    assert found == status and sentence in text and text.count("error:") == 1, text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[1]",
        '{"mean": [1], "std": [1]}',
        '{"mean": [NaN], "std": [1], "dtype": "uint8"}',
        '{"mean": [1], "std": [-1], "dtype": "uint8"}',
    ],
)
def test_a_damaged_statistics_file_is_refused(content, tmp_path):
    (tmp_path / "x.stats.json").write_text(content)
    with pytest.raises(ValueError, match="is damaged: write it again by"):
        image_source.find_stats(str(tmp_path / "x"), 1)


@pytest.mark.full
def test_own_images_need_data_py_alone(tmp_path):
    for name in ("data.py", "examples/own_images.py"):
        shutil.copy(ROOT / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "own_images.py"],
        cwd=tmp_path,
        env={"PATH": ""},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 5 and all("(8, 12, 32, 32)" in line for line in lines)
