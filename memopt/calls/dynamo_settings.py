"""The settings under which Dynamo traces a model for memopt, and its errors in words for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from memopt.capture.export import NotTracedError
from memopt.compilation.session import Session
from memopt.errors import first_line
from memopt.torch_compat.absent_attributes import absent_attributes
from memopt.torch_compat.aot_autograd import checkpoints_draw
from memopt.torch_compat.bounded_deques import bounded_deques
from memopt.torch_compat.changing_numbers import ChangingNumbers
from memopt.torch_compat.checked_results import keep_checks
from memopt.torch_compat.class_names import class_names
from memopt.torch_compat.compared_modules import compared_modules_guarded
from memopt.torch_compat.dynamo import NO_WEAK_REFERENCES, functions_keep_backward
from memopt.torch_compat.dynamo import dynamo_settings as torch_settings
from memopt.torch_compat.dynamo_errors import (
    BackendCompilerFailed,
    FailOnRecompileLimitHit,
    TorchDynamoException,
    TorchRuntimeError,
    is_tracers_own,
    place_in_model,
)
from memopt.torch_compat.fixed_comparisons import fixed_comparisons
from memopt.torch_compat.folded_errors import folded_errors_raise
from memopt.torch_compat.formatted_keys import formatted_keys
from memopt.torch_compat.function_outputs import outputs_keep_gradients
from memopt.torch_compat.gradients_let_go import let_gradients_go
from memopt.torch_compat.logging_calls import deferred_logging
from memopt.torch_compat.no_outputs import none_has_no_gradient
from memopt.torch_compat.out_views import out_views_copied
from memopt.torch_compat.random_objects import own_random_objects
from memopt.torch_compat.recurrent_calls import RECURRENT_CALLS
from memopt.torch_compat.replaced_calls import replaced_calls
from memopt.torch_compat.static_shapes import Varying, static_shapes, varying_shapes
from memopt.torch_compat.traceable import REPLACEMENTS

# What Dynamo fails at, by its words, and what to write instead.
_INSTEAD = {
    "Tensor must have a last dimension of size 2": "clone() the view before the branch",  # view_as_complex over a break
}
_APART = "move that line into a function under torch.compiler.disable"

# How many shapes and modes of one model are compiled before a call is refused.
_RECOMPILE_LIMIT = 256


def settings_of(
    session: Session, *, symbolic: bool = False, varying: Varying | None = None
) -> contextlib.AbstractContextManager[None]:
    """`dynamo_settings` for a session's engine."""
    return dynamo_settings(session.numbers, symbolic=symbolic, varying=varying, recurrent=session.engine().recurrent)


@contextlib.contextmanager
def dynamo_settings(
    numbers: ChangingNumbers, *, symbolic: bool = False, varying: Varying | None = None, recurrent: bool = True
) -> Iterator[None]:
    """Let many shapes be compiled, refuse instead of falling back to eager, and raise memopt's own errors.

    With `symbolic` sizes are captured as symbols, as far as they may vary; where they are listed, those that are.
    Recurrent layers are captured, as one operator each, if `recurrent`.

    Guards look at every tensor: by the tags of dictionaries, as torch 2.11 has it by default, a weight whose `data` is
    of another dtype or layout now would not be noticed.
    """
    keep_checks()
    let_gradients_go()
    settings = torch_settings(
        use_recursive_dict_tags_for_guards=False,
        skip_nnmodule_hook_guards=False,  # a hook that is registered between two calls is run from then on
        skip_tensor_guards_with_matching_dict_tags=False,
        recompile_limit=_RECOMPILE_LIMIT,
        allow_rnn=recurrent,
        accumulated_recompile_limit=8 * _RECOMPILE_LIMIT,
        fail_on_recompile_limit_hit=True,
        optimize_ddp=False,  # it cuts the graph where buckets are full: gradients are handed over within backward
        use_numpy_random_stream=True,  # numpy.random draws from NumPy's own stream, and not from torch's
        **NO_WEAK_REFERENCES,
    )
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(settings)
            if varying is not None:
                stack.enter_context(varying_shapes(varying))
            elif not symbolic:
                stack.enter_context(static_shapes())
            seen = deferred_logging(), formatted_keys(), absent_attributes(), class_names()
            for each in (*seen, folded_errors_raise(), functions_keep_backward(), checkpoints_draw()):
                stack.enter_context(each)
            stack.enter_context(outputs_keep_gradients())
            stack.enter_context(fixed_comparisons())
            stack.enter_context(own_random_objects())
            stack.enter_context(bounded_deques())
            stack.enter_context(compared_modules_guarded())
            stack.enter_context(replaced_calls({**REPLACEMENTS, **RECURRENT_CALLS}))
            stack.enter_context(out_views_copied())
            stack.enter_context(none_has_no_gradient())
            stack.enter_context(numbers.followed())
            yield
    except BackendCompilerFailed as error:
        raise error.inner_exception from error.inner_exception.__cause__  # not from what Dynamo says around it
    except TorchRuntimeError as error:  # the model's own error, on inputs of a wrong shape, say, lies within Dynamo's
        first: BaseException = error
        while isinstance(first, TorchDynamoException) and (first.__cause__ or first.__context__):
            first = first.__cause__ or first.__context__ or first
        raise RuntimeError(str(first)) from error
    except FailOnRecompileLimitHit as error:
        number = numbers.often
        what = f"values of {number}: keep it in a tensor" if number else "input shapes: pad or bucket the inputs"
        raise RuntimeError(f"more than {_RECOMPILE_LIMIT} different {what}") from error
    except Exception as error:
        if not is_tracers_own(error):
            raise
        raise NotTracedError(_untraced(error, numbers)) from error


def _untraced(error: Exception, numbers: ChangingNumbers) -> str:
    """The line for a user whose model Dynamo fails at: where, what, and what to write instead."""
    place, line, name = place_in_model(error), first_line(error), numbers.model_name
    instead = next((way for words, way in _INSTEAD.items() if words in line), _APART)
    instead = f"keep {numbers.often} in a tensor (a buffer that fill_ changes)" if numbers.often else instead
    return f"{name} cannot be captured: torch's tracer fails{place and f' at {place}'} ({line}): {instead}"
