"""One thread, one seed and an own cache: results must not depend on cores, the order of tests, or a user's files."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _deterministic() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEMOPT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        patch.delenv("MEMOPT_CACHE", raising=False)
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
