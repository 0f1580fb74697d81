"""A process that forks children which walk through a store until they are killed: `python -m ...zygote`.

It imports once, has no thread of its own, and forks a child for each line that it is given on standard input, a JSON
object of `path`, `seed`, `start` (the model) and either `point` and `n` (the child kills itself when it gets there for
the n-th time) or `ops` and `seconds` (it is killed so long after it has begun its ops-th operation). It answers with
the numbers of the last operation that was done and the last that had begun, and how the child ended.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any

import numba

from kvstore import KVStore, directory
from kvstore.storage.files import write_atomic
from kvstore.storage.lmdb_tier import LmdbTier
from kvstore.storage.manifest import write_manifest
from tests.kvstore.faults.workload import SCHEMA, perform, small, walk
from tests.storage.crash_child import suicide

MOST_OPS = 400


def listen(hook: Any) -> None:
    """Have every file that a store writes tell a hook how far it is."""
    directory.LmdbTier = partial(LmdbTier, hook=hook)
    directory.write_manifest = partial(write_manifest, hook=hook)
    directory.write_atomic = partial(write_atomic, hook=hook)


def child(job: dict[str, Any], out: int) -> None:
    """Walk, and say before and after each operation which it is."""
    if "point" in job:
        listen(suicide(job["point"], job["n"]))
    store = KVStore.open(job["path"], SCHEMA, small())
    for i, (op, _) in enumerate(walk(job["seed"], MOST_OPS, job["start"]), 1):
        os.write(out, b"b%d\n" % i)
        perform(store, op)
        os.write(out, b"d%d\n" % i)


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """Fork a child, kill it if it shall be killed from outside, and say how far it got."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        try:
            child(job, write)
        except BaseException as error:
            os.write(write, f"e{error!r}\n".encode())
        os._exit(3)
    os.close(write)
    said, is_killed = [], "point" in job
    with os.fdopen(read) as lines:
        for line in lines:
            said.append(line.strip())
            if not is_killed and line.startswith("b") and int(line[1:]) >= job["ops"]:
                time.sleep(job["seconds"])
                os.kill(pid, signal.SIGKILL)
                is_killed = True
    _, status = os.waitpid(pid, 0)
    numbers = {kind: max((int(line[1:]) for line in said if line[0] == kind), default=0) for kind in "db"}
    errors = [line for line in said if line[0] == "e"]
    return {"done": numbers["d"], "begun": numbers["b"], "signal": os.WTERMSIG(status), "errors": errors}


def warm_up() -> None:
    """Load kernels once instead of in each child; NUMBA_THREADING_LAYER must be one that survives a fork."""
    store = KVStore(SCHEMA, small())
    for op, _ in walk(0, 40):
        if op[0] != "unload":
            perform(store, op)
    store.close()
    assert threading.active_count() == 1
    assert numba.threading_layer() == "workqueue"


def main() -> None:
    warm_up()
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
