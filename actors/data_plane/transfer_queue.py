"""The data plane over TransferQueue: its start and stop for one run, and the client. The only module that imports transfer_queue.

    run's Ray namespace                                     process (driver, actor, task)
      data_plane_controller    keys, columns, tags     ◄──┬── _Connection, one per process and run: ZMQ, an event loop thread
      data_plane_storage_0..n  values                  ◄──┘      └── TransferQueuePlane: any number, cheap

`transfer_queue.init()` would share one controller per Ray cluster: two runs would see each other and die together. So the
actors are made here from TransferQueue's own classes, named in the run's namespace, owned by the process that calls `start`.

Bookkeeping lives in TransferQueue too, so a put or a get sends no request more than TransferQueue's own:
* a shadow partition "schema::<id>" has one key per column, whose tags are the column's type and the partition's capacity;
* each sample's tags name the columns written for it, and come with the answer that resolves keys.
A bounded partition is claimed first and counted then: whoever went over the capacity gives its claim back and waits.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import random
import threading
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import RayActorError
from tensordict import TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.simple_storage import SimpleStorageUnit, StorageKeyNotFoundError
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQRequestType, ZMQServerInfo

from actors.data_plane import codec
from actors.data_plane.connect import DataPlaneAddress, Endpoint
from actors.data_plane.interface import (
    AlreadyWrittenError,
    CapacityError,
    Column,
    DataPlane,
    DataPlaneError,
    DataPlaneGoneError,
    PartitionConflictError,
    PartitionStatus,
    UnknownFieldError,
    UnknownKeyError,
    UnknownPartitionError,
    check_schema,
)
from actors.data_plane.meta import KVBatchMeta
from actors.waiting import ActorGoneError, ActorTimeoutError, wait_all
from configs.run import DataPlaneConfig

CONTROLLER = "data_plane_controller"
STORAGE = "data_plane_storage_{}"
# For the queue's own processes: else every request on a machine of under 8 cores warns about torch threads, and a look-up of a
# key that is gone (no error here, or a typed one) warns in the driver's log.
_ACTOR_ENV = {"TQ_NUM_THREADS": "1", "TQ_LOGGING_LEVEL": "ERROR"}
_START_S = 300.0  # the actors import torch: 10 to 25 s, and 100 s were seen on a busy machine
_PROBE_EVERY_S = 1.0  # a call that takes longer has the actors' health looked at this often
_POLL_S = (0.01, 0.05)  # between looks at a full partition; random, so that two waiting writers do not move in step

_owned: dict[str, list[Any]] = {}  # namespace -> actor handles; Ray ends a non-detached actor with its last handle
_connections: dict[DataPlaneAddress, _Connection] = {}
_lock = threading.Lock()


def start(namespace: str, config: DataPlaneConfig) -> DataPlaneAddress:
    """Start one run's queue. Its actors end with `stop`, or with this process: this module holds their only handles.

    Storage is not bounded as a whole; `register_partition` bounds each partition.

    Raises:
        DataPlaneError: no Ray cluster attached, or the namespace has a data plane already.
        DataPlaneGoneError: an actor died or was not ready within 300 s.
    """
    _require_ray()
    environment = {"env_vars": _ACTOR_ENV}
    options = {"namespace": namespace, "num_cpus": 0, "scheduling_strategy": "SPREAD", "runtime_env": environment}
    storage = {"num_data_storage_units": config.num_storage_units, "total_storage_size": None}
    actors: dict[str, Any] = {}
    try:
        actors[CONTROLLER] = TransferQueueController.options(name=CONTROLLER, **options).remote()
        for unit in range(config.num_storage_units):
            name = STORAGE.format(unit)
            actors[name] = SimpleStorageUnit.options(name=name, **options).remote(config=storage)
        answers = {name: actor.get_zmq_server_info.remote() for name, actor in actors.items()}
        servers = wait_all(answers, what=f"start the data plane of {namespace!r}", timeout_s=_START_S)
    except ValueError as error:
        _kill(actors.values())
        raise DataPlaneError(f"namespace {namespace!r} has a data plane already: {error}") from error
    except (ActorGoneError, ActorTimeoutError) as error:
        _kill(actors.values())
        raise DataPlaneGoneError(str(error)) from error
    _owned[namespace] = list(actors.values())
    ends = [Endpoint(name, server.id, server.ip, tuple(sorted(server.ports.items()))) for name, server in servers.items()]
    return DataPlaneAddress(namespace=namespace, controller=ends[0], storage=tuple(ends[1:]))


def stop(address: DataPlaneAddress) -> None:
    """End the run's queue, from any process of the cluster. Idempotent."""
    with _lock:
        if connection := _connections.pop(address, None):
            connection.close()
    _kill(handle for end in (address.controller, *address.storage) if (handle := _find(address.namespace, end.actor)))
    _owned.pop(address.namespace, None)


