//! Harness of the end-to-end tests: the `gantry` binary, a separate cluster for each test, and
//! checks of the machine afterwards.

pub mod concourse;
pub mod holder;
pub mod machines;
pub mod registry;
pub mod snapshot;
pub mod suite;
pub mod terminal;
pub mod tree;

use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// Time limit for a condition before the test fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns whether this process may run containers. Prints a message if it may not.
#[must_use]
pub fn may_run_containers() -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        eprintln!("not applicable: this process is not root");
    }
    root
}

/// Returns the path of the `gantry` binary of this build. The other binaries are beside it.
#[must_use]
pub fn gantry_binary() -> PathBuf {
    if let Some(path) = std::env::var_os("GANTRY_BINARY") {
        return path.into();
    }
    let this = std::env::current_exe().expect("the path of this program");
    // Test binaries are in a subdirectory of the directory with the binaries.
    let found =
        this.ancestors().skip(1).take(2).map(|directory| directory.join("gantry")).find(|path| path.exists());
    found.unwrap_or_else(|| {
        panic!("there is no gantry beside {}: build the workspace's binaries first", this.display())
    })
}

/// Waits until `condition` returns a value, and returns it.
pub fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = condition() {
            return found;
        }
        assert!(Instant::now() < deadline, "{what} did not come true");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Local cluster with separate directories. The first command starts it, and drop stops it.
pub struct Cluster {
    /// Unmounted before the directory that it is in is removed.
    disk: Option<SmallDisk>,
    home: TempDir,
    settings: Vec<(String, String)>,
    /// Whether the commands run as [`ORDINARY_USER`], and not as the user of the tests.
    is_of_ordinary_user: bool,
}

/// A user without an account, so that the tests need not create one.
pub const ORDINARY_USER: u32 = 12_345;

/// Returns whether the tests can run containers as [`ORDINARY_USER`]. If not, prints that the test
/// is not applicable.
#[must_use]
pub fn may_run_containers_as_ordinary_user() -> bool {
    if !may_run_containers() {
        return false;
    }
    let mut command = as_ordinary_user("unshare");
    command.args(["--user", "--map-root-user", "--mount", "true"]);
    let may = command.output().is_ok_and(|output| output.status.success());
    if !may {
        eprintln!("not applicable: ordinary users have no user namespaces here");
    }
    may
}

/// A command that [`ORDINARY_USER`] runs. Some machines keep `/dev/net/tun` closed, so the user has
/// a separate one.
fn as_ordinary_user(program: impl AsRef<OsStr>) -> Command {
    const SCRIPT: &str = "\
        mount -t tmpfs -o mode=755 none /dev/net && mknod -m 666 /dev/net/tun c 10 200 || exit; \
        exec setpriv --reuid=12345 --regid=12345 --clear-groups -- \"$@\"";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--", "sh", "-c", SCRIPT, "sh"]).arg(program);
    command
}

impl Default for Cluster {
    fn default() -> Self {
        Self::new()
    }
}

impl Cluster {
    /// Makes the directories of a cluster, which is not started yet.
    #[must_use]
    pub fn new() -> Self {
        let home = tempfile::Builder::new().prefix("gantry-it-").tempdir().expect("a temporary directory");
        std::fs::create_dir(home.path().join("run")).expect("a runtime directory");
        Self { disk: None, home, settings: Vec::new(), is_of_ordinary_user: false }
    }

    /// Makes the directories of a cluster of [`ORDINARY_USER`], with a copy of the program there.
    #[must_use]
    pub fn of_ordinary_user() -> Self {
        let mut cluster = Self::new();
        cluster.is_of_ordinary_user = true;
        // The directory of the build may be closed to other users.
        std::fs::copy(gantry_binary(), cluster.path("gantry")).expect("a copy of the program");
        for path in [cluster.home.path().to_owned(), cluster.path("run")] {
            std::os::unix::fs::chown(path, Some(ORDINARY_USER), Some(ORDINARY_USER)).expect("chown");
        }
        cluster
    }

