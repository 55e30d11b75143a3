"""A real Slurm on one machine, for tests: two nodes of eight made-up GPUs, with accounting.

    python tests/workflow/slurm/cluster.py FOLDER      starts it, prints SLURM_CONF, stops it on Ctrl-C or SIGTERM

Needs root and the Debian packages in apt.txt. Every daemon runs in the foreground as a child of this process, with its
files below one folder, so nothing of the machine's own configuration is read or changed and stopping is killing them.
Each node has its own host name and /etc/hosts through a UTS and a mount name space.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

NODES = 2
GPUS = 8
CPUS = 64
PROGRAMS = ("munged", "mariadbd", "slurmdbd", "slurmctld", "slurmd", "sbatch", "sacct", "unshare")
SYSTEM_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
SQL = Path("/usr/share/mysql")


def missing() -> str | None:
    """Why the cluster cannot be started here, or None."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:{SYSTEM_PATH}") is None]
    if absent:
        return f"not installed: {', '.join(absent)} (apt-get install the packages in tests/workflow/slurm/apt.txt)"
    if os.geteuid() != 0:
        return "needs root"
    if subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True, check=False).returncode:
        return "this container may not make name spaces (unshare)"
    return None


class Cluster:
    """Start with :meth:`up`, stop with :meth:`down`; `SLURM_CONF` is in :attr:`environment`.

    Every user must be able to reach ``folder``: munged insists on that.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.etc = folder / "etc"
        self.logs = folder / "log"
        self.socket = folder / "munge" / "socket"
        self.environment = {"SLURM_CONF": str(self.etc / "slurm.conf")}
        self._running: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._ports = iter(free_ports(4 + NODES))

    def up(self) -> None:
        """Start every daemon and wait until both nodes are idle."""
        for name in ("etc", "log", "munge", "spool", "state", "dev", "mysql"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o755)
        for name in ("etc", "log", "munge"):
            (self.folder / name).chmod(0o755)
        try:
            self._munge()
            database = self._mariadb()
            self._configure(database)
            self._start("slurmdbd", ["slurmdbd", "-D"])
            self._wait("slurmdbd", lambda: self._answers(["sacctmgr", "-n", "-i", "list", "cluster"]))
            self._answers(["sacctmgr", "-n", "-i", "add", "cluster", "lab"])
            self._start("slurmctld", ["slurmctld", "-D", "-i"])
            self._wait("slurmctld", lambda: self._answers(["scontrol", "ping"]))
            for number in range(1, NODES + 1):
                self._node(f"n{number}")
            self._wait("slurmd", self._all_idle)
        except BaseException:
            self.down()
            raise

    def down(self) -> None:
        """Stop everything, newest first."""
        if any(name == "slurmctld" and process.poll() is None for name, process in self._running):
            self._answers(["scancel", "--partition", "gpu"])
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and self._output(["squeue", "-h", "-o", "%A"]):
                time.sleep(0.1)
        for _, process in reversed(self._running):
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running.clear()

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon without ceremony."""
        for label, process in self._running:
            if label == name:
                process.kill()
                process.wait()

    # -- the daemons -----------------------------------------------------------------------------------------------

    def _munge(self) -> None:
        key = self.folder / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        folder = self.folder / "munge"
        self._start("munged", ["munged", "--foreground", f"--key-file={key}", f"--socket={self.socket}", f"--pid-file={folder}/pid",
                               f"--log-file={self.logs}/munged.log", f"--seed-file={folder}/seed", "--num-threads=2"])  # fmt: skip
        self._wait("munged", lambda: self._answers(["munge", "-S", str(self.socket), "-n"]))

    def _mariadb(self) -> int:
        data = self.folder / "mysql"
        small = ["--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M", "--skip-log-bin"]
        tables = "".join((SQL / name).read_text() for name in ("mysql_system_tables.sql", "mysql_system_tables_data.sql"))
        statements = f"CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket=NULL;\n{tables}"
        with (self.logs / "mariadb-install.log").open("wb") as log:
            subprocess.run(
                ["mariadbd", "--no-defaults", "--bootstrap", "--user=root", f"--datadir={data}", *small],
                input=statements.encode(), stdout=log, stderr=log, check=True, env=self._environment(),
            )  # fmt: skip
        accounts = self.etc / "accounts.sql"
        statements_by_line = ["CREATE DATABASE slurm_acct_db;"]  # the server reads one statement a line
        for host in ("127.0.0.1", "localhost"):
            statements_by_line.append(f"CREATE USER 'slurm'@'{host}' IDENTIFIED BY 'slurm';")
            statements_by_line.append(f"GRANT ALL ON slurm_acct_db.* TO 'slurm'@'{host}';")
        accounts.write_text("\n".join(statements_by_line) + "\n")
        port = next(self._ports)
        self._start("mariadbd", ["mariadbd", "--no-defaults", "--user=root", f"--datadir={data}", f"--socket={self.folder}/munge/mysql",
                                 "--bind-address=127.0.0.1", f"--port={port}", "--skip-name-resolve", f"--init-file={accounts}",
                                 "--innodb-lock-wait-timeout=900", "--innodb-flush-log-at-trx-commit=0", "--performance-schema=OFF",
                                 *small])  # fmt: skip
        self._wait("mariadbd", lambda: listens(port))
        return port

    def _configure(self, database: int) -> None:
        host, dbd, ctld = socket.gethostname().split(".")[0], next(self._ports), next(self._ports)
        nodes = [f"n{number}" for number in range(1, NODES + 1)]
        for number in range(GPUS):  # character devices: with regular files Slurm leaves CUDA_VISIBLE_DEVICES empty
            device = self.folder / "dev" / f"nvidia{number}"
            if not device.exists():
                os.mknod(device, 0o666 | 0o020000, os.makedev(1, 3))
        (self.etc / "hosts").write_text(Path("/etc/hosts").read_text() + "".join(f"127.0.0.1 {node}\n" for node in nodes))
        (self.etc / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (self.etc / "gres.conf").write_text(f"NodeName=n[1-{NODES}] Name=gpu Type=h200 File={self.folder}/dev/nvidia[0-{GPUS - 1}]\n")
        account = {
            "AuthType": "auth/munge", "AuthInfo": f"socket={self.socket}", "DbdHost": host, "DbdAddr": "127.0.0.1", "DbdPort": dbd,
            "SlurmUser": "root", "LogFile": self.logs / "slurmdbd.log", "PidFile": self.folder / "slurmdbd.pid",
            "StorageType": "accounting_storage/mysql", "StorageHost": "127.0.0.1", "StoragePort": database, "StorageUser": "slurm",
            "StoragePass": "slurm", "StorageLoc": "slurm_acct_db",
        }  # fmt: skip
        write_conf(self.etc / "slurmdbd.conf", account)
        (self.etc / "slurmdbd.conf").chmod(0o600)
        settings = {
            "ClusterName": "lab", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmctldPort": ctld, "SlurmUser": "root", "SlurmdUser": "root",
            "AuthType": "auth/munge", "CredType": "cred/munge",
            # cred_expire also sets how long a requeued job waits before it may start again (120 s unless told)
            "AuthInfo": f"socket={self.socket},cred_expire=5",
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
            "StateSaveLocation": self.folder / "state", "SlurmdSpoolDir": f"{self.folder}/spool/%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid", "SlurmdPidFile": f"{self.folder}/slurmd-%n.pid",
            "SlurmctldLogFile": self.logs / "slurmctld.log", "SlurmdLogFile": f"{self.logs}/slurmd-%n.log", "PlugStackConfig": "/dev/null",
            # the CPUs are made up: no cgroups and no binding
            "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none", "JobAcctGatherType": "jobacct_gather/none",
            "SwitchType": "switch/none", "MpiDefault": "none", "SlurmdParameters": "config_overrides", "ReturnToService": 2,
            "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU", "GresTypes": "gpu", "SchedulerType": "sched/backfill",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1",
            "KillWait": 3, "CompleteWait": 0, "MinJobAge": 3600, "JobRequeue": 1, "SlurmdTimeout": 30,
            "AccountingStorageType": "accounting_storage/slurmdbd", "AccountingStorageHost": "127.0.0.1", "AccountingStoragePort": dbd,
            "AccountingStoragePass": self.socket, "AccountingStorageTRES": "gres/gpu",
        }  # fmt: skip
        lines = [
            f"NodeName={node} NodeHostname={node} NodeAddr=127.0.0.1 Port={next(self._ports)} CPUs={CPUS} RealMemory=200000 "
            f"Gres=gpu:h200:{GPUS} State=UNKNOWN"
            for node in nodes
        ]
        lines.append(f"PartitionName=gpu Nodes=n[1-{NODES}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO")
        write_conf(self.etc / "slurm.conf", settings, lines)

    def _node(self, name: str) -> None:
        (self.folder / "spool" / name).mkdir(exist_ok=True)
        # a configuration of the machine itself is hidden from the node
        script = (
            f"hostname {name}; mount --bind '{self.etc}/hosts' /etc/hosts; "
            f"[ ! -d /etc/slurm ] || mount --bind '{self.etc}' /etc/slurm; exec slurmd -D -N {name}"
        )
        self._start(name, ["unshare", "--uts", "--mount", "sh", "-c", script])

    # -- helpers ---------------------------------------------------------------------------------------------------

    def _environment(self) -> dict[str, str]:
        path = f"{os.environ['PATH']}:{SYSTEM_PATH}"
        return {**os.environ, **self.environment, "PATH": path}

    def _start(self, name: str, command: list[str]) -> None:
        with (self.logs / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment(), start_new_session=True
            )
        self._running.append((name, process))

    def _wait(self, name: str, ready: Callable[[], bool], seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while not ready():
            dead = [label for label, process in self._running if process.poll() is not None]
            if dead or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not come up (ended: {dead or 'none'}); logs in {self.logs}")
            time.sleep(0.1)

    def _output(self, command: list[str]) -> str | None:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, env=self._environment(), check=False)
        except subprocess.TimeoutExpired:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    def _answers(self, command: list[str]) -> bool:
        return self._output(command) is not None

    def _all_idle(self) -> bool:
        states = (self._output(["sinfo", "-h", "-N", "-o", "%t"]) or "").split()
        return states.count("idle") == NODES


def write_conf(path: Path, settings: dict[str, object], lines: list[str] | None = None) -> None:
    """A file of ``key=value`` lines."""
    path.write_text("\n".join([*(f"{key}={value}" for key, value in settings.items()), *(lines or [])]) + "\n")


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def listens(port: int) -> bool:
    """Whether something accepts connections on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    """Run a cluster until interrupted."""
    reason = missing()
    if reason:
        sys.exit(reason)
    cluster = Cluster(Path(sys.argv[1]).absolute())
    for number in (signal.SIGINT, signal.SIGTERM):  # also in the background, where a shell has SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    start = time.monotonic()
    cluster.up()
    print(f"up after {time.monotonic() - start:.1f} s\nexport SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        cluster.down()


if __name__ == "__main__":
    main()
