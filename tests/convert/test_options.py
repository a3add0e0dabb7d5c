"""What a conversion may be asked for, and what is refused in one line."""

import pytest

from memopt.convert.options import Options, make_options
from memopt.convert.rewriting import TARGETS, chosen_passes


def names(passes):
    return [item.name for item in passes]


@pytest.mark.parametrize("target", TARGETS)
def test_all_passes_of_the_target_unless_told_otherwise(target):
    options = make_options(target=target)
    assert names(options.pipeline) == names(Options(target=target).pipeline) == names(chosen_passes(target=target))
    assert not options.repeat and make_options(target=target, level=3).repeat
    assert not make_options(level=0).pipeline
    assert 0 < len(make_options(level=1).pipeline) < len(make_options().pipeline)


def test_passes_by_name_keep_the_order_asked_for():
    first, second, *_ = names(chosen_passes())
    assert names(make_options(passes=[second, first]).pipeline) == [second, first]
    assert first not in names(make_options(skip=[first]).pipeline)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_pass_for_float32_alone_is_left_out_where_precision_is_lowered(dtype):
    alone = [item.name for target in TARGETS for item in chosen_passes(target=target) if item.float32_only]
    assert alone
    for target in TARGETS:
        assert not set(alone) & set(names(make_options(target=target, dtype=dtype).pipeline))
        assert names(make_options(target=target, dtype="fp32").pipeline) == names(chosen_passes(target=target))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"opset": 17}, "opset is 17: use 18 to 25"),
        ({"opset": 26}, "opset is 26: use 18 to 25"),
        ({"opset": "20"}, "opset is '20': use 18 to 25"),
        ({"target": "tensorrt"}, "unknown target 'tensorrt': use one of standard, "),
        ({"dtype": "float16"}, "unknown dtype 'float16': use fp32, fp16 or bf16"),
        ({"quantize": "int4"}, "cannot quantize to 'int4': use int8"),
        ({"dtype": "fp16", "quantize": "int8"}, "dtype and quantize do not go together"),
        ({"tolerance": 0.1}, "a tolerance goes with dtype or quantize"),
        ({"tolerance": 0.1, "dtype": "fp32"}, "a tolerance goes with dtype or quantize"),
        ({"tolerance": 0.0, "dtype": "fp16"}, "tolerance is 0.0: it is a share between 0 and 1"),
        ({"tolerance": float("nan"), "dtype": "fp16"}, "tolerance is nan"),
        ({"level": 4}, "level is 4: use 0, 1, 2 or 3"),
        ({"passes": ["fuse_nothing"]}, "fuse_nothing"),
        ({"skip": ["fuse_nothing"]}, "fuse_nothing"),
    ],
)
def test_what_is_not_understood(options, message):
    with pytest.raises(ValueError) as caught:
        make_options(**options)
    assert message in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("opset", [None, 18, 25])
def test_opsets_that_are_written(opset):
    assert make_options(opset=opset).opset == opset
