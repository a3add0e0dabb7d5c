import pytest


@pytest.fixture(autouse=True)
def _costs_by_figures() -> None:
    """Here operators are timed."""
