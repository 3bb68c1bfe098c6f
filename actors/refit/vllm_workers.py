"""Makes our transports known to vLLM: vLLM imports this module in each of its workers, as that of `WorkerExtension`."""

from actors.refit.transports import TRANSPORTS

for _transport in TRANSPORTS.values():
    _transport.register()


class WorkerExtension:
    """The reason for vLLM to import this module (EngineArgs.worker_extension_cls). Adds nothing to the workers."""
