"""What torch's errors say to set can be set as soon as torch and memopt are imported."""

import subprocess
import sys


def test_a_setting_that_torch_s_error_names_is_there():
    """Its line on `retain_graph=True` says to set this; `import torch` alone does not load it."""
    code = "import torch, memopt; torch._functorch.config.donated_buffer = False"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
