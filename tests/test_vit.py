"""vit.py against hand-made numbers and against transformers' implementation."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import convert
import vit

# name: (timm's count with positions of 224 px and 1000 classes, trained, published in millions)
COUNTS = {
    "base": (86_567_656, 111_655_680, 87),
    "huge": (632_045_800, 656_613_964, 635),
    "1b": (909_449_704, 933_827_148, 914),
    "3b": (3_051_443_944, 3_074_867_788, 3067),
    "5b": (5_349_481_192, 5_373_667_916, 5349),
    "15b": (14_643_786_520, 14_665_553_484, 14720),
}


def on_meta(config: vit.ViTConfig, img_size: int = 224) -> vit.ViTMAE:
    with torch.device("meta"):
        return vit.ViTMAE(config, img_size)


def small() -> vit.ViTMAE:
    """A model of a few thousand parameters with random weights that are not the initial ones."""
    config = vit.ViTConfig(48, 2, 96, 4, 4, decoder_width=32, decoder_depth=2, decoder_heads=2)
    model = vit.ViTMAE(config, 24)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    return model


# --- sizes


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    timm_count, trained, published = COUNTS[name]
    model = on_meta(vit.MODELS[name])
    counts = {n: p.numel() for n, p in model.named_parameters()}
    mine = sum(v for n, v in counts.items() if not n.startswith(("decoder", "mask_token")))
    head = 1000 * vit.MODELS[name].width + 1000
    assert mine + model.pos_embed.numel() + head == timm_count
    assert sum(counts.values()) == trained
    assert timm_count == pytest.approx(published * 1e6, rel=0.015)


@pytest.mark.parametrize("name", ["tiny", "base", "5b"])  # plain and gated
def test_flops_agree_with_torchs_counter(name):
    config = replace(vit.MODELS[name], depth=2, decoder_depth=2)
    model = on_meta(config)
    images = torch.empty(2, 3, 224, 224, device="meta")
    # torch counts fused attention's recomputation too, so let it see the plain matrix products
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss, _, _ = model(images, 0.5)
        loss.backward()
    expected = counter.get_total_flops() / 2
    assert vit.flops_per_image(config, 224, 0.5) == pytest.approx(expected, rel=0.01)


# --- masking and loss


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="not a multiple of the patch size 14"):
        vit.ViTMAE(vit.MODELS["huge"], 220)
    with pytest.raises(ValueError, match=r"of shape .*24, 24\), not .*28, 28"):
        small()(torch.zeros(1, 3, 28, 28))
    for ratio in (1.0, -0.1, 0.99):
        with pytest.raises(ValueError, match=f"mask ratio {ratio} "):
            vit.count_visible(16, ratio)


@pytest.mark.parametrize(
    ("patches", "ratio", "kept"),
    [(196, 0.75, 49), (256, 0.75, 64), (100, 0.9, 10), (10, 0.3, 7), (196, 0.9, 19), (16, 0, 16)],
)
def test_visible_patches_do_not_lose_one_to_rounding(patches, ratio, kept):
    assert vit.count_visible(patches, ratio) == kept


def test_the_smallest_noise_stays_visible():
    noise = torch.tensor([[0.3, 0.1, 0.9, 0.2], [0.5, 0.6, 0.1, 0.7]], dtype=torch.float64)
    keep, mask = vit.random_masking(noise, 0.5)
    assert keep.tolist() == [[1, 3], [2, 0]]
    assert mask.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]] and mask.dtype == torch.float32


def test_loss_is_fp32_under_autocast_and_the_mean_of_the_images_losses():
    """Without noise, masks are random and differ by image."""
    model = small()
    images = torch.randn(4, 3, 24, 24)
    with torch.autocast("cpu", torch.bfloat16):
        loss, pred, mask = model(images)
    assert loss.dtype == torch.float32 and pred.dtype == torch.bfloat16
    assert mask.sum(1).tolist() == [27] * 4 and len({tuple(m.tolist()) for m in mask}) > 1
    each = vit.loss_per_image(images, pred, mask, 4, norm_pix_loss=True)
    assert each.shape == (4,) and each.dtype == torch.float64
    assert each.mean().item() == pytest.approx(loss.item(), rel=1e-6)
    target = vit.reconstruction_target(vit.patchify(images[2:3], 4), norm_pix_loss=True)
    errors = (pred[2].double() - target[0].double())[mask[2].bool()] ** 2
    assert each[2].item() == pytest.approx(errors.mean().item(), rel=1e-6)


# --- initial values


def test_initial_values_do_not_depend_on_device_or_order():
    config = vit.MODELS["tiny"]
    model = vit.ViTMAE(config, 32)
    meta = on_meta(config, 32)
    vit.initialize(model, seed=5)
    for name, p in reversed(list(meta.named_parameters())):
        assert torch.equal(vit.initial_value(config, name, p.shape, 5), model.get_parameter(name))
    for name, buffer in meta.named_buffers():
        assert torch.equal(vit.initial_value(config, name, buffer.shape), model.get_buffer(name))
    again = vit.initial_value(config, "blocks.0.attn.qkv.weight", torch.Size([576, 192]), 6)
    assert not torch.equal(again, model.blocks[0].attn.qkv.weight)
    assert not torch.equal(model.blocks[0].attn.qkv.weight, model.blocks[1].attn.qkv.weight)


def test_initial_values_follow_the_release():
    config = vit.MODELS["tiny"]
    for name, shaped in on_meta(config, 32).named_parameters():
        p = vit.initial_value(config, name, shaped.shape)
        assert p.shape == shaped.shape
        if name in ("cls_token", "mask_token"):
            assert 0.015 < p.std() < 0.025
        elif name == "patch_embed.proj.bias":  # nn.Conv2d's own: uniform within 1 / sqrt(3 x 8 x 8)
            assert 0.9 < p.abs().max() * math.sqrt(192) <= 1
        elif name.endswith("bias"):
            assert (p == 0).all()
        elif p.ndim == 1:
            assert (p == 1).all()
        else:
            fan_out, *inputs = p.shape
            fan_in = math.prod(inputs)
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert 0.99 < p.abs().max() / bound <= 1
            assert p.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)


# --- an independent implementation


@pytest.mark.parametrize("norm_pix", [True, False])
def test_equal_to_transformers(norm_pix, tmp_path):
    """Position table, loss, predictions and gradients with one masking order."""
    from benchmarks import step

    mine = small()
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, 3, 24, 24, generator=generator)
    noise = torch.rand(2, 36, generator=generator)
    theirs = step.transformers_mae(mine.config, 24)
    mine.norm_pix_loss = theirs.config.norm_pix_loss = norm_pix
    made = theirs.vit.embeddings
    made.patch_embeddings.projection._is_hf_initialized = False
    made.position_embeddings._is_hf_initialized = False
    made.initialize_weights()  # else it leaves the positions at zero
    torch.testing.assert_close(mine.pos_embed, made.position_embeddings.data, atol=1e-6, rtol=0)
    with torch.no_grad():
        for p in theirs.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)
    theirs.save_pretrained(tmp_path)
    mine.load_state_dict(convert.read_model(tmp_path).weights)
    loss, pred, mask = mine(images, 0.75, noise)
    out = theirs(pixel_values=images, noise=noise)
    assert loss.item() == pytest.approx(out.loss.item(), rel=1e-5)
    assert torch.equal(mask, out.mask.float())
    torch.testing.assert_close(pred, out.logits, atol=1e-5, rtol=1e-5)
    loss.backward()
    out.loss.backward()
    for p in theirs.parameters():
        p.data = p.data if p.grad is None else p.grad
    theirs.save_pretrained(tmp_path)
    gradients = convert.read_model(tmp_path).weights
    expected = {name: p.grad for name, p in mine.named_parameters()}
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5)
