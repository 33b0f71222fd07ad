"""Images of a registry on the loopback, beside skopeo with umoci, and a container engine."""

import contextlib
import gzip
import hashlib
import io
import json
import os
import pathlib
import random
import shutil
import socket
import subprocess
import tarfile
import tempfile

from clusters import Cluster, end, make_image, wait_for
from measure import MIB, not_applicable, row, table, timed
from start import no_engine

LAYERS = 10
# Files of a layer, and their size in bytes.
FILES, SIZE = 400, 256 << 10


class Layout:
    """An OCI layout that is written by hand, so that no measured tool has made it."""

    def __init__(self, path):
        self.path = path
        (path / "blobs/sha256").mkdir(parents=True)
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        self.manifests = []

    def blob(self, kind, contents):
        digest = hashlib.sha256(contents).hexdigest()
        (self.path / "blobs/sha256" / digest).write_bytes(contents)
        return {"mediaType": f"application/vnd.oci.image.{kind}", "digest": f"sha256:{digest}", "size": len(contents)}

    def layer(self, fill):
        """Adds a layer with what `fill` adds to an archive. Returns its descriptor and the digest of the archive."""
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            fill(tar)
        contents = archive.getvalue()
        digest = f"sha256:{hashlib.sha256(contents).hexdigest()}"
        return self.blob("layer.v1.tar+gzip", gzip.compress(contents, 1)), digest

    def image(self, tag, layers):
        architecture = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
        config = {
            "architecture": architecture,
            "os": "linux",
            "config": {"Cmd": ["/bin/true"]},
            "rootfs": {"type": "layers", "diff_ids": [digest for _, digest in layers]},
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": self.blob("config.v1+json", json.dumps(config).encode()),
            "layers": [descriptor for descriptor, _ in layers],
        }
        described = self.blob("manifest.v1+json", json.dumps(manifest).encode())
        self.manifests.append({**described, "annotations": {"org.opencontainers.image.ref.name": tag}})
        (self.path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": self.manifests}))


def fill(number):
    """A function that adds files to an archive, half of whose bytes can be compressed."""

    def add(tar):
        source = random.Random(number)
        for index in range(FILES):
            contents = source.randbytes(SIZE // 2) + b"a line of text\n" * (SIZE // 30)
            entry = tarfile.TarInfo(f"data/{number}/{index % 20}/{index}")
            entry.size, entry.mode = len(contents), 0o644
            tar.addfile(entry, io.BytesIO(contents))

    return add


def make_layout(home):
    """Makes the images `one` and `two`, which differ in their last layer."""
    layout = Layout(home / "layout")
    root = home / "base"
    root.mkdir()
    make_image(root)
    base = layout.layer(lambda tar: tar.add(root / "rootfs", "."))
    layers = [base, *(layout.layer(fill(number)) for number in range(LAYERS))]
    layout.image("one", layers)
    layout.image("two", [*layers[:-1], layout.layer(fill(LAYERS))])
    return layout


@contextlib.contextmanager
def registry(home, layout):
    """A registry with these images. Yields the name of their repository."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = home / "registry.yml"
    storage = f"storage: {{filesystem: {{rootdirectory: {home}/registry}}}}"
    settings.write_text(f"version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n{storage}\nhttp: {{addr: 127.0.0.1:{port}}}\n")
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    child = subprocess.Popen(["docker-registry", "serve", str(settings)], **quiet)
    try:
        wait_for("the registry", lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        for tag in ("one", "two"):
            copy(f"oci:{layout.path}:{tag}", f"docker://127.0.0.1:{port}/app:{tag}", "--dest-tls-verify=false")
        yield f"127.0.0.1:{port}/app"
    finally:
        end(child)


def copy(source, target, *options):
    subprocess.run(["skopeo", "copy", "--quiet", *options, source, target], check=True)


def with_tools(home, name, tags):
    """Fetches with skopeo and unpacks with umoci. Returns the time for each tag."""
    place = pathlib.Path(tempfile.mkdtemp(dir=home))

    def use(tag):
        copy(f"docker://{name}:{tag}", f"oci:{place}/oci:{tag}", "--src-tls-verify=false")
        subprocess.run(["umoci", "unpack", "--image", f"{place}/oci:{tag}", f"{place}/{tag}"], check=True, capture_output=True)

    figures = [timed(lambda: use(tag), 1)[0] for tag in tags]
    shutil.rmtree(place)
    return figures


def with_gantry(base, name, tags):
    """Runs `true` in each image, on a cluster that has seen none. Returns the time for each tag."""
    with Cluster(base) as cluster:
        cluster.run("run", "-q", "--", "true")
        return [timed(lambda: cluster.run("run", "-q", "--image", f"{name}:{tag}"), 1)[0] for tag in tags]


def with_engine(name, tags):
    def use(tag):
        subprocess.run(["docker", "run", "--rm", "--quiet", f"{name}:{tag}"], check=True, capture_output=True)

    figures = [timed(lambda: use(tag), 1)[0] for tag in tags]
    subprocess.run(["docker", "image", "rm", *(f"{name}:{tag}" for tag in set(tags))], check=True, capture_output=True)
    return figures


def bench_images(base, runs):
    home = pathlib.Path(tempfile.mkdtemp(prefix="gantry-bench-images-", dir=base))
    lines = []
    try:
        layout = make_layout(home)
        compressed = sum(blob.stat().st_size for blob in (layout.path / "blobs/sha256").iterdir()) * LAYERS // (LAYERS + 1)
        with registry(home, layout) as name:
            tags = ("one", "one", "two")
            tools = list(zip(*(with_tools(home, name, ("one", "two")) for _ in range(runs))))
            gantry = list(zip(*(with_gantry(base, name, tags) for _ in range(runs))))
            lines.append(row("`skopeo copy` and `umoci unpack`, first", tools[0]))
            lines.append(row("`gantry run --image`, first use in a cluster", gantry[0], tools[0]))
            lines.append(row("`gantry run --image`, again", gantry[1], tools[0]))
            lines.append(row("`skopeo copy` and `umoci unpack`, another tag", tools[1]))
            lines.append(row("`gantry run --image`, another tag", gantry[2], tools[1]))
            if fact := no_engine():
                lines.append(not_applicable("`docker run`", fact))
            else:
                engine = list(zip(*(with_engine(name, tags) for _ in range(runs))))
                for what, of, reference in (("first", 0, tools[0]), ("again", 1, tools[0]), ("another tag", 2, tools[1])):
                    lines.append(row(f"`docker run`, {what}", engine[of], reference))
    finally:
        shutil.rmtree(home)
    unpacked = LAYERS * FILES * SIZE // MIB
    note = f"The image has {LAYERS} layers with {FILES} files each: {unpacked} MiB, compressed to {compressed // MIB} MiB, in a registry on the loopback. The other tag differs in the last layer. Each time ends with the end of `true` in the image, or of the unpacking."
    return [*table("Images from a registry", lines), note, ""]
