"""What is kept on disk goes by versions, source, passes and place."""

import json

import torch

from memopt.passes.checkpoint import Checkpoint
from memopt.passes.chunk_loss import ChunkLoss
from memopt.step import keys


def test_what_was_made_by_another_version_or_source_goes_by_another_name(monkeypatch):
    plain = keys.versions()
    assert keys.versions() == plain
    assert json.loads(plain)["torch"] == torch.__version__
    with monkeypatch.context() as patch:
        patch.setattr(keys, "_source", lambda: "another")
        assert keys.versions() != plain
    monkeypatch.setattr("memopt.__version__", "0.0.9")
    assert keys.versions() != plain


def test_the_source_is_that_of_every_room(tmp_path, monkeypatch):
    package = tmp_path / "memopt"
    (package / "step").mkdir(parents=True)
    (tmp_path / "passes").mkdir()
    (package / "passes").symlink_to(tmp_path / "passes")
    monkeypatch.setattr(keys, "MEMOPT", f"{package}/")
    digests = set()
    for file in (package / "step" / "keys.py", tmp_path / "passes" / "inplace.py", tmp_path / "passes" / "fuse.py"):
        file.write_text("one")
        digests.add(keys._source.__wrapped__())
        file.write_text("two")
        digests.add(keys._source.__wrapped__())
    (package / "note.txt").write_text("not code")
    digests.add(keys._source.__wrapped__())
    assert len(digests) == 6


def test_passes_go_by_class_settings_and_order():
    one, other = Checkpoint(), ChunkLoss()
    assert keys.described([one, other]) == keys.described([Checkpoint(), ChunkLoss()])
    assert keys.described([one, other]) != keys.described([other, one])


def test_a_place_is_its_device():
    assert keys.place_of(torch.device("cpu")) == {"device": "cpu"}
