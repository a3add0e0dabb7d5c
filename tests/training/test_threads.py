"""A loop in another thread than the main one: it ends as it should, and the report says what was not seen there."""

import subprocess
import sys

LOOP = """
import threading
import torch
import memopt

model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
run = memopt.compile(model, "1GB", optimizer=optimizer, backend="aten")

def train():
    for _ in range(3):
        run(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

thread = threading.Thread(target=train)
thread.start()
thread.join()
print(*run.report.notes)
"""


def test_a_process_whose_thread_has_trained_within_bytes_ends_well():
    found = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "is not seen in another thread than the main one" in found.stdout
