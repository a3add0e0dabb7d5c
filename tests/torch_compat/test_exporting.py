"""Composite operators of exported programs."""

import logging
import zipfile

import pytest
import torch
from torch import nn

from memopt.torch_compat.exporting import composites, load_program, written_out


class Net(nn.Module):
    def forward(self, x):
        return torch.ops.aten.silu(torch.ops.aten.layer_norm(x, [4]))


def targets(exported):
    return {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}


def test_composite_operators_are_written_out_and_others_kept():
    exported = torch.export.export(Net(), (torch.ones(2, 4),))
    table = composites()
    assert torch.ops.aten.layer_norm.default in table
    out = written_out(exported, table)
    assert "aten.native_layer_norm.default" in targets(out) and "aten.layer_norm.default" not in targets(out)
    assert "aten.silu.default" in targets(out), "an operator that is none of several is kept"
    x = torch.arange(8.0).reshape(2, 4)
    torch.testing.assert_close(out.module()(x), Net()(x))


def test_a_broken_archive_is_an_error_that_tells_why_and_nothing_is_logged(tmp_path):
    said = []
    handler = logging.Handler()
    handler.emit = said.append
    path, broken = tmp_path / "sound.pt2", tmp_path / "broken.pt2"
    torch.export.save(torch.export.export(Net(), (torch.ones(2, 4),)), path)
    with zipfile.ZipFile(path) as sound, zipfile.ZipFile(broken, "w") as archive:
        for name in sound.namelist():
            if not name.endswith("archive_format"):
                archive.writestr(name, sound.read(name))
    log = logging.getLogger("torch.export")
    log.addHandler(handler)
    try:
        with pytest.raises(RuntimeError, match="archive_format"):
            load_program(broken)
        assert said == []
        assert targets(load_program(path)) >= {"aten.silu.default"}
        log.warning("later")
    finally:
        log.removeHandler(handler)
    assert [record.getMessage() for record in said] == ["later"]
