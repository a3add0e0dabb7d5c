"""The monitor's page in a real browser: no error, nothing fetched, readable in light, dark and narrow."""

import pytest
import torch

import memopt
from memopt.monitoring.page import monitor_view
from tests.monitoring.loops import trained
from tests.report.chromium import browser


@pytest.fixture(scope="module")
def monitor():
    kept = []
    with pytest.raises(torch.OutOfMemoryError), memopt.monitor(device="cpu") as found:
        trained(8, lambda out, loss: kept.append(out))
        raise torch.OutOfMemoryError("tried to allocate </script> 2 GiB")
    return found


def test_the_view_adds_up(monitor):
    view = monitor_view(monitor)
    assert [step[0] for step in view["steps"]] == list(range(8))
    *parts, (total, size) = view["breakdown"]
    assert total == "total" and size == sum(part for _, part in parts) == monitor.out_of_memory.filled.bytes
    titles = ["Leaks", "Modules", "What filled the device as memory ran out", "Steps"]
    assert [table["title"] for table in view["tables"]] == titles
    assert view["notes"][0].startswith("Memory ran out in step 8") and view["cards"][-1]["tone"] == "bad"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1280, 500])
def test_opens_in_light_dark_and_narrow(monitor, tmp_path, dark, width):
    monitor.save(tmp_path / "monitor.html")
    with browser() as chromium:
        chromium.open(tmp_path / "monitor.html", dark=dark, width=width)
        assert chromium.run("document.documentElement.scrollWidth <= innerWidth")
        assert "2 GiB" in chromium.text(".note")
        chromium.run("document.querySelector('#steps svg').focus()")
        chromium.press("End")
        assert chromium.text("#steps .readout").startswith("step 7: ")
        chromium.press("Home")
        assert chromium.text("#steps .readout").startswith("step 0: ")
        assert chromium.troubles == []
        chromium.screenshot(tmp_path / "page.png", whole=True)
