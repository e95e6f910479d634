"""Fills an MLflow SQLite store, in MLflow's own environment: python mlflow_furnish.py DATABASE RUNS STEPS METRICS.

One run is made through MLflow's client, so that every table is as MLflow makes it; the others are copies of its row, and the points
of the first are written to the tables directly: through the client it would take an hour. Prints the ids as JSON.
"""

from __future__ import annotations

import json
import random
import sqlite3
import sys
import uuid


def main() -> None:
    database, num_runs, num_steps, num_metrics = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{database}")
    with mlflow.start_run() as run:
        mlflow.log_params({"beta": 0.04, "model": "tiny"})
        mlflow.log_metric("metric_0", 0.0, step=0)
    first = run.info.run_id
    connection = sqlite3.connect(database)
    connection.row_factory = sqlite3.Row
    template = dict(connection.execute("SELECT * FROM runs WHERE run_uuid = ?", (first,)).fetchone())
    ids = [first, *(uuid.uuid4().hex for _ in range(num_runs - 1))]
    columns = list(template)
    rows = [[run_id if name == "run_uuid" else template[name] for name in columns] for run_id in ids[1:]]
    connection.executemany(f"INSERT INTO runs ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})", rows)
    connection.execute("DELETE FROM metrics WHERE run_uuid = ?", (first,))
    draw = random.Random(1)
    points = (
        (f"metric_{number}", draw.random(), 1_700_000_000_000 + step * 1000, first, step, 0)
        for step in range(1, num_steps + 1)
        for number in range(num_metrics)
    )
    connection.executemany("INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, ?)", points)
    connection.commit()
    connection.close()
    print(json.dumps({"ids": ids[:2000], "experiment": template["experiment_id"]}))


if __name__ == "__main__":
    main()
