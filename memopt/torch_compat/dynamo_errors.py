"""What Dynamo raises, around errors of a model's and of a backend's too; tried on torch 2.11 and 2.13."""

from torch._dynamo.exc import BackendCompilerFailed as BackendCompilerFailed
from torch._dynamo.exc import FailOnRecompileLimitHit as FailOnRecompileLimitHit
from torch._dynamo.exc import TorchDynamoException as TorchDynamoException
from torch._dynamo.exc import TorchRuntimeError as TorchRuntimeError
