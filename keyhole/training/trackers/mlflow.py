"""MLflow: to MLFLOW_TRACKING_URI, or into run/mlflow.db, an SQLite file that `mlflow ui` shows.

The metrics of an entry are one request; the settings are parameters of the run. A resumed run is found by its id, which
is a tag (keyhole.run), and continued. Only the client API is used, so the caller's own MLflow settings and active run
are not changed.
"""

import os
import time
from typing import Any

from keyhole.training.trackers import PROJECT, About, step_and_numbers

TAG = "keyhole.run"
MOST_VALUE, AT_ONCE = 500, 100  # characters of a parameter, parameters of a request


class MLflow:
    """One run of MLflow."""

    def __init__(self, about: About) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # set before the import; it would send usage data
        from mlflow import MlflowClient
        from mlflow.entities import Param

        place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(about.directory / 'mlflow.db').absolute()}"
        self.client = MlflowClient(tracking_uri=place)
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT), about)
        before = self.client.search_runs([experiment], f"tags.`{TAG}` = '{about.run}'", max_results=1)
        if before:
            self.run: str = before[0].info.run_id
            self.client.update_run(self.run, status="RUNNING")
            return
        self.run = self.client.create_run(experiment, tags={TAG: about.run}, run_name=about.name).info.run_id
        params = [Param(name, str(value)[:MOST_VALUE]) for name, value in about.config.items()]
        for i in range(0, len(params), AT_ONCE):
            self.client.log_batch(self.run, params=params[i : i + AT_ONCE])

    def _experiment(self, name: str, about: About) -> str:
        found = self.client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        own = None if os.environ.get("MLFLOW_TRACKING_URI") else (about.directory / "mlartifacts").absolute().as_uri()
        return str(self.client.create_experiment(name, artifact_location=own))

    def write(self, entry: dict[str, Any]) -> None:
        from mlflow.entities import Metric

        step, numbers = step_and_numbers(entry)
        now_ms = int(1000 * time.time())
        self.client.log_batch(self.run, metrics=[Metric(name, value, now_ms, step) for name, value in numbers.items()])

    def close(self) -> None:
        self.client.set_terminated(self.run)
