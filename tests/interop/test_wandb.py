"""A metrics file sent to Weights & Biases, read back from the file that its offline mode writes."""
import json
import struct
import sys

from megashard import ROOT, environment, run


def records_of_wandb(file):
    """Payloads of a .wandb file: LevelDB's log format after a header of 7 bytes."""
    data, offset, payload = file.read_bytes(), 7, b""
    while offset < len(data):
        left = 32768 - offset % 32768  # of a block; a record's header is never cut
        if left < 7:
            offset += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        payload += data[offset + 7:offset + 7 + length]
        offset += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield payload
            payload = b""


def test_a_metrics_file_becomes_a_run_of_wandb(tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    lines = [dict(step=step, loss=loss, lr=0.1) for step, loss in [(1, 2.5), (2, 1.25), (2, 9), (3, 0.75)]]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(sys.executable, ROOT / "launch/forward_to_wandb.py", tmp_path / "metrics.jsonl", "--project", "p",
        cwd=tmp_path, env=environment(WANDB_MODE="offline", WANDB_SILENT="true"))
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history = []
    for payload in records_of_wandb(file):
        record = Record.FromString(payload)
        if record.HasField("history"):
            history.append({".".join(item.nested_key) or item.key: json.loads(item.value_json)
                            for item in record.history.item})
    assert [(step["_step"], step["loss"], step["lr"]) for step in history] == [(1, 2.5, 0.1), (2, 1.25, 0.1),
                                                                               (3, 0.75, 0.1)]
