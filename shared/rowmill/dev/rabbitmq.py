"""A private RabbitMQ node from Debian's package: own ports on loopback, own folder, own cookie, own epmd.

The package's own scripts in lib/rabbitmq/bin are called, not the wrappers in sbin, which change user and folder. The system's node, if
any, shares nothing with ours: not its port mapper (epmd), not its node name's registration, not its configuration.
"""

from __future__ import annotations

import secrets
import shutil
import signal
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rowmill.dev import processes
from rowmill.dev.ports import LOOPBACK, come_free, free_ports, speaks_amqp
from rowmill.dev.processes import Account, ProcessMark
from rowmill.dev.state import read_record, write_record
from rowmill.errors import PackagesMissing, ServersUnavailable

PACKAGE_SCRIPTS = Path("/usr/lib/rabbitmq/bin")

_NODE_NAME = "rowmill@localhost"
_USER = "rowmill"
_START_SECONDS = 90.0
_STOP_SECONDS = 30.0

# What rabbitmqctl is told of a quorum queue's unacknowledged messages was noted at its last tick, every 5 s by default: the doctor would see messages
# in hand that are not any more, or none where some are. In milliseconds.
_ADVANCED = "[{rabbit, [{quorum_tick_interval, 1000}]}].\n"

# Erlang's distribution would listen on every address otherwise, in the node and in each rabbitmqctl.
_LOOPBACK_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"

# Asks each quorum queue's own state: `messages_unacknowledged`, which `rabbitmqctl` tells, was noted at its last tick. Evaluated in the node.
_HELD = """
[{element(4, amqqueue:get_name(Queue)), Held} || Queue <- rabbit_amqqueue:list(VHost), amqqueue:is_quorum(Queue),
 {ok, {_, Held}, _} <- [{ok, {_, _}, _} = ra:leader_query(amqqueue:get_pid(Queue), fun rabbit_fifo:query_messages_checked_out/1, 30000)]].
"""
_TELL_HELD = f"""
{{ok, Tokens, _}} = erl_scan:string(os:getenv("ROWMILL_HELD")), {{ok, Parsed}} = erl_parse:parse_exprs(Tokens),
VHost = list_to_binary(os:getenv("ROWMILL_VHOST")),
{{value, Queues, _}} = rpc:call('{_NODE_NAME}', erl_eval, exprs, [Parsed, [{{'VHost', VHost}}]]),
[io:format("~ts\\t~w~n", [Name, Held]) || {{Name, Held}} <- Queues], halt().
"""


def scripts_folder() -> Path | None:
    """Where the package keeps `rabbitmq-server` and `rabbitmqctl` themselves; None if it is not installed."""
    if (PACKAGE_SCRIPTS / "rabbitmq-server").exists():
        return PACKAGE_SCRIPTS
    found = shutil.which("rabbitmq-server")
    beside = Path(found).resolve().parent if found else None
    return beside if beside is not None and (beside / "rabbitmq-env").exists() else None


