"""A buffer's column that is written is read behind the write, whatever kernels Inductor merges with the reader."""

import copy

import pytest
import torch
from torch import nn

import memopt
from tests.inductor.test_peak_lower_bound import needs_compiler

COLUMNS = (lambda b: b.unbind(1)[0], lambda b: b.chunk(4, 1)[1], lambda b: b[:, 2], lambda b: b.diagonal())


class Column(nn.Module):
    def __init__(self, column):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("kept", torch.randn(12, 4))
        self.column = column

    def forward(self, x):
        y = self.norm(x)
        self.column(self.kept).add_(1)
        read = x + self.kept
        y[1:].add_(y[1:])
        return read[6:], y


@pytest.mark.quick("<lambda>-True3")
@needs_compiler
@pytest.mark.parametrize(("column", "training"), [(COLUMNS[0], False), *((column, True) for column in COLUMNS)])
def test_a_written_column_is_read_behind_the_write(column, training):
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = Column(column)
    model = copy.deepcopy(plain)
    x = torch.randn(12, 4)
    run = memopt.compile(model, backend="inductor")
    with torch.set_grad_enabled(training):
        torch.testing.assert_close(run(x), plain(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
