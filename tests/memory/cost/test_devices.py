"""Devices by name, and figures that cannot be mixed up."""

import pytest

from memopt.memory.cost.devices import CPU, DEVICES, find, typical


@pytest.mark.parametrize("name", DEVICES)
def test_figures_are_plausible(name):
    device = DEVICES[name]
    assert device.name == name and device.title.startswith("NVIDIA ") and device.type == "cuda"
    assert set(device.flops) == {"float16", "bfloat16", "tf32", "float32", "float64"}
    assert device.flops["float64"] <= device.flops["float32"] <= device.flops["tf32"] <= device.flops["float16"]
    # From a T4 to a B200: a slipped power of ten falls out.
    assert 6e13 < device.flops["float16"] < 3e15 and 8e12 < device.flops["float32"] < 1.2e14
    assert 3e11 <= device.bytes_per_second <= 8e12 and 15e9 < device.memory_bytes < 200e9


def test_known_figures():
    assert DEVICES["h100"].flops["bfloat16"] == 989.4e12 and DEVICES["h100"].bytes_per_second == 3350e9
    assert DEVICES["a100"].flops["tf32"] == 156e12 and DEVICES["a100"].memory_bytes == 80 * 10**9
    assert DEVICES["v100"].flops["bfloat16"] == DEVICES["v100"].flops["float32"] == 15.7e12
    assert DEVICES["rtx4090"].flops["float16"] == 165.2e12


@pytest.mark.parametrize("name", ["h100", "H100", " h100 ", "H-100"])
def test_names_are_read_generously(name):
    assert find(name) is DEVICES["h100"]
    assert find("RTX 4090") is DEVICES["rtx4090"] and find("a100_40GB") is DEVICES["a100-40gb"]


@pytest.mark.parametrize("name", ["", "h1000", "tpu", "cuda"])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="known are b200, h200, h100") as caught:
        find(name)
    assert all(known in str(caught.value) for known in DEVICES) and "\n" not in str(caught.value)


def test_what_is_typical():
    assert typical("cpu") is CPU and typical("meta") is CPU and typical("cuda") is DEVICES["a100"]
