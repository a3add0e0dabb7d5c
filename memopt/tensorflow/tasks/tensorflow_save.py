"""Write a StableHLO module and its weights as a SavedModel."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla


def run(request: dict[str, Any], folder: Any) -> dict[str, Any]:
    """Write the folder `saved_model`, whose one signature is `serving_default`.

    The request: `version` and `platforms` of `module.bin`; `arguments`, one entry each: "variable" or "input", the name
    of a tensor of `variables` or of an input, and the dtype that the module takes it in; `inputs` and `outputs`: name,
    dtype and shape, null where it varies.
    """
    module = tf.Module(name="memopt")
    arrays = folder.read("variables")
    # As a list, so that their names may be any.
    module.weights = [tf.Variable(array, trainable=False, name=name) for name, array in arrays.items()]
    places = {name: place for place, name in enumerate(arrays)}
    code = (folder.path / "module.bin").read_bytes()
    kinds = [tf.as_dtype(entry["dtype"]) for entry in request["outputs"]]
    shapes = [tf.TensorShape(entry["shape"]) for entry in request["outputs"]]

    def call(**inputs: Any) -> dict[str, Any]:
        arguments = [
            tf.cast(module.weights[places[name]] if kind == "variable" else inputs[name], tf.as_dtype(dtype))
            for kind, name, dtype in request["arguments"]
        ]
        results = xla.call_module(
            arguments,
            version=request["version"],
            module=code,
            Tout=kinds,
            Sout=shapes,
            platforms=request["platforms"],
        )
        return {entry["name"]: result for entry, result in zip(request["outputs"], results, strict=True)}

    specs = {
        entry["name"]: tf.TensorSpec(entry["shape"], tf.as_dtype(entry["dtype"]), name=entry["name"])
        for entry in request["inputs"]
    }
    module.serve = tf.function(call, jit_compile=True)
    concrete = module.serve.get_concrete_function(**specs)
    tf.saved_model.save(module, str(folder.path / "saved_model"), signatures={"serving_default": concrete})
    return {"tensorflow": tf.__version__}
