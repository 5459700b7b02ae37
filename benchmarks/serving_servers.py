"""``.venv/bin/python serving_servers.py KIND SAVED_MODEL PORT [GRPC_PORT]``: a peer that serves.

KIND is ``fastapi``, ``litserve`` or ``ray``. All take TensorFlow Serving's row form of a model with
one input, read JSON with orjson where they let us, call the signature of the SavedModel with one
thread, and batch up to 32 examples: Ray without waiting for more, LitServe with a wait of 2 ms.
Runs until SIGTERM.
"""

import os
import signal
import sys
import threading
from typing import Any

BATCH = 32
QUIET = {"log_level": "error", "access_log": False}


class Model:
    """The compiled signature of a SavedModel with one input and one output."""

    def __init__(self, directory: str) -> None:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        self._constant = tf.constant
        self._loaded = tf.saved_model.load(directory)
        self._call = self._loaded.signatures["serving_default"]
        (self.input,) = self._call.structured_input_signature[1]
        (self.output,) = self._call.structured_outputs

    def __call__(self, rows: Any) -> Any:
        """Return the output of rows, as NumPy's arrays; float32."""
        import numpy as np

        found = self._call(**{self.input: self._constant(np.asarray(rows, np.float32))})
        return found[self.output].numpy()


def fastapi(directory: str, port: int) -> None:
    """One process; the call is in the event loop, as a thread of its own takes longer."""
    import orjson
    import uvicorn
    from fastapi import FastAPI, Request, Response

    model = Model(directory)
    app = FastAPI()

    @app.post("/predict")
    async def predict(request: Request) -> Response:
        rows = orjson.loads(await request.body())["instances"]
        found = orjson.dumps({"predictions": model(rows)}, option=orjson.OPT_SERIALIZE_NUMPY)
        return Response(found, media_type="application/json")

    uvicorn.run(app, port=port, loop="uvloop", http="httptools", **QUIET)


def litserve(directory: str, port: int) -> None:
    """Its HTTP process and a worker; its queue over ZeroMQ, which it has for many requests."""
    import serving_litserve

    serving_litserve.main(directory, port, batch=BATCH)


def ray(directory: str, port: int, grpc_port: int) -> None:
    """A node of one core without a dashboard; a replica with `serve.batch`, HTTP and gRPC proxy."""
    # What it offers for throughput, apart from going round the proxies; a proxy that loads the
    # stubs, and TensorFlow with them, takes longer than the 5 s that it is given.
    os.environ |= {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"
    import orjson
    import ray as ray_
    from ray import serve
    from ray.serve.config import gRPCOptions
    from ray.serve.schema import LoggingConfig
    from starlette.requests import Request
    from starlette.responses import Response

    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    ray_.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="error")
    servicer = "tensorflow_serving.apis.prediction_service_pb2_grpc"
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        grpc_options=gRPCOptions(
            port=grpc_port,
            grpc_servicer_functions=[f"{servicer}.add_PredictionServiceServicer_to_server"],
        ),
        logging_config=quiet,
    )

    @serve.deployment(max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.5})
    class Served:
        def __init__(self) -> None:
            import numpy as np
            import tensorflow as tf

            self.np, self.tf = np, tf
            self.model = Model(directory)

        @serve.batch(max_batch_size=BATCH, batch_wait_timeout_s=0.0)
        async def answers(self, inputs: list[Any]) -> list[Any]:
            return list(self.model(self.np.stack(inputs)))

        async def __call__(self, request: Request) -> Response:
            rows = orjson.loads(await request.body())["instances"]
            found = await self.answers(self.np.asarray(rows[0], self.np.float32))
            body = orjson.dumps({"predictions": [found]}, option=orjson.OPT_SERIALIZE_NUMPY)
            return Response(body, media_type="application/json")

        async def Predict(self, request: Any) -> Any:
            from tensorflow_serving.apis import predict_pb2

            (tensor,) = request.inputs.values()
            shape = [dim.size for dim in tensor.tensor_shape.dim]
            rows = self.np.frombuffer(tensor.tensor_content, self.np.float32).reshape(shape)
            found = await self.answers(rows[0])
            answer = predict_pb2.PredictResponse()
            made = answer.outputs[self.model.output]
            made.dtype = 1
            for size in (1, *found.shape):
                made.tensor_shape.dim.add().size = size
            made.float_val.extend(found.tolist())
            return answer

    serve.run(Served.bind(), name="m", route_prefix="/predict", logging_config=quiet)
    print("ready", flush=True)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    stop.wait()
    serve.shutdown()
    ray_.shutdown()


KINDS = {"fastapi": fastapi, "litserve": litserve, "ray": ray}

if __name__ == "__main__":
    kind, directory, *ports = sys.argv[1:]
    KINDS[kind](directory, *map(int, ports))
