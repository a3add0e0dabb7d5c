"""The ONNX file that one engine makes of a model, for onnx_files.py: only that engine's packages are imported."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def make(name: str, engine: str, folder: Path, tiny: bool, verify: bool) -> None:
    target = folder / engine.replace("/", "_").replace(" ", "_") / "model.onnx"
    target.parent.mkdir(parents=True, exist_ok=True)
    source = folder / "torch" / "model.onnx"
    half = engine.endswith(" fp16")
    kind = engine.removesuffix(" fp16")
    if kind in ("torch", "memopt", "memopt/onnxruntime", "memopt/onnxruntime-cuda"):
        _made_by_us(name, kind, half, folder, target, tiny, verify)
    elif kind == "onnxsim":
        import onnx
        import onnxsim

        model, same = onnxsim.simplify(str(source))
        if not same:
            raise RuntimeError("onnxsim's own check fails")
        onnx.save(model, target)
    elif kind == "onnxslim":
        import onnxslim

        onnxslim.slim(str(source), str(target))
    elif kind == "onnxruntime":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(target)
        options.log_severity_level = 4
        onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    elif kind == "optimum":
        _optimum(source, target, folder)
    print("{}")


def _made_by_us(name: str, kind: str, half: bool, folder: Path, target: Path, tiny: bool, verify: bool) -> None:
    import logging
    import warnings

    import torch

    from benchmarks.onnx_models import build
    from memopt.convert.inputs import Dynamic, dynamic_axes

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    model, inputs = build(name, tiny)
    if kind == "torch":
        if not half:
            _write_expected(name, model, inputs, folder)
        if half:
            model = model.half()
            inputs = {key: value.half() if value.is_floating_point() else value for key, value in inputs.items()}
        axes = dynamic_axes(inputs, Dynamic())
        shapes = {key: dict.fromkeys(axes.get(key, {}), torch.export.Dim.DYNAMIC) or None for key in inputs}
        with torch.no_grad():
            torch.onnx.export(
                model, (), target, kwargs=inputs, dynamo=True, dynamic_shapes=shapes, external_data=False, verbose=False
            )
        return
    from memopt.convert.options import Options
    from memopt.convert.pipeline import convert_module

    options = Options(target=kind.partition("/")[2] or "standard", dtype="fp16" if half else None)
    if verify:
        convert_module(model, inputs, target, options=options)
        return
    from memopt.convert.capture import capture
    from memopt.convert.emit import emit, output_names
    from memopt.convert.lower import lowered
    from memopt.convert.write import staged
    from memopt.onnx import OnnxPassManager

    captured = capture(model, inputs, dynamic_axes(inputs, Dynamic()), required=False)
    with torch.no_grad():
        names = output_names(model(**inputs))
    graph, _ = OnnxPassManager(options.pipeline, verify=False).run(emit(captured, names))
    with staged(lowered(graph, options).model, target) as stage:
        stage.commit()


def _write_expected(name: str, model: Any, inputs: dict[str, Any], folder: Path) -> None:
    import numpy as np
    import torch

    from memopt.convert.emit import tensors

    single = {key: value[:1] for key, value in inputs.items()}
    with torch.no_grad():
        outputs = tensors(model(**single))
    np.savez(folder / "inputs.npz", **{key: value.numpy() for key, value in single.items()})
    np.savez(folder / "outputs.npz", *[value.numpy() for value in outputs])
    if hasattr(model, "config"):
        model.config.save_pretrained(folder)


def _optimum(source: Path, target: Path, folder: Path) -> None:
    if not (folder / "config.json").exists():
        raise RuntimeError("optimum optimizes models of transformers only")
    from optimum.onnxruntime import ORTOptimizer
    from optimum.onnxruntime.configuration import OptimizationConfig

    shutil.copy(folder / "config.json", source.parent / "config.json")
    optimizer = ORTOptimizer.from_pretrained(source.parent, file_names=["model.onnx"])
    optimizer.optimize(
        save_dir=target.parent, optimization_config=OptimizationConfig(optimization_level=2), file_suffix=""
    )