class TransferQueuePlane(DataPlane):
    """A client of one run's queue; see `DataPlane`. Safe to share between threads; blocks the calling thread only."""

    def __init__(self, address: DataPlaneAddress, timeout_s: float) -> None:
        """Raises: DataPlaneGoneError, DataPlaneError (no Ray cluster attached)."""
        self._timeout_s = timeout_s
        self._closed = False
        with _lock:
            if address not in _connections:
                _connections[address] = _Connection(address, timeout_s)
            self._link = _connections[address]

    def register_partition(self, partition_id: str, *, fields: Sequence[str], capacity: int | None = None) -> None:
        schema = check_schema(partition_id, fields, capacity)
        known = self._call(self._link.register(partition_id, schema, capacity), f"register partition {partition_id!r}")
        if known is None or (known.fields, known.capacity) != (schema, capacity):
            raise PartitionConflictError(f"partition {partition_id!r} exists with other columns or another capacity")

    def put(self, meta: KVBatchMeta, columns: Mapping[str, Column], *, overwrite: bool = False) -> KVBatchMeta:
        where = f"partition {meta.partition_id!r}"
        schema = self._schema(meta.partition_id)
        types = codec.check_columns(meta, columns, schema.fields)
        if not types:
            return meta.with_fields(*columns)
        self._settle_types(meta.partition_id, schema, types)
        encoded = [codec.encode(name, rows, schema.types[name]) for name, rows in columns.items()]
        data = TensorDict({field: values for stored in encoded for field, values in stored.items()}, batch_size=[len(meta)])
        names, what = frozenset(columns), f"put {len(meta)} samples into {where}"
        deadline = time.monotonic() + self._timeout_s
        while excess := self._call(self._link.put(meta, schema, names, data, overwrite), what):
            (fresh, held), capacity = excess, schema.capacity or 0
            message = f"{where}: no space for {fresh} more samples, it holds {held} of {capacity}"
            if fresh > capacity:
                raise CapacityError(message)
            self._wait_for_space(meta.partition_id, capacity - fresh, deadline, message)
        return meta.with_fields(*columns)

    def get(self, meta: KVBatchMeta, fields: Sequence[str]) -> dict[str, list[Any]]:
        schema = self._schema(meta.partition_id)
        codec.check_fields(meta.partition_id, fields, schema.fields)
        if not meta.keys:
            return {name: [] for name in fields}
        if any(name not in schema.types for name in fields):
            schema = self._schema(meta.partition_id, fresh=True)
        stored = {name: codec.stored_fields(name, schema.types[name]) if name in schema.types else (name,) for name in fields}
        what = f"get {', '.join(fields)} of {len(meta)} samples from partition {meta.partition_id!r}"
        data = self._call(self._link.get(meta, schema, stored), what)
        return {name: codec.decode(name, schema.types[name], data) for name in fields}

    def clear(self, meta: KVBatchMeta) -> None:
        self._schema(meta.partition_id)
        if meta.keys:
            self._call(self._link.clear(meta), f"clear {len(meta)} samples of partition {meta.partition_id!r}")

    def status(self, partition_id: str) -> PartitionStatus:
        schema = self._schema(partition_id)
        tags = self._call(self._link.tags(partition_id), f"count the samples of partition {partition_id!r}")
        return PartitionStatus(partition_id, sum("columns" in tag for tag in tags.values()), schema.fields, schema.capacity)

    def close(self) -> None:
        self._closed = True

    def _call(self, request: Coroutine[Any, Any, Any], what: str) -> Any:
        if self._closed:
            request.close()
            raise DataPlaneGoneError(f"{what}: this data-plane client is closed")
        return self._link.call(request, what, self._timeout_s)

    def _schema(self, partition_id: str, fresh: bool = False) -> codec.Schema:
        schema = None if fresh or self._closed else self._link.schemas.get(partition_id)
        if schema is None:
            schema = self._call(self._link.read_schema(partition_id), f"read the schema of partition {partition_id!r}")
        if schema is None:
            raise UnknownPartitionError(f"no partition {partition_id!r}: register it first")
        return schema

    def _settle_types(self, partition_id: str, schema: codec.Schema, types: Mapping[str, codec.ColumnType]) -> None:
        # TransferQueue drops a batch of another dtype than the field's first one without an error; so we record types ourselves.
        if new := {name: kind for name, kind in types.items() if name not in schema.types}:
            self._call(self._link.settle_types(partition_id, schema, new), f"settle column types of partition {partition_id!r}")
        for name, kind in types.items():
            codec.check_type(schema.types[name], kind, f"partition {partition_id!r}: column {name!r}")

    def _wait_for_space(self, partition_id: str, most: int, deadline: float, message: str) -> None:
        while True:
            if time.monotonic() >= deadline:
                raise CapacityError(f"{message} after waiting {self._timeout_s:g} s")
            time.sleep(random.uniform(*_POLL_S))
            if len(self._call(self._link.tags(partition_id), f"wait for space in partition {partition_id!r}")) <= most:
                return


