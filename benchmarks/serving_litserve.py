"""The LitServe server of `serving_servers.py`: its processes import the class from a module."""

from typing import Any

import litserve as ls
import numpy as np
from fastapi import Request
from serving_servers import Model


class Api(ls.LitAPI):
    """The model in LitServe's steps; it has read the JSON before, by Python's own parser."""

    def __init__(self, directory: str, **options: Any) -> None:
        super().__init__(**options)
        self.directory = directory

    def setup(self, device: str) -> None:
        """Load the model, in the worker."""
        self.model = Model(self.directory)

    def decode_request(self, request: Request) -> Any:
        """Return the example of a request."""
        return np.asarray(request["instances"][0], np.float32)

    def batch(self, inputs: Any) -> Any:
        """Return examples as a batch."""
        return np.stack(inputs)

    def predict(self, x: Any) -> Any:
        """Return the outputs of a batch."""
        return self.model(x)

    def unbatch(self, output: Any) -> Any:
        """Return the outputs one by one."""
        return list(output)

    def encode_response(self, output: Any) -> Any:
        """Return what is sent as JSON."""
        return {"predictions": [output.tolist()]}


def main(directory: str, port: int, *, batch: int) -> None:
    """Serve until SIGTERM. With a timeout of 0 the worker spins, which takes the core from HTTP."""
    api = Api(directory, max_batch_size=batch, batch_timeout=0.002)
    server = ls.LitServer(api, accelerator="cpu", workers_per_device=1, fast_queue=True)
    server.run(
        host="127.0.0.1",
        port=port,
        num_api_servers=1,
        generate_client_file=False,
        log_level="error",
        access_log=False,
    )
