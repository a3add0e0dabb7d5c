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
