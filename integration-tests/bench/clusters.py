"""Clusters to measure: in one process, in separate processes, and with Concourse workers."""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
RELEASE = ROOT / "target/release"
GANTRY = RELEASE / "gantry"


class Cluster:
    """Local cluster with separate directories. `prefix` is a command that runs another one as another user."""

    def __init__(self, base, settings={}, prefix=()):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-", dir=base))
        self.prefix = prefix
        if prefix:
            os.chown(self.home, NOBODY, NOBODY)
        self.env = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.home),
            "XDG_STATE_HOME": str(self.home / "state"),
            "XDG_RUNTIME_DIR": str(self.home / "run"),
            "GANTRY_GC_GRACE": "0s",
            **settings,
        }

    def run(self, *args, **kwargs):
        options = {"env": self.env, "cwd": self.home, "stdin": subprocess.DEVNULL, "check": True}
        options.update(kwargs)
        return subprocess.run([*self.prefix, str(GANTRY), *args], **options)

    def pids(self):
        """Returns the processes of this cluster."""
        found = []
        for entry in pathlib.Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if str(self.home).encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.run("down", "--force", check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self.home, ignore_errors=True)


NOBODY = 65534


def wait_for(what, condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise TimeoutError(what)
        time.sleep(0.05)


def succeeds(command, **kwargs):
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, **kwargs).returncode == 0


def end(child, how=signal.SIGTERM):
    """Ends a process that the benchmark started."""
    child.send_signal(how)
    try:
        child.wait(30)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


class Ports:
    """Free ports. They stay bound until all are chosen, so that no port is chosen twice."""

    def __init__(self):
        self.kept = []

    def address(self):
        self.kept.append(socket.create_server(("127.0.0.1", 0)))
        return f"127.0.0.1:{self.kept[-1].getsockname()[1]}"

    def release(self):
        for kept in self.kept:
            kept.close()


class Postgres:
    """Durable PostgreSQL server, as in production. PostgreSQL refuses to run as root."""

    def __init__(self, base, address):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-postgres-", dir=base))
        os.chown(self.home, NOBODY, NOBODY)
        self.host, self.port = address.split(":")
        self.options = {"user": NOBODY, "group": NOBODY, "extra_groups": [], "cwd": "/"}
        self.bin = pathlib.Path(sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"))[-1])
        data = self.home / "data"
        initdb = [self.bin / "initdb", "-A", "trust", "-U", "postgres", "-E", "UTF8", "--locale=C", "-D", data]
        subprocess.run(initdb, check=True, stdout=subprocess.DEVNULL, **self.options)
        settings = {"listen_addresses": self.host, "max_connections": "300", "unix_socket_directories": self.home}
        command = [self.bin / "postgres", "-D", data, "-p", self.port]
        for name, value in settings.items():
            command += ["-c", f"{name}={value}"]
        self.command = command
        self.log = open(self.home / "log", "wb")
        self.start()

    def start(self):
        self.child = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, **self.options)
        wait_for("PostgreSQL", lambda: succeeds(self.asked("SELECT 1"), **self.options))

    def restart(self):
        end(self.child, signal.SIGINT)
        self.start()

    def asked(self, sql):
        psql = [self.bin / "psql", "-X", "-v", "ON_ERROR_STOP=1", "-h", self.host, "-p", self.port]
        return [*psql, "-U", "postgres", "-d", "postgres", "-c", sql]

    def execute(self, sql):
        subprocess.run(self.asked(sql), check=True, stdout=subprocess.DEVNULL, **self.options)

    def url(self, user):
        return f"postgres://{user}@{self.host}:{self.port}/postgres"

    def stop(self):
        end(self.child, signal.SIGINT)
        self.log.close()
        shutil.rmtree(self.home, ignore_errors=True)


