//! The host runtime as an ordinary user: the other tests of this program, in a user namespace.

use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

use super::networks::NAME_SERVER;
use super::subject::SUPERVISOR;

/// A user without an account, so that the test need not create one.
const USER: u32 = 12_345;

/// Shell commands that run the arguments as root of a user namespace of [`USER`]. Some machines
/// keep `/dev/net/tun` closed, so the caller has its own, in its own mount namespace.
const AS_ORDINARY_USER: &str = "\
    mount -t tmpfs -o mode=755 none /dev/net && mknod -m 666 /dev/net/tun c 10 200 || exit; \
    exec setpriv --reuid=12345 --regid=12345 --clear-groups -- unshare --user --map-root-user --mount -- \"$@\"";

/// A command that is root of a user namespace of [`USER`].
fn as_ordinary_user(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("unshare");
    command.args(["--mount", "--", "sh", "-c", AS_ORDINARY_USER, "sh"]).arg(program);
    command
}

fn is_applicable() -> bool {
    if !rustix::process::geteuid().is_root() || std::env::var_os(SUPERVISOR).is_some() {
        eprintln!("not applicable: this process is not root");
        return false;
    }
    let may = as_ordinary_user("true").output().is_ok_and(|output| output.status.success());
    if !may {
        eprintln!("not applicable: ordinary users have no user namespaces here");
    }
    may
}

/// A directory of [`USER`] with the programs of these tests.
fn programs() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    // The directory of the build may be closed to other users.
    let tests = std::env::current_exe().expect("the path of this program");
    for (from, name) in [(&*tests, "tests"), (Path::new(env!("CARGO_BIN_EXE_runtime-gateway")), "supervisor")]
    {
        let to = directory.path().join(name);
        std::fs::copy(from, &to).expect("a copy");
        std::fs::set_permissions(to, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    }
    chown(directory.path(), Some(USER), Some(USER)).expect("chown");
    directory
}

/// Runs tests, and fails if one of them fails or if there are none.
fn run(command: &mut Command, directory: &Path) {
    let output = command
        .env(SUPERVISOR, directory.join("supervisor"))
        .env("TMPDIR", directory)
        .current_dir(directory)
        .output()
        .expect("setpriv and unshare");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!printed.contains("running 0 tests"), "{printed}");
}

/// Tests of rights that an ordinary user does not have: limits, privileges and further ids.
const OF_ROOT: &[&str] = &[
    "container_inherits_no_limit_of_the_gateway",
    "container_user_has_no_capabilities",
    "deep_volume_is_copied_and_changes_owner",
    "host_names_resolve_in_any_image",
    "limits_of_processes_and_cpu_are_set",
    "memory_limit_kills_and_is_reported",
    "privileged_container_has_rights_of_machine_root",
    "programs_see_their_limits_and_cannot_change_them",
    "runtime_starts_with_unremovable_leftovers",
];

/// Runs the tests whose names contain one of `names`, except those of root, and fails if one of
/// them fails.
fn pass(names: &[&str]) {
    if !is_applicable() {
        return;
    }
    let directory = programs();
    let mut command = as_ordinary_user(directory.path().join("tests"));
    command.args(names).args(["--test-threads", "4"]);
    command.args(OF_ROOT.iter().flat_map(|name| ["--skip", name]));
    run(&mut command, directory.path());
}

#[test]
fn runtime_of_ordinary_user_conforms() {
    pass(&["host::conformance::"]);
}

#[test]
fn runtime_of_ordinary_user_withstands_bad_input() {
    pass(&["host::children::", "host::deep::", "host::images::", "host::inside::", "host::takeover::"]);
}

/// A view of a machine with another machine, a bridge with a further container, and a name server
/// on its loopback. When the file `move` appears, the machine gets another address.
const MACHINE: &str = r#"
set -e
directory=$1; shift
trap 'kill $(jobs -p)' EXIT
ip link set lo up
unshare --net python3 "$directory/outside.py" > "$directory/outside.ready" &
outside=$!
python3 "$directory/names.py" > "$directory/names.ready" &
until [ -s "$directory/outside.ready" ] && [ -s "$directory/names.ready" ]; do sleep 0.05; done
connect() { # connect NAME ADDRESS OTHER_ADDRESS
    ip link add "$1" type veth peer name "$1" netns "$outside"
    ip addr add "$2" dev "$1"
    ip link set "$1" up
    nsenter --net --target "$outside" ip addr add "$3" dev "$1"
    nsenter --net --target "$outside" ip link set "$1" up
}
connect near 198.51.100.1/24 198.51.100.2/24
connect bridge 172.30.0.1/24 172.30.0.2/24
ip route add default via 198.51.100.2
echo 'nameserver 127.0.0.153' > "$directory/resolv.conf"
mount --bind "$directory/resolv.conf" /etc/resolv.conf
(until [ -e "$directory/move" ]; do sleep 0.05; done; ip addr add 203.0.113.7/32 dev near) &
(eval "$AS_ORDINARY_USER")
"#;

/// Answers each connection with the address of its peer.
const OUTSIDE: &str = r#"
import socket
server = socket.create_server(("", 7))
print("ready", flush=True)
while True:
    connection, (address, _) = server.accept()
    connection.sendall(f"you are {address}\n".encode())
    connection.close()
"#;

#[test]
fn networks_of_ordinary_user_are_private() {
    if !is_applicable() {
        return;
    }
    let directory = programs();
    for (name, contents) in [("outside.py", OUTSIDE), ("names.py", NAME_SERVER)] {
        std::fs::write(directory.path().join(name), contents).expect("write");
    }
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--", "bash", "-c", MACHINE, "bash"]).arg(directory.path());
    command.arg(directory.path().join("tests")).args(["--ignored", "host::slirp::"]);
    run(command.env("AS_ORDINARY_USER", AS_ORDINARY_USER), directory.path());
}
