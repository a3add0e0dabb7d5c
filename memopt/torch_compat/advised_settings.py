"""Settings that torch's own errors name, loaded so that users find them: `torch._functorch.config`; tried on 2.13."""

import torch._functorch.config  # noqa: F401  (6 ms)