    /// Adds a setting to the environment of every command, and so of the cluster.
    #[must_use]
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.settings.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Changes a setting for all later commands.
    pub fn set(&mut self, name: &str, value: &str) {
        self.settings.retain(|(known, _)| known != name);
        self.settings.push((name.to_owned(), value.to_owned()));
    }

    /// Puts the state of the cluster on a disk of `mib` MiB.
    #[must_use]
    pub fn on_small_disk(mut self, mib: u32) -> Self {
        self.disk = Some(SmallDisk::mount(self.home.path().join("state"), mib));
        self
    }

    /// Starts the cluster in the foreground, in a separate mount namespace that the shell script
    /// `prepare` may change. Returns once the cluster listens. Its standard error goes to the file
    /// `up.log`.
    #[must_use]
    pub fn up(&self, prepare: &str) -> Child {
        let gantry = self.gantry(["up"]);
        let mut command = Command::new("unshare");
        let script = format!("set -e\n{prepare}\nexec \"$0\" up");
        command.args(["--mount", "--propagation", "private", "sh", "-c", &script]).arg(gantry.get_program());
        command.env_clear().envs(gantry.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let log = std::fs::File::create(self.path("up.log")).expect("a log");
        command.current_dir(self.home.path()).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let mut child = command.spawn().expect("unshare");
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().expect("stdout"));
        stdout.read_line(&mut line).expect("a line");
        assert!(line.starts_with("listening on "), "{line:?}: {}", self.up_log());
        // The cluster may write more, which the test does not read.
        child.stdout = Some(stdout.into_inner());
        child
    }

    /// Returns the standard error of the cluster that [`Cluster::up`] started.
    #[must_use]
    pub fn up_log(&self) -> String {
        std::fs::read_to_string(self.path("up.log")).unwrap_or_default()
    }

    /// Kills all processes of the cluster at once: services, supervisors and containers.
    pub fn kill_everything(&self) {
        wait_for("the end of everything", || {
            let processes = snapshot::processes(self);
            for pid in processes.keys() {
                // SAFETY: kill accesses no memory of this process.
                unsafe { libc::kill(*pid, libc::SIGKILL) };
            }
            processes.is_empty().then_some(())
        });
    }

    /// Returns the path of a file of the test.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Returns the state directory of the cluster.
    #[must_use]
    pub fn state(&self) -> PathBuf {
        self.home.path().join("state/gantry")
    }

    /// Makes a `gantry` command without standard input.
    pub fn gantry<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Command {
        let mut command = if self.is_of_ordinary_user {
            as_ordinary_user(self.path("gantry"))
        } else {
            Command::new(gantry_binary())
        };
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", self.home.path())
            .env("XDG_STATE_HOME", self.home.path().join("state"))
            .env("XDG_RUNTIME_DIR", self.home.path().join("run"))
            .env("GANTRY_IDLE_END", "10m")
            .envs(self.settings.iter().map(|(name, value)| (name, value)))
            .current_dir(self.home.path())
            .stdin(Stdio::null());
        // SAFETY: signal is safe to call between fork and exec.
        unsafe {
            // A shell ignores SIGINT for background commands, which these tests may be.
            command.pre_exec(|| {
                libc::signal(libc::SIGINT, libc::SIG_DFL);
                Ok(())
            });
        }
        command
    }

    /// Runs a command to its end.
    pub fn output<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Output {
        self.gantry(arguments).output().expect("gantry runs")
    }

    /// Runs a command that must succeed, and returns its standard output.
    pub fn succeed<S: AsRef<OsStr>>(&self, arguments: impl IntoIterator<Item = S>) -> Vec<u8> {
        let output = self.output(arguments);
        assert!(output.status.success(), "{}", describe(&output));
        output.stdout
    }

    /// Makes `/tmp/go` in a container, whose main process may end on that, and end this command too.
    pub fn let_go(&self, workload: &str) {
        let output = self.output(["exec", workload, "--", "touch", "/tmp/go"]);
        assert!(matches!(code(&output), 0 | 137), "{}", describe(&output));
    }

