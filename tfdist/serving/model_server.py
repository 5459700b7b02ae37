"""The files that TensorFlow Serving takes beside the versions: which models, and how it batches.

    docker run -v "$PWD/served:/models" tensorflow/serving --model_config_file=/models/models.config
        --enable_batching --batching_parameters_file=/models/batching.config

https://github.com/tensorflow/serving/blob/master/tensorflow_serving/g3doc/serving_config.md
"""

from __future__ import annotations

from pathlib import Path

from tfdist.files import write_text
from tfdist.serving.versions import find_models

MODELS = "models.config"
BATCHING = "batching.config"
_MOUNTED_AT = "/models"  # where the image of TensorFlow Serving has models
_BATCHING = """\
# Change it as you like: an export writes it where there is none.
max_batch_size { value: 32 }
batch_timeout_micros { value: 0 }
max_enqueued_batches { value: 1000 }
"""


def write_configs(directory: Path) -> None:
    """Write the list of all models in a directory, and once how requests are batched.

    Raises OSError.
    """
    blocks = [
        "  config {\n"
        f'    name: "{name}"\n'
        f'    base_path: "{_MOUNTED_AT}/{name}"\n'
        '    model_platform: "tensorflow"\n'
        "  }\n"
        for name in find_models(directory)
    ]
    write_text(directory / MODELS, f"model_config_list {{\n{''.join(blocks)}}}\n")
    if not (directory / BATCHING).exists():
        write_text(directory / BATCHING, _BATCHING)
