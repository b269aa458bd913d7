"""The classifier compiled and exported: the same numbers."""

import pytest
import torch
from published import TINY, TINY_SEED, error, golden_input, published_state, tiny_golden
from slow_reference import SlowNaLaFormer

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig
from nalaformer_hf.convert import from_published

SIZE = "2x3x64x48"
GATE = 5e-6


@pytest.fixture
def model() -> NaLaForImageClassification:
    return from_published(published_state(SlowNaLaFormer(**TINY), TINY_SEED))


class Logits(torch.nn.Module):
    def __init__(self, model: NaLaForImageClassification):
        super().__init__()
        self.model = model
        self.eval()

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values).logits


def test_exported_program(model):
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(
        Logits(model), (golden_input(SIZE),), dynamic_shapes={"pixel_values": {0: batch}}
    )
    for images in (golden_input(SIZE), golden_input(SIZE)[:1]):
        expected = tiny_golden()[f"logits/{SIZE}.f64"][: len(images)]
        assert error(program.module()(images), expected) <= GATE


def test_onnx_under_onnxruntime(model, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    file = tmp_path / "model.onnx"
    torch.onnx.export(
        Logits(model),
        (golden_input(SIZE),),
        file,
        input_names=["pixel_values"],
        output_names=["logits"],
        dynamic_shapes={"pixel_values": {0: torch.export.Dim("batch", min=1, max=64)}},
        dynamo=True,
        verbose=False,
    )
    session = onnxruntime.InferenceSession(file)
    for images in (golden_input(SIZE), golden_input(SIZE)[:1]):
        (logits,) = session.run(None, {"pixel_values": images.numpy()})
        expected = tiny_golden()[f"logits/{SIZE}.f64"][: len(images)]
        assert error(torch.from_numpy(logits), expected) <= GATE


@pytest.mark.slow
@pytest.mark.needs_compiler
def test_compiled_training_step():
    config = NaLaVisionConfig(
        hidden_sizes=[8, 12],
        num_attention_heads=[1, 3],
        depths=[1, 1],
        mlp_ratios=[2.0] * 2,
        mixers=["linear", "softmax"],
        layer_scale_init_values=[1.0] * 2,
        drop_path_rate=0.0,
    )
    model, images = NaLaForImageClassification(config), torch.randn(2, 3, 40, 48)
    expected = model(images).logits
    expected.square().sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    logits = torch.compile(model, fullgraph=True)(images).logits
    logits.square().sum().backward()
    assert error(logits, expected) <= GATE
    largest = {
        name.rpartition(".")[0]: grad.abs().max() for name, grad in gradients.items() if "weight" in name
    }
    for name, weight in model.named_parameters():
        # Before a BatchNorm a bias has no gradient but rounding, so its weight's gradient is the measure.
        scale = largest.get(name.rpartition(".")[0], gradients[name].abs().max())
        assert (weight.grad - gradients[name]).abs().max() <= 1e-4 * scale, name
