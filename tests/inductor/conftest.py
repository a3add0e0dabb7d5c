from tests.backends.conftest import _compiler, _fresh_dynamo

__all__ = ["_compiler", "_fresh_dynamo"]
