"""--model base:depth=6,...: a size of one's own, from the command line to the log and the plan."""

import argparse
import json
from dataclasses import replace

import pytest
from ranks import Run, run_ranks

import plan
import train_fsdp
import vit
from downstream.pretrained import read_pretrained
from runtime.config import model_config, model_size

OWN = "tiny:depth=2,width=96,mlp_width=100,heads=4,gated_mlp=1"
SHAPE = vit.ViTConfig(96, 2, 100, 4, 8, True, 3, 128, 2, 4)


def test_fields_replace_those_of_the_row():
    assert model_config(OWN) == SHAPE and model_size(OWN) == OWN
    assert all(model_config(name) == row for name, row in vit.MODELS.items())
    assert model_config("5b:gated_mlp=0") == replace(vit.MODELS["5b"], gated_mlp=False)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("giant", "there is no model 'giant': use tiny, base"),
        ("", "there is no model ''"),
        ("base:", "'' in 'base:' is not one FIELD=VALUE of width, depth"),
        ("base:depth", "depth of 'base:depth': '' is not a whole number"),
        ("base:layers=3", "'layers=3' in"),
        ("base:depth=2,depth=3", "'depth=3' in"),
        ("base:channels=4", "'channels=4' in"),
        ("base:depth=0", "depth of 'base:depth=0': '0' is not a whole number from 1"),
        ("base:depth=1e3", "is not a whole number"),
        ("base:gated_mlp=yes", "is not a whole number from 0 to 1"),
        ("base:width=770", "width 770 is not a multiple of 4 and of its 12 heads"),
        ("base:heads=7", "width 768 is not a multiple of 4 and of its 7 heads"),
        ("base:decoder_heads=12", "width 512 is not a multiple of 4 and of its 12 heads"),
        ("base:width=6,heads=3", "width 6 is not a multiple of 4 and of its 3 heads"),
    ],
)
def test_what_is_no_model_is_one_sentence(text, sentence, capsys):
    with pytest.raises(argparse.ArgumentTypeError) as refused:
        model_size(text)
    assert sentence in str(refused.value)
    with pytest.raises(SystemExit, match="2"):
        train_fsdp.main(["--model", text])
    (line,) = capsys.readouterr().err.splitlines()
    assert sentence in line


def test_it_is_trained_saved_and_planned(tmp_path, capsys):
    argv = ["--model", OWN, "--img-size", "32", "--device", "cpu", "--precision", "fp32"]
    argv += ["--batch", "2", "--workers", "0"]
    more = ["--mode", "full_shard", "--steps", "1", "--save-every", "1"]
    (result,) = run_ranks(2, [Run([*argv, *more], to=str(tmp_path / "out"))], tmp_path)
    count = sum(p.numel() for p in vit.ViTMAE(SHAPE, 32).parameters())
    assert result.status == [0, 0] and result.start["params"] == count
    found = read_pretrained(tmp_path / "out")
    assert (found.config, found.size) == (SHAPE, OWN)
    assert plan.main([*argv, "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == count