class PrivateRabbitMQ:
    """One node whose data live in `base`/rabbitmq and whose record (ports, password, process) is `base`/rabbitmq.json."""

    kind = "private"

    def __init__(self, base: Path) -> None:
        self.folder = base / "rabbitmq"
        self._record_file = base / "rabbitmq.json"

    @property
    def url(self) -> str:
        return self._url_of("/")

    @property
    def running(self) -> bool:
        return processes.alive(self._mark("node"))

    def start(self) -> None:
        if self.running:
            self._await_ready()
            return
        scripts = _require_scripts()
        account = processes.account_for("rabbitmq")
        processes.make_private_folder(self.folder, account)
        record = self._record() or {"password": secrets.token_urlsafe(18), "ports": []}
        self._end_port_mapper(record)
        if not record["ports"] or not come_free(record["ports"]):
            record["ports"] = free_ports(3)
        write_record(self._record_file, record)
        self._configure(record, account)
        environment = self._environment(record)
        mapper = ["epmd", "-port", str(record["ports"][2]), "-address", LOOPBACK]
        node = [str(scripts / "rabbitmq-server")]
        logs = self.folder / "log"
        processes.make_private_folder(logs, account)
        for name, argv in (("port_mapper", mapper), ("node", node)):
            mark = processes.start_detached(argv, account=account, env=environment, folder=self.folder, log=logs / f"{name}.log")
            record[name] = [mark.pid, mark.born]
            write_record(self._record_file, record)
        self._await_ready()

    def stop(self) -> None:
        if (node := self._mark("node")) is not None:
            processes.stop_tree(node, signal.SIGTERM, timeout=_STOP_SECONDS)
        self._end_port_mapper(self._record())

    def kill(self) -> None:
        if (node := self._mark("node")) is not None:
            processes.kill_tree(node)
        self._end_port_mapper(self._record())

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        if (node := self._mark("node")) is not None:
            processes.freeze_tree(node)

    def resume(self) -> None:
        if (node := self._mark("node")) is not None:
            processes.signal_tree(node, signal.SIGCONT)

    def delete(self) -> None:
        self.kill()
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._record_file.unlink(missing_ok=True)

    def describe(self) -> dict[str, object]:
        known = bool(self._record())
        return {
            "kind": self.kind,
            "running": self.running,
            "url": self.url if known else None,
            "data": str(self.folder),
            "log": str(self.folder / "log"),
        }

    def add_vhost(self, name: str) -> str:
        self.control("add_vhost", name)
        self.control("set_permissions", "-p", name, _USER, ".*", ".*", ".*")
        return self._url_of(name)

    def drop_vhost(self, name: str) -> None:
        self.control("delete_vhost", name)

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl --quiet` on this node and return what it printed; about half a second each."""
        account = processes.account_for("rabbitmq")
        done = processes.run_as(
            account,
            [str(_require_scripts() / "rabbitmqctl"), "--quiet", *arguments],
            env=self._environment(self._record()),
            folder=self.folder,
        )
        if done.returncode != 0:
            raise ServersUnavailable(f"rabbitmqctl {arguments[0]} failed: {' '.join((done.stderr or done.stdout).split())}")
        return done.stdout

    def unacknowledged(self, vhost: str) -> dict[str, int]:
        """How many messages consumers hold now of each quorum queue. A third of what `control` takes, which loads all of rabbitmqctl first."""
        account = processes.account_for("rabbitmq")
        argv = ["erl", "-noinput", "-hidden", "-start_epmd", "false", "-sname", f"asks-{secrets.token_hex(8)}@localhost"]
        argv += [*_LOOPBACK_ONLY.split(), "-eval", _TELL_HELD]
        environment = {**self._environment(self._record()), "ROWMILL_VHOST": vhost, "ROWMILL_HELD": _HELD, "ERL_CRASH_DUMP_BYTES": "0"}
        done = processes.run_as(account, argv, env=environment, folder=self.folder)
        if done.returncode != 0:
            raise ServersUnavailable(f"the broker did not say what its consumers hold: {' '.join((done.stderr or done.stdout).split())[:500]}")
        lines = (line.rsplit("\t", 1) for line in done.stdout.splitlines())
        return {name: int(held) for name, held in lines}

    def sync_new_queues(self) -> None:
        """Have the node write the names of newly declared quorum queues to disk now rather than within half a second.

        For tests that kill it at once: RabbitMQ 3.10 keeps them in a table that is saved after 500 ms (`dets` auto_save of `ra_directory`), and
        a queue whose name is lost comes back without its messages and without ever electing a leader.
        """
        self.control("eval", "[ok = dets:sync(Table) || Table <- dets:all()].")

    def _record(self) -> dict[str, Any]:
        return read_record(self._record_file)

    def _mark(self, name: str) -> ProcessMark | None:
        stored = self._record().get(name)
        mark = ProcessMark(stored[0], stored[1]) if stored else None
        return mark if processes.alive(mark) else None

    def _end_port_mapper(self, record: dict[str, Any]) -> None:
        if stored := record.get("port_mapper"):
            processes.stop_tree(ProcessMark(stored[0], stored[1]), signal.SIGTERM, timeout=5.0)

    def _url_of(self, vhost: str) -> str:
        record = self._record()
        if not record:
            raise ServersUnavailable(f"the broker in {self.folder} was never started")
        path = "/" if vhost == "/" else f"/{quote(vhost, safe='')}"
        return f"amqp://{_USER}:{record['password']}@{LOOPBACK}:{record['ports'][0]}{path}"

    def _await_ready(self) -> None:
        port = self._record()["ports"][0]
        ready = processes.wait_until(lambda: speaks_amqp(LOOPBACK, port) or not self.running, timeout=_START_SECONDS)
        if not ready or not self.running:
            logs = self.folder / "log"
            words = processes.last_words(logs / "node.log", *sorted(logs.glob("rowmill@*.log")))
            ended = "ended while starting" if ready else f"did not serve within {_START_SECONDS:.0f} s"
            raise ServersUnavailable(f"the private RabbitMQ in {self.folder} {ended}; its last words: {words}")

    def _configure(self, record: dict[str, Any], account: Account) -> None:
        """Write its configuration anew at each start. User and password are taken by the node at its first start only."""
        settings = {
            "listeners.tcp.1": f"{LOOPBACK}:{record['ports'][0]}",
            "default_user": _USER,
            "default_pass": record["password"],
            "loopback_users.1": _USER,
            "heartbeat": 10,  # seconds; a frozen peer is noticed after about three
            "log.console": "false",
            "log.file.level": "warning",
            "disk_free_limit.absolute": "200MB",
            "raft.wal_max_size_bytes": 64 * 1024 * 1024,  # quorum queues keep the log's current file in memory; the default is 512 MiB
        }
        lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
        processes.write_private_file(self.folder / "rabbitmq.conf", lines, account)
        for name, text in (("advanced.config", _ADVANCED), ("enabled_plugins", "[].\n"), ("environment.conf", "")):
            processes.write_private_file(self.folder / name, text, account)

    def _environment(self, record: dict[str, Any]) -> dict[str, str]:
        amqp, distribution, mapper = (str(port) for port in record["ports"])
        folder = str(self.folder)
        return processes.plain_environment(
            {
                "HOME": folder,  # the Erlang cookie is made and read here
                "RABBITMQ_NODENAME": _NODE_NAME,
                "RABBITMQ_NODE_IP_ADDRESS": LOOPBACK,
                "RABBITMQ_NODE_PORT": amqp,
                "RABBITMQ_DIST_PORT": distribution,
                "ERL_EPMD_ADDRESS": LOOPBACK,
                "ERL_EPMD_PORT": mapper,
                "RABBITMQ_MNESIA_BASE": f"{folder}/data",
                "RABBITMQ_LOG_BASE": f"{folder}/log",
                "RABBITMQ_PID_FILE": f"{folder}/pid",
                "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
                "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
                "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
                "RABBITMQ_CONF_ENV_FILE": f"{folder}/environment.conf",
                "RABBITMQ_SCHEDULER_BIND_TYPE": "u",  # unbound: several nodes on one machine would bind to the same cores
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": _LOOPBACK_ONLY,
                "RABBITMQ_CTL_ERL_ARGS": _LOOPBACK_ONLY,
                "RUNNING_UNDER_SYSTEMD": "true",  # the script then becomes the node instead of watching over it: its pid is the node's
            }
        )


def _require_scripts() -> Path:
    scripts = scripts_folder()
    if scripts is None:
        raise PackagesMissing("RabbitMQ is not installed; `rowmill dev up --install` installs Debian's rabbitmq-server")
    return scripts
