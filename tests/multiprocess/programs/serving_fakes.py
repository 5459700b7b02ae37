"""The service of a directory with replicas that need no TensorFlow; options as JSON."""

import asyncio
import json
import logging
import sys
from pathlib import Path

from tfdist.serving.supervisor import ServeOptions, ServiceSupervisor

MODULES = {
    "front": "tfdist.serving.front",
    "replica": "tests.multiprocess.programs.fake_replica",
}


async def main(directory: str, told: dict[str, object]) -> None:
    ports = {"rest_port": 0, "grpc_port": 0}
    options = ServeOptions(directory=Path(directory), **ports, **told)  # type: ignore[arg-type]
    supervisor = ServiceSupervisor(options, modules=MODULES)
    print(supervisor.rest_address, supervisor.grpc_address, flush=True)
    await supervisor.run()


logging.basicConfig(level=logging.INFO, format="%(message)s")
asyncio.run(main(sys.argv[1], json.loads(sys.argv[2])))