class Processes:
    """Scheduler, artifact store and streamer as separate processes on PostgreSQL. `gateway` adds gateways."""

    def __init__(self, base, settings={}):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-processes-", dir=base))
        self.named = {}
        self.own = {}
        # Groups of processes by their names.
        self.groups = {}
        ports = Ports()
        addresses = {name: ports.address() for name in ("postgres", "scheduler", "artifact-store", "streamer")}
        ports.release()
        (self.home / "token").write_text("the-token-of-the-bench")
        self.postgres = Postgres(base, addresses["postgres"])
        at = {name: f"http://{address}" for name, address in addresses.items()}
        self.common = {
            "PATH": os.environ["PATH"],
            "GANTRY_TOKEN_FILE": str(self.home / "token"),
            "GANTRY_SCHEDULER": at["scheduler"],
            "GANTRY_ARTIFACT_STORE": at["artifact-store"],
            "GANTRY_STREAMER": at["streamer"],
            "GANTRY_GC_GRACE": "0s",
            **settings,
        }
        server = f"scheduler={at['scheduler']},artifacts={at['artifact-store']},streamer={at['streamer']}"
        self.env = {**self.common, "HOME": str(self.home), "GANTRY_SERVER": server}
        for name in ("scheduler", "artifact-store", "streamer"):
            own = {"GANTRY_LISTEN": addresses[name]}
            if name != "streamer":
                user = name.replace("-", "_")
                self.postgres.execute(f"CREATE ROLE {user} LOGIN")
                self.postgres.execute(f"CREATE SCHEMA its_{user} AUTHORIZATION {user}")
                own |= {"GANTRY_DATABASE_URL": self.postgres.url(user), "GANTRY_DATABASE_SCHEMA": f"its_{user}"}
            self.spawn(name, name, own)

    def gateway(self, name, settings={}):
        """Starts a gateway for a new host worker with its name as a tag, unless `settings` select another worker.

        Returns its address."""
        ports = Ports()
        address = ports.address()
        own = {
            "GANTRY_LISTEN": address,
            "GANTRY_WORKER_ALLOW": "host-image",
            "GANTRY_WORKER_NAME": name,
            "GANTRY_WORKER_TAGS": name,
            "GANTRY_STATE_DIR": str(self.home / f"state-{name}"),
            "GANTRY_RUNTIME_DIR": str(self.home / f"run-{name}"),
        }
        ports.release()
        self.spawn(name, "runtime-gateway", {**own, **settings})
        return f"http://{address}"

    def proxy(self):
        """Starts a proxy, and returns its address."""
        ports = Ports()
        address = ports.address()
        ports.release()
        self.spawn("proxy", "runtime-gateway", {"GANTRY_LISTEN": address, "GANTRY_GATEWAY_PROXY": "true"})
        return f"http://{address}"

    def spawn(self, name, program, own):
        env = {**self.common, **own}
        self.own[name] = (program, own)
        with open(self.home / f"{name}.log", "ab") as log:
            options = {"env": env, "cwd": self.home, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "group": self.groups.get(name)}
            self.named[name] = subprocess.Popen([str(RELEASE / program)], **options)
        wait_for(name, lambda: succeeds([str(RELEASE / program), "health"], env=env))

    def respawn(self, name):
        """Starts a process again that has ended."""
        self.spawn(name, *self.own[name])

    @property
    def children(self):
        """The processes in the order in which they were first started."""
        return list(self.named.values())

    prefix = ()
    run = Cluster.run

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind:
            for log in sorted(self.home.glob("*.log")):
                print(f"--- {log.name}", log.read_text()[-4000:], sep="\n")
        for child in reversed(self.children):
            end(child)
        self.postgres.stop()
        # Volumes that were not swept yet.
        mounts = pathlib.Path("/proc/self/mountinfo").read_text().splitlines()
        for at in reversed([line.split()[4] for line in mounts]):
            if at.startswith(f"{self.home}/"):
                subprocess.run(["umount", "--lazy", at], check=True)
        shutil.rmtree(self.home, ignore_errors=True)


class ConcourseWorkers:
    """Fake Garden and Baggageclaim servers in a separate process: one pair for each name, with that name as a tag."""

    def __init__(self, base, *names):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-concourse-", dir=base))
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(self.home)}
        command = [str(RELEASE / "garden_worker"), *names]
        self.child = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.workers = json.loads(self.child.stdout.readline())

    def settings(self, *names):
        """Returns the settings of a gateway for the workers with these names."""
        file = self.home / f"workers-{'-'.join(names)}.json"
        file.write_text(json.dumps([worker for worker in self.workers if worker["name"] in names]))
        return {"GANTRY_WORKERS_FILE": str(file)}

    def requests(self):
        """Returns all requests so far."""
        self.child.stdin.write("\n")
        self.child.stdin.flush()
        return json.loads(self.child.stdout.readline())

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.stdin.close()
        self.child.wait(30)
        shutil.rmtree(self.home, ignore_errors=True)


class GardenServer:
    """Original Garden server package with containers of runc, in a separate process."""

    def __init__(self, base):
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-garden-", dir=base))
        program = self.home / "garden-server"
        # The binary is also the init of its containers, which have no libraries.
        go = {"cwd": ROOT / "integration-tests/garden-server", "env": {**os.environ, "CGO_ENABLED": "0"}}
        subprocess.run(["go", "build", "-o", str(program), "."], check=True, **go)
        env = {"PATH": os.environ["PATH"], "TMPDIR": str(self.home)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.child = subprocess.Popen([str(program), "--runc"], env=env, **pipes)
        self.address = self.child.stdout.readline().strip()
        wait_for("the Garden server", self.listens)

    def listens(self):
        host, port = self.address.split(":")
        with contextlib.suppress(OSError), socket.create_connection((host, int(port))):
            return True
        return False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.child.stdin.close()
        self.child.wait(30)
        shutil.rmtree(self.home, ignore_errors=True)


def make_image(directory):
    """Makes an image with a static program `true`."""
    root = directory / "rootfs"
    for name in ("bin", "tmp", "etc", "proc", "dev"):
        (root / name).mkdir(parents=True)
    source = directory / "true.c"
    source.write_text("int main(void) { return 0; }\n")
    subprocess.run(["cc", "-O2", "-static", "-o", str(root / "bin/true"), str(source)], check=True)
    source.unlink()
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/true\n")
    (directory / "metadata.json").write_text("{}")