    /// Uploads a directory, and returns the id of its artifact.
    #[must_use]
    pub fn upload(&self, directory: impl AsRef<Path>) -> String {
        id(self.succeed([OsStr::new("upload"), directory.as_ref().as_os_str()]))
    }

    /// Returns the process id of the cluster. `None`: no cluster runs.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        let status = self.output(["status", "--json"]);
        let status: serde_json::Value = serde_json::from_slice(status.stdout.trim_ascii()).ok()?;
        i32::try_from(status.get("process_id")?.as_i64()?).ok()
    }

    /// Kills the process of the cluster.
    pub fn kill(&self) {
        let pid = self.pid().expect("a running cluster");
        // SAFETY: kill accesses no memory of this process.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGKILL) }, 0);
        wait_for("the end of the cluster", || {
            (!Path::new("/proc").join(pid.to_string()).exists()).then_some(())
        });
    }

    /// Suspends the process of the cluster. Its socket still accepts connections, but no call is
    /// answered.
    pub fn freeze(&self) {
        let pid = self.pid().expect("a running cluster");
        // SAFETY: kill accesses no memory of this process.
        assert_eq!(unsafe { libc::kill(pid, libc::SIGSTOP) }, 0);
    }

    /// Returns the objects that `gantry list KIND` prints.
    #[must_use]
    pub fn list(&self, kind: &str) -> Vec<serde_json::Value> {
        let output = self.succeed(["list", kind, "--json"]);
        let lines = output.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).expect("one JSON object per line")).collect()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let down = self.output(["down", "--force"]);
        if std::thread::panicking() {
            if let Ok(log) = std::fs::read_to_string(self.state().join("cluster.log")) {
                eprintln!("--- the cluster's log ---\n{log}");
            }
            eprintln!("--- down ---\n{}", describe(&down));
        }
    }
}

/// Small disk in memory.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(at: PathBuf, mib: u32) -> Self {
        std::fs::create_dir(&at).expect("a directory");
        let size = std::ffi::CString::new(format!("size={mib}m,mode=700")).expect("an option");
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("tmpfs", &at, "tmpfs", flags, size.as_c_str()).expect("mount");
        Self(at)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let unmounted = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        if !std::thread::panicking() {
            unmounted.expect("unmount");
        }
    }
}

/// Writes a file, and creates its parent directories.
pub fn write(path: &Path, contents: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().expect("a directory above it")).expect("directories");
    std::fs::write(path, contents).expect("write");
}

/// Parses the id that a command printed.
#[must_use]
pub fn id(output: impl Into<Vec<u8>>) -> String {
    String::from_utf8(output.into()).expect("an id").trim().to_owned()
}

/// Starts a command, and waits until it has printed `ready`. Also returns the rest of its standard
/// output.
#[must_use]
pub fn started(mut command: Command) -> (Child, BufReader<ChildStdout>) {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("gantry");
    let mut stdout = BufReader::new(child.stdout.take().expect("stdout"));
    let mut line = String::new();
    stdout.read_line(&mut line).expect("a line");
    if line != "ready\n" {
        let mut printed = String::new();
        child.stderr.take().expect("stderr").read_to_string(&mut printed).expect("text");
        panic!("{line:?} instead of ready: {printed}");
    }
    (child, stdout)
}

/// Sends a signal to a command.
pub fn send(child: &Child, signal: i32) {
    let pid = i32::try_from(child.id()).expect("a pid");
    // SAFETY: kill accesses no memory of this process.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// Describes the end and the output of a command, for messages of failed tests.
#[must_use]
pub fn describe(output: &Output) -> String {
    format!(
        "{}\n--- stdout ---\n{}\n--- stderr ---\n{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Returns the exit code. Panics if a signal ended the command.
#[must_use]
pub fn code(output: &Output) -> i32 {
    output.status.code().unwrap_or_else(|| panic!("no exit code: {}", describe(output)))
}
