import pytest


@pytest.fixture(autouse=True)
def _brief_searches() -> None:
    """Here searches are asked for all that they find."""
