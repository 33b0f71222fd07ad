//! The host runtime as an ordinary user: the other tests of this program, in a user namespace.

use std::ffi::OsStr;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use super::subject::SUPERVISOR;

/// A user without an account, so that the test need not create one.
const USER: u32 = 12_345;

/// A command that is root of a user namespace of [`USER`].
fn as_ordinary_user(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=12345", "--regid=12345", "--clear-groups", "--"]);
    command.args(["unshare", "--user", "--map-root-user", "--mount", "--"]).arg(program);
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
    let directory = tempfile::tempdir().expect("a directory");
    let at = |name: &str| directory.path().join(name);
    // The directory of the build may be closed to other users.
    let tests = std::env::current_exe().expect("the path of this program");
    for (from, name) in [(&*tests, "tests"), (Path::new(env!("CARGO_BIN_EXE_runtime-gateway")), "supervisor")]
    {
        std::fs::copy(from, at(name)).expect("a copy");
        std::fs::set_permissions(at(name), std::fs::Permissions::from_mode(0o755)).expect("chmod");
    }
    chown(directory.path(), Some(USER), Some(USER)).expect("chown");
    let output = as_ordinary_user(at("tests"))
        .args(names)
        .args(["--test-threads", "4"])
        .args(OF_ROOT.iter().flat_map(|name| ["--skip", name]))
        .env(SUPERVISOR, at("supervisor"))
        .env("TMPDIR", directory.path())
        .current_dir(directory.path())
        .output()
        .expect("setpriv and unshare");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{printed}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!printed.contains("running 0 tests"), "{printed}");
}

#[test]
fn runtime_of_ordinary_user_conforms() {
    pass(&["host::conformance::"]);
}

#[test]
fn runtime_of_ordinary_user_withstands_bad_input() {
    pass(&["host::children::", "host::deep::", "host::images::", "host::inside::", "host::takeover::"]);
}
