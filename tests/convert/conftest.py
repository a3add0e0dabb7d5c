import pytest


@pytest.fixture(autouse=True)
def _unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What graphs take is not measured, in three processes for each conversion: that is for test_measure.py."""
    measure = pytest.importorskip("memopt.convert.measure")
    monkeypatch.setattr(measure, "_measured", lambda files, feeds: None)