class _Connection:
    """TransferQueue's asynchronous client on an event loop of its own, and the requests the plane makes of it.

    The storage manager is called directly: the client's `async_put` and `async_get_data` around it set this process's number
    of torch threads, under the feet of whoever computes here.
    """

    def __init__(self, address: DataPlaneAddress, timeout_s: float) -> None:
        _require_ray()
        ends = (address.controller, *address.storage)
        self._actors = {end.actor: _find(address.namespace, end.actor) for end in ends}
        if missing := [name for name, handle in self._actors.items() if handle is None]:
            raise DataPlaneGoneError(f"{missing[0]} is not in Ray namespace {address.namespace!r}: it died, or the run has ended")
        self.schemas: dict[str, codec.Schema] = {}
        self._controller = _server(address.controller, Role.CONTROLLER)
        self._client = AsyncTransferQueueClient(f"data_plane_client_{uuid4().hex[:8]}", self._controller, zmq_io_threads=2)
        storage = {"zmq_info": {end.actor: _server(end, Role.STORAGE) for end in address.storage}}
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._client.initialize_storage_manager("SimpleStorage", storage)
                break
            except TimeoutError as error:  # after 4 s: a busy machine may need longer, a dead controller never answers
                late = time.monotonic() >= deadline
                if reason := self._dead() or (f"{CONTROLLER} did not answer within {timeout_s:g} s" if late else None):
                    self._client.close()
                    raise DataPlaneGoneError(f"connect: {reason}") from error
        self._values = self._client.storage_manager
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-plane", daemon=True)
        self._thread.start()

    def call(self, request: Coroutine[Any, Any, Any], what: str, timeout_s: float) -> Any:
        """Run a request on the loop, with a deadline; an actor's death ends it within seconds.

        Raises:
            DataPlaneGoneError, or what the request raises; TransferQueue's own errors come as DataPlaneError.
        """
        if self._loop.is_closed():
            request.close()
            raise DataPlaneGoneError(f"{what}: the run's data plane was stopped")
        future = asyncio.run_coroutine_threadsafe(request, self._loop)
        deadline = time.monotonic() + timeout_s
        while not concurrent.futures.wait([future], timeout=min(_PROBE_EVERY_S, max(0.0, deadline - time.monotonic()))).done:
            reason = self._dead()
            if reason is None and time.monotonic() >= deadline:
                reason = f"no answer from {', '.join(self._actors)} within {timeout_s:g} s"
            if reason is not None:
                future.cancel()
                raise DataPlaneGoneError(f"{what}: {reason}")
        try:
            return future.result()
        except DataPlaneError:
            raise
        except StorageKeyNotFoundError as error:
            raise UnknownKeyError(f"{what}: a sample was cleared meanwhile ({error})") from error
        except (Exception, concurrent.futures.CancelledError) as error:
            if dead := self._dead():
                raise DataPlaneGoneError(f"{what}: {dead}") from error
            raise DataPlaneError(f"{what}: TransferQueue failed: {type(error).__name__}: {error}") from error

    async def read_schema(self, partition_id: str) -> codec.Schema | None:
        tags = await self.tags(f"schema::{partition_id}")
        if not tags or not all("capacity" in tag for tag in tags.values()):
            return None
        types = {name: codec.ColumnType.parse(tag["type"]) for name, tag in tags.items() if tag["type"]}
        schema = codec.Schema(frozenset(tags), next(iter(tags.values()))["capacity"], types)
        self.schemas[partition_id] = schema
        return schema

    async def register(self, partition_id: str, fields: frozenset[str], capacity: int | None) -> codec.Schema | None:
        """The schema that the partition has: the given one, unless another was there."""
        if known := await self.read_schema(partition_id):
            return known
        await self._set_schema_tags(partition_id, {name: {"type": "", "capacity": capacity} for name in sorted(fields)})
        return await self.read_schema(partition_id)

    async def settle_types(self, partition_id: str, schema: codec.Schema, new: Mapping[str, codec.ColumnType]) -> None:
        known = await self.read_schema(partition_id)
        types = dict(new) | (known.types if known else {})  # whoever wrote the column first decides
        if unset := {name: str(kind) for name, kind in new.items() if known is None or name not in known.types}:
            await self._set_schema_tags(partition_id, {n: {"type": k, "capacity": schema.capacity} for n, k in unset.items()})
        schema.types.update(types)
        self.schemas[partition_id] = schema

    async def put(
        self, meta: KVBatchMeta, schema: codec.Schema, columns: frozenset[str], data: TensorDict, overwrite: bool
    ) -> tuple[int, int] | None:
        """Claim, check, store, note. Returns None, or (new samples, samples held by others) when there is no space."""
        claim = await self._resolve(meta.partition_id, list(meta.keys), create=True)
        mask, ready = schema.mask(columns), schema.mask(schema.fields.intersection(claim.field_names))
        written = [ready | tag.get("columns", 0) for tag in claim.custom_meta]
        fresh = [row for row, done in enumerate(written) if not done]
        for key, done in zip(meta.keys, written, strict=True):
            if done & mask and not overwrite:
                await self._forget(claim, fresh)
                both = next(name for name in sorted(columns) if done & schema.mask([name]))
                raise AlreadyWrittenError(f"partition {meta.partition_id!r}: column {both!r} is already written for key {key!r}")
        if schema.capacity is not None and fresh:
            held = len(await self.tags(meta.partition_id))
            if held > schema.capacity:
                await self._forget(claim, fresh)
                return len(fresh), held - len(fresh)
        try:
            await self._values.put_data(data, claim)
        except Exception:
            await self._forget(claim, fresh)
            raise
        tags = {index: {"columns": done | mask} for index, done in zip(claim.global_indexes, written, strict=True)}
        await self._set_tags(meta.partition_id, tags)
        return None

    async def get(self, meta: KVBatchMeta, schema: codec.Schema, stored: Mapping[str, Sequence[str]]) -> TensorDict:
        found = await self._resolve(meta.partition_id, list(meta.keys), create=False)
        names = [part for parts in stored.values() for part in parts]
        if found.size < len(meta) or not set(names) <= set(found.field_names):
            await self._explain(meta, schema, stored)
        wanted = BatchMeta(found.global_indexes, found.partition_ids, field_schema={name: {} for name in names})
        values: TensorDict = await self._values.get_data(wanted)
        return values

    async def clear(self, meta: KVBatchMeta) -> None:
        found = await self._resolve(meta.partition_id, list(meta.keys), create=False)
        await self._forget(found, range(found.size))

    async def tags(self, partition_id: str) -> dict[str, dict[str, Any]]:
        """Tags of every key of a partition; empty when it has none."""
        listing: dict[str, dict[str, dict[str, Any]]] = await self._client.async_kv_list(partition_id)
        return listing.get(partition_id, {})

    def close(self) -> None:
        """Stop the loop, then release the sockets (in this order: the loop's thread uses them)."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._loop.close()
            self._client.close()

    async def _resolve(self, partition_id: str, keys: list[str], create: bool) -> BatchMeta:
        return await self._client.async_kv_retrieve_meta(keys=keys, partition_id=partition_id, create=create)

    async def _forget(self, batch: BatchMeta, rows: Sequence[int]) -> None:
        if rows:
            indexes, ids = [batch.global_indexes[row] for row in rows], [batch.partition_ids[row] for row in rows]
            await self._client.async_clear_samples(BatchMeta(indexes, ids))

    async def _set_tags(self, partition_id: str, tags: Mapping[int, dict[str, Any]]) -> None:
        # What the client's async_set_custom_meta sends, without its copies of the batch: 1 ms instead of 11 for 512 samples.
        async with self._client.controller_rpc_pool.alease(self._controller) as socket:
            await self._client._request_controller(
                socket=socket,
                request_type=ZMQRequestType.SET_CUSTOM_META,
                response_type=ZMQRequestType.SET_CUSTOM_META_RESPONSE,
                body={"partition_custom_meta": {partition_id: tags}},
            )

    async def _set_schema_tags(self, partition_id: str, tags: Mapping[str, dict[str, Any]]) -> None:
        shadow = f"schema::{partition_id}"
        claim = await self._resolve(shadow, list(tags), create=True)
        await self._set_tags(shadow, dict(zip(claim.global_indexes, tags.values(), strict=True)))

    async def _explain(self, meta: KVBatchMeta, schema: codec.Schema, names: Iterable[str]) -> None:
        """Raise the error that names the key or column which is not there."""
        where, tags = f"partition {meta.partition_id!r}", await self.tags(meta.partition_id)
        if gone := [key for key in meta.keys if "columns" not in tags.get(key, {})]:
            raise UnknownKeyError(f"{where}: no key {gone[0]!r}")
        for name in names:
            if lacking := [key for key in meta.keys if not tags[key]["columns"] & schema.mask([name])]:
                raise UnknownFieldError(f"{where}: column {name!r} is not written for key {lacking[0]!r}")
        raise UnknownFieldError(f"{where}: {', '.join(names)} are being written or cleared right now")

    def _dead(self) -> str | None:
        """Which actor died, or None; an actor that is only slow to answer is not dead."""
        if not ray.is_initialized():
            return "this process has left the Ray cluster"
        refs = {handle.get_zmq_server_info.remote(): name for name, handle in self._actors.items()}
        for ref in ray.wait(list(refs), num_returns=len(refs), timeout=_PROBE_EVERY_S)[0]:
            try:
                ray.get(ref, timeout=_PROBE_EVERY_S)
            except RayActorError:
                return f"{refs[ref]} died"
        return None


def _server(end: Endpoint, role: Role) -> ZMQServerInfo:
    return ZMQServerInfo(role=role, id=end.server_id, ip=end.ip, ports=dict(end.ports))


def _require_ray() -> None:
    # Without this, looking up an actor would start a cluster of its own.
    if not ray.is_initialized():
        raise DataPlaneError("this process is not attached to a Ray cluster: call ray.init(address=...) first")


def _find(namespace: str, name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=namespace)
    except ValueError:
        return None


def _kill(handles: Iterable[Any]) -> None:
    for handle in handles:
        ray.kill(handle, no_restart=True)


@atexit.register
def _close_connections() -> None:
    for connection in _connections.values():
        connection.close()
