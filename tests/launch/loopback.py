"""A wandb server on this machine: as much of one as a sweep's registration and its agents ask for."""

import http.server
import json
import re
import threading

import yaml


class Server:
    """Within it, it answers; it hands out each run once, and notes what it is told.

    Attributes:
      url: for WANDB_BASE_URL.
      asked: the names of the queries, in order.
    """

    def __init__(self, sweep: str, project: str, entity: str, runs: list[dict]):
        """`runs`: parameters of the runs to hand out; `sweep`: the id of the sweep."""
        self._sweep, self._project, self._entity = sweep, project, entity
        self._runs = [
            {"run_id": f"run{i}", "args": {name: {"value": value} for name, value in run.items()}}
            for i, run in enumerate(runs)
        ]
        self._config = "{}"
        self.asked: list[str] = []

    def __enter__(self):
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if not self.path.endswith("graphql"):  # wandb's telemetry, for one
                    self.send_error(404)
                    return
                asked = json.loads(content)
                body = json.dumps({"data": server._answer(asked["query"], asked.get("variables") or {})}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()

    def _commands(self, variables: dict) -> list[dict]:
        """What an agent is to do next: nothing while it has a run, else the next one, or to leave."""
        if json.loads(variables["runState"]):
            return []
        if not self._runs:
            return [{"type": "exit"}]
        return [{"type": "run", "program": yaml.safe_load(self._config)["program"], **self._runs.pop(0)}]

    def _answer(self, query: str, variables: dict) -> dict:
        name = re.search(r"(?:query|mutation)\s+(\w+)", query)
        self.asked.append(name[1] if name else query)
        project = {"id": "1", "name": self._project, "entity": {"id": "2", "name": self._entity}}
        match self.asked[-1]:
            case "UpsertSweep":
                self._config = variables["config"]
                return {"upsertSweep": {"sweep": {"name": self._sweep, "project": project}}}
            case "SweepWithRuns":
                runs = {"edges": []}
                return {"project": {"sweep": {"id": "3", "name": self._sweep, "config": self._config, "runs": runs}}}
            case "CreateAgent":
                return {"createAgent": {"agent": {"id": "4"}}}
            case "Heartbeat":
                return {"agentHeartbeat": {"agent": {"id": "4"}, "commands": json.dumps(self._commands(variables))}}
            case _:
                teams = {"edges": [{"node": {"name": self._entity}}]}
                return {
                    "viewer": {"id": "5", "entity": self._entity, "username": "someone", "flags": "{}", "teams": teams}
                }
