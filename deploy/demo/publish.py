"""Publisher of the demo's records to NATS: 569 tumours, each at one of five hospitals.

    python publish.py nats://HOST:4222 NAME...

Every start publishes all records again, as new records.
"""

from __future__ import annotations

import asyncio
import json
import sys

import nats
from sklearn.datasets import load_breast_cancer

STREAM = "WARDS"
FIELDS = ("radius", "texture", "smoothness", "compactness", "concavity", "symmetry")


async def main(server: str, *names: str) -> None:
    """Publish the records in order, to each hospital in turn."""
    dataset = load_breast_cancer()
    columns = [list(dataset.feature_names).index(f"mean {field}") for field in FIELDS]
    client = await nats.connect(server, connect_timeout=5, max_reconnect_attempts=30)
    try:
        stream = client.jetstream()
        await stream.add_stream(name=STREAM, subjects=["wards.*"], max_bytes=64 * 1024 * 1024)
        for number, (row, label) in enumerate(zip(dataset.data, dataset.target, strict=True)):
            record = dict(zip(FIELDS, map(float, row[columns]), strict=True))
            record["diagnosis"] = str(dataset.target_names[label])
            await stream.publish(f"wards.{names[number % len(names)]}", json.dumps(record).encode())
    finally:
        await client.close()
    print(f"published {len(dataset.data)} records for {', '.join(names)}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
