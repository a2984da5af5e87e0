"""One rank of a device mesh, for tests: ``python -m tests.support.mesh_member ADDRESS RUN DP TP PP ORDER``."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

import shardwell
from tests.support import gloo


def main() -> None:
    address, run, dp, tp, pp, order = sys.argv[1:]
    world = shardwell.World(int(dp), int(tp), int(pp), tuple(order.split(",")))
    with shardwell.join(
        address, run=run, world=world, host="127.0.0.1", waits=shardwell.WaitOptions(wait_limit_s=60)
    ) as session:
        mesh = session.device_mesh()
        assert mesh.mesh_dim_names is not None
        sums = {}
        for axis in mesh.mesh_dim_names:
            total = torch.tensor(float(session.global_rank or 0))
            dist.all_reduce(total, group=mesh.get_group(axis))
            sums[axis] = total.item()
        place = [session.dp_rank, session.tp_rank, session.pp_rank]
        print(json.dumps({"rank": session.global_rank, "place": place, "axes": mesh.mesh_dim_names, "sums": sums}))
    gloo.leave()


if __name__ == "__main__":
    main()
