"""The training script of the tests: a run of the small transformer, whose cluster and place Slurm names."""

import json
import os
import time
from pathlib import Path

import torch

import shardwell
from tests.support import transformer
from tests.support.reference import sha256
from tests.support.trainer import train


def main() -> None:
    """Trains, and writes the hash of the weights to a file of this trainer."""
    torch.set_num_threads(1)
    item_s = float(os.environ["TEST_ITEM_S"])
    with shardwell.join() as session:
        compute = transformer.batch

        def batch(step: int, dp_rank: int) -> torch.Tensor:
            time.sleep(item_s)  # stands for the computation of a larger model
            return compute(step, dp_rank)

        transformer.batch = batch  # type: ignore[assignment]
        _, state = train(session, steps=int(os.environ["TEST_STEPS"]))
        name = session.trainer
    path = Path(os.environ["TEST_RESULTS"]) / f"{os.environ['SHARDWELL_RUN']}.{name}"
    path.write_text(json.dumps({"sha256": sha256(state), "trainer": name}))


if __name__ == "__main__":
    main()
