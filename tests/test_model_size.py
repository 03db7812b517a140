"""--model base:depth=6,...: a size of one's own, from the command line to the log and the plan."""

import json
from dataclasses import replace

from ranks import read_log

import checkpoint
import plan
import train_fsdp
import vit

OWN = "tiny:depth=2,width=96,mlp_width=100,heads=4,gated_mlp=1"
SHAPE = vit.ViTConfig(96, 2, 100, 4, 8, True, 3, 128, 2, 4)


def test_fields_replace_those_of_the_row():
    def config(text: str) -> vit.ViTConfig:
        return train_fsdp.model_config(train_fsdp.parse_flags(["--model", text]))

    assert config(OWN) == SHAPE
    assert all(config(name) == row for name, row in vit.MODELS.items())
    assert config("5b:gated_mlp=0") == replace(vit.MODELS["5b"], gated_mlp=False)


def test_it_is_trained_saved_and_planned(tmp_path, capsys):
    argv = ["--model", OWN, "--img-size", "32", "--device", "cpu", "--precision", "fp32"]
    argv += ["--batch", "2", "--workers", "0"]
    out = tmp_path / "out"
    assert train_fsdp.main([*argv, "--mode", "full_shard", "--steps", "1", "--out", str(out)]) == 0
    count = sum(p.numel() for p in vit.ViTMAE(SHAPE, 32).parameters())
    state = vit.ViTMAE(SHAPE, 32).state_dict()
    start, _, _ = read_log(out / "log.jsonl")
    assert start["params"] == count
    weights, _ = checkpoint.read_weights(out)
    assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in state.items()}
    capsys.readouterr()
    assert plan.main([*argv, "--world-size", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["params"] == count
