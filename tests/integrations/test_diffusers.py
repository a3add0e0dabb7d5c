"""Pipelines of diffusers with a stand-in as their network: the same images, and what they save can be read."""

import pytest
import torch

import memopt

pytest.importorskip("diffusers", reason="make test-integrations installs it")
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel

pytestmark = pytest.mark.filterwarnings("ignore")  # the library's own


def unet():
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        layers_per_block=1,
        norm_num_groups=4,
    )


def images_of(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    found = pipeline(batch_size=2, num_inference_steps=2, generator=generator, output_type="np").images
    return torch.from_numpy(found)


def test_a_pipeline_trains_averages_samples_and_is_saved_as_without_memopt(tmp_path):
    found = []
    for budget in (None, "20MB"):
        model = unet()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if budget is not None:
            model = memopt.compile(model, budget, optimizer=optimizer, backend="aten")
        average, scheduler = EMAModel(model.parameters(), decay=0.5), DDPMScheduler()
        torch.manual_seed(1)
        for _ in range(2):
            images, noise = torch.randn(2, 2, 3, 8, 8)
            steps = torch.randint(0, 1000, (2,))
            loss = (model(scheduler.add_noise(images, noise, steps), steps).sample - noise).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
        average.copy_to(model.parameters())
        pipeline = DDPMPipeline(model.eval(), scheduler)
        found.append(images_of(pipeline))
        pipeline.save_pretrained(tmp_path / str(budget))
        found.append(images_of(DDPMPipeline.from_pretrained(tmp_path / str(budget))))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-4, atol=1e-4)
