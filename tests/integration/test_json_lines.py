"""The logs of servers in JSON: every line is an object, and an ordinary run has no line about a rejected request."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.cluster import small_run
from tests.support.server_processes import ready_address, server_process


def test_every_line_of_an_ordinary_run_is_an_object(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    common = ("--checkpoint-root", "any")
    with server_process("coordinator", "--listen", "127.0.0.1:0", *common, SHARDWELL_LOG_FORMAT="json") as coordinator:
        address = ready_address(coordinator)
        shard = ("shard", "--coordinator", address, "--id", "one", *common, "--log-format", "json")
        with server_process(*shard) as server:
            ready_address(server)
            with small_run(address, "gpt", checkpoint_dir=folder) as session:
                url = session.save_checkpoint(wait=True)
            with small_run(address, "gpt", steps=4):  # the trainer left, and joins again
                pass
            with small_run(address, "next", resume=url, steps=4):
                pass
            logs = []
            for process in (server, coordinator):
                process.terminate()
                logs.append([json.loads(line) for line in process.communicate(timeout=60)[1].splitlines()])
    of_shard, of_coordinator = logs
    for name, lines in (("one", of_shard), ("coordinator", of_coordinator)):
        for line in lines:
            assert {"time", "level", "logger", "message", "process"} <= line.keys()
            assert line["process"] == name
            assert "rejected" not in line["message"]
            assert line["level"] in ("info", "warning")

    def about(event: str) -> list[dict[str, Any]]:
        return [line for line in of_coordinator if line.get("event") == event]

    joined = about("trainer_joined")
    assert [line["run"] for line in joined] == ["gpt", "gpt", "next"]
    assert {(line["rpc"], line["trainer"]) for line in joined} == {("Join", "tester")}
    assert [line["run"] for line in about("step_committed")] == ["gpt"] * 4 + ["next"] * 2
    (committed, *_) = about("step_committed")
    assert committed["request"] and committed["step"] == 0 and committed["peer"].startswith("ipv4:127.0.0.1:")
    assert about("server_registered")[0]["server"] == "one"
    assert of_shard
