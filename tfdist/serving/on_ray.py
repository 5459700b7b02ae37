"""``tfdist.serve DIR --on ray``: the exported models as a deployment of Ray Serve.

Each replica loads all models and new versions from the directory. Each node must have the
directory. Only REST is available, with the front's addresses and messages. Needs ``ray[serve]``.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response

from tfdist.errors import TfdistError
from tfdist.serving import protocol
from tfdist.serving.model_versions import (
    Model,
    directory_name,
    find_models,
    find_versions,
    require_models,
)
from tfdist.serving.protocol import HTTP_STATUS, FrameKind, RequestError
from tfdist.serving.supervisor import ServeOptions

if TYPE_CHECKING:
    from tfdist.serving.model import ServedModel

_LOG = logging.getLogger("tfdist.serve")
_APPLICATION = "tfdist"
_SCAN_S = 1.0


class LoadedModel:
    """Model with the version that this process serves."""

    def __init__(self, name: str, directory: Path, options: ServeOptions) -> None:
        self.session: ServedModel | None = None
        self._name = name
        self._directory = directory
        self._sizes = options.batch_sizes
        self._ids = itertools.count(1)
        self.versions = Model(replicas_wanted=1)

    def look(self) -> None:
        """Load the newest version and replace the served version."""
        found = self.versions.scanned(find_versions(self._directory))
        self.versions, starts, _ = found.plan(self._ids)
        for one in starts:
            self._load(one.id, one.version)

    def _load(self, id: int, version: int) -> None:
        from tfdist.serving.model import ServedModel

        directory = self._directory / directory_name(self.versions.found[version])
        try:
            session = ServedModel(directory, self._name, batch_sizes=self._sizes)
            session.warm_up(directory)
            if find_versions(self._directory).get(version) != self.versions.found[version]:
                raise TfdistError("its files changed during loading")
        except Exception as error:
            reason = protocol.reason_of(error)
            _LOG.error("%s: version %d rejected: %s", self._name, version, reason)
            self.versions = self.versions.failed(id, reason)
            return
        self.session = session
        self.versions = self.versions.loaded(id)
        _LOG.info("%s: serving version %d", self._name, version)


class RayReplica:
    """Process that serves all models."""

    def __init__(self, options: ServeOptions) -> None:
        if not options.directory.is_dir():
            node = ray.util.get_node_ip_address()
            text = f"node {node} has no directory {options.directory}"
            raise TfdistError(f"{text}. Fix: put it at the same path on each node")
        paths = find_models(options.directory, options.name)
        self._models = {name: LoadedModel(name, path, options) for name, path in paths.items()}
        self._answers.set_max_batch_size(max(options.batch_sizes))
        for model in self._models.values():
            model.look()
        threading.Thread(target=self._keep_looking, daemon=True).start()

    async def __call__(self, request: Request) -> Response:
        try:
            status, body = 200, await self._answer(request)
        except RequestError as error:
            status, body = HTTP_STATUS.get(error.code, 500), protocol.error_body(error)
        return Response(body, status, media_type="application/json")

    async def _answer(self, request: Request) -> bytes:
        target, kind = protocol.parse_path(request.method, request.scope["path"])
        model = self._models.get(target.name)
        status = model.versions.status if model else None
        if kind is None:
            return protocol.status_json(protocol.states_of(target, status))
        protocol.version_of(target, status)
        session = self._models[target.name].session
        if session is None or target.version not in (None, session.version):
            raise target.not_found()  # a new version replaced it after the check
        answer = await self._answers((session, kind, await request.body()))
        if isinstance(answer, RequestError):
            raise answer
        return answer

    @serve.batch(batch_wait_timeout_s=0.0)
    async def _answers(
        self, requests: list[tuple[ServedModel, FrameKind, bytes]]
    ) -> list[bytes | RequestError]:
        """Answer the requests that arrived during the computation of the previous batch."""
        answers: list[bytes | RequestError] = [b""] * len(requests)
        for model in {one for one, _, _ in requests}:
            own = [at for at, (one, _, _) in enumerate(requests) if one is model]
            batch = [requests[at][1:] for at in own]
            found = await asyncio.to_thread(model.answer, batch)
            for at, answer in zip(own, found, strict=True):
                answers[at] = answer
        return answers

    def _keep_looking(self) -> None:
        """Scan for new versions once a second. `LoadedModel` refuses versions that fail to load."""
        pause = threading.Event()
        while not pause.wait(_SCAN_S):
            for name, model in self._models.items():
                try:
                    model.look()
                except OSError as error:
                    _LOG.warning("%s: cannot read versions: %s; retrying", name, error.strerror)


def run(options: ServeOptions) -> None:
    """Deploy the models at RAY_ADDRESS or on a new cluster. Undeploy them at SIGTERM or Ctrl-C.

    Raises UsageError if there is no model, or TfdistError if Ray cannot deploy the models.
    """
    require_models(options.directory, options.name)
    http = {"host": options.host, "port": options.rest_port, "request_timeout_s": options.timeout_s}
    deploy = serve.deployment(
        num_replicas=options.replicas,
        max_ongoing_requests=2 * max(options.batch_sizes),
        max_queued_requests=options.requests,
        graceful_shutdown_timeout_s=options.drain_s,
        ray_actor_options={"num_cpus": 1},
    )
    try:
        ray.init(log_to_driver=False, logging_level=logging.WARNING)
        serve.start(proxy_location="EveryNode", http_options=http)
        serve.run(deploy(RayReplica).bind(options), name=_APPLICATION, route_prefix="/")
    except (ConnectionError, RuntimeError) as error:  # also if the cluster is missing
        reason = (str(error).strip().splitlines() or ["no reason"])[-1]
        raise TfdistError(f"serve: Ray failed to deploy {options.directory}: {reason}") from error
    stop = threading.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: stop.set())  # after Ray set its own handlers
    address = f"http://{options.host}:{options.rest_port}/v1/models"
    print(f"serving {options.directory} on ray: REST {address}", flush=True)
    stop.wait()
    serve.delete(_APPLICATION)
